"""The manifest of prepared data: its settings and the sha256 of every file, written last.

An interrupted preparation has no manifest and is repeated. Each reader of the folder verifies every
file, since a damaged one would silently train a wrong model: workers once per host and start of the
run (file_digests.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.data.file_digests import FileDigests
from lockstep.errors import DataError
from lockstep.files import read_json, write_json

log = logging.getLogger("lockstep")

MANIFEST = "prepared.json"


def read_manifest(folder: Path) -> dict[str, Any]:
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


def matches_prepared(folder: Path, settings: dict[str, Any], key: str, source: Callable[[], Any]) -> bool:
    """Whether data was prepared in `folder`. Adds a description of the source, `settings[key]`.
    DataError: other settings or files, or neither prepared data nor a readable source."""
    exists = (folder / MANIFEST).exists()
    try:
        settings[key] = source()
    except DataError as error:
        if not exists:
            raise
        # The source files are gone or moved; the prepared data is sufficient.
        log.warning("using the prepared data in %s; its source cannot be compared: %s", folder, error.what)
    if not exists:
        return False
    prepared = read_manifest(folder)["asked"]
    if different := [name for name, value in settings.items() if prepared.get(name) != value]:
        raise DataError(
            f"the data was prepared with other settings: {', '.join(different)} differ{'s' if len(different) == 1 else ''}",
            "\n".join([str(folder), *(f"{name}: prepared with {prepared.get(name)}, asked for {settings[name]}" for name in different)]),
            "use another run folder, or the settings and files of this one",
        )
    return True


def write_manifest(folder: Path, files: Iterable[Path], digests: FileDigests, **fields: Any) -> None:
    """Write the fields that `read_manifest` expects, and the sha256 of `files`."""
    write_json(folder / MANIFEST, {**fields, "files": {path.name: digest for path, digest in digests.of(files).items()}})


def verify_files(expected: Mapping[Path, str], folder: Path, digests: FileDigests) -> None:
    """DataError when a file is missing or its sha256 differs from the expected one."""
    actual = digests.of(path for path in expected if path.exists())
    for path, digest in expected.items():
        if (found := actual.get(path, "missing")) != digest:
            what = f"{path} is {'missing' if found == 'missing' else 'damaged'}"
            raise DataError(what, f"sha256 {found}\nwas    {digest}", f"remove {folder} to prepare the data again")


def open_manifest(folder: Path, digests: FileDigests) -> dict[str, Any]:
    """Return the manifest after verifying every file: about 1 s per gigabyte. DataError."""
    manifest = read_manifest(folder)
    verify_files({folder / name: digest for name, digest in manifest["files"].items()}, folder, digests)
    return manifest
