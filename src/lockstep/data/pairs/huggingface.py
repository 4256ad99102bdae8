"""Pairs from a Hugging Face dataset, such as Helsinki-NLP/opus_books (en-it), or from a folder of the same shape.

A file of its own because importing `datasets` takes seconds: `corpus` imports this file only when a run asks for it.
The column `translation` holds one text for each language; columns named by the languages, or `source` and `target`, do as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

import datasets

from lockstep.data.pairs.textfiles import Pairs, sides_of
from lockstep.errors import DataError


def read_dataset(name: str, subset: str, source: str, target: str, splits: dict[str, str]) -> dict[str, Pairs]:
    """Pairs of each split that is there.

    name     of a dataset on the hub, or a folder: one that `save_to_disk` wrote, or one with data files (parquet, jsonl, csv)
    splits   our split -> the dataset's name for it; "" takes the split of our name if there is one, and none otherwise
    DataError: no such dataset or subset, no such split or column. The hub is asked only when the dataset is not in the user's cache.
    """
    where = f"data.dataset={name} data.subset={subset}"
    found = load(name, subset, where)
    pairs = {}
    for ours, wanted in choose_splits(splits, list(found), where).items():
        split = found[wanted]
        texts = {column: split[column][:] for column in split.column_names if column in ("translation", source, target, "source", "target")}
        if not texts:
            what = f"no column for {source!r} and {target!r}, but {', '.join(split.column_names)}"
            raise DataError(what, where, "set data.source, data.target")
        rows = (dict(zip(texts, values, strict=True)) for values in zip(*texts.values(), strict=True))
        pairs[ours] = [sides_of(row, source, target, f"{where}, split {wanted}, row {i}") for i, row in enumerate(rows)]
    return pairs


def choose_splits(asked: Mapping[str, str], there: Sequence[str], where: str) -> dict[str, str]:
    """Our split -> the dataset's name for it: the one asked for; else the one of our name, unless another split of ours asks for it.

    DataError: the dataset has no such split, or two of ours ask for one, whose rows would be on both sides.
    """
    chosen: dict[str, str] = {}
    for ours, theirs in asked.items():
        taken = ours in [name for other, name in asked.items() if other != ours]
        wanted = theirs or ("train" if ours == "train" else ours if ours in there and not taken else "")
        if wanted and wanted not in there:
            near = get_close_matches(wanted, there, n=1, cutoff=0.0) or ["none"]
            raise DataError(f"the dataset has no split {wanted!r}, but {', '.join(there)}", where, f"try data.{ours}={near[0]}")
        if twice := [other for other, name in chosen.items() if wanted and name == wanted]:
            raise DataError(f"data.{twice[0]} and data.{ours} are one split, {wanted!r}", where, "name another one, or leave one out")
        if wanted:
            chosen[ours] = wanted
    return chosen


def splits_of(name: str, subset: str, asked: Mapping[str, str]) -> dict[str, str]:
    """`choose_splits` of a dataset."""
    where = f"data.dataset={name} data.subset={subset}"
    return choose_splits(asked, list(load(name, subset, where)), where)


def read_column(name: str, subset: str, split: str, column: str) -> Iterator[tuple[int, str]]:
    """(number, text) of each row of one split, read from its files as they are asked for; rows without a text are left out.

    DataError: no such dataset or column.
    """
    where = f"data.dataset={name} data.subset={subset}"
    rows = load(name, subset, where)[split]
    if column not in rows.column_names:
        raise DataError(f"no column {column!r}, but {', '.join(rows.column_names)}", where, "set data.column to one that is there")
    for number, row in enumerate(rows.select_columns([column])):
        if isinstance(text := row[column], str):
            yield number, text


@lru_cache(maxsize=1)  # a run reads its dataset several times, and the hub is asked at each loading
def load(name: str, subset: str, where: str) -> datasets.DatasetDict:
    """The dataset; one without splits is a split train. Whatever keeps it from loading becomes a DataError with its reason."""
    folder = Path(name)
    try:
        if folder.is_dir() and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, subset or None)
        return datasets.DatasetDict({"train": found}) if isinstance(found, datasets.Dataset) else found
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        what = f"the dataset cannot be loaded: {reason[:300]}"
        hint = "is the name right, and the network there? a folder that `save_to_disk` wrote, or one with parquet files, needs none"
        raise DataError(what, where, hint) from error
