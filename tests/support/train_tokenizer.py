"""Train a tokenizer on generated pairs and print its fingerprint: `train_tokenizer.py KIND`."""

from __future__ import annotations

import sys

from lockstep.corpus import cldr
from lockstep.corpus.tokenizer import Tokenizer

if __name__ == "__main__":
    pairs = cldr.generate_pairs("en", "it", limit=3000, held_out=50)[0]["train"]
    texts = (text for pair in pairs for text in pair)
    kind = sys.argv[1]
    print(
        Tokenizer.train(
            texts, kind=kind, vocab_size=2000, min_frequency=2, lowercase=False
        ).fingerprint
    )
