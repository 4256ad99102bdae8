"""Which list of members is generation n: a log in the run folder, in which every number is written once.

    RUN/generations/000007.json

A record is written whole beside its place and then given its name by link(2), which fails when the name is taken. So of all who propose
a number exactly one wins, nobody hosts the log, and the two halves of a cut network cannot both go on. Whoever comes second reads the
winner's record and follows it. link(2) is atomic on local disks and on NFS, whose client may say that it failed when it did not (a lost
reply); so the winner is always read back, and knows itself by the random token.

The messages between members (member.py) only make a change of members fast; this log makes it right.

    RUN/generations/000007.suspects.json

stands beside a generation whose replicas differ, where nobody can tell what is right: nobody goes on from what its members hold. Each that
finds it out writes that before it leaves, so that who did not find it out, since the others were gone too soon, has it from there.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DamagedFileError
from lockstep.files import checked, read_json, with_checksum, write_first, write_json

log = logging.getLogger("lockstep")
NAME = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class Member:
    """One worker process, for its whole life.

    id        "HOST/SLOT/RANDOM": never given twice
    slot      its number on its host, from 0
    address   where its member thread listens: "ADDRESS:PORT"
    loopback  the network in which a loopback address is known (seat.py); "" for an address that other machines reach
    """

    id: str
    host: str
    slot: int
    pid: int
    address: str
    loopback: str = ""

    @property
    def place(self) -> tuple[str, int, str]:
        """Its place in the order of those that have no generation yet."""
        return self.host, self.slot, self.id

    @staticmethod
    def from_json(value: Any) -> Member:
        """Parse a member from a file or another process. TypeError or ValueError when it is malformed."""
        member = Member(**value)
        kinds = {"id": str, "host": str, "slot": int, "pid": int, "address": str}
        if wrong := [name for name, kind in kinds.items() if type(getattr(member, name)) is not kind]:
            raise TypeError(f"a member's {wrong[0]} is {getattr(member, wrong[0])!r}")
        host, _, port = member.address.rpartition(":")
        ipaddress.ip_address(host)
        if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"a member's port is {port!r}")
        return member


@dataclass(frozen=True)
class Out:
    """A member that the next generation goes on without, and why."""

    id: str
    why: str


@dataclass(frozen=True)
class End:
    """How the run ended. No generation follows until somebody starts the run again."""

    code: int
    text: str = ""


@dataclass(frozen=True)
class Record:
    """One generation.

    number   from 1, without a gap
    token    random, so that a generation is never mistaken for another of its number
    members  in the order of their ranks; none when the run has ended
    store    "ADDRESS:PORT" of the store, held by rank 0, over which the group forms; needed only until it has
    step     steps committed when it began; 0 at a start, whose checkpoint is found only then: events.jsonl has it ("began")
    reason   for people
    out      those that are in the generation before and not in this one
    end      None while the run goes on
    """

    number: int
    token: str
    members: tuple[Member, ...]
    store: str
    step: int
    reason: str
    out: tuple[Out, ...] = ()
    end: End | None = None

    def rank_of(self, id: str) -> int | None:
        """The rank of a member; None: it is not in this generation."""
        return next((rank for rank, member in enumerate(self.members) if member.id == id), None)

    def to_json(self) -> dict[str, Any]:
        """As the log has it."""
        return asdict(self)

    @staticmethod
    def from_json(value: Any) -> Record:
        """The record in a JSON value. KeyError, TypeError or ValueError when it is none."""
        fields = dict(value)
        return Record(
            **fields
            | {
                "members": tuple(map(Member.from_json, fields["members"])),
                "out": tuple(Out(**one) for one in fields["out"]),
                "end": End(**fields["end"]) if fields["end"] else None,
            }
        )


def new_token() -> str:
    """A token that no other generation has."""
    return secrets.token_hex(8)


class Arbiter:
    """The log of generations in `folder`. OSError from every method when the disk does not do what it should.

    It never makes the folder. A log without the newest generation that was seen in it is not this log: its disk is away.
    since  the newest one that others have seen
    """

    def __init__(self, folder: Path, since: int = 0) -> None:
        self.folder, self.seen = folder, since

    def newest(self, known: int = 0) -> Record | None:
        """The newest record; None when there is none above `known`. Costs a stat() when nothing is new.

        known  the newest number that the caller has: numbers have no gap, so the next one is simply looked for
        """
        if known and not self._path(known + 1).exists():
            self._require(known)
            return None
        newest = max((int(match[1]) for name in os.listdir(self.folder) if (match := NAME.fullmatch(name))), default=0)
        if newest < self.seen:
            self._require(self.seen)
        return self.read(newest) if newest > known else None

    def read(self, number: int) -> Record:
        """Return the record of a generation. OSError when it is missing; DamagedFileError (an OSError) when it is damaged."""
        path = self._path(number)
        try:
            found = Record.from_json(checked(read_json(path)))
            if found.number != number:
                raise ValueError(f"it is generation {found.number}")
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{path.name}, the record of generation {number}, is damaged: {error}",
                str(path),
                f"stop the workers of this run on all hosts, then move {self.folder} aside; the next start resumes from a checkpoint",
            ) from error
        self.seen = max(self.seen, number)
        return found

    def propose(self, record: Record) -> Record:
        """Publish `record`; the record of that number that won, which may be another."""
        self._require(max(record.number - 1, self.seen))
        write_first(self._path(record.number), json.dumps(with_checksum(record.to_json()), indent=1))
        return self.read(record.number)

    def condemn(self, number: int, why: str, facts: dict[str, Any]) -> None:
        """Nobody may go on from what the members of a generation hold. `facts` help to tell who was wrong (Team)."""
        write_json(self.folder / f"{number:06d}.suspects.json", with_checksum({"why": why, **facts}))

    def condemned(self, number: int) -> str:
        """Why nobody may go on from what the members of a generation hold; "" where they may. That the file is there is enough."""
        path = self.folder / f"{number:06d}.suspects.json"
        try:
            return str(checked(read_json(path))["why"])
        except FileNotFoundError:
            return ""
        except (DamagedFileError, ValueError, KeyError) as error:
            return f"replicas of generation {number} differ; {path.name}, which says how, is damaged ({error})"

    def suspects(self) -> list[tuple[Path, dict[str, Any]]]:
        """Who differed from whom, and where that stands until it is known who was wrong; in the order of the generations.

        A damaged file is skipped and stays.
        """
        found = []
        for path in sorted(self.folder.glob("*.suspects.json")):
            try:
                facts = checked(read_json(path))
                if not (isinstance(facts["step"], int) and isinstance(facts["what"], str) and isinstance(facts["digests"], dict)):
                    raise ValueError("it lacks what a worker writes")
                found.append((path, facts))
            except FileNotFoundError:
                continue
            except (DamagedFileError, ValueError, KeyError) as error:
                log.warning("%s is damaged (%s): which worker was wrong will not be found out", path, error)
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _require(self, number: int) -> None:
        """FileNotFoundError when generation `number` is not in the log, though it must be."""
        if number and not self._path(number).exists():
            raise FileNotFoundError(errno.ENOENT, f"the log lacks generation {number}", str(self.folder))
