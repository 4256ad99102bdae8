"""The run folder: its subfolders, created once when a run starts, and whether it is usable now.

    RUN/token         secret token, which identifies the folder and authenticates workers (link.py):
                      readable by its owner alone (mode 600)
    RUN/generations   the log of generations (generation_log.py)
    RUN/waiting       the waiting room, where workers outside every generation publish their
                      addresses:
        HOST-SLOT-RANDOM.json  address of a waiting worker; removed when it joins, or by its agent
        HOST-SLOT-RANDOM.sign  liveness file: changes while its worker is the coordinator
    RUN/logs          output of the workers

A worker that cannot reach a member but sees its liveness file change knows that the member lives.
If the hosts share no disk, the waiting room is in the store of the run (object_store/storage.py).

A folder on a shared disk may be unavailable for a while: unmounted, read-only, empty, or replaced.
While the run lives, a missing subfolder is never created again: there would be two logs once the
disk is back. A process that needs it waits.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.elastic.generation_log import Member, open_generation_log
from lockstep.errors import (
    CheckpointError,
    DamagedFileError,
    DataError,
    LockstepError,
    SaveFailedError,
    UsageError,
)
from lockstep.files import open_regular, parse_json, write_if_absent
from lockstep.log import log
from lockstep.object_store.storage import Storage, shared_folder
from lockstep.runtime.worker_env import WorkerEnv

WAITING = "waiting"
SUBFOLDERS = ("generations", WAITING, "logs")
TOKEN_BYTES = 32
TOKEN = re.compile(rb"[0-9a-f]{%d}" % (2 * TOKEN_BYTES))
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


def make_token(run: Path) -> None:
    """Create the run's token if it has none. OSError when it cannot be written."""
    if not (run / "token").exists():
        write_if_absent(run / "token", secrets.token_hex(TOKEN_BYTES), 0o600)


def read_token(run: Path) -> bytes:
    """Read the run's token. OSError: missing or damaged. UsageError: other users can read it."""
    path = run / "token"
    with open(path, "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise UsageError(
                f"{path} can be read by other users",
                "the run's token authenticates workers",
                f"chmod 600 {path}",
            )
        token = file.read(1 << 20).strip()
    if not TOKEN.fullmatch(token):
        raise DamagedFileError(
            f"the run's token is damaged: {len(token)} bytes, "
            f"not {2 * TOKEN_BYTES} hexadecimal digits",
            str(path),
            "stop the workers of this run on all hosts, then remove the file: "
            "the next start makes a new token",
        )
    return token


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
    path = run / WAITING / f".{host}-{slot}-{secrets.token_hex(4)}.json"
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


# The waiting room.


def name_of(member: Member, suffix: str = "json") -> str:
    return f"{member.id.replace('/', '-')}.{suffix}"


class WaitingRoom:
    """The waiting room of a run, in a folder on its disk or in its store."""

    def __init__(self, folder: Storage) -> None:
        self.folder = folder

    def register(self, me: Member) -> None:
        """Publish this worker's address, in place of earlier ones of its slot. OSError when the
        waiting room is missing."""
        earlier = (name for name in self.folder.names() if is_of_slot(name, me.host, me.slot))
        self.folder.remove(*earlier)
        self.folder.write(name_of(me), json.dumps(vars(me)).encode())

    def members(self, known: dict[str, Member] | None = None) -> list[Member]:
        """Return the workers in the waiting room. Some may have exited; their ports refuse.
        known: file name -> worker, from the last call: a file never changes, so it is read once."""
        known = {} if known is None else known
        names = [name for name in self._names() if name.endswith(".json")]
        for name in known.keys() - set(names):
            del known[name]
        for name in set(names) - known.keys():
            with suppress(OSError, ValueError, TypeError):
                known[name] = Member.from_json(parse_json(self.folder.read(name).decode()))
        return [known[name] for name in names if name in known]

    def write_liveness(self, me: Member) -> None:
        self.folder.write(name_of(me, "sign"), str(time.monotonic_ns()).encode())

    def read_liveness(self, members: Sequence[Member]) -> dict[str, str]:
        """Return id -> content of the liveness file, for the members that have one."""
        contents = {}
        present = set(self._names()) if members else set()
        for member in members:
            if (name := name_of(member, "sign")) in present:
                with suppress(OSError, ValueError):
                    contents[member.id] = self.folder.read(name).decode()
        return contents

    def _names(self) -> Sequence[str]:
        """Return the names of the files; none in a copy of a run, which has no waiting room."""
        try:
            return self.folder.names()
        except FileNotFoundError:
            return []

    def unregister(self, me: Member, *, with_liveness: bool = False) -> None:
        self.folder.remove(name_of(me), *([name_of(me, "sign")] if with_liveness else []))


def open_waiting_room(run: Path) -> WaitingRoom:
    return WaitingRoom(shared_folder(run, WAITING))


def remove_stale_files(run: Path, host: str, slot: int) -> None:
    """Remove the files of earlier workers of an empty slot. In a store, its next worker does
    that."""
    for path in (run / WAITING).glob("*"):
        if is_of_slot(path.name, host, slot):
            path.unlink(missing_ok=True)


def is_of_slot(name: str, host: str, slot: int) -> bool:
    return bool(re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", name))
