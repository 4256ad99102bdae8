"""Bits per byte of held-out text: a run's model against xz -9 on the same files.

    lockstep train recipes/llama-pretrain.toml --out RUN; python -m bench.llama.bits_per_byte RUN

xz is measured twice: file by file, as the model sees them, and all files as one stream, where later files profit from earlier ones.
The model's bits are those of `lockstep evaluate RUN --split SPLIT`, end marks included.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

from lockstep.record.metrics import read_metrics
from lockstep.tasks.evaluator import Split

SPLITS: tuple[Split, ...] = ("validation", "test")


def xz_bits(texts: list[bytes]) -> float:
    """Bits a byte that xz -9 needs for the texts, each by itself."""
    packed = sum(len(lzma.compress(text, format=lzma.FORMAT_XZ, preset=9)) for text in texts)
    return 8 * packed / sum(map(len, texts))


def main(folder: Path) -> None:
    """Print a line for each split."""
    lines = (
        read_metrics(folder / "evaluations.jsonl")
        if (folder / "evaluations.jsonl").exists()
        else []
    )
    for split in SPLITS:
        with open(folder / "data" / f"{split}.jsonl", encoding="utf-8") as file:
            texts = [json.loads(line)["text"].encode() for line in file]
        found = [line for line in lines if line["split"] == split]
        model = (
            f"{found[-1]['bits_per_byte']:.4f} at step {found[-1]['step']}"
            if found
            else "not scored yet"
        )
        print(f"{split}: {len(texts)} files, {sum(map(len, texts)):,} bytes; bits a byte:")
        print(
            f"  model           {model}\n  xz -9 by file   {xz_bits(texts):.4f}\n  xz -9, a stream {xz_bits([b''.join(texts)]):.4f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
