"""The waiting room, RUN/waiting: those who are in no generation show there where they listen, so that they find each other.

HOST-SLOT-RANDOM.json is written by its worker, which takes it away as soon as it is in; of one that was killed before, its agent does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.files import read_json, write_json
from lockstep.membership.arbiter import Member

FOLDER = "waiting"


def path_of(run: Path, one: Member) -> Path:
    """Its file."""
    return run / FOLDER / f"{one.id.replace('/', '-')}.json"


def show(run: Path, me: Member) -> None:
    """Show others that this worker is in no generation, and where it listens."""
    path_of(run, me).parent.mkdir(parents=True, exist_ok=True)
    write_json(path_of(run, me), vars(me))


def members(run: Path) -> Iterator[Member]:
    """Those who have shown themselves. Some may have ended since: a refused connection tells."""
    for path in sorted((run / FOLDER).glob("[!.]*.json")):
        with suppress(OSError, ValueError, TypeError):
            yield Member(**read_json(path))


def sweep(run: Path, host: str, slot: int) -> None:
    """Take away what is left of the workers of a slot, in which nobody sits."""
    for path in (run / FOLDER).glob("*.json*"):
        if re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.json.*", path.name):
            path.unlink(missing_ok=True)
