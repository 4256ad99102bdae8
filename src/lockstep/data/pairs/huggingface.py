"""Pairs and texts from a Hugging Face dataset, such as Helsinki-NLP/opus_books (en-it), or a local folder.

A separate module because importing `datasets` takes seconds: it is imported on demand. Pairs come from
a column `translation` with a text per language, or from columns named after the languages or `source`
and `target`.
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
    """Return the pairs of each split that exists.

    name    dataset on the hub, or a folder: of `save_to_disk`, or with data files (parquet, jsonl, csv)
    splits  our split -> the dataset's name of it; "": the split of our name, if it exists
    DataError: no such dataset, subset, split or column. The hub is contacted only if the dataset is not cached.
    """
    where = f"data.dataset={name} data.subset={subset}"
    dataset = load(name, subset, where)
    pairs = {}
    for ours, wanted in choose_splits(splits, list(dataset), where).items():
        split = dataset[wanted]
        texts = {column: split[column][:] for column in split.column_names if column in ("translation", source, target, "source", "target")}
        if not texts:
            what = f"no column for {source!r} and {target!r}, but {', '.join(split.column_names)}"
            raise DataError(what, where, "set data.source, data.target")
        rows = (dict(zip(texts, values, strict=True)) for values in zip(*texts.values(), strict=True))
        pairs[ours] = [sides_of(row, source, target, f"{where}, split {wanted}, row {i}") for i, row in enumerate(rows)]
    return pairs


def choose_splits(requested: Mapping[str, str], available: Sequence[str], where: str) -> dict[str, str]:
    """Return our split -> the dataset's split: the requested one, else the one of our name unless it is
    requested for another split of ours.

    DataError if a split does not exist, or is used twice.
    """
    chosen: dict[str, str] = {}
    for ours, theirs in requested.items():
        taken = ours in [name for other, name in requested.items() if other != ours]
        wanted = theirs or ("train" if ours == "train" else ours if ours in available and not taken else "")
        if wanted and wanted not in available:
            near = get_close_matches(wanted, available, n=1, cutoff=0.0) or ["none"]
            raise DataError(f"the dataset has no split {wanted!r}, but {', '.join(available)}", where, f"try data.{ours}={near[0]}")
        if used := [other for other, name in chosen.items() if wanted and name == wanted]:
            raise DataError(f"data.{used[0]} and data.{ours} are one split, {wanted!r}", where, "use another split, or remove one")
        if wanted:
            chosen[ours] = wanted
    return chosen


def splits_of(name: str, subset: str, requested: Mapping[str, str]) -> dict[str, str]:
    """Apply `choose_splits` to a dataset."""
    where = f"data.dataset={name} data.subset={subset}"
    return choose_splits(requested, list(load(name, subset, where)), where)


def read_column(name: str, subset: str, split: str, column: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each row of a split; skip rows without a text.

    DataError: no such dataset or column.
    """
    where = f"data.dataset={name} data.subset={subset}"
    rows = load(name, subset, where)[split]
    if column not in rows.column_names:
        raise DataError(f"no column {column!r}, but {', '.join(rows.column_names)}", where, "set data.column to one of its columns")
    for number, row in enumerate(rows.select_columns([column])):
        if isinstance(text := row[column], str):
            yield number, text


@lru_cache(maxsize=1)  # a run reads its dataset several times, and each load contacts the hub
def load(name: str, subset: str, where: str) -> datasets.DatasetDict:
    """Load the dataset. Without splits, it becomes the split train. DataError if it fails."""
    folder = Path(name)
    try:
        if folder.is_dir() and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, subset or None)
        return datasets.DatasetDict({"train": dataset}) if isinstance(dataset, datasets.Dataset) else dataset
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        what = f"the dataset cannot be loaded: {reason[:300]}"
        hint = "check the name and the network; a folder of `save_to_disk`, or one with parquet files, needs no network"
        raise DataError(what, where, hint) from error
