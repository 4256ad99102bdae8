"""The waiting room, RUN/waiting, where workers outside every generation publish their addresses.

    HOST-SLOT-RANDOM.json  address of a waiting worker; removed when it joins, or by its agent
    HOST-SLOT-RANDOM.sign  liveness file: changes while its worker is the coordinator

A worker that cannot reach a member but sees its liveness file change knows that the member lives.
If the hosts share no disk, these files are objects in the store of the run (stored_folder.py).
"""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.elastic.generation_log import Member
from lockstep.elastic.stored_folder import stored_folder
from lockstep.files import open_regular, parse_json, read_text, write_json

FOLDER = "waiting"


def file_of(run: Path, member: Member, suffix: str = "json") -> Path:
    return run / FOLDER / f"{member.id.replace('/', '-')}.{suffix}"


def list_names(run: Path, suffix: str) -> list[str]:
    """Return the names of the files with a suffix, in order."""
    stored = stored_folder(run, FOLDER)
    names = stored.names() if stored else [path.name for path in (run / FOLDER).glob("[!.]*")]
    return sorted(name for name in names if name.endswith(suffix))


def read_file(run: Path, name: str) -> str:
    stored = stored_folder(run, FOLDER)
    return stored.read(name) if stored else read_text(run / FOLDER / name)


def register(run: Path, me: Member) -> None:
    """Publish this worker's address. OSError when the waiting room is missing."""
    path = file_of(run, me)
    if stored := stored_folder(run, FOLDER):
        stored.remove(*(name for name in stored.names() if is_of_slot(name, me.host, me.slot)))
        stored.write(path.name, json.dumps(vars(me)))
    else:
        write_json(path, vars(me))


def registered_members(run: Path, known: dict[str, Member] | None = None) -> list[Member]:
    """Return the workers in the waiting room. Some may have exited; their ports refuse.
    known: file name -> worker, from the last call: a file never changes, so it is read once."""
    known = {} if known is None else known
    names = list_names(run, ".json")
    for name in known.keys() - set(names):
        del known[name]
    for name in set(names) - known.keys():
        with suppress(OSError, ValueError, TypeError):
            known[name] = Member.from_json(parse_json(read_file(run, name)))
    return [known[name] for name in names if name in known]


def write_liveness(run: Path, me: Member) -> None:
    path, content = file_of(run, me, "sign"), str(time.monotonic_ns())
    if stored := stored_folder(run, FOLDER):
        stored.write(path.name, content)
    else:
        with open(path, "w", encoding="utf-8", opener=open_regular) as file:
            file.write(content)


def read_liveness(run: Path, members: Sequence[Member]) -> dict[str, str]:
    """Return id -> content of the liveness file, for the members that have one."""
    contents = {}
    present = set(list_names(run, ".sign")) if members else set()
    for member in members:
        if (name := file_of(run, member, "sign").name) in present:
            with suppress(OSError, ValueError):
                contents[member.id] = read_file(run, name)
    return contents


def unregister(run: Path, me: Member, *, with_liveness: bool = False) -> None:
    paths = [file_of(run, me), *([file_of(run, me, "sign")] if with_liveness else [])]
    if stored := stored_folder(run, FOLDER):
        stored.remove(*(path.name for path in paths))
        return
    for path in paths:
        path.unlink(missing_ok=True)


def remove_stale_files(run: Path, host: str, slot: int) -> None:
    """Remove the files of earlier workers of an empty slot. In a store, its next worker does that."""
    for path in (run / FOLDER).glob("*"):
        if is_of_slot(path.name, host, slot):
            path.unlink(missing_ok=True)


def is_of_slot(name: str, host: str, slot: int) -> bool:
    return bool(re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", name))
