"""The names of environment variables that are for users; loads nothing else."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

CACHE = "LOCKSTEP_CACHE"  # folder of what runs share: prepared data; off: none
TRACK = "LOCKSTEP_TRACK"  # the metric backends of Sessions, separated by commas
PROFILE = "LOCKSTEP_PROFILE"  # the steps that Sessions profile
REPLAY = "LOCKSTEP_REPLAY"  # what a process of `lockstep replay` does (history/request.py)
# By axis: its size in the layout of a Session, as lockstep run --layout.AXIS sets it.
LAYOUT = {
    "shard": "LOCKSTEP_LAYOUT_SHARD",
    "tensor": "LOCKSTEP_LAYOUT_TENSOR",
    "pipeline": "LOCKSTEP_LAYOUT_PIPELINE",
}


def user_cache() -> Path:
    """Return Lockstep's folder in the user's cache. RuntimeError: the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


def environment_variable(key: str) -> str:
    return "LOCKSTEP_" + key.upper().replace(".", "_")


def takes_no_value(word: str) -> bool:
    """Whether a flag of a user's function switches a boolean off: --no-augment. No key of a run
    starts like that."""
    return word.startswith("--no-")


def unknown_variables(environ: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the unknown names that begin with LOCKSTEP_. Kubernetes sets some for a service with a
    name like lockstep-run: these are not returned."""
    linked = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP).*)?$")
    names = [name for name in environ if name.startswith("LOCKSTEP_") and name not in known]
    return [name for name in names if not linked.search(name)]
