"""The agent's view of the generation log: reads new generations, and records the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.agent.event_log import EventLog
from lockstep.agent.lock import PriorState
from lockstep.elastic.generation_log import Generation, GenerationLog, RunResult, new_token
from lockstep.errors import DamagedFileError
from lockstep.runtime.worker_env import is_loopback_reachable


class GenerationReader:
    """Reads the generation log. `newest`: the newest generation read; `known`: its number."""

    def __init__(self, folder: Path, prior: PriorState, events: EventLog) -> None:
        self.log = GenerationLog(folder / "generations", since=prior.newest.number if prior.newest else 0)
        self.newest, self.known, self.events = prior.newest, prior.base_generation, events

    def read_new(self) -> Iterator[tuple[Generation, Generation | None]]:
        """Yield (generation, the one before it) for each generation since the last call."""
        try:
            newest = self.log.newest(self.known)
            last = newest.number if newest else 0
            for number in range(self.known + 1, last + 1):
                before = self.newest if self.newest and self.newest.number == number - 1 else self.read(number - 1)
                try:
                    self.newest = self.log.read(number)
                except DamagedFileError as error:
                    if number == last:
                        raise
                    self.events.warn(f"skipping generation {number}", error)
                    continue
                self.known = number
                yield self.newest, before
        except OSError as error:
            self.events.warn("cannot read the generation log", error)

    def read(self, number: int) -> Generation | None:
        with suppress(OSError):
            return self.log.read(number)
        return None

    def active_hosts(self) -> set[str]:
        """Return the hosts of the newest generation; "" for hosts in another loopback network."""
        members = self.newest.members if self.newest else ()
        return {member.host if is_loopback_reachable(member.loopback) else "" for member in members}

    def record_end(self, code: int, text: str, reason: str) -> None:
        """Record the end of the run as the next generation, unless another host has recorded one."""
        number, step = (self.newest.number, self.newest.step) if self.newest else (0, 0)
        try:
            while True:
                accepted = self.log.propose(Generation(number + 1, new_token(), (), "", step, reason, end=RunResult(code, text)))
                if accepted.end:
                    return
                number, step = accepted.number, accepted.step
        except OSError as error:
            self.events.warn("cannot write the end of the run into the generation log; other hosts may not learn of it", error)
