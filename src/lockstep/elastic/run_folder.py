"""The run folder: its subfolders, created once when a run starts, and whether it is usable now.

    RUN/token         secret token, which identifies the folder (link.py)
    RUN/generations   the log of generations (generation_log.py)
    RUN/waiting       the waiting room (waiting_room.py)
    RUN/logs          output of the workers

A folder on a shared disk may be unavailable for a while: unmounted, read-only, empty, or replaced.
While the run lives, a missing subfolder is never created again: there would be two logs once the
disk is back. A process that needs it waits.
"""

import errno
import hashlib
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import open_generation_log
from lockstep.elastic.link import make_token, read_token
from lockstep.errors import (
    CheckpointError,
    DamagedFileError,
    DataError,
    LockstepError,
    SaveFailedError,
)
from lockstep.log import log
from lockstep.runtime.worker_env import WorkerEnv

SUBFOLDERS = ("generations", waiting.FOLDER, "logs")
POLL_S = 0.25


def create_run_folder(run: Path, host: str) -> str:
    """Create what is missing for a new start; return the folder's id. OSError: not writable."""
    for name in SUBFOLDERS:
        (run / name).mkdir(parents=True, exist_ok=True)
    make_token(run)
    check_writable(run, host, 0)
    return folder_id(read_token(run))


def remove_untrained_run(run: Path) -> None:
    """Delete what a start has created in a new run folder in which nothing trained, and the folder
    if nothing else is in it: the user's script may have written there."""
    for name in SUBFOLDERS:
        shutil.rmtree(run / name, ignore_errors=True)
    with suppress(OSError):
        for name in ("token", "events.jsonl"):
            (run / name).unlink(missing_ok=True)
        run.rmdir()


def folder_id(token: bytes) -> str:
    """Return a public id, from which the token cannot be derived."""
    return hashlib.sha256(b"run folder " + token).hexdigest()[:16]


def read_folder_id(run: Path) -> str:
    """Return the id of a run folder; "" when it has no token."""
    try:
        return folder_id(read_token(run))
    except FileNotFoundError:
        return ""


def read_worker_token(env: WorkerEnv) -> bytes:
    """Read the token of a worker's run. OSError when the folder is unavailable or another run's."""
    token = read_token(Path(env.folder))
    if env.folder_id and folder_id(token) != env.folder_id:
        raise OSError(errno.ESTALE, "the folder has the token of another run", env.folder)
    return token


def folder_error(env: WorkerEnv) -> str:
    """Return why the folder of a worker's run is unusable; "" if usable. UsageError: unsafe
    token."""
    run = Path(env.folder)
    try:
        read_worker_token(env)
        open_generation_log(run, since=env.known_generation).newest()
        check_writable(run, env.host, env.slot)
    except DamagedFileError as error:
        return error.what
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or run}"
    return ""


def check_writable(run: Path, host: str, slot: int) -> None:
    """Create and remove a file, or raise OSError. `remove_stale_files` cleans up after a kill."""
    path = run / waiting.FOLDER / f".{host}-{slot}-{secrets.token_hex(4)}.json"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with suppress(FileNotFoundError):
        path.unlink()


def wait_until_usable(env: WorkerEnv) -> None:
    """Return when the folder of a worker's run is usable."""
    if not (why := folder_error(env)):
        return
    started_s = time.monotonic()
    log.warning(
        "the run folder cannot be used (%s); worker %s/%d waits for it", why, env.host, env.slot
    )
    while folder_error(env):
        time.sleep(POLL_S)
    log.warning(
        "the run folder is usable again after %.0f s; %s/%d continues",
        time.monotonic() - started_s,
        env.host,
        env.slot,
    )


def may_be_folder_error(error: BaseException | None) -> bool:
    """Whether an unavailable run folder may have caused an error, here or on another worker."""
    if isinstance(error, SaveFailedError):
        return False  # always ends the run
    while error is not None:
        if isinstance(error, OSError | DataError | CheckpointError) or type(error) is LockstepError:
            return True
        error = error.__cause__ or error.__context__
    return False
