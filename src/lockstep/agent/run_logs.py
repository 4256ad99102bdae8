"""The run's logs, as an agent uses them: the events and the generations.

A disk that cannot be written or read stops nothing.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.agent.lock import PriorState
from lockstep.elastic.generation_log import (
    KEEP,
    NO_GENERATION,
    Generation,
    GenerationLog,
    RunResult,
    open_generation_log,
)
from lockstep.errors import DamagedFileError
from lockstep.log import log
from lockstep.record.events import append_event
from lockstep.runtime.worker_env import is_loopback_reachable


class EventLog:
    """The events of one host. Each warning is shown only once: an outage may be long."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.warned: set[str] = set()

    def add(self, event: str, why: str, **facts: int) -> None:
        """Append an event with its reason and the worker it concerns (slot, pid)."""
        if not append_event(self.folder, event, host=self.host, **facts, why=why):
            self.warn(f"cannot write {self.folder / 'events.jsonl'}", "its lines are lost")

    def warn(self, what: str, error: Exception | str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s: %s", what, error)


class GenerationReader:
    """Reads the generation log. `newest`: the newest generation read; `known`: its number."""

    def __init__(self, folder: Path, prior: PriorState, events: EventLog) -> None:
        self.folder, self.log = (
            folder,
            GenerationLog(folder / "generations", since=prior.newest.number),
        )
        self.newest, self.base, self.events = prior.newest, prior.base_generation, events
        self.known = self.last_handled(
            prior.newest.number, {process.pid for process in prior.running.values()}
        )

    def read_new(self) -> Iterator[tuple[Generation, Generation]]:
        """Yield (generation, the one before it) for each generation since the last call."""
        try:
            newest = self.log.newest(self.known)
            last = newest.number if newest else 0
            for number in range(self.known + 1, last + 1):
                before = self.newest if self.newest.number == number - 1 else self.read(number - 1)
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

    def last_handled(self, newest: int, running: set[int]) -> int:
        """Return the generation after which to read on, for an agent with workers of an earlier
        one. A worker that was removed meanwhile is in an earlier generation than the newest. One
        that waits to join is in none, so the search ends after KEEP generations."""
        number, oldest = newest, max(self.base, newest - KEEP)
        while running and number > oldest:
            running = running - {
                member.pid
                for member in self.read(number).members
                if member.host == self.events.host
            }
            number -= 1
        return number

    def read(self, number: int) -> Generation:
        with suppress(OSError):
            return self.log.read(number)
        return NO_GENERATION

    def active_hosts(self) -> set[str]:
        """Return the hosts of the newest generation; "" for hosts in another loopback network."""
        return {
            member.host if is_loopback_reachable(member.loopback) else ""
            for member in self.newest.members
        }

    def record_end(self, code: int, text: str, reason: str) -> None:
        """Record the end of the run as the next generation, unless another host has recorded
        one."""
        try:
            open_generation_log(self.folder).record_end(RunResult(code, text), reason, self.base)
        except OSError as error:
            self.events.warn(
                "cannot write the end of the run into the generation log; other hosts may not learn of it",
                error,
            )
