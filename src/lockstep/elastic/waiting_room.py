"""The waiting room, RUN/waiting, where workers outside every generation publish their addresses.

    HOST-SLOT-RANDOM.json  address of a waiting worker; removed when it joins, or by its agent
    HOST-SLOT-RANDOM.sign  liveness file: changes while its worker is the coordinator

A worker that cannot reach a member but sees its liveness file change knows that the member lives.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.elastic.generation_log import Member
from lockstep.files import open_regular, read_json, read_text, write_json

FOLDER = "waiting"


def file_of(run: Path, member: Member, suffix: str = "json") -> Path:
    return run / FOLDER / f"{member.id.replace('/', '-')}.{suffix}"


def register(run: Path, me: Member) -> None:
    """Publish this worker's address. OSError when the waiting room is missing."""
    write_json(file_of(run, me), vars(me))


def registered_members(run: Path, known: dict[str, Member] | None = None) -> list[Member]:
    """Return the workers in the waiting room. Some may have exited; their ports refuse.
    known: file name -> worker, from the last call: a file never changes, so it is read once."""
    known = {} if known is None else known
    paths = {path.name: path for path in sorted((run / FOLDER).glob("[!.]*.json"))}
    for name in known.keys() - paths.keys():
        del known[name]
    for name in paths.keys() - known.keys():
        with suppress(OSError, ValueError, TypeError):
            known[name] = Member.from_json(read_json(paths[name]))
    return [known[name] for name in paths if name in known]


def write_liveness(run: Path, me: Member) -> None:
    with open(file_of(run, me, "sign"), "w", encoding="utf-8", opener=open_regular) as file:
        file.write(str(time.monotonic_ns()))


def read_liveness(run: Path, members: Sequence[Member]) -> dict[str, str]:
    """Return id -> content of the liveness file, for the members that have one."""
    contents = {}
    present = {path.name: path for path in (run / FOLDER).glob("*.sign")} if members else {}
    for member in members:
        with suppress(OSError, ValueError, KeyError):
            contents[member.id] = read_text(present[file_of(run, member, "sign").name])
    return contents


def unregister(run: Path, me: Member, *, with_liveness: bool = False) -> None:
    file_of(run, me).unlink(missing_ok=True)
    if with_liveness:
        file_of(run, me, "sign").unlink(missing_ok=True)


def remove_stale_files(run: Path, host: str, slot: int) -> None:
    """Remove the files of earlier workers of an empty slot."""
    for path in (run / FOLDER).glob("*"):
        if re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", path.name):
            path.unlink(missing_ok=True)
