"""The log of generations (numbered membership lists) in the run folder, each written once.

    RUN/generations/000007.json            members, step and reason of generation 7
    RUN/generations/000007.suspects.json   its replicas differ: its state is not trusted
    RUN/generations/archive/000007.json    the same file, once generation 1,007 exists

A generation is written to a temporary file, to which link(2) then gives its name, unless the name
is taken. So exactly one proposal for a number wins, no process hosts the log, and the two halves of
a cut network cannot both continue. link(2) is atomic on local disks and on NFS, but an NFS client
may report a failure after success (a lost reply). So a proposer always reads the winner back and
recognizes it by its random token. The messages between members only make a change fast.

If replicas differ without a majority, every member that detects it writes the second file before it
leaves, for members that lost their peers too early to detect it.

A start lists the folder, so the winner of a number archives the generation that is KEEP older.

If the hosts share no disk, the log is in an object store: there a conditional put decides a number
(object_store/storage.py). RUN/generations of each host is a copy then, for commands that only read.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import DamagedFileError
from lockstep.files import add_checksum, parse_json, verify_checksum
from lockstep.log import log
from lockstep.object_store.storage import DiskStorage, Storage, shared_folder

GENERATION_FILE = re.compile(r"(\d{6,})\.json")
ARCHIVE = "archive/"
KEEP = 1000  # newest generations that stay in the folder
RETRY_S = 20.0  # how long a member tries to read whether its state is trusted


@dataclass(frozen=True)
class Member:
    """One worker process, for its whole life."""

    id: str  # "HOST/SLOT/RANDOM", unique
    host: str
    slot: int  # number on its host, from 0
    pid: int
    address: str  # "ADDRESS:PORT" on which its membership thread listens
    # Id of the network of a loopback address (worker_env.py); "" if other hosts reach it.
    loopback: str = ""

    @property
    def sort_key(self) -> tuple[str, int, str]:
        """Position among workers outside every generation."""
        return self.host, self.slot, self.id

    @staticmethod
    def from_json(value: Any) -> Member:
        """Parse a member from a file or another process. TypeError or ValueError: malformed."""
        member = Member(**value)
        kinds = {"id": str, "host": str, "slot": int, "pid": int, "address": str}
        if wrong := [
            name for name, kind in kinds.items() if type(getattr(member, name)) is not kind
        ]:
            raise TypeError(f"a member's {wrong[0]} is {getattr(member, wrong[0])!r}")
        host, _, port = member.address.rpartition(":")
        ipaddress.ip_address(host)
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"a member's port is {port!r}")
        return member


@dataclass(frozen=True)
class Removed:
    """A member of the previous generation that is not in this one, and why."""

    id: str
    why: str


@dataclass(frozen=True)
class RunResult:
    """How the run ended. No generation follows until the run is started again."""

    code: int
    text: str = ""


@dataclass(frozen=True)
class Generation:
    """A numbered list of members."""

    number: int  # from 1, without gaps
    token: str  # random; distinguishes proposals of the same number
    members: tuple[Member, ...]  # in rank order; empty in the record that ends the run
    store: str  # "ADDRESS:PORT" of the TCPStore of its proposer, used to form the process group
    # Committed steps at its start; 0 for a start, which looks for its checkpoint only later.
    step: int
    reason: str  # why it was formed, for logs
    out: tuple[Removed, ...] = ()  # members of the previous generation that are not in this one
    end: RunResult | None = None  # of the run; None while it runs

    @cached_property
    def ranks(self) -> dict[str, int]:
        """The rank of each member, by id."""
        return {member.id: rank for rank, member in enumerate(self.members)}

    def rank_of(self, id: str) -> int | None:
        return self.ranks.get(id)

    def to_json(self, before: Generation | None = None) -> dict[str, Any]:
        """Return the generation as JSON. Members of `before` are pairs (first rank, end) there."""
        members: list[Any] = []
        for member in self.members:
            rank = before.rank_of(member.id) if before else None
            if rank is None:
                members.append(vars(member))
            elif members and isinstance(members[-1], list) and members[-1][1] == rank:
                members[-1][1] += 1
            else:
                members.append([rank, rank + 1])
        return asdict(replace(self, members=())) | {"members": members}

    @staticmethod
    def from_json(value: Any, before: Generation | None = None) -> Generation:
        """Parse the result of `to_json`. KeyError, TypeError or ValueError: malformed."""
        fields = dict(value)
        ranges = [
            before.members[slice(*item)]
            if before and isinstance(item, list)
            else [Member.from_json(item)]
            for item in fields["members"]
        ]
        return Generation(
            **fields
            | {
                "members": tuple(member for members in ranges for member in members),
                "out": tuple(Removed(**removed) for removed in fields["out"]),
                "end": RunResult(**fields["end"]) if fields["end"] else None,
            }
        )


NO_GENERATION = Generation(0, "", (), "", 0, "")  # before the first one


def new_token() -> str:
    return secrets.token_hex(8)


def name_of(number: int) -> str:
    return f"{number:06d}.json"


def suspects_name(number: int) -> str:
    return f"{number:06d}.suspects.json"


class GenerationLog:
    """The log of generations in a folder. Every method raises OSError when the disk or the store
    fails. A missing generation that was seen before, here or by another process (`since`), means
    that it is unavailable."""

    def __init__(self, folder: Path | Storage, since: int = 0) -> None:
        self.folder = DiskStorage(folder) if isinstance(folder, Path) else folder
        self.seen = since

    def newest(self, known: int = 0) -> Generation:
        """Return the newest generation above `known`. NO_GENERATION: there is none, which costs
        two stat()."""
        number = self.newest_number(known)
        return self.read(number) if number > known else NO_GENERATION

    def newest_number(self, known: int = 0) -> int:
        """Return the number of the newest generation, `known` or above; 0: there is none."""
        exists = self.folder.exists
        if known and not exists(name_of(known + 1)) and exists(name_of(known)):
            return known
        matches = [match for match in map(GENERATION_FILE.fullmatch, self.folder.names()) if match]
        newest = max((int(match[1]) for match in matches), default=0)
        if newest < max(known, self.seen):
            self._require(max(known, self.seen))
        return newest

    def read(self, number: int) -> Generation:
        """Read a generation. OSError: missing; DamagedFileError (an OSError): damaged."""
        return self._parse(number, lambda: self.read_bytes(number))

    def read_bytes(self, number: int) -> bytes:
        try:
            return self.folder.read(name_of(number))
        except FileNotFoundError:
            return self.folder.read(ARCHIVE + name_of(number))

    def _parse(self, number: int, read_bytes: Callable[[], bytes]) -> Generation:
        try:
            generation = Generation.from_json(verify_checksum(parse_json(read_bytes().decode())))
            if generation.number != number:
                raise ValueError(f"it holds generation {generation.number}")
        except (ValueError, KeyError, TypeError) as error:
            where = self.folder.where
            raise DamagedFileError(
                f"{name_of(number)}, the record of generation {number}, is damaged: {error}",
                f"{where}/{name_of(number)}",
                f"stop the workers of this run on all hosts, then move {where} aside; "
                "the next start resumes from a checkpoint",
            ) from error
        self.seen = max(self.seen, number)
        return generation

    def propose(self, generation: Generation) -> Generation:
        """Publish `generation`; return the generation that won its number, maybe another's."""
        number = generation.number
        self._require(max(number - 1, self.seen))
        winner = self.add(generation)
        if self.folder.exists(ARCHIVE + name_of(number)):
            # This process was stopped meanwhile: the number was taken.
            self.folder.remove(name_of(number))
            return self.read(number)
        if winner.token == generation.token:
            self._archive(number - KEEP)
        return winner

    def add(self, generation: Generation) -> Generation:
        """Publish `generation` also where the log lacks the one before it."""
        number = generation.number
        content = json.dumps(add_checksum(generation.to_json()), indent=1).encode()
        return self._parse(number, lambda: self.folder.create(name_of(number), content))

    def record_end(self, end: RunResult, reason: str, after: int) -> Generation:
        """Record the end of the run; return the record of its end, maybe another process's.
        after: newest generation before this start: an earlier end is not this one's."""
        newest = self.newest()
        while not newest.end or newest.number <= after:  # another process may propose, too
            number = newest.number + 1
            last = Generation(number, new_token(), (), "", newest.step, reason, end=end)
            newest = self.propose(last)
        return newest

    def _archive(self, number: int) -> None:
        """Move a generation, and earlier ones still in the folder, to the archive."""
        with suppress(OSError, ValueError):  # the next winner tries again; damaged: it stays
            while number > 0 and self.folder.exists(name_of(number)):
                self.folder.create(ARCHIVE + name_of(number), self.folder.read(name_of(number)))
                self.folder.remove(name_of(number))
                number -= 1

    def mark_untrusted(self, number: int, why: str, facts: dict[str, Any]) -> None:
        """Make every member restart from a checkpoint. facts: digests of each worker."""
        content = json.dumps(add_checksum({"why": why, **facts}), indent=1).encode()
        self.folder.create(suspects_name(number), content)

    def untrusted_reason(self, number: int) -> str:
        """Return why a generation's state is untrusted, also for a damaged file; else "". Try for
        RETRY_S."""
        until_s = time.monotonic() + RETRY_S
        name = suspects_name(number)
        while True:
            try:
                return str(self._read_suspects(name)["why"])
            except FileNotFoundError:
                return ""
            except (DamagedFileError, ValueError, KeyError) as error:
                return (
                    f"replicas of generation {number} differ; "
                    f"{name} with the details is damaged ({error})"
                )
            except OSError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.25)

    def divergence_records(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, content) of each untrusted generation, in order; skip damaged files."""
        records = []
        for name in self.folder.names():
            if not name.endswith(".suspects.json"):
                continue
            try:
                records.append((name, self._read_suspects(name)))
            except FileNotFoundError:
                continue
            except (DamagedFileError, ValueError) as error:
                log.warning(
                    "%s/%s is damaged (%s): cannot determine which worker diverged",
                    self.folder.where,
                    name,
                    error,
                )
        return records

    def _read_suspects(self, name: str) -> dict[str, Any]:
        return verify_checksum(parse_json(self.folder.read(name).decode()))

    def _require(self, number: int) -> None:
        if number and not self.folder.exists(name_of(number)):
            raise FileNotFoundError(
                errno.ENOENT, f"the log lacks generation {number}", self.folder.where
            )


def open_generation_log(run: Path, since: int = 0) -> GenerationLog:
    """Return the log that decides the membership of the run in this folder. Where hosts share no
    disk, RUN/generations is a copy of it, which may be a second old."""
    return GenerationLog(shared_folder(run, "generations"), since)
