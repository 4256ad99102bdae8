"""From the text of a run to what its processes open: a tokenizer, token ids in memory-mapped arrays, and the held-out text.

The leader prepares once; `prepared.json` is written last (marker.py).

Too long a pair (`data.max_tokens`, the end mark included) is left out of the arrays of every split, and counted. The held-out text keeps
it: BLEU and its like are over all held-out pairs; only their loss leaves the long ones out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import schema as config
from lockstep.data.manifest import MARKER, compare, read_marker, refuse_another
from lockstep.data.pairs import corpus
from lockstep.data.pairs.corpus import SPLITS, Corpus, Report
from lockstep.data.pairs.encoded import SIDES, EncodedPairs, write_side
from lockstep.data.pairs.textfiles import Pairs
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import DataError
from lockstep.files import sha256_file, write_atomic, write_json

log = logging.getLogger("lockstep")

AT_ONCE = 50_000  # texts encoded at a time: the library's results are large


@dataclass(frozen=True)
class Prepared:
    """An opened corpus. `fingerprints` has "corpus" (every text), "tokenizer" and "asked" (the settings it was made with)."""

    folder: Path
    tokenizer: Tokenizer
    train: EncodedPairs
    validation: EncodedPairs
    test: EncodedPairs
    fingerprints: dict[str, str]
    report: Report

    def text(self, split: str) -> Pairs:
        """The held-out pairs of "validation" or "test" as text: all of them, also those too long for the arrays."""
        lines = (self.folder / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
        found = (json.loads(line) for line in lines if line)
        return [(row["source"], row["target"]) for row in found]


def prepare(data: config.Data, tokens: config.Tokens, folder: Path) -> None:
    """For the leader: have the corpus ready under `folder`. Returns at once when it is there.

    DataError when another corpus is there, or when this one cannot be read.
    """
    asked = settings(data, tokens)
    if (folder / MARKER).exists():
        try:
            asked["corpus"] = corpus.fingerprint(data)
        except DataError as error:  # the text's files are gone, and the run has all that it needs
            log.warning("going on with the corpus that was prepared in %s; its text cannot be compared: %s", folder, error.what)
        refuse_another(read_marker(folder)["asked"], asked, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    asked["corpus"] = corpus.fingerprint(data)
    text = corpus.read(data)
    log.info(text.report.line())
    tokenizer = Tokenizer.train(
        (sentence for pair in text.train for sentence in pair),
        kind=tokens.kind,
        vocabulary=tokens.vocabulary,
        min_frequency=tokens.min_frequency,
        lowercase=tokens.lowercase,
    )
    tokenizer.save(folder / "tokenizer.json")
    files, too_long = write_arrays(folder, text, tokenizer, data.max_tokens)
    for split in SPLITS[1:]:
        rows = (json.dumps({"source": a, "target": b}, ensure_ascii=False) for a, b in getattr(text, split))
        write_atomic(folder / f"{split}.jsonl", "\n".join(rows) + "\n")
        files.append(folder / f"{split}.jsonl")
    report = text.report
    for split, count in too_long.items():
        reason = f"longer than {data.max_tokens} tokens" if split == "train" else f"too long for the loss of {split}, kept as text"
        log.info("%s: %d pairs %s", split, count, reason)
        if split == "train":
            kept = {**report.kept, "train": report.kept["train"] - count}
            report = replace(report, kept=kept, left_out={**report.left_out, reason: count})
    if not report.kept["train"]:
        what = f"no training pair has at most {data.max_tokens} tokens"
        raise DataError(what, "data.max_tokens", "raise it, or cut the text into sentences")
    log.info("tokenizer: %d entries (%s, %d asked for)", tokenizer.size, tokens.kind, tokens.vocabulary)
    write_json(
        folder / MARKER,
        {
            "corpus": text.fingerprint,
            "tokenizer": tokenizer.fingerprint,
            "asked": asked,
            "report": asdict(report),
            "too_long": too_long,
            "files": {path.name: sha256_file(path) for path in [folder / "tokenizer.json", *files]},
        },
    )


def write_arrays(folder: Path, text: Corpus, tokenizer: Tokenizer, max_tokens: int) -> tuple[list[Path], dict[str, int]]:
    """The token ids of every split; returns the files, and how many pairs of each split were too long (splits with none left out)."""
    files: list[Path] = []
    too_long: dict[str, int] = {}
    for split in SPLITS:
        pairs: Pairs = getattr(text, split)
        both = [list(encode(tokenizer, [pair[side] for pair in pairs])) for side in range(len(SIDES))]
        fits = [max(len(a), len(b)) < max_tokens for a, b in zip(*both, strict=True)]
        for side, rows in zip(SIDES, both, strict=True):
            files += write_side(folder, split, side, (row for row, fit in zip(rows, fits, strict=True) if fit), tokenizer.size)
        if not all(fits):
            too_long[split] = fits.count(False)
    return files, too_long


def encode(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    for start in range(0, len(texts), AT_ONCE):
        yield from tokenizer.encode(texts[start : start + AT_ONCE])


def settings(data: config.Data, tokens: config.Tokens) -> dict[str, Any]:
    """What decides the prepared files besides the corpus itself, as it stands in the marker."""
    return {"max_tokens": data.max_tokens, **{f"tokens.{name}": value for name, value in asdict(tokens).items()}}


def open_prepared(folder: Path) -> Prepared:
    """The corpus under `folder`, every file compared with its sha256. DataError when one is missing or damaged.

    Cost: one reading of the files, about a second a gigabyte.
    """
    marker = read_marker(folder)
    compare({folder / name: digest for name, digest in marker["files"].items()}, folder)
    asked = json.dumps(marker["asked"], sort_keys=True)
    return Prepared(
        folder=folder,
        tokenizer=Tokenizer.load(folder / "tokenizer.json"),
        train=EncodedPairs.open(folder, "train"),
        validation=EncodedPairs.open(folder, "validation"),
        test=EncodedPairs.open(folder, "test"),
        fingerprints={"corpus": marker["corpus"], "tokenizer": marker["tokenizer"], "asked": asked},
        report=Report(**marker["report"]),
    )
