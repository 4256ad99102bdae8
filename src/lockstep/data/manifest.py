"""The marker of prepared data: written last, with the settings that were asked for and the sha256 of every file.

A preparation that was cut short has none, and is simply done again. A damaged file would train a wrong model without a word, so every
file is compared whenever a process opens the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.files import read_json, sha256_file

MARKER = "prepared.json"


def read_marker(folder: Path) -> dict[str, Any]:
    """What the preparation wrote last. DataError when it is missing or torn."""
    try:
        found = read_json(folder / MARKER)
        if isinstance(found, dict) and {"corpus", "tokenizer", "asked", "report", "files"} <= found.keys():
            return found
        raise ValueError("it lacks what a preparation writes")
    except FileNotFoundError:
        what = f"no data was prepared in {folder}"
        raise DataError(what, f"{MARKER} is missing", "start the training once, it prepares the data") from None
    except ValueError as error:
        raise DataError(f"{folder / MARKER} is damaged: {error}", "", "remove the folder to prepare the data again") from None


def refuse_another(found: Mapping[str, Any], asked: Mapping[str, Any], folder: Path) -> None:
    """DataError when `folder` holds data that was made with other settings or of other files."""
    other = [name for name, value in asked.items() if found.get(name) != value]
    if other:
        raise DataError(
            f"other data was prepared here: {', '.join(other)} differ{'s' if len(other) == 1 else ''}",
            "\n".join([str(folder), *(f"{name}: prepared with {found.get(name)}, asked for {asked[name]}" for name in other)]),
            "take another run folder, or the settings and files that this one began with",
        )


def compare(expected: Mapping[Path, str], folder: Path) -> None:
    """DataError when a file is missing or has another sha256 than expected. Cost: about a second a gigabyte."""
    for path, digest in expected.items():
        found = sha256_file(path) if path.exists() else "missing"
        if found != digest:
            what = f"{path} is {'missing' if found == 'missing' else 'damaged'}"
            raise DataError(what, f"sha256 {found}\nwas    {digest}", f"remove {folder} to prepare the data again")
