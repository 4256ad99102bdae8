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


class WaitingRoom:
    """The waiting room of the run in the folder `run`, on its disk or in its store."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder, self.stored = run, run / FOLDER, stored_folder(run, FOLDER)

    def register(self, me: Member) -> None:
        """Publish this worker's address. OSError when the waiting room is missing."""
        path = file_of(self.run, me)
        if self.stored:
            self.stored.remove(
                *(name for name in self.stored.names() if is_of_slot(name, me.host, me.slot))
            )
            self.stored.write(path.name, json.dumps(vars(me)))
        else:
            write_json(path, vars(me))

    def members(self, known: dict[str, Member] | None = None) -> list[Member]:
        """Return the workers in the waiting room. Some may have exited; their ports refuse.
        known: file name -> worker, from the last call: a file never changes, so it is read once."""
        known = {} if known is None else known
        names = self._names(".json")
        for name in known.keys() - set(names):
            del known[name]
        for name in set(names) - known.keys():
            with suppress(OSError, ValueError, TypeError):
                known[name] = Member.from_json(parse_json(self._read(name)))
        return [known[name] for name in names if name in known]

    def write_liveness(self, me: Member) -> None:
        path, content = file_of(self.run, me, "sign"), str(time.monotonic_ns())
        if self.stored:
            self.stored.write(path.name, content)
        else:
            with open(path, "w", encoding="utf-8", opener=open_regular) as file:
                file.write(content)

    def read_liveness(self, members: Sequence[Member]) -> dict[str, str]:
        """Return id -> content of the liveness file, for the members that have one."""
        contents = {}
        present = set(self._names(".sign")) if members else set()
        for member in members:
            if (name := file_of(self.run, member, "sign").name) in present:
                with suppress(OSError, ValueError):
                    contents[member.id] = self._read(name)
        return contents

    def unregister(self, me: Member, *, with_liveness: bool = False) -> None:
        paths = [file_of(self.run, me), *([file_of(self.run, me, "sign")] if with_liveness else [])]
        if self.stored:
            self.stored.remove(*(path.name for path in paths))
            return
        for path in paths:
            path.unlink(missing_ok=True)

    def _names(self, suffix: str) -> list[str]:
        """Return the names of the files with a suffix, in order."""
        names = (
            self.stored.names()
            if self.stored
            else [path.name for path in self.folder.glob("[!.]*")]
        )
        return sorted(name for name in names if name.endswith(suffix))

    def _read(self, name: str) -> str:
        return self.stored.read(name) if self.stored else read_text(self.folder / name)


def remove_stale_files(run: Path, host: str, slot: int) -> None:
    """Remove the files of earlier workers of an empty slot. In a store, its next worker does
    that."""
    for path in (run / FOLDER).glob("*"):
        if is_of_slot(path.name, host, slot):
            path.unlink(missing_ok=True)


def is_of_slot(name: str, host: str, slot: int) -> bool:
    return bool(re.fullmatch(rf"\.?{re.escape(host)}-{slot}-[0-9a-f]+\.(json|sign).*", name))
