"""The lock of the only agent of a host and run, and what an earlier agent left behind.

The agent holds the file lock state/agent.lock, which the kernel releases when the agent dies.
Before it starts a worker, it replaces the record state/agent.json, which tells the next agent:

    pid              of the holder
    base_generation  the newest one before the workers were started: an earlier result is not theirs
    lives_on         whether the workers outlive their agent
    folder_id        of the run folder: while workers run, another folder in its place is refused
    command          the settings that the workers were started with, by name

The record is another file than the lock, since a file that is replaced atomically loses its lock.
Workers whose record is missing or damaged are neither killed nor adopted.
"""

import os
import select
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.elastic.generation_log import Generation, GenerationLog
from lockstep.elastic.run_folder import create_run_folder, read_folder_id
from lockstep.errors import DamagedFileError, DataError, UsageError
from lockstep.files import add_checksum, read_json, try_lock, verify_checksum, write_json
from lockstep.log import log
from lockstep.runtime.processes import kill_group, open_worker_log
from lockstep.runtime.worker_env import ProcessIdentity, running_workers

KILL_TIMEOUT_S = 5.0
RECORD = "agent.json"


@dataclass(frozen=True)
class PriorState:
    """State of the run when an agent starts."""

    newest: Generation  # in the log
    base_generation: int  # the newest one before the start of the workers
    # slot -> worker of an earlier agent that is still training.
    running: Mapping[int, ProcessIdentity]
    folder_id: str = ""


@contextmanager
def agent_lock(
    folder: Path, state: Path, host: str, command: Mapping[str, str], *, slots: int, lives_on: bool
) -> Iterator[PriorState]:
    """Be the agent of `host` for the run in `folder`, which is prepared.
    UsageError if there is another agent, other workers survived, or the folder cannot be used;
    DataError if it is unknown how workers that survived were started."""
    with hold_lock(state, folder, host):
        before, running = read_record(state), running_workers(state)
        if running and not before:
            raise unknown_workers(running, state, folder)
        folder_id = prepare_folder(
            folder,
            slots,
            host,
            str(before.get("folder_id", "")) if running and before.get("lives_on") else "",
        )
        newest = newest_generation(folder)
        if running and not before.get("lives_on"):
            kill_all(running.values())  # their agent is dead, and the kernel is about to end them
            running = {}
        if running:
            check_adoptable(running, folder, slots, lives_on, before.get("command", {}), command)
        base = int(before["base_generation"]) if running else newest.number
        value = {
            "pid": os.getpid(),
            "base_generation": base,
            "lives_on": lives_on,
            "folder_id": folder_id,
            "command": dict(command),
        }
        write_record(state, value)
        yield PriorState(newest, base, running, folder_id)
        remove_stale_files(state)


@contextmanager
def hold_lock(state: Path, folder: Path, host: str) -> Iterator[None]:
    path = state / "agent.lock"
    descriptor = try_lock(path)
    if descriptor is None:
        holder = read_record(state).get("pid", "unknown")
        raise UsageError(
            f"another training is already running in {folder}: the agent of {host}, pid {holder}",
            f"it holds {path}",
            f"wait for it, stop it (kill {holder}), or choose another --out",
        )
    try:
        yield
    finally:
        os.close(descriptor)


def read_record(state: Path) -> dict[str, Any]:
    """Return how the last agent started its workers; {} if the record is missing or damaged."""
    path = state / RECORD
    try:
        return verify_checksum(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s in the state folder of this host is damaged: %s", path.name, error)
        return {}


def write_record(state: Path, value: Mapping[str, Any]) -> None:
    try:
        write_json(state / RECORD, add_checksum(value))
    except OSError as error:
        raise UsageError(
            f"cannot write {state / RECORD}: {error.strerror}",
            "state folder of agents and workers, in LOCKSTEP_TMP or /tmp",
            "free space there, or set LOCKSTEP_TMP to a folder on another local disk",
        ) from None


def pids_of(running: Mapping[int, ProcessIdentity]) -> str:
    return ", ".join(str(process.pid) for process in running.values())


def unknown_workers(running: Mapping[int, ProcessIdentity], state: Path, folder: Path) -> DataError:
    """Return the error for workers that cannot be adopted and must not be killed."""
    return DataError(
        f"workers are training in {folder} (pid {pids_of(running)}), "
        "and it is unknown how they were started",
        f"{state / RECORD}, which their agent wrote, is missing or damaged",
        f"they keep training; stop them before another start: lockstep launch --stop {folder}",
    )


def prepare_folder(folder: Path, slots: int, host: str, expected_id: str = "") -> str:
    """Create the run folder with subfolders and logs, and return its id. UsageError if it fails.
    expected_id: id of the folder that surviving workers use; it must exist already."""
    try:
        folder_id = read_folder_id(folder) if expected_id else create_run_folder(folder, host)
        if folder_id != expected_id and expected_id:
            token = "another" if folder_id else "no"
            raise UsageError(
                f"{folder} is not the folder "
                f"that the workers of {host} train in: it has {token} token",
                "the disk is not mounted, or another one is",
                "mount it again, or choose another --out",
            )
        (folder / "logs").mkdir(exist_ok=True)
        for slot in range(1, slots):
            open_worker_log(folder, slot, host).close()
        return folder_id
    except OSError as error:
        raise UsageError(
            f"cannot write {folder}: {error.strerror}",
            "given with --out",
            "choose a folder that this user can write, on a disk with free space",
        ) from None


def newest_generation(folder: Path) -> Generation:
    """Return the newest generation. DamagedFileError or UsageError if it cannot be read."""
    generation_log = GenerationLog(folder / "generations")
    try:
        return generation_log.newest()
    except DamagedFileError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot read the generation log: {error}",
            generation_log.folder.where,
            "repair it, or choose another --out",
        ) from None


def check_adoptable(
    running: Mapping[int, ProcessIdentity],
    folder: Path,
    slots: int,
    lives_on: bool,
    before: Mapping[str, str],
    now: Mapping[str, str],
) -> None:
    """UsageError if this start cannot adopt the workers that an earlier `launch` left running.
    before, now: the command that they were started with, and this one."""
    names = [
        name
        for name in dict.fromkeys([*before, *now])
        if before and before.get(name) != now.get(name)
    ]
    differences = [
        f"{name} is {before.get(name) or 'not set'} for them and {now.get(name) or 'not set'} here"
        for name in names
    ]
    if not lives_on:
        what, fix = (
            f"workers of `lockstep launch` are training in {folder}",
            "run lockstep launch again, which adopts them;",
        )
    elif max(running) >= slots:
        what = (
            f"{max(running) + 1} workers are training "
            f"in {folder} on this host, but {slots} were requested"
        )
        fix = "request as many workers as are running,"
    elif differences:
        what = (
            f"workers that were started with another command are training in {folder}: "
            f"{'; '.join(differences)}"
        )
        fix = "give the same command, which adopts them;"
    else:
        return
    raise UsageError(
        what,
        f"pid {pids_of(running)}; their agent was killed, and they kept training",
        f"{fix} or stop them first: lockstep launch --stop {folder}",
    )


def kill_all(processes: Iterable[ProcessIdentity]) -> None:
    """Kill workers and the processes that they started, and wait until they have exited."""
    for process in processes:
        with suppress(ProcessLookupError):
            pidfd = os.pidfd_open(process.pid)
            if process.alive:
                kill_group(process.pid)
                select.select([pidfd], [], [], KILL_TIMEOUT_S)
            os.close(pidfd)


def remove_stale_files(state: Path) -> None:
    """Delete the files of exited workers, also partly written ones, from the state folder."""
    if not running_workers(state):
        patterns = ("[0-9]*.*", "file_digests.*", RECORD)
        for pattern in (*patterns, *(f".{pattern}" for pattern in patterns), f".{RECORD}.*"):
            for path in state.glob(pattern):
                path.unlink()
