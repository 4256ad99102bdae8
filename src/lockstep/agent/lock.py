"""Being the one agent of a host and run, and finding what an earlier one has left.

The agent holds the lock state/agent.lock, which the kernel takes from it when it dies. In it stands what the next one must know:

    pid       who holds it
    after     the newest generation before the workers were started: an end that it says is over
    lives_on  whether the workers outlive their agent
    mark      by which the run folder is known: as long as workers live, another one in its place is not taken for it

Beside it, as long as there are workers, state/agent.command has what they were started with, JSON: each value by its name.
"""

from __future__ import annotations

import json
import logging
import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.elastic.generation_log import Arbiter, Record
from lockstep.elastic.run_folder import known_by, make
from lockstep.errors import DamagedFileError, UsageError
from lockstep.files import checked, read_json, regular, try_lock, with_checksum, write_json
from lockstep.runtime.subprocesses import kill_group, open_output
from lockstep.runtime.worker_env import Sitter, sitters

log = logging.getLogger("lockstep")
PATIENCE_S = 5.0  # for the kernel to end a process
COMMAND = "agent.command"


@dataclass(frozen=True)
class Found:
    """What an agent finds at its start.

    newest   the newest generation in the log
    after    the newest one that this agent's workers have nothing to do with
    sitting  slot -> worker of an earlier agent that trains on
    mark     by which the run folder is known
    """

    newest: Record | None
    after: int
    sitting: Mapping[int, Sitter]
    mark: str = ""


@contextmanager
def claim(folder: Path, state: Path, host: str, command: Mapping[str, str], *, slots: int, lives_on: bool) -> Iterator[Found]:
    """Be the agent of `host` for the run in `folder` while entered, with the folder made ready.

    UsageError when there is an agent already, when what an earlier one has left does not fit this start, or when the folder cannot be had.
    """
    with hold(state / "agent.lock", folder, host) as lock:
        before, sitting = read_lock(lock), sitters(state)
        mark = make_ready(folder, slots, host, str(before.get("mark", "")) if sitting and before.get("lives_on") else "")
        newest = newest_generation(folder)
        if sitting and not before.get("lives_on"):
            end_all(sitting)  # their agent is dead, and they are about to follow
            sitting = {}
        if sitting:
            refuse_to_mix(sitting, folder, slots, lives_on)
            refuse_another_command(sitting, folder, read_command(state), command)
        else:
            write_json(state / COMMAND, with_checksum(command))
        after = int(before["after"]) if sitting else newest.number if newest else 0
        write_lock(lock, {"pid": os.getpid(), "after": after, "lives_on": lives_on, "mark": mark})
        yield Found(newest, after, sitting, mark)
        tidy(state)


@contextmanager
def hold(path: Path, folder: Path, host: str) -> Iterator[BinaryIO]:
    """Hold the lock. UsageError when another agent does."""
    descriptor = try_lock(path)
    if descriptor is None:
        with open(path, "rb", opener=regular) as file:
            holder = read_lock(file).get("pid", "unknown")
        raise UsageError(
            f"another training is at work in {folder}: the agent of {host}, pid {holder}",
            f"it holds {path}",
            f"wait for it, stop it (kill {holder}), or give another --out",
        )
    with open(descriptor, "r+b", buffering=0) as lock:
        yield lock


def read_lock(lock: BinaryIO) -> dict[str, Any]:
    """Return what the newest agent wrote into its lock; {} when it is empty or damaged."""
    lock.seek(0)
    try:
        return checked(json.loads(lock.read() or b"{}"))
    except (ValueError, RecursionError) as error:
        log.warning("agent.lock in the state folder of this host is damaged (%s); it is written again", error)
        return {}


def write_lock(lock: BinaryIO, value: Mapping[str, Any]) -> None:
    """Write into the lock."""
    lock.seek(0)
    lock.truncate()
    lock.write(json.dumps(with_checksum(value)).encode())


def make_ready(folder: Path, slots: int, host: str, mark: str = "") -> str:
    """Make the run folder, with its parts and logs; what it is known by. UsageError when it cannot be had.

    mark  of the folder of workers that are at work here, for whom nothing is made
    """
    try:
        found = known_by(folder) if mark else make(folder, host)
        if found != mark and mark:
            raise UsageError(
                f"{folder} is not the folder in which the workers of {host} train: {'another token' if found else 'no token'} is there",
                "another disk, or none, is in its place",
                "mount it again, or give another --out",
            )
        for slot in range(1, slots):
            output, _ = open_output(folder, slot, host)
            if output:
                output.close()
        return found
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}",
            "given with --out",
            "give a folder that this user can write, on a disk with space",
        ) from None


def newest_generation(folder: Path) -> Record | None:
    """The newest generation. DamagedFileError when its record is damaged, UsageError when the log cannot be read."""
    arbiter = Arbiter(folder / "generations")
    try:
        return arbiter.newest()
    except DamagedFileError:
        raise
    except OSError as error:
        raise UsageError(f"the log of generations cannot be read: {error}", str(arbiter.folder), "mend it, or give another --out") from None


def refuse_to_mix(sitting: Mapping[int, Sitter], folder: Path, slots: int, lives_on: bool) -> None:
    """UsageError when the workers that an earlier `launch` has left at work are not such as this start would have."""
    pids = ", ".join(str(one.pid) for one in sitting.values())
    stop = f"stop them first: lockstep launch --stop {folder}"
    if not lives_on:
        raise UsageError(
            f"workers of `lockstep launch` train in {folder}: pid {pids}",
            "their agent was killed, and they trained on",
            f"start lockstep launch again, which takes them over; or {stop}",
        )
    if max(sitting) >= slots:
        raise UsageError(
            f"{max(sitting) + 1} workers train in {folder} on this host, and {slots} are asked for: pid {pids}",
            "their agent was killed, and they trained on",
            f"start as many workers as there are, or {stop}",
        )


def read_command(state: Path) -> dict[str, str]:
    """Return the command of the workers on this host; {} when no agent wrote it. DamagedFileError when the file is damaged."""
    path = state / COMMAND
    try:
        return checked(read_json(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DamagedFileError(
            f"{COMMAND}, the command that the workers of this host were started with, is damaged: {error}",
            str(path),
            "stop them first (lockstep launch --stop RUN), then remove it",
        ) from None


def refuse_another_command(sitting: Mapping[int, Sitter], folder: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """UsageError when the workers that are at work were started with another command: they would not obey this one, and others would."""
    names = [name for name in dict.fromkeys([*before, *now]) if before and before.get(name) != now.get(name)]
    if differ := [f"{name} is {before.get(name) or 'not set'} for them and {now.get(name) or 'not set'} here" for name in names]:
        raise UsageError(
            f"workers that were started with another command train in {folder}: {'; '.join(differ)}",
            f"pid {', '.join(str(one.pid) for one in sitting.values())}; their agent was killed, and they trained on",
            f"give the same command, which takes them over; or stop them first: lockstep launch --stop {folder}",
        )


def end_all(sitting: Mapping[int, Sitter]) -> None:
    """SIGKILL to workers and what they have started; they are gone when it returns."""
    for one in sitting.values():
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(one.pid)
            if one.alive:
                kill_group(one.pid)
                select.select([handle], [], [], PATIENCE_S)
            os.close(handle)


def tidy(state: Path) -> None:
    """Remove what stands in the state folder of workers that are gone, also what one had begun to write when it was killed."""
    if not sitters(state):
        for path in [*state.glob("[0-9]*.*"), *state.glob(".[0-9]*.*"), *state.glob(COMMAND)]:
            path.unlink()
