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

If the hosts share no disk, the log is in an object store (StoredGenerationLog): there a conditional
put decides a number. RUN/generations of each host is a copy then, for commands that only read.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.elastic.stored_folder import StoredFolder, stored_folder
from lockstep.errors import DamagedFileError
from lockstep.files import (
    add_checksum,
    parse_json,
    read_json,
    read_text,
    verify_checksum,
    write_if_absent,
    write_json,
)
from lockstep.log import log

GENERATION_FILE = re.compile(r"x*(\d{6,})\.json")
KEEP = 1000  # newest generations that stay in the folder
RETRY_S = 20.0  # how long a member tries to read whether its state is trusted, when a store does not answer


@dataclass(frozen=True)
class Member:
    """One worker process, for its whole life."""

    id: str  # "HOST/SLOT/RANDOM", unique
    host: str
    slot: int  # number on its host, from 0
    pid: int
    address: str  # "ADDRESS:PORT" on which its membership thread listens
    loopback: str = (
        ""  # id of the network of a loopback address (worker_env.py); "" if other hosts reach it
    )

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
    step: int  # committed steps at its start; 0 for a start, which looks for its checkpoint only later
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
    """Return the name of a generation's file, without its end. A store lists names as text, so from
    1,000,000 on each further digit has an "x" before the number."""
    digits = f"{number:06d}"
    return "x" * (len(digits) - 6) + digits


class GenerationLog:
    """The log of generations in `folder`. Every method raises OSError when the disk fails.
    It never creates the folder. A missing generation that was seen before, here or by another
    process (`since`), means that the disk is unavailable."""

    def __init__(self, folder: Path, since: int = 0) -> None:
        self.folder, self.seen = folder, since

    def newest(self, known: int = 0) -> Generation | None:
        """Return the newest generation above `known`, or None, which costs two stat()."""
        if known and not self._path(known + 1).exists() and self._path(known).exists():
            return None
        newest = max(
            (
                int(match[1])
                for name in os.listdir(self.folder)
                if (match := GENERATION_FILE.fullmatch(name))
            ),
            default=0,
        )
        if newest < max(known, self.seen):
            self._require(max(known, self.seen))
        return self.read(newest) if newest > known else None

    def read(self, number: int) -> Generation:
        """Read a generation. OSError: missing; DamagedFileError (an OSError): damaged."""
        path = self._path(number)
        return self._parse(number, path if path.exists() else self._archived(number), self.folder)

    def _parse(self, number: int, source: Path | str, where: object) -> Generation:
        """Return the generation in a file, or in a text of the log `where`."""
        try:
            text = read_text(source) if isinstance(source, Path) else source
            generation = Generation.from_json(verify_checksum(parse_json(text)))
            if generation.number != number:
                raise ValueError(f"it holds generation {generation.number}")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{name_of(number)}.json, the record of generation {number}, is damaged: {error}",
                str(source if isinstance(source, Path) else where),
                f"stop the workers of this run on all hosts, then move {where} aside; the next start resumes from a checkpoint",
            ) from error
        self.seen = max(self.seen, number)
        return generation

    def propose(self, generation: Generation) -> Generation:
        """Publish `generation`; return the generation that won its number, maybe another's."""
        self._require(max(generation.number - 1, self.seen))
        write_if_absent(
            self._path(generation.number), json.dumps(add_checksum(generation.to_json()), indent=1)
        )
        if self._archived(
            generation.number
        ).exists():  # this process was stopped meanwhile: the number was taken
            self._path(generation.number).unlink(missing_ok=True)
        winner = self.read(generation.number)
        if winner.token == generation.token:
            self._archive(generation.number - KEEP)
        return winner

    def record_end(self, end: RunResult, reason: str, after: int) -> Generation:
        """Record the end of the run; return the record of its end, maybe another process's.
        after: newest generation before this start: an earlier end is not this one's."""
        newest = self.newest()
        while (
            newest is None or not newest.end or newest.number <= after
        ):  # another process may propose, too
            number, step = (newest.number + 1, newest.step) if newest else (1, 0)
            newest = self.propose(Generation(number, new_token(), (), "", step, reason, end=end))
        return newest

    def _archive(self, number: int) -> None:
        """Move a generation, and earlier ones still in the folder, to the archive."""
        with suppress(OSError):  # the next winner tries again
            while self._path(number).exists():
                self._archived(number).parent.mkdir(exist_ok=True)
                with suppress(FileExistsError):
                    os.link(self._path(number), self._archived(number))
                self._path(number).unlink()
                number -= 1

    def mark_untrusted(self, number: int, why: str, facts: dict[str, Any]) -> None:
        """Make every member restart from a checkpoint. facts: digests of each worker."""
        write_json(
            self.folder / f"{name_of(number)}.suspects.json", add_checksum({"why": why, **facts})
        )

    def untrusted_reason(self, number: int) -> str:
        """Return why a generation's state is untrusted, also for a damaged file; else ""."""
        path = self.folder / f"{name_of(number)}.suspects.json"
        try:
            return str(verify_checksum(read_json(path))["why"])
        except FileNotFoundError:
            return ""
        except (DamagedFileError, ValueError, KeyError) as error:
            return f"replicas of generation {number} differ; {path.name} with the details is damaged ({error})"

    def divergence_records(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return (file, content) of each untrusted generation, in order; skip damaged files."""
        records = []
        for path in sorted(self.folder.glob("*.suspects.json")):
            try:
                records.append((path, verify_checksum(read_json(path))))
            except FileNotFoundError:
                continue
            except (DamagedFileError, ValueError) as error:
                log.warning(
                    "%s is damaged (%s): cannot determine which worker diverged", path, error
                )
        return records

    def _path(self, number: int) -> Path:
        return self.folder / f"{name_of(number)}.json"

    def _archived(self, number: int) -> Path:
        return self.folder / "archive" / f"{name_of(number)}.json"

    def _require(self, number: int) -> None:
        if number and not self._path(number).exists():
            raise FileNotFoundError(
                errno.ENOENT, f"the log lacks generation {number}", str(self.folder)
            )


class StoredGenerationLog(GenerationLog):
    """The log of a run whose hosts share no disk. folder: the copy of this host."""

    def __init__(self, folder: Path, stored: StoredFolder, since: int = 0) -> None:
        super().__init__(folder, since)
        self.stored, self.where = stored, f"{stored.bucket.address}/{stored.path}"

    def newest(self, known: int = 0) -> Generation | None:
        oldest = max(known, self.seen)
        names = self.stored.names(after=f"{name_of(oldest - 1)}.json" if oldest > 1 else "")
        newest = max(
            (int(match[1]) for match in map(GENERATION_FILE.fullmatch, names) if match), default=0
        )
        if newest < oldest:
            raise FileNotFoundError(errno.ENOENT, f"the log lacks generation {oldest}", self.where)
        return self.read(newest) if newest > known else None

    def read(self, number: int) -> Generation:
        return self._parse(number, self.stored.read(f"{name_of(number)}.json"), self.where)

    def propose(self, generation: Generation) -> Generation:
        number = generation.number
        self.newest(max(number - 1, self.seen))  # which requires that one
        text = json.dumps(add_checksum(generation.to_json()), indent=1)
        return self._parse(number, self.stored.create(f"{name_of(number)}.json", text), self.where)

    def mark_untrusted(self, number: int, why: str, facts: dict[str, Any]) -> None:
        self.stored.write(
            f"{name_of(number)}.suspects.json", json.dumps(add_checksum({"why": why, **facts}))
        )

    def untrusted_reason(self, number: int) -> str:
        until_s = time.monotonic() + RETRY_S
        while True:
            try:
                self._copy_suspects([f"{name_of(number)}.suspects.json"])
                return super().untrusted_reason(number)
            except OSError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.25)

    def divergence_records(self) -> list[tuple[Path, dict[str, Any]]]:
        self._copy_suspects(
            [name for name in self.stored.names() if name.endswith(".suspects.json")]
        )
        return super().divergence_records()

    def copy_new(self) -> None:
        """Add the generations after the newest one in the copy of this host, in order; to an empty
        copy only the newest."""
        copied = sorted(filter(GENERATION_FILE.fullmatch, os.listdir(self.folder)))
        names = [
            name
            for name in self.stored.names(after=copied[-1] if copied else "")
            if GENERATION_FILE.fullmatch(name)
        ]
        for name in names if copied else names[-1:]:
            write_if_absent(self.folder / name, self.stored.read(name))

    def _copy_suspects(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                write_if_absent(self.folder / name, self.stored.read(name))


def open_generation_log(run: Path, since: int = 0) -> GenerationLog:
    """Return the log that decides the membership of the run in this folder. Where hosts share no
    disk, RUN/generations is a copy of it, which may be a second old."""
    folder, stored = run / "generations", stored_folder(run, "generations")
    return StoredGenerationLog(folder, stored, since) if stored else GenerationLog(folder, since)
