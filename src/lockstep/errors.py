"""Every way in which Lockstep fails, on one page.

A message has three parts: what happened with the values, where they came from, what to try.

    LockstepError              exit code 1   training failed
      UsageError                         2   the command's words do not fit
        ConfigError                      2   the run's values do not fit
      DataError                          3   text, tokens or prepared files are damaged or missing
        DamagedFileError                 3   a file of a run is not what was written, or is no file at all
      CheckpointError                    3   a checkpoint is damaged, missing or cannot be written
        SaveFailedError                  3   one could not be written, and save.on_error is "stop"
      DivergedError                      4   the loss or the gradient is no longer finite
      OutOfMemoryError                   1   what a worker was to hold did not fit
      PeersLostError                    76   other processes of this run are gone
        FencedError                     77   the run goes on without this worker; its agent starts it anew
          FolderAwayError               77   the run folder cannot be used: the next worker waits for it

Codes that are no error: 0 done, 75 saved and wants to be started again, 128 + n ended by signal n.
"""

from __future__ import annotations

import errno


class LockstepError(Exception):
    """`what` happened (with the values), `where` they came from, `hint`: what to try. The last two may be empty."""

    exit_code = 1

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        more = [line for part in (self.where, self.hint) for line in part.splitlines() if line]
        return "\n  ".join([f"{type(self).__name__}: {self.what}", *more])


class UsageError(LockstepError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(LockstepError):
    exit_code = 3


class DamagedFileError(DataError, OSError):
    """An OSError too, so that code which expects an unreadable file handles it like one."""

    def __init__(self, what: str, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.errno, self.strerror, self.filename = errno.EINVAL, what, where or None


class CheckpointError(LockstepError):
    exit_code = 3


class SaveFailedError(CheckpointError):
    pass


class DivergedError(LockstepError):
    exit_code = 4


class OutOfMemoryError(LockstepError):
    pass


class PeersLostError(LockstepError):
    exit_code = 76


class FencedError(PeersLostError):
    exit_code = 77


class FolderAwayError(FencedError):
    pass


BY_NAME: dict[str, type[LockstepError]] = {
    cls.__name__: cls
    for cls in (
        LockstepError,
        UsageError,
        ConfigError,
        DataError,
        DamagedFileError,
        CheckpointError,
        SaveFailedError,
        DivergedError,
        PeersLostError,
        FolderAwayError,
    )
}
