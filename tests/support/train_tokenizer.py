"""Train a tokenizer on generated pairs and print its fingerprint: `train_tokenizer.py KIND`."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.corpus import cldr
from lockstep.corpus.tokenizer import Tokenizer


def train_on(texts: Iterable[str], kind: Any) -> Tokenizer:
    return Tokenizer.train(texts, kind=kind, vocab_size=2000, min_frequency=2, lowercase=False)


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Return the sha256 of the saved tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        tokenizer.save(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    pairs = cldr.generate_pairs("en", "it", limit=3000, held_out=50)[0]["train"]
    print(fingerprint_of(train_on((text for pair in pairs for text in pair), sys.argv[1])))
