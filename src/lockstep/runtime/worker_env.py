"""What an agent gives a worker, and what each finds of the other on their host.

An agent starts workers with these variables:

    LOCKSTEP_SEAT       JSON: the fields of Seat
    LOCKSTEP_STATE      a folder of this host, not shared: what outlives the agent and the worker
    LOCKSTEP_ONE_SCREEN 1: all hosts show what they show on one screen, for one command started them

In that folder, for slot 3:

    3.json     who sits there: pid and start time, written before the worker runs
    3.end      its last words (failures.Account), written by itself
    3.board    what it is doing now (board.py)
    agent.lock held by the one agent of this host and run
    agent.command  what the workers were started with, as long as there are some (claim.py)
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.files import checked, read_json, with_checksum, write_json
from lockstep.runtime import status_board as board

log = logging.getLogger("lockstep")
SEAT, STATE, ONE_SCREEN = "LOCKSTEP_SEAT", "LOCKSTEP_STATE", "LOCKSTEP_ONE_SCREEN"


@dataclass(frozen=True)
class Seat:
    """A worker's place on its host.

    folder      of the run, absolute
    state       the host's own folder for this run
    host        name of the host, unique in the run
    slot        from 0; `slots` of them on this host
    expected    workers on all hosts together, for whom the first generation waits
    least       workers below which training waits (`min`)
    most        workers that train at once; others stand by (`max`)
    address     of this host, where its servers listen
    after       the newest generation before this start: an end that it says is over
    agent       pid of the agent with which this worker ends; 0: it outlives its agent
    drain       SIGUSR1 means: this host leaves, and the rest goes on
    folder_mark by which the run folder is known (folder.py); "": by whatever token is there
    known       the newest generation when this worker was asked for: a log without it is not the run's
    flags       of a user's own loop, as they were given: equal on all who train together
    """

    folder: str
    state: str
    host: str
    slot: int
    slots: int
    expected: int
    least: int
    most: int
    address: str
    after: int = 0
    agent: int = 0
    drain: bool = False
    folder_mark: str = ""
    known: int = 0
    flags: dict[str, str] = field(default_factory=dict)

    def environ(self) -> dict[str, str]:
        """The variables for the worker."""
        return {SEAT: json.dumps(asdict(self)), STATE: self.state}


def find_seat(environ: Mapping[str, str]) -> Seat | None:
    """This worker's seat; None when no agent started it. UsageError when the variable is not what an agent writes."""
    text = environ.get(SEAT)
    if not text:
        return None
    try:
        return Seat(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{SEAT} is not what an agent writes: {error}", "environment", "leave it unset") from None


def state_folder(run: Path, host: str) -> Path:
    """Where this host keeps what outlives agent and workers: not on the run's disk, which may be slow or gone. Made with mode 700.

    In /tmp (or $LOCKSTEP_TMP), whatever TMPDIR and XDG_RUNTIME_DIR say: an agent that cron starts must find what one at a terminal left,
    and a person who logs out takes nothing along.
    """
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    parent = Path(os.environ.get("LOCKSTEP_TMP") or "/tmp") / f"lockstep-{os.getuid()}"
    for folder in (parent, parent / f"{name}-{host}"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            where = "LOCKSTEP_TMP, else /tmp: where agents and workers of a host find each other"
            raise UsageError(f"{folder} cannot be made: {error.strerror}", where, "set LOCKSTEP_TMP to a folder on a local disk") from None
        if folder.stat().st_uid != os.getuid():
            raise UsageError(
                f"{folder} belongs to another user",
                "where agents and workers of a host find each other",
                "remove it, as its owner or as root",
            )
    return parent / f"{name}-{host}"


@functools.cache
def loopback_network() -> str:
    """Return an id of the network that 127.0.0.1 belongs to: the boot of this machine and the network namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def within_reach(loopback: str) -> bool:
    """Whether a member with this `loopback` is reachable from here. If not, a refused connection proves nothing."""
    return loopback in ("", loopback_network())


# Who sits where.


@dataclass(frozen=True)
class Sitter:
    """A process, told from a later one with its number by when it started.

    started        clock ticks after boot: setting the wall clock does not change it
    begun_at_byte  how long its log was when it began
    """

    pid: int
    started: int
    begun_at_byte: int = 0

    @property
    def alive(self) -> bool:
        """Whether it still runs; one that has ended and not been waited for does not."""
        try:
            state, started = look(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return started == self.started and state not in "ZX"


def look(pid: int) -> tuple[str, int]:
    """(state, start time in ticks after boot) of a process, from /proc/PID/stat (proc(5)). FileNotFoundError when there is none."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before may hold anything
    return words[0], int(words[19])


def sitter(pid: int, begun_at_byte: int = 0) -> Sitter:
    """The living process `pid`. FileNotFoundError when there is none."""
    return Sitter(pid, look(pid)[1], begun_at_byte)


def note_sitter(state: Path, slot: int, one: Sitter) -> None:
    """Write down who sits in `slot`."""
    write_json(state / f"{slot}.json", with_checksum(asdict(one)))


def last_words(state: Path, slot: int) -> Path:
    """Where the worker of `slot` tells how it ended."""
    return state / f"{slot}.end"


def sitters(state: Path) -> dict[int, Sitter]:
    """Slot -> the living process that sits there."""
    found = {}
    for path in sorted(state.glob("*.json")):
        if not path.stem.isdecimal():
            continue
        try:
            one: Sitter | None = Sitter(**checked(read_json(path)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            known = by_its_board(path.with_suffix(".board"))
            which = f"its worker is found by its board: pid {known.pid}" if known else "no worker is known to live there"
            log.warning("%s is damaged (%s); %s", path, error, which)
            one = known
        if one and one.alive:
            found[int(path.stem)] = one
    return found


def by_its_board(path: Path) -> Sitter | None:
    """Return the living process that has the board at `path` mapped, and so writes to it; None when none does."""
    try:
        pid = board.look(path).pid
        same = any(line.split(maxsplit=5)[5:] == [str(path.resolve())] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        return sitter(pid) if same else None
    except OSError:
        return None
