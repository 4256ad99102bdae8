"""Records of a Hugging Face dataset, such as Helsinki-NLP/opus_books, or of a local folder.

Imported on demand, as importing `datasets` takes 1 to 4 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

import datasets

from lockstep.config.schema import DataOptions
from lockstep.corpus.files import Record
from lockstep.errors import ConfigError, DataError


def records(data: DataOptions, split: str, columns: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a split of the dataset, with those of `columns` that it has. A cached
    dataset does not contact the hub. DataError: no such dataset, or no such column."""
    where = describe(data)
    rows = load(data.dataset, data.subset)[split]
    chosen = [column for column in rows.column_names if column in columns]
    if not chosen:
        raise DataError(
            f"no column {' or '.join(map(repr, columns))}, but {', '.join(rows.column_names)}",
            where,
            "set data.column, or data.source and data.target, to existing columns",
        )
    number = 0
    for batch in rows.select_columns(chosen).iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            yield f"{where}, split {split}, row {number}", dict(zip(batch, values, strict=True))
            number += 1


def choose_splits(
    requested: Mapping[str, str], available: Sequence[str], where: str
) -> dict[str, str]:
    """Return our split -> the dataset's split: the requested one, else the one of our name unless
    it is requested for another split. DataError if a split does not exist, or is used twice."""
    chosen: dict[str, str] = {}
    for split, name in requested.items():
        is_free = split in available and split not in requested.values()
        if not name and (split == "train" or is_free):
            name = split
        if not name:
            continue
        if name not in available:
            near = get_close_matches(name, available, n=1, cutoff=0.0) or ["none"]
            raise DataError(
                f"the dataset has no split {name!r}, but {', '.join(available)}",
                where,
                f"try data.{split}={near[0]}",
            )
        if used := [other for other, taken in chosen.items() if taken == name]:
            raise DataError(
                f"data.{used[0]} and data.{split} are one split, {name!r}",
                where,
                "use another split, or remove one",
            )
        chosen[split] = name
    return chosen


def splits_of(data: DataOptions) -> dict[str, str]:
    """Return our split -> the dataset's split. ConfigError: the user gave several names for one."""
    names = {"train": data.train, "validation": data.validation, "test": data.test}
    if several := [split for split, given in names.items() if len(given) > 1]:
        raise ConfigError(
            f"data.{several[0]} names several splits",
            f"data.dataset={data.dataset}",
            "name one, or none",
        )
    requested = {split: "".join(given) for split, given in names.items()}
    return choose_splits(requested, list(load(data.dataset, data.subset)), describe(data))


def cached_files(data: DataOptions) -> dict[str, list[Path]]:
    """Return the files with the rows of each split, in order; none for a split in memory."""
    dataset = load(data.dataset, data.subset)
    return {
        split: [Path(file["filename"]) for file in dataset[name].cache_files]
        for split, name in splits_of(data).items()
    }


def describe(data: DataOptions) -> str:
    return f"data.dataset={data.dataset} data.subset={data.subset}"


@lru_cache(maxsize=1)  # a run reads its dataset several times, and each load contacts the hub
def load(name: str, subset: str) -> datasets.DatasetDict:
    """Load a dataset of the hub, a folder of `save_to_disk`, or one with parquet, jsonl or csv
    files. A dataset without splits becomes the split train. DataError."""
    folder = Path(name)
    is_saved = any((folder / file).exists() for file in ("dataset_dict.json", "state.json"))
    try:
        if is_saved:
            dataset = datasets.load_from_disk(name)
        else:
            dataset = datasets.load_dataset(name, subset or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the dataset cannot be loaded: {' '.join(str(error).split())[:300]}",
            f"data.dataset={name} data.subset={subset}",
            "check the name and the network; a folder of `save_to_disk`, or one with parquet "
            "files, needs no network",
        ) from error
    if isinstance(dataset, datasets.Dataset):
        return datasets.DatasetDict({"train": dataset})
    return dataset
