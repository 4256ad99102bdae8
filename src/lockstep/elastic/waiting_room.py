"""The waiting room, RUN/waiting: those who are in no generation show there where they listen, so that they find each other.

HOST-SLOT-RANDOM.json is written by its worker, which takes it away as soon as it is in; of one that was killed before, its agent does.
HOST-SLOT-RANDOM.sign changes as long as its worker leads: whoever cannot reach it, but sees the run folder, knows that it lives.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.elastic.generation_log import Member
from lockstep.files import read_json, read_text, regular, write_json

FOLDER = "waiting"


def path_of(run: Path, one: Member, ending: str = "json") -> Path:
    """Its file."""
    return run / FOLDER / f"{one.id.replace('/', '-')}.{ending}"


def show(run: Path, me: Member) -> None:
    """Show others that this worker is in no generation, and where it listens. OSError when the room is not there."""
    write_json(path_of(run, me), vars(me))


def members(run: Path) -> Iterator[Member]:
    """Those who have shown themselves. Some may have ended since: a refused connection tells."""
    for path in sorted((run / FOLDER).glob("[!.]*.json")):
        with suppress(OSError, ValueError, TypeError):
            yield Member.from_json(read_json(path))


def sign(run: Path, me: Member) -> None:
    """Show that this worker lives."""
    with open(path_of(run, me, "sign"), "w", encoding="utf-8", opener=regular) as file:
        file.write(str(time.monotonic_ns()))


def signs(run: Path, some: Iterable[Member]) -> dict[str, str]:
    """The newest signs of `some`, as far as there are any."""
    found = {}
    for one in some:
        with suppress(OSError, ValueError):
            found[one.id] = read_text(path_of(run, one, "sign"))
    return found


def leave(run: Path, me: Member, *, sign_too: bool = False) -> None:
    """Take this worker's file away."""
    path_of(run, me).unlink(missing_ok=True)
    if sign_too:
        path_of(run, me, "sign").unlink(missing_ok=True)


def sweep(run: Path, host: str, slot: int) -> None:
    """Take away what is left of the workers of a slot, in which nobody sits."""
    for path in (run / FOLDER).glob("*"):
        if re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", path.name):
            path.unlink(missing_ok=True)
