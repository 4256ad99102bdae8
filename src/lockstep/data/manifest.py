"""The manifest of prepared data: its settings and the sha256 of every file, written last.

An interrupted preparation has no manifest and is repeated. A damaged file would silently train a
wrong model, so every file is verified whenever a process opens the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.files import read_json, sha256_file

MANIFEST = "prepared.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. DataError if it is missing or damaged."""
    try:
        manifest = read_json(folder / MANIFEST)
        if isinstance(manifest, dict) and {"corpus", "tokenizer", "asked", "report", "files"} <= manifest.keys():
            return manifest
        raise ValueError("keys are missing")
    except FileNotFoundError:
        what = f"no data was prepared in {folder}"
        raise DataError(what, f"{MANIFEST} is missing", "start the training run once: it prepares the data") from None
    except ValueError as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {error}", "", "remove the folder to prepare the data again") from None


def refuse_other_settings(prepared: Mapping[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    """DataError if the data in `folder` was prepared with other settings or from other files."""
    other = [name for name, value in settings.items() if prepared.get(name) != value]
    if other:
        raise DataError(
            f"the data was prepared with other settings: {', '.join(other)} differ{'s' if len(other) == 1 else ''}",
            "\n".join([str(folder), *(f"{name}: prepared with {prepared.get(name)}, asked for {settings[name]}" for name in other)]),
            "use another run folder, or the settings and files of this one",
        )


def verify_files(expected: Mapping[Path, str], folder: Path) -> None:
    """DataError if a file is missing or its sha256 differs. Cost: about one second per gigabyte."""
    for path, digest in expected.items():
        actual = sha256_file(path) if path.exists() else "missing"
        if actual != digest:
            what = f"{path} is {'missing' if actual == 'missing' else 'damaged'}"
            raise DataError(what, f"sha256 {actual}\nwas    {digest}", f"remove {folder} to prepare the data again")
