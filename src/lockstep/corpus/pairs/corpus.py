"""The parallel corpus of a run: training, validation and test pairs from the source in `data.kind`.

    cldr         generated from Unicode CLDR; needs no download         corpus/pairs/cldr.py
    files        parallel text files                                    corpus/pairs/textfiles.py
    huggingface  a dataset of the hub or of a local folder              corpus/pairs/huggingface.py

Every pair is either kept, or counted by reason in the report. If the source has no validation or
test pairs, the training pairs whose source texts have the smallest hashes are held out. So equal
source texts are in one split, and the choice does not depend on the machine or the order.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.config import schema as config
from lockstep.corpus.pairs import cldr, textfiles
from lockstep.corpus.pairs.textfiles import Pairs
from lockstep.data.manifest import NOT_SHARED, FileDigests
from lockstep.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")

# The data options with paths or names that each kind reads. Other ones are refused.
FIELDS = {
    "cldr": (),
    "files": ("train", "validation", "test"),
    "huggingface": ("train", "validation", "test", "dataset", "subset"),
}


@dataclass(frozen=True)
class CorpusReport:
    """Number of pairs: read = sum of kept + sum of left_out."""

    read: int
    kept: dict[str, int]  # split -> pairs
    left_out: dict[str, int]  # reason -> pairs

    def line(self) -> str:
        kept = ", ".join(f"{count:,} {split}" for split, count in self.kept.items())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.read:,} pairs read: {kept}; dropped: {reasons or 'none'}"


@dataclass(frozen=True)
class Corpus:
    train: Pairs
    validation: Pairs
    test: Pairs
    fingerprint: str  # sha256 of all texts in order
    report: CorpusReport


def read_corpus(data: config.DataOptions) -> Corpus:
    refuse_unused_options(data)
    splits, left_out = read_splits(data)
    dropped = Counter(left_out)
    raw = sum(len(pairs) for pairs in splits.values()) + sum(dropped.values())
    cleaned = {split: clean(splits.get(split, []), dropped) for split in SPLITS}
    if not cleaned["train"]:
        reason = (
            f"{raw:,} pairs were read, none has text on both sides" if raw else "nothing was read"
        )
        raise DataError(
            f"the training text is empty: {reason}",
            describe_source(data),
            "check the file, the split and the languages",
        )
    for split in SPLITS[1:]:
        if split in splits and not cleaned[split]:
            raise DataError(
                f"the {split} text is empty",
                describe_source(data),
                f"remove data.{split}, to hold out training pairs",
            )
    missing = [split for split in SPLITS[1:] if split not in splits]
    cleaned["train"], *held_out = hold_out(
        cleaned["train"], data.held_out, parts=len(missing), where=describe_source(data)
    )
    cleaned.update(zip(missing, held_out, strict=True))
    report = CorpusReport(
        raw,
        {split: len(pairs) for split, pairs in cleaned.items()},
        {k: n for k, n in dropped.items() if n},
    )
    return Corpus(**cleaned, fingerprint=digest(cleaned), report=report)


def read_splits(data: config.DataOptions) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Return the splits of the source, and the pairs that its reader dropped, by reason."""
    if data.kind == "cldr":
        return cldr.generate_pairs(
            data.source, data.target, limit=data.pairs, held_out=data.held_out
        )
    if data.kind == "files":
        given = {
            split: getattr(data, split)
            for split in SPLITS
            if getattr(data, split) or split == "train"
        }
        return {
            split: textfiles.read_pairs(paths, data.source, data.target, split)
            for split, paths in given.items()
        }, {}
    return importlib.import_module("lockstep.corpus.pairs.huggingface").read_dataset(data), {}


def clean(pairs: Pairs, left_out: Counter[str]) -> Pairs:
    """Strip white space; drop and count pairs without text on both sides."""
    stripped = [(a.strip(), b.strip()) for a, b in pairs]
    kept = [pair for pair in stripped if pair[0] and pair[1]]
    left_out["empty on one side"] += sum(bool(a) != bool(b) for a, b in stripped)
    left_out["empty on both sides"] += sum(not a and not b for a, b in stripped)
    return kept


def hold_out(pairs: Pairs, size: int, *, parts: int, where: str) -> tuple[Pairs, ...]:
    """Return (remaining pairs, part 1, .., part `parts`) in corpus order, each part with `size`
    pairs, taken by the hash of the source text. A group of pairs with equal source text that does
    not fit into a part stays in training. DataError if the parts take more than half."""
    if 2 * parts * size > len(pairs):
        what = f"{len(pairs):,} pairs are too few to hold out {parts} times {size:,}"
        raise DataError(
            what,
            where,
            f"set data.held_out to {max(1, len(pairs) // (8 * parts)):,}, or give validation and test files",
        )
    groups = Counter(source for source, _ in pairs)
    part_of: dict[str, int] = {}
    space = [size] * parts
    for source in (
        sorted(groups, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
        if parts
        else ()
    ):
        part = next((i for i, free in enumerate(space) if groups[source] <= free), None)
        if part is not None:
            part_of[source] = part + 1
            space[part] -= groups[source]
        if not any(space):
            break
    splits: tuple[Pairs, ...] = tuple([] for _ in range(parts + 1))
    for pair in pairs:
        splits[part_of.get(pair[0], 0)].append(pair)
    return splits


def digest(splits: dict[str, Pairs]) -> str:
    total = hashlib.sha256()
    for split in SPLITS:
        total.update(f"{split} {len(splits[split])}\n".encode())
        total.update("\n".join(f"{a}\t{b}" for a, b in splits[split]).encode())
    return total.hexdigest()


def fingerprint(data: config.DataOptions, digests: FileDigests = NOT_SHARED) -> str:
    """Return the hex sha256 of the sources of the corpus, without parsing them. DataError.

    cldr: versions, CLDR data, options. files, local datasets: bytes of the files. Hub datasets:
    name and options only, so that a prepared run resumes without network.
    """
    total = hashlib.sha256(
        json.dumps(
            {k: v for k, v in asdict(data).items() if k not in (*SPLITS, "dataset", "max_tokens")}
        ).encode()
    )
    if data.kind == "cldr":
        total.update(
            cldr.fingerprint(
                data.source, data.target, limit=data.pairs, held_out=data.held_out
            ).encode()
        )
    if data.kind == "huggingface" and not Path(data.dataset).is_dir():
        total.update(
            json.dumps([data.dataset, *(getattr(data, split) for split in SPLITS)]).encode()
        )
    files = files_of(data)
    try:
        sha256 = digests.of(path for _, path in files)
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}",
            describe_source(data),
            "check the path",
        ) from None
    for split, path in files:
        total.update(f"{split} {path.name} {sha256[path]}\n".encode())
    return total.hexdigest()


def files_of(data: config.DataOptions) -> list[tuple[str, Path]]:
    """Return (split, file) of every file of the source, in a fixed order."""
    if data.kind == "files":
        return [(split, Path(path)) for split in SPLITS for path in getattr(data, split)]
    if data.kind == "huggingface" and Path(data.dataset).is_dir():
        return [
            ("dataset", path) for path in sorted(Path(data.dataset).rglob("*")) if path.is_file()
        ]
    return []


def refuse_unused_options(data: config.DataOptions) -> None:
    unused = [
        name
        for name in FIELDS["huggingface"]
        if name not in FIELDS[data.kind] and getattr(data, name)
    ]
    if unused:
        where = describe_source(data)
        kinds = [kind for kind, fields in FIELDS.items() if unused[0] in fields]
        raise ConfigError(
            f"data.kind={data.kind} does not read data.{unused[0]}",
            where,
            f"set data.kind to {' or '.join(kinds)}",
        )


def describe_source(data: config.DataOptions) -> str:
    fields = {
        name: getattr(data, name) for name in ("kind", "source", "target", *FIELDS[data.kind])
    }
    return " ".join(
        f"data.{k}={v if isinstance(v, str) else ','.join(v)}" for k, v in fields.items() if v
    )
