"""Pairs and texts from a Hugging Face dataset, such as Helsinki-NLP/opus_books, or a local folder.

Imported on demand, as importing `datasets` takes 1 to 4 s. Pairs come from a column `translation`
with a text per language, or from columns named after the languages or `source` and `target`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

import datasets

from lockstep.config.schema import DataOptions
from lockstep.corpus.pairs.textfiles import Pairs, sides_of
from lockstep.errors import ConfigError, DataError


def read_dataset(data: DataOptions) -> dict[str, Pairs]:
    """Return the pairs of each split that exists. A cached dataset does not contact the hub.
    ConfigError, DataError: no such dataset, subset, split or column."""
    source, target, where = data.source, data.target, describe(data.dataset, data.subset)
    dataset = load(data.dataset, data.subset)
    pairs = {}
    for ours, wanted in splits_of(data).items():
        split = dataset[wanted]
        texts = {
            column: split[column][:]
            for column in split.column_names
            if column in ("translation", source, target, "source", "target")
        }
        if not texts:
            what = f"no column for {source!r} and {target!r}, but {', '.join(split.column_names)}"
            raise DataError(what, where, "set data.source, data.target")
        rows = (
            dict(zip(texts, values, strict=True)) for values in zip(*texts.values(), strict=True)
        )
        pairs[ours] = [
            sides_of(row, source, target, f"{where}, split {wanted}, row {i}")
            for i, row in enumerate(rows)
        ]
    return pairs


def choose_splits(
    requested: Mapping[str, str], available: Sequence[str], where: str
) -> dict[str, str]:
    """Return our split -> the dataset's split: the requested one, else the one of our name unless
    it is requested for another split. DataError if a split does not exist, or is used twice."""
    chosen: dict[str, str] = {}
    for split, given in requested.items():
        taken = split in [name for other_split, name in requested.items() if other_split != split]
        chosen_name = given or (
            "train" if split == "train" else split if split in available and not taken else ""
        )
        if chosen_name and chosen_name not in available:
            near = get_close_matches(chosen_name, available, n=1, cutoff=0.0) or ["none"]
            raise DataError(
                f"the dataset has no split {chosen_name!r}, but {', '.join(available)}",
                where,
                f"try data.{split}={near[0]}",
            )
        if used := [
            other_split
            for other_split, name in chosen.items()
            if chosen_name and name == chosen_name
        ]:
            raise DataError(
                f"data.{used[0]} and data.{split} are one split, {chosen_name!r}",
                where,
                "use another split, or remove one",
            )
        if chosen_name:
            chosen[split] = chosen_name
    return chosen


def splits_of(data: DataOptions) -> dict[str, str]:
    """Return our split -> the dataset's split. ConfigError: the user gave several names for one."""
    names: dict[str, tuple[str, ...]] = {
        "train": data.train,
        "validation": data.validation,
        "test": data.test,
    }
    if several := [split for split, given in names.items() if len(given) > 1]:
        raise ConfigError(
            f"data.{several[0]} names several splits",
            f"data.dataset={data.dataset}",
            "name one, or none",
        )
    requested = {split: "".join(given) for split, given in names.items()}
    return choose_splits(
        requested, list(load(data.dataset, data.subset)), describe(data.dataset, data.subset)
    )


def describe(name: str, subset: str) -> str:
    return f"data.dataset={name} data.subset={subset}"


def read_column(name: str, subset: str, split: str, column: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each row with a text. DataError: no such dataset or column."""
    rows = load(name, subset)[split]
    if column not in rows.column_names:
        what = f"no column {column!r}, but {', '.join(rows.column_names)}"
        raise DataError(what, describe(name, subset), "set data.column to one of its columns")
    for number, row in enumerate(rows.select_columns([column])):
        if isinstance(text := row[column], str):
            yield number, text


@lru_cache(maxsize=1)  # a run reads its dataset several times, and each load contacts the hub
def load(name: str, subset: str) -> datasets.DatasetDict:
    """Load a dataset of the hub, a folder of `save_to_disk`, or one with parquet, jsonl or csv
    files. A dataset without splits becomes the split train. DataError."""
    folder = Path(name)
    try:
        if folder.is_dir() and (
            (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
        ):
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, subset or None)
        return (
            datasets.DatasetDict({"train": dataset})
            if isinstance(dataset, datasets.Dataset)
            else dataset
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        what = f"the dataset cannot be loaded: {' '.join(str(error).split())[:300]}"
        hint = "check the name and the network; a folder of `save_to_disk`, or one with parquet files, needs no network"
        raise DataError(what, describe(name, subset), hint) from error
