"""Prepare the parallel corpus of a run: tokenizer, token ids in mapped arrays, held-out text.

Pairs longer than `data.max_tokens`, END included, are dropped from the arrays of every split and
counted. The held-out text keeps them: the scores cover all held-out pairs, the loss does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lockstep.config import schema as config
from lockstep.corpus.pairs import corpus
from lockstep.corpus.pairs.corpus import SPLITS, Corpus, CorpusReport
from lockstep.corpus.pairs.encoded import SIDES, EncodedPairs, write_side
from lockstep.corpus.pairs.textfiles import Pairs
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.data.manifest import (
    NOT_SHARED,
    FileDigests,
    matches_prepared,
    open_manifest,
    write_manifest,
)
from lockstep.errors import DataError
from lockstep.files import remove_unpublished, write_atomic
from lockstep.log import log

ENCODE_BATCH = 50_000  # texts encoded at once: the results of the library need much memory


@dataclass(frozen=True)
class PreparedPairs:
    """A prepared corpus. fingerprints: "corpus" (all texts), "tokenizer", "asked" (settings)."""

    folder: Path
    tokenizer: Tokenizer
    train: EncodedPairs
    validation: EncodedPairs
    test: EncodedPairs
    fingerprints: dict[str, str]
    report: CorpusReport

    def text(self, split: str) -> Pairs:
        """Return all pairs of "validation" or "test" as text, including too long ones."""
        lines = (self.folder / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
        return [(row["source"], row["target"]) for row in map(json.loads, filter(None, lines))]


def prepare(
    data: config.DataOptions,
    options: config.TokenizerOptions,
    folder: Path,
    digests: FileDigests = NOT_SHARED,
) -> None:
    """For rank 0: prepare the corpus under `folder`, and the manifest last. If they exist, only
    compare the settings. DataError if another corpus is there, or this one cannot be read."""
    # The files depend on the corpus and on these settings.
    settings = {
        "max_tokens": data.max_tokens,
        **{f"tokenizer.{name}": value for name, value in asdict(options).items()},
    }
    if matches_prepared(folder, settings, "corpus", partial(corpus.fingerprint, data, digests)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_unpublished(folder)
    text = corpus.read_corpus(data)
    log.info(text.report.line())
    tokenizer = Tokenizer.train(
        (sentence for pair in text.train for sentence in pair), **asdict(options)
    )
    tokenizer.save(folder / "tokenizer.json")
    files, too_long = write_arrays(folder, text, tokenizer, data.max_tokens)
    for split in SPLITS[1:]:
        rows = (
            json.dumps({"source": a, "target": b}, ensure_ascii=False)
            for a, b in getattr(text, split)
        )
        write_atomic(folder / f"{split}.jsonl", "\n".join(rows) + "\n")
        files.append(folder / f"{split}.jsonl")
    report = text.report
    for split, count in too_long.items():
        reason = (
            f"longer than {data.max_tokens} tokens"
            if split == "train"
            else f"too long for the loss of {split}, kept as text"
        )
        log.info("%s: %d pairs %s", split, count, reason)
        if split == "train":
            kept = {**report.kept, "train": report.kept["train"] - count}
            report = replace(report, kept=kept, left_out={**report.left_out, reason: count})
    if not report.kept["train"]:
        what = f"no training pair has at most {data.max_tokens} tokens"
        raise DataError(what, "data.max_tokens", "increase it, or split the text into sentences")
    log.info(
        "tokenizer: %d entries (%s, %d asked for)",
        tokenizer.vocab_size,
        options.kind,
        options.vocab_size,
    )
    fingerprints = {"corpus": text.fingerprint, "tokenizer": tokenizer.fingerprint}
    facts = {**fingerprints, "asked": settings, "report": asdict(report), "too_long": too_long}
    write_manifest(folder, [folder / "tokenizer.json", *files], digests, **facts)


def write_arrays(
    folder: Path, text: Corpus, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Path], dict[str, int]]:
    """Write the ids of every split. Return the files, and the number of long pairs by split."""
    files: list[Path] = []
    too_long: dict[str, int] = {}
    for split in SPLITS:
        pairs: Pairs = getattr(text, split)
        sides = [
            list(encode(tokenizer, [pair[side] for pair in pairs])) for side in range(len(SIDES))
        ]
        fits = [max(len(a), len(b)) < max_tokens for a, b in zip(*sides, strict=True)]
        for side, rows in zip(SIDES, sides, strict=True):
            files += write_side(
                folder,
                split,
                side,
                (row for row, fit in zip(rows, fits, strict=True) if fit),
                tokenizer.vocab_size,
            )
        if not all(fits):
            too_long[split] = fits.count(False)
    return files, too_long


def encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    for start in range(0, len(texts), ENCODE_BATCH):
        yield from tokenizer.encode(texts[start : start + ENCODE_BATCH])


def open_prepared(folder: Path, digests: FileDigests = NOT_SHARED) -> PreparedPairs:
    """Open the corpus under `folder` and verify every file: about 1 s per gigabyte. DataError."""
    manifest = open_manifest(folder, digests)
    settings = json.dumps(manifest["asked"], sort_keys=True)
    return PreparedPairs(
        folder=folder,
        tokenizer=Tokenizer.load(folder / "tokenizer.json"),
        **{split: EncodedPairs.open(folder, split) for split in SPLITS},
        fingerprints={
            "corpus": manifest["corpus"],
            "tokenizer": manifest["tokenizer"],
            "asked": settings,
        },
        report=CorpusReport(**manifest["report"]),
    )
