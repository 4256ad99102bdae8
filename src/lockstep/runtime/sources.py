"""Fingerprints of the code that this process runs: Lockstep's, and that of a user's own loop.

Both are hashes of source files taken when they are loaded, so that a later edit of a file does not change them. Where a folder lies
does not matter, nor do compiled files.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType

HERE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
own: dict[str, str] = {}  # {"own loop": ...} once a user's function was loaded


def fingerprint() -> dict[str, str]:
    """Return the code that decides the bits: {"lockstep": "0.1.0, sources 3f2a..."}, and "own loop" where a user's own function trains."""
    main = sys.modules.get("__main__")
    if not own and main and is_users_own(main):  # torchrun FILE.py
        note_own(main)
    return {"lockstep": f"{lockstep_version()}, sources {SOURCES}", **own}


@functools.cache
def lockstep_version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version  # 30 ms, which a command that trains nothing need not pay

    try:
        return version("lockstep-train")
    except PackageNotFoundError:  # on the path, not installed
        return "not installed"


def note_own(module: ModuleType) -> None:
    """Take the code of a user's own loop: its file, and what it has imported from the file's folder or its own package."""
    file = Path(module.__file__ or "").resolve()
    folder, package = f"{file.parent}{os.sep}", module.__name__.partition(".")[0]
    taken = {str(file): file.name}
    for name, other in list(sys.modules.items()):
        path = getattr(other, "__file__", None) or ""
        beside = path.startswith(folder) and not any(f"{os.sep}{part}{os.sep}" in path for part in INSTALLED)
        if path.endswith(".py") and (beside or name.partition(".")[0] == package) and not path.startswith(HERE):
            taken.setdefault(path, path.removeprefix(folder) if beside else name)
    modules = [(name, Path(path).read_bytes()) for path, name in taken.items() if os.path.isfile(path)]
    more = f" and {len(modules) - 1} modules" if len(modules) > 1 else ""
    own["own loop"] = f"{file.name}{more}, sources {sha256_of(modules)}"


def is_users_own(module: ModuleType) -> bool:
    """Whether the module is a program of the user, not of an installed package or of Lockstep."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    ours = str(path).startswith(HERE)
    return path.suffix == ".py" and path.is_file() and not ours and not set(INSTALLED) & set(path.parts)


def modules_in(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """(path, content) of each Python file under a package's folder, which may lie in a zip file."""
    for entry in folder.iterdir():
        if entry.name.startswith("."):  # what editors leave
            continue
        if entry.is_dir():
            yield from modules_in(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".py"):
            yield prefix + entry.name, entry.read_bytes()


def sha256_of(modules: Iterable[tuple[str, bytes]]) -> str:
    """Return the first 12 hex digits of the sha256 over names and contents, in the order of the names."""
    total = hashlib.sha256()
    for name, content in sorted(modules):
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()[:12]


SOURCES = sha256_of(modules_in(files("lockstep")))
