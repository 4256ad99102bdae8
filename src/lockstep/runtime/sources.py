"""Source fingerprints of the code that this process runs: Lockstep's and a user's training loop.

Both are hashes of source files at load time, independent of later edits and of their folder.
"""

import functools
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

PACKAGE_FOLDER = f"{Path(__file__).resolve().parents[1]}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
user_code: dict[str, str] = {}  # {"own loop": ...} once a user's function is loaded


def fingerprint() -> dict[str, str]:
    """Return {"lockstep": "0.1.0, sources 3f2a..."}, and "own loop" for a user's function."""
    main = sys.modules.get("__main__")
    if not user_code and main and is_user_code(main):  # torchrun FILE.py
        record_user_code(main)
    return {"lockstep": f"{lockstep_version()}, sources {SOURCES}", **user_code}


@functools.cache
def lockstep_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 30 ms: only when needed

    try:
        return version("lockstep-train")
    except PackageNotFoundError:  # imported from PYTHONPATH
        return "not installed"


def record_user_code(module: ModuleType) -> None:
    """Record a user's loop: its file, and its imports from the same folder or package."""
    file = Path(module.__file__ or "").resolve()
    folder, package = f"{file.parent}{os.sep}", module.__name__.partition(".")[0]
    names = {str(file): file.name}
    for name, other in list(sys.modules.items()):
        if other is module:  # its __file__ may be relative (runpy)
            continue
        path = getattr(other, "__file__", None) or ""
        beside = path.startswith(folder) and not any(f"{os.sep}{part}{os.sep}" in path for part in INSTALLED)
        if path.endswith(".py") and (beside or name.partition(".")[0] == package) and not path.startswith(PACKAGE_FOLDER):
            names.setdefault(path, path.removeprefix(folder) if beside else name)
    modules = [(name, Path(path).read_bytes()) for path, name in names.items() if os.path.isfile(path)]
    more = f" and {len(modules) - 1} modules" if len(modules) > 1 else ""
    user_code["own loop"] = f"{file.name}{more}, sources {sha256_of(modules)}"


def is_user_code(module: ModuleType) -> bool:
    """Return whether the module is a user's program, not of an installed package or of Lockstep."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    is_lockstep = str(path).startswith(PACKAGE_FOLDER)
    return path.suffix == ".py" and path.is_file() and not is_lockstep and not set(INSTALLED) & set(path.parts)


def python_files_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of each Python file in a package folder, except hidden ones of editors."""
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        if "/." not in f"/{name}":
            yield name, path.read_bytes()


def sha256_of(modules: Iterable[tuple[str, bytes]]) -> str:
    """Return the first 12 hex digits of the sha256 over names and contents, sorted by name."""
    digest = hashlib.sha256()
    for name, content in sorted(modules):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


SOURCES = sha256_of(python_files_in(Path(PACKAGE_FOLDER)))
