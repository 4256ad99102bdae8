"""The exception tree of Lockstep and the exit code of each class.

A message has three parts: what happened with the values, where they came from, what to try.

    LockstepError              exit code 1   training failed
      UsageError                         2   invalid command line or environment
        ConfigError                      2   invalid configuration values
      DataError                          3   text, tokens or prepared files are damaged or missing
        DamagedFileError                 3   a file of a run is damaged, or not a regular file
      CheckpointError                    3   a checkpoint is damaged, missing or cannot be written
        SaveFailedError                  3   not saved, and checkpoint.on_error is "stop"
        StoreError                       3   the object store does not answer, or refuses a request
      DivergedError                      4   the loss or the gradient is no longer finite
      OutOfMemoryError                   1   the model or a batch does not fit into memory
      CollectiveMismatchError            1   workers are in different collectives
      PeersLostError                    76   other workers of this run exited or do not answer
        FencedError                     77   evicted from the run; its agent restarts it
          RunFolderUnavailableError     77   run folder unusable: the next worker waits

Exit codes without an error: 0 done, 75 saved and to be restarted, 128 + n killed by signal n.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

from lockstep.log import printable
from lockstep.units import join_names


class LockstepError(Exception):
    """`what` happened, `where` its values came from, `hint`: what to try. The last two may be
    ""."""

    exit_code = 1

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        more = [
            line
            for part in (self.where, self.hint)
            for line in printable(part).splitlines()
            if line
        ]
        return "\n  ".join([f"{type(self).__name__}: {printable(self.what)}", *more])


class UsageError(LockstepError):
    exit_code = 2


def refuse(names: Iterable[str], what: str, where: str, hint: str) -> None:
    """UsageError if there are any names. They follow `what` in the message."""
    if listed := list(names):
        raise UsageError(f"{what} {join_names(listed)}", where, hint)


def perhaps(word: str, known: Iterable[str]) -> str:
    """Return "perhaps A or B", the names most like `word`; "" if none is."""
    near = get_close_matches(word, list(known), n=2, cutoff=0.8)
    return f"perhaps {' or '.join(near)}" if near else ""


class ConfigError(UsageError):
    pass


def missing_package(
    name: str, extra: str, needed_by: str, problem: str = "is not installed"
) -> ConfigError:
    """Return the error about an optional package, which this extra of pyproject.toml installs."""
    hint = f"pip install 'lockstep-train[{extra}]', in a checkout: pip install '.[{extra}]'"
    return ConfigError(f"the package {name} {problem}", needed_by, hint)


TEXT_PACKAGES = ("babel", "rapidfuzz", "sacrebleu", "tokenizers")


def require_text_packages(needed_by: str) -> None:
    """ConfigError if a package is missing that the recipes need, for data and scores of text."""
    for name in TEXT_PACKAGES:
        if find_spec(name) is None:
            raise missing_package(name, "text", needed_by)


class DataError(LockstepError):
    exit_code = 3


class DamagedFileError(DataError, OSError):
    """Also an OSError: code that handles unreadable files handles this error too."""

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.errno = errno.EINVAL
        self.strerror = what
        self.filename = where or None


class CheckpointError(LockstepError):
    exit_code = 3


class SaveFailedError(CheckpointError):
    pass


class StoreError(CheckpointError, OSError):
    """Also an OSError: code that handles a disk which fails handles this error too."""

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.errno = errno.EIO
        self.strerror = what
        self.filename = where or None


class DivergedError(LockstepError):
    exit_code = 4


class OutOfMemoryError(LockstepError):
    pass


class CollectiveMismatchError(LockstepError):
    pass


class PeersLostError(LockstepError):
    exit_code = 76


class FencedError(PeersLostError):
    exit_code = 77


class RunFolderUnavailableError(FencedError):
    pass


ERRORS_BY_NAME = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, LockstepError)
}
