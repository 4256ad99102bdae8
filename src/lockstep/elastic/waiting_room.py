"""The waiting room, RUN/waiting, where workers outside every generation publish their addresses.

    HOST-SLOT-RANDOM.json  address of a waiting worker; removed when it joins, or by its agent
    HOST-SLOT-RANDOM.sign  liveness file: changes while its worker is the coordinator

A worker that cannot reach a member but sees its liveness file change knows that the member lives.
If the hosts share no disk, these files are objects in the run's store (object_store/storage.py).
"""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.elastic.generation_log import Member
from lockstep.files import parse_json
from lockstep.object_store.storage import Storage, shared_folder

FOLDER = "waiting"


def name_of(member: Member, suffix: str = "json") -> str:
    return f"{member.id.replace('/', '-')}.{suffix}"


class WaitingRoom:
    """The waiting room of a run, in a folder on its disk or in its store."""

    def __init__(self, folder: Storage) -> None:
        self.folder = folder

    def register(self, me: Member) -> None:
        """Publish this worker's address, in place of earlier ones of its slot. OSError when the
        waiting room is missing."""
        earlier = (name for name in self.folder.names() if is_of_slot(name, me.host, me.slot))
        self.folder.remove(*earlier)
        self.folder.write(name_of(me), json.dumps(vars(me)).encode())

    def members(self, known: dict[str, Member] | None = None) -> list[Member]:
        """Return the workers in the waiting room. Some may have exited; their ports refuse.
        known: file name -> worker, from the last call: a file never changes, so it is read once."""
        known = {} if known is None else known
        names = [name for name in self._names() if name.endswith(".json")]
        for name in known.keys() - set(names):
            del known[name]
        for name in set(names) - known.keys():
            with suppress(OSError, ValueError, TypeError):
                known[name] = Member.from_json(parse_json(self.folder.read(name).decode()))
        return [known[name] for name in names if name in known]

    def write_liveness(self, me: Member) -> None:
        self.folder.write(name_of(me, "sign"), str(time.monotonic_ns()).encode())

    def read_liveness(self, members: Sequence[Member]) -> dict[str, str]:
        """Return id -> content of the liveness file, for the members that have one."""
        contents = {}
        present = set(self._names()) if members else set()
        for member in members:
            if (name := name_of(member, "sign")) in present:
                with suppress(OSError, ValueError):
                    contents[member.id] = self.folder.read(name).decode()
        return contents

    def _names(self) -> Sequence[str]:
        """Return the names of the files; none in a copy of a run, which has no waiting room."""
        try:
            return self.folder.names()
        except FileNotFoundError:
            return []

    def unregister(self, me: Member, *, with_liveness: bool = False) -> None:
        self.folder.remove(name_of(me), *([name_of(me, "sign")] if with_liveness else []))


def open_waiting_room(run: Path) -> WaitingRoom:
    return WaitingRoom(shared_folder(run, FOLDER))


def remove_stale_files(run: Path, host: str, slot: int) -> None:
    """Remove the files of earlier workers of an empty slot. In a store, its next worker does
    that."""
    for path in (run / FOLDER).glob("*"):
        if is_of_slot(path.name, host, slot):
            path.unlink(missing_ok=True)


def is_of_slot(name: str, host: str, slot: int) -> bool:
    return bool(re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", name))
