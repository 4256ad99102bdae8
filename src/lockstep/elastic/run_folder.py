"""The run folder's own parts, made once when a run starts, and whether the folder can be used now.

    RUN/token         by which the folder is known (wire.py)
    RUN/generations   the log (arbiter.py)
    RUN/waiting       the waiting room (waiting.py)
    RUN/logs          what the workers show

On a shared disk the folder may be away for a while: unmounted, read-only, an empty one or another run's in its place. A part that was
made and is missing means just that. Nobody makes it anew, or the run would have two logs when the disk is back: whoever needs it waits.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import Arbiter
from lockstep.elastic.link import make_token, read_token
from lockstep.errors import CheckpointError, DamagedFileError, DataError, LockstepError, SaveFailedError
from lockstep.runtime.worker_env import Seat

log = logging.getLogger("lockstep")
PARTS = ("generations", waiting.FOLDER, "logs")
LOOK_S = 0.25


def make(run: Path, host: str) -> str:
    """Make the parts that are missing, for a run that starts now; what the folder is known by. OSError when it cannot be written."""
    for part in PARTS:
        (run / part).mkdir(parents=True, exist_ok=True)
    make_token(run)
    try_to_write(run, host, 0)
    return mark(read_token(run))


def mark(token: bytes) -> str:
    """What tells the folder with this token from others. The token cannot be found from it."""
    return hashlib.sha256(b"run folder " + token).hexdigest()[:16]


def known_by(run: Path) -> str:
    """What a run folder is known by; "" when it has no token."""
    try:
        return mark(read_token(run))
    except FileNotFoundError:
        return ""


def token_of(seat: Seat) -> bytes:
    """The token of the run that a worker is for. OSError when its folder is not there."""
    token = read_token(Path(seat.folder))
    if seat.folder_mark and mark(token) != seat.folder_mark:
        raise OSError(errno.ESTALE, "another run's token is there", seat.folder)
    return token


def trouble(seat: Seat) -> str:
    """Why the folder of a worker's run cannot be used now; "" when it can. UsageError when others than its owner can read its token."""
    run = Path(seat.folder)
    try:
        token_of(seat)
        Arbiter(run / "generations", since=seat.known).newest()
        try_to_write(run, seat.host, seat.slot)
    except DamagedFileError as error:
        return error.what
    except OSError as error:
        return f"{error.strerror or error}: {error.filename or run}"
    return ""


def try_to_write(run: Path, host: str, slot: int) -> None:
    """Make a file and remove it. OSError when that cannot be done. What is left after a kill goes with the slot's other files."""
    path = run / waiting.FOLDER / f".{host}-{slot}-{secrets.token_hex(4)}.json"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with suppress(FileNotFoundError):
        path.unlink()


def wait_for(seat: Seat) -> None:
    """Return when the folder of a worker's run can be used."""
    began_s, said = time.monotonic(), False
    while why := trouble(seat):
        if not said:
            log.warning("the run folder cannot be used (%s); the new worker of %s/%d waits for it", why, seat.host, seat.slot)
        said = True
        time.sleep(LOOK_S)
    if said:
        log.warning("the run folder is there again after %.0f s; %s/%d goes on", time.monotonic() - began_s, seat.host, seat.slot)


def about_files(error: BaseException | None) -> bool:
    """Whether an error may come from a folder that is away: the system's, one that it led to, or what another worker told of one."""
    if isinstance(error, SaveFailedError):
        return False  # the run is to end with it, wherever it came from
    while error is not None:
        if isinstance(error, OSError | DataError | CheckpointError) or type(error) is LockstepError:
            return True
        error = error.__cause__ or error.__context__
    return False
