"""The prepared pairs of a run: tokenizer, token ids in mapped arrays, held-out text.

Pairs longer than `data.max_tokens`, END included, are dropped from the arrays of every split and
counted. The held-out text keeps them: the scores cover all held-out pairs, the loss does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.config import schema as config
from lockstep.corpus.documents import SPLITS
from lockstep.corpus.pairs import Corpus, Pairs, read_corpus, report_line
from lockstep.corpus.prepared import Prepared, Sample, prepare_once, write_samples
from lockstep.corpus.token_stream import ONE_FILE, Ints, TokenStream
from lockstep.corpus.tokenizer import BEGIN, END, PAD, Tokenizer
from lockstep.data.manifest import NOT_SHARED, FileDigests, write_manifest
from lockstep.errors import DataError
from lockstep.files import sha256_file
from lockstep.log import announcing, log

ENCODE_BATCH = 50_000  # texts encoded at once: the results of the library need much memory
SIDES = (".source", ".target")


class EncodedPairs:
    """Token ids of a split, without special ids. lengths: (n, 2) int32, source and target, END
    included. Access to a pair takes a few microseconds."""

    def __init__(self, streams: list[TokenStream]) -> None:
        self._streams = streams
        self.lengths: npt.NDArray[np.int32] = np.stack(
            [np.diff(stream.offsets) + 1 for stream in streams], axis=1
        ).astype(np.int32)

    @classmethod
    def open(cls, folder: Path, split: str) -> EncodedPairs:
        """Map a split. DataError if a file is missing or the sides are inconsistent."""
        streams = [TokenStream.open(folder, split + side) for side in SIDES]
        if len(streams[0]) != len(streams[1]):
            raise DataError(
                f"the arrays of {split} are inconsistent",
                str(folder),
                "remove the folder to prepare the corpus again",
            )
        return cls(streams)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(
        self, ids: Ints, rows: int, source_length: int, target_length: int
    ) -> tuple[Ints, Ints, Ints]:
        """Return source (rows, S), target (rows, T) and labels (rows, T), int64, padded with PAD.

        source = sentence, END; target = BEGIN, sentence; labels = sentence, END. ValueError if
        there are more ids than rows, or a pair is longer than its side.
        """
        if len(ids) > rows:
            raise ValueError(f"{len(ids)} pairs do not fit into {rows} rows")
        source = self._with_end(0, ids, rows, source_length)
        labels = self._with_end(1, ids, rows, target_length)
        target = np.zeros_like(labels)
        target[: len(ids), 0] = BEGIN
        target[:, 1:] = np.where(labels[:, :-1] == END, PAD, labels[:, :-1])
        return source, target, labels

    def _with_end(self, side: int, ids: Ints, rows: int, length: int) -> Ints:
        out = np.full((rows, length), PAD, dtype=np.int64)
        if not len(ids):
            return out
        stream = self._streams[side]
        tokens = self.lengths[ids, side].astype(np.int64)[:, None] - 1
        if tokens.max() >= length:
            worst = int(tokens.argmax())
            raise ValueError(
                f"{SIDES[side][1:]} of pair {ids[worst]} has {tokens[worst, 0] + 1} tokens, "
                f"the shape holds {length}"
            )
        column = np.arange(length)[None, :]
        inside = column < tokens
        if inside.any():
            out[: len(ids)][inside] = stream.ids[0][(stream.offsets[ids][:, None] + column)[inside]]
        out[: len(ids)][column == tokens] = END
        return out


PreparedPairs = Prepared[Tokenizer, EncodedPairs]


def prepare(
    data: config.DataOptions,
    options: config.TokenizerOptions,
    folder: Path,
    digests: FileDigests = NOT_SHARED,
) -> None:
    """For rank 0: prepare the corpus under `folder`, and the manifest last. If they exist, only
    compare the settings. DataError if another corpus is there, or this one cannot be read."""
    # The files depend on the corpus and on these settings.
    names = ("kind", "source", "target", "pairs", "held_out", "max_tokens")
    settings = {f"data.{name}": getattr(data, name) for name in names}
    settings |= {f"tokenizer.{name}": value for name, value in asdict(options).items()}

    def write() -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)  # before the pairs are read, which takes seconds
        with announcing(f"{'generating' if data.kind == 'cldr' else 'reading'} the pairs"):
            text = read_corpus(data)
        log.info(report_line(text.report))
        sentences = (sentence for pair in text.train for sentence in pair)
        with announcing(f"training a tokenizer of {options.vocab_size:,} entries"):
            tokenizer = Tokenizer.train(sentences, **asdict(options))
        too_long: Counter[str] = Counter()
        with announcing("encoding the pairs"):
            files, _ = write_samples(
                folder,
                pair_samples(text, tokenizer, data.max_tokens, too_long),
                tokenizer.vocab_size,
                sides=SIDES,
                shard_tokens=ONE_FILE,
            )
        file = folder / "tokenizer.json"
        tokenizer.save(file)
        count_long_pairs(text.report, too_long, data.max_tokens)
        log.info(
            "tokenizer: %d entries (%s, %d asked for)",
            tokenizer.vocab_size,
            options.kind,
            options.vocab_size,
        )
        facts = {"tokenizer": sha256_file(file), "report": text.report, "too_long": +too_long}
        manifest = write_manifest(folder, [file, *files], digests, asked=settings, **facts)
        return [file, *files, manifest]

    report = prepare_once({"data": folder}, data, settings, write, digests, hashes=digests.of)
    if report:
        log.info(report_line(report))


def pair_samples(
    text: Corpus, tokenizer: Tokenizer, max_tokens: int, too_long: Counter[str]
) -> Iterator[Sample]:
    """Yield the pairs of all splits; a pair that is too long has no ids, and is counted."""
    for split in SPLITS:
        pairs: Pairs = getattr(text, split)
        for start in range(0, len(pairs), ENCODE_BATCH):
            batch = pairs[start : start + ENCODE_BATCH]
            sides = [tokenizer.encode(list(side)) for side in zip(*batch, strict=True)]
            for (source, target), ids in zip(batch, zip(*sides, strict=True), strict=True):
                fits = max(map(len, ids)) < max_tokens
                too_long[split] += not fits
                yield Sample(split, {"source": source, "target": target}, ids if fits else ())


def count_long_pairs(report: dict[str, Any], too_long: Counter[str], max_tokens: int) -> None:
    """Move the long pairs of training from the kept to the dropped ones. DataError: no pair is
    left."""
    for split, count in (+too_long).items():
        reason = f"too long for the loss of {split}, kept as text"
        if split == "train":
            reason = f"longer than {max_tokens} tokens"
            report["kept"][split] -= count
            report["left_out"][reason] = count
        log.info("%s: %d pairs %s", split, count, reason)
    if not report["kept"]["train"]:
        raise DataError(
            f"no training pair has at most {max_tokens} tokens",
            "data.max_tokens",
            "increase it, or split the text into sentences",
        )


def open_prepared(folder: Path, digests: FileDigests = NOT_SHARED) -> PreparedPairs:
    """Open the corpus under `folder`, all of it verified. DataError."""
    file = folder / "tokenizer.json"
    opened: PreparedPairs = PreparedPairs.verified(
        folder, file, lambda: Tokenizer.load(file), EncodedPairs.open, digests
    )
    return opened
