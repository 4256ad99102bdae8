"""Where workers come from: forked by the zygote, or, when there is none that can, started as new programs.

Whoever asks for a worker gets one, a little later, at its gate. A zygote that was killed is replaced; one that hangs, or cannot fork, is
passed over; one that cannot be (the user's module starts threads) is done without.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from lockstep.agent.event_log import Journal
from lockstep.agent.forkserver import ONE_THREAD, Birth, Work, Zygote, spawn
from lockstep.runtime.subprocesses import KEEP_MEMORY, now_s
from lockstep.runtime.worker_env import Seat

log = logging.getLogger("lockstep")
RETRY_S = 1.0  # after a worker could not be started at all
STILLBORN = 2  # zygotes in a row that ended before they were ready


@dataclass
class Expected:
    """A worker that was asked for.

    out, err, gate  what it gets; opener: the other end of the gate
    asked_s         when the zygote was asked for it; None: it was not
    cold            the zygote is passed over
    due_s           not before
    pid             of its process, once there is one
    """

    slot: int
    birth: Birth
    out: int
    err: int
    gate: int
    opener: int
    asked_s: float | None = None
    cold: bool = False
    due_s: float = 0.0
    pid: int = 0

    def close(self) -> None:
        """Let go of what was for the worker; not of the opener, which holds it at its gate."""
        for descriptor in (self.out, self.err, self.gate):
            os.close(descriptor)


@dataclass(frozen=True)
class Newborn:
    """A worker, child of this process, at its gate. A byte into `opener` lets it go; closing it without ends it."""

    slot: int
    pid: int
    opener: int
    how: str


class Nursery:
    """The nursery of one agent.

    import_s, fork_s  until a zygote is ready, and from one worker to the next; a slower one is given up
    """

    def __init__(self, work: Work, environ: Mapping[str, str], journal: Journal, *, import_s: float, fork_s: float) -> None:
        self.work, self.journal, self.import_s, self.fork_s = work, journal, import_s, fork_s
        self.environ = {**KEEP_MEMORY, **ONE_THREAD, **environ, "PYTHONUNBUFFERED": "1"}
        self.expected: dict[int, Expected] = {}
        self.zygote: Zygote | None = None
        self.since_s = self.heard_s = 0.0
        self.stillborn = 0
        self.start_zygote()

    def expect(self, seat: Seat, out: int, err: int, *, again: bool) -> None:
        """Ask for a worker with this seat and output.

        again  it comes after another one in its slot
        """
        argv = self.work.again if again and self.work.again is not None else self.work.argv
        birth = Birth(self.work.entry, argv, seat.environ(), seat.agent)
        self.expected[seat.slot] = Expected(seat.slot, birth, os.dup(out), os.dup(err), *os.pipe())

    def turn(self) -> list[Newborn]:
        """Do what can be done now; the workers that have come."""
        self.hear()
        self.lose_patience()
        for one in self.expected.values():
            if not one.pid and one.asked_s is None and now_s() >= one.due_s:
                self.bring(one)
        born = [one for one in self.expected.values() if one.pid]
        for one in born:
            del self.expected[one.slot]
            one.close()
        return [Newborn(one.slot, one.pid, one.opener, "as a new program" if one.cold else "forked by the zygote") for one in born]

    def forget(self) -> None:
        """Nobody is expected any more."""
        for one in self.expected.values():
            one.close()
            os.close(one.opener)
        self.expected = {}

    def close(self) -> None:
        """End the zygote. Workers live on."""
        self.forget()
        if self.zygote:
            self.zygote.end()

    def descriptors(self) -> list[int]:
        """Can be read when there is something to do."""
        return [self.zygote.socket.fileno()] if self.zygote else []

    def pids(self) -> set[int]:
        """Children of this process that are for the nursery to wait for."""
        return {self.zygote.process.pid} if self.zygote else set()

    # -- one worker -----------------------------------------------------------------------------------------------------------

    def bring(self, one: Expected) -> None:
        """Ask the zygote for a worker, or start it. It waits for a zygote that is still importing, which is no slower than it would be."""
        one.cold = one.cold or self.zygote is None
        try:
            if one.cold:
                one.pid = spawn(one.birth, self.environ, (one.out, one.err, one.gate))
            elif self.zygote and self.zygote.ready:
                self.zygote.ask(one.slot, one.birth, (one.out, one.err, one.gate))
                one.asked_s = now_s()
        except ConnectionError:
            self.replace("it ended")
        except OSError as error:
            self.journal.warn(f"a worker for slot {one.slot} cannot be {'started' if one.cold else 'forked'}", error)
            one.due_s, one.cold = now_s() + (RETRY_S if one.cold else 0.0), True

    # -- the zygote -----------------------------------------------------------------------------------------------------------

    def start_zygote(self) -> None:
        """Start a zygote."""
        try:
            self.zygote, self.since_s = Zygote(self.work, self.environ), now_s()
        except OSError as error:
            self.do_without(str(error))

    def hear(self) -> None:
        """Take what the zygote has said."""
        said = self.zygote.answers() if self.zygote else []
        if said is None:
            self.replace("it ended")
        self.heard_s = now_s() if said else self.heard_s
        for answer in said or []:
            if "ready" in answer and self.zygote:
                self.zygote.ready, self.stillborn = True, 0
            elif "cold" in answer:
                self.do_without(answer["cold"])
            elif one := self.expected.get(answer["slot"]):
                one.pid = answer.get("pid", 0)
                one.cold = "error" in answer
                one.asked_s = None

    def lose_patience(self) -> None:
        """Give up a zygote that hangs."""
        late_s = now_s() - self.fork_s
        asked = [one for one in self.expected.values() if one.asked_s is not None and max(one.asked_s, self.heard_s) < late_s]
        slow = self.zygote and not self.zygote.ready and now_s() > self.since_s + self.import_s
        for one in self.expected.values() if slow else asked:
            one.cold = True
        if asked or slow:
            self.replace(f"it was not ready within {self.import_s:g} s" if slow else f"it did not fork within {self.fork_s:g} s")

    def replace(self, why: str) -> None:
        """The zygote is gone, or useless: start another one, unless that has led nowhere."""
        if self.zygote:
            self.stillborn = 0 if self.zygote.ready else self.stillborn + 1
            self.zygote.end()
            self.zygote = None
        self.journal.note("zygote ended", why)
        for one in self.expected.values():  # what it forked without saying so stands at a gate that closes now
            if one.asked_s is not None:
                os.close(one.gate)
                os.close(one.opener)
                one.gate, one.opener = os.pipe()
                one.asked_s = None
        if self.stillborn < STILLBORN:
            self.start_zygote()
        else:
            self.do_without(f"{why}, {STILLBORN} times before it was ready")

    def do_without(self, why: str) -> None:
        """From now on each worker is a new program."""
        if self.zygote:
            with suppress(ProcessLookupError):
                self.zygote.end()
            self.zygote = None
        self.journal.note("no zygote", why)
        log.info("each worker imports everything by itself: %s", why)
