"""The parallel corpus of a run: training, validation and test pairs from the source in `data.kind`.

    cldr         generated from Unicode CLDR; needs no download              corpus/cldr.py
    files        two aligned text files, one TSV, or one JSONL, each plain or .gz
    huggingface  a dataset of the hub or of a local folder: a column `translation` with a text per
                 language, or columns named after the languages or `source` and `target`

Every pair is either kept, or counted by reason in the report. If the source has no validation or
test pairs, the training pairs whose source texts have the smallest hashes are held out. So equal
source texts are in one split, and the choice does not depend on the machine or the order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.config import schema as config
from lockstep.corpus import cldr
from lockstep.corpus.documents import SPLITS
from lockstep.corpus.files import read_lines, records_of
from lockstep.errors import DataError
from lockstep.units import shorten

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Corpus:
    train: Pairs
    validation: Pairs
    test: Pairs
    report: dict[str, Any]  # number of pairs: read = sum of kept (by split) + left_out (by reason)


def read_corpus(data: config.DataOptions) -> Corpus:
    splits, left_out = read_splits(data)
    dropped = Counter(left_out)
    read = sum(map(len, splits.values())) + dropped.total()
    where = describe_source(data)
    kept = {split: clean(splits.get(split, []), dropped) for split in SPLITS}
    if not kept["train"]:
        reason = f"{read:,} pairs were read, none has text on both sides"
        raise DataError(
            f"the training text is empty: {reason if read else 'nothing was read'}",
            where,
            "check the file, the split and the languages",
        )
    missing = [split for split in SPLITS[1:] if split not in splits]
    for split in SPLITS[1:]:
        if split not in missing and not kept[split]:
            raise DataError(
                f"the {split} text is empty",
                where,
                f"remove data.{split}, to hold out training pairs",
            )
    parts = hold_out(kept["train"], data.held_out, parts=len(missing), where=where)
    kept.update(zip(["train", *missing], parts, strict=True))
    counts = {split: len(pairs) for split, pairs in kept.items()}
    return Corpus(**kept, report={"read": read, "kept": counts, "left_out": dict(+dropped)})


def report_line(report: Mapping[str, Any]) -> str:
    kept = ", ".join(f"{count:,} {split}" for split, count in report["kept"].items())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["left_out"].items())
    return f"{report['read']:,} pairs read: {kept}; dropped: {reasons or 'none'}"


def read_splits(data: config.DataOptions) -> tuple[dict[str, Pairs], dict[str, int]]:
    """Return the splits of the source, and the pairs that its reader dropped, by reason."""
    source, target = data.source, data.target
    if data.kind == "cldr":
        return cldr.generate_pairs(source, target, limit=data.pairs, held_out=data.held_out)
    splits: dict[str, Pairs] = {}
    if data.kind == "files":
        for split in SPLITS:
            paths = getattr(data, split)
            if paths or split == "train":
                splits[split] = read_pairs(paths, source, target, split)
        return splits, {}
    reader = import_module("lockstep.corpus.huggingface")
    columns = ("translation", source, target, "source", "target")
    for split, name in reader.splits_of(data).items():
        rows = reader.records(data, name, columns)
        splits[split] = [sides_of(row, source, target, where) for where, row in rows]
    return splits, {}


def read_pairs(paths: Sequence[str], source: str, target: str, split: str) -> Pairs:
    """Return the pairs of `split`, including empty ones, from a source and a target text file, or
    one .tsv or .jsonl. DataError: unreadable or not UTF-8, sides of different length or missing."""
    if len(paths) == 2:
        return pair_lines(Path(paths[0]), Path(paths[1]))
    kind = Path(paths[0]).name.removesuffix(".gz").rpartition(".")[2] if len(paths) == 1 else ""
    if kind == "tsv":
        return pairs_of_tsv(Path(paths[0]), source, target)
    if kind in ("jsonl", "json"):
        records = records_of(Path(paths[0]))
        return [sides_of(record, source, target, where) for where, record in records]
    files = "file" if len(paths) == 1 else "files"
    raise DataError(
        f"data.{split} has {len(paths)} {files}: {', '.join(paths) or 'none'}",
        "data.kind=files",
        "give two text files (source, then target), one .tsv, or one .jsonl; each may end in .gz",
    )


def pair_lines(source: Path, target: Path) -> Pairs:
    a, b = read_lines(source), read_lines(target)
    if len(a) != len(b):
        raise DataError(
            f"the two sides have {len(a):,} and {len(b):,} lines",
            f"{source}\n{target}",
            "line n of one must translate line n of the other; look for unpaired lines",
        )
    return list(zip(a, b, strict=True))


def pairs_of_tsv(path: Path, source: str, target: str) -> Pairs:
    rows = [line.split("\t") for line in read_lines(path)]
    names = rows[0] if rows else []
    if {source, target} <= set(names):
        left, right = names.index(source), names.index(target)
        first = 1
    else:
        left, right = 0, 1
        first = 0
    if rows and not first and len(names) != 2:
        raise DataError(
            f"{path} has {len(names)} columns and no header with {source!r} and {target!r}",
            f"line 1: {shorten(names)}",
            "write two columns, or a first line with column names",
        )
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise DataError(
                f"{path} has {len(row)} columns in line {number:,}, {len(names)} in line 1",
                shorten(row),
                "look for a missing or extra tab",
            )
    return [(row[left], row[right]) for row in rows[first:]]


def sides_of(record: Any, source: str, target: str, where: str) -> tuple[str, str]:
    """Return both texts of a record: {"en": .., "it": ..}, also under the key "translation", or
    {"source": .., "target": ..}. A null is an empty text. DataError: no such columns."""
    inner = record.get("translation", record) if isinstance(record, dict) else {}
    for left, right in ((source, target), ("source", "target")):
        if isinstance(inner, dict) and left in inner and right in inner:
            a, b = inner[left], inner[right]
            if all(text is None or isinstance(text, str) for text in (a, b)):
                return a or "", b or ""
            raise DataError(
                f"the texts are {type(a).__name__} and {type(b).__name__}",
                where,
                "both sides must be strings",
            )
    columns = ", ".join(map(str, inner)) if isinstance(inner, dict) and inner else shorten(record)
    raise DataError(
        f"no columns {source!r} and {target!r}, but {columns}",
        where,
        "set data.source and data.target to existing columns",
    )


def clean(pairs: Pairs, left_out: Counter[str]) -> Pairs:
    """Strip white space; drop and count pairs without text on both sides."""
    stripped = [(a.strip(), b.strip()) for a, b in pairs]
    kept = [pair for pair in stripped if pair[0] and pair[1]]
    left_out["empty on one side"] += sum(bool(a) != bool(b) for a, b in stripped)
    left_out["empty on both sides"] += sum(not a and not b for a, b in stripped)
    return kept


def hold_out(pairs: Pairs, size: int, *, parts: int, where: str) -> list[Pairs]:
    """Return [remaining pairs, part 1, .., part `parts`] in corpus order, each part with `size`
    pairs, taken by the hash of the source text. A group of pairs with equal source text that does
    not fit into a part stays in training. DataError if the parts take more than half."""
    if 2 * parts * size > len(pairs):
        fitting = max(1, len(pairs) // (8 * parts))
        raise DataError(
            f"{len(pairs):,} pairs are too few to hold out {parts} times {size:,}",
            where,
            f"set data.held_out to {fitting:,}, or give validation and test files",
        )
    if not parts:
        return [pairs]
    groups = Counter(source for source, _ in pairs)
    part_of: dict[str, int] = {}
    space = [0, *[size] * parts]
    by_hash = sorted(
        groups, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest()
    )
    for source in by_hash:
        if not any(space):
            break
        part = next((i for i, free in enumerate(space) if groups[source] <= free), 0)
        part_of[source] = part
        space[part] -= groups[source] * bool(part)
    splits: list[Pairs] = [[] for _ in space]
    for pair in pairs:
        splits[part_of.get(pair[0], 0)].append(pair)
    return splits


def describe_source(data: config.DataOptions) -> str:
    names = ("kind", "source", "target", *SPLITS, "dataset", "subset")
    values = {name: getattr(data, name) for name in names}
    return " ".join(
        f"data.{name}={value if isinstance(value, str) else ','.join(value)}"
        for name, value in values.items()
        if value
    )
