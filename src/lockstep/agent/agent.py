"""The host's side of a run: one agent a host starts the workers, sees each end at once, and puts a new one into the slot.

It imports no torch, owns no thread and holds nothing that cannot be found again: who sits in which slot stands in the state folder
(seat.py), what the run is doing stands in the log of generations. So it may die at any time. Under `lockstep launch` its workers train on,
and the next agent takes them over; under `lockstep train` they end with it, by the kernel's doing.

It sleeps until a worker ends (its pidfd can be read), the zygote says something or a signal comes, and looks ten times a second at the log:
a worker of this host that the newest generation goes on without is killed, stopped or hanging as it may be, and a record with an end is
the end of all. What follows from the end of a worker is decided in restart.py.

A signal that stops the run goes to the workers, who bring it into the vote. Those who stand by have no vote, so where no worker of this
host has one the agent tells somebody who has (control.py), and ends with the run.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.agent.evaluator_process import Companion
from lockstep.agent.event_log import Journal
from lockstep.agent.forkserver import Work, adopt_orphans
from lockstep.agent.lock import Found, claim, end_all
from lockstep.agent.restart_policy import RULES, Past, Rules, after, crashed, in_short, only_here, own_fault
from lockstep.agent.worker_pool import RETRY_S, Newborn, Nursery
from lockstep.elastic import control
from lockstep.elastic import generation_log as arbiter
from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import Arbiter, Member, Record, new_token
from lockstep.errors import DamagedFileError, LockstepError, UsageError
from lockstep.files import read_bytes, regular
from lockstep.runtime import status_board as board
from lockstep.runtime.exit_report import Account, End, kind, verdict
from lockstep.runtime.signals import INTERRUPTED, STOPPING
from lockstep.runtime.status_board import Doing
from lockstep.runtime.subprocesses import Inbox, kill_group, last_lines, now_s, open_output
from lockstep.runtime.worker_env import Seat, Sitter, last_words, note_sitter, sitter, state_folder, within_reach

log = logging.getLogger("lockstep")
TOUCH_S = 3600.0
TELL_S = 1.0  # from one attempt to tell the run that it is to stop to the next, and how long each takes at most
IN_A_STEP = ("data", "forward", "backward", "reducing", "voting", "updating", "saving")


@dataclass(frozen=True)
class Limits:
    """How long an agent waits.

    look_s    from one look at the log of generations to the next
    grace_s   from a signal to the agreed stop: a step and a checkpoint; and for what comes after a run that is done
    leave_s   from the end of a run that was not done until SIGTERM for those who have not left, and from there until SIGKILL
    told_s    from the last words of a worker that failed until SIGKILL, when it does not end
    import_s  until the zygote has imported everything
    fork_s    until it has forked, for one worker
    answer_s  until others must have answered who are told that the run is to stop, when nobody is left here
    score_s   for the evaluator, to score the last checkpoint of a run that is done
    """

    look_s: float = 0.1
    grace_s: float = 300.0
    leave_s: float = 2.0
    told_s: float = 10.0
    import_s: float = 120.0
    fork_s: float = 5.0
    answer_s: float = 5.0
    score_s: float = 600.0


@dataclass
class Worker:
    """A living worker.

    handle  its pidfd: readable when it has ended, and never another process's (pidfd_open(2))
    child   ours to wait for; otherwise taken over from an earlier agent
    sent    signals that were to end it
    asked   it was sent the signal that stops the run
    doomed  (when it is killed, why)
    """

    slot: int
    sitter: Sitter
    handle: int
    child: bool
    began_s: float
    sent: list[int] = field(default_factory=list)
    asked: bool = False
    doomed: tuple[float, str] | None = None

    @property
    def pid(self) -> int:
        """Its number, which is that of its process group and session too."""
        return self.sitter.pid

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)


@dataclass
class Slot:
    """One of the host's places for a worker.

    due_s          when one is asked for; None: there is one, one is on its way, or there will be none
    again          it has had a worker before
    begun_at_byte  how long its log was when its newest worker was asked for
    end            of its last worker
    """

    number: int
    due_s: float | None = 0.0
    again: bool = False
    begun_at_byte: int = 0
    worker: Worker | None = None
    end: End | None = None
    past: Past = Past()


@dataclass(frozen=True)
class Over:
    """The run has ended: with this exit code, these words, at this time."""

    code: int
    text: str
    at_s: float


def run_agent(
    work: Work,
    folder: Path,
    *,
    host: str,
    address: str,
    slots: int,
    expected: int,
    least: int,
    most: int,
    lives_on: bool,
    environ: Mapping[str, str],
    flags: Mapping[str, str] | None = None,
    command: Mapping[str, str] | None = None,
    evaluator: bool = False,
    limits: Limits = Limits(),
    rules: Rules = RULES,
) -> int:
    """Look after this host's workers until the run ends; the exit code of the command, with the first failure on stderr.

    folder    of the run
    slots     workers of this host; expected, least, most, host, address: see Seat
    lives_on  the workers outlive the agent, and SIGUSR1 means that this host is taken away; otherwise they end with it
    environ   of the workers, to which ours is added
    flags     see Seat
    command   what the workers are started with, by name: those that live on are taken over by the same alone
    evaluator keep one beside the workers
    Errors: UsageError before anything was started. For the main thread.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"no agent for {sys.platform}", "it needs pidfd_open(2) and prctl(2)", "start the workers with torchrun -m lockstep train"
        )
    state = state_folder(folder, host)
    command = {**(command or {}), "--workers": str(slots), "--min": str(least), "--max": str(most)}
    with Inbox() as inbox, claim(folder, state, host, command, slots=slots, lives_on=lives_on) as found:
        adopt_orphans()
        seat = Seat(
            folder=str(folder.resolve()),
            state=str(state),
            host=host,
            slot=0,
            slots=slots,
            expected=expected,
            least=least,
            most=most,
            address=address,
            after=found.after,
            agent=0 if lives_on else os.getpid(),
            drain=lives_on,
            folder_mark=found.mark,
            flags=dict(flags or {}),
        )
        journal = Journal(folder, host)
        nursery = Nursery(work, environ, journal, import_s=limits.import_s, fork_s=limits.fork_s)
        companion = Companion(folder, host, environ, journal) if evaluator else None
        agent = Agent(seat, found, nursery, journal, limits, rules, companion)
        try:
            code, text = agent.watch(inbox)
        finally:
            agent.close()
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


class Agent:
    """The agent of one host and run."""

    def __init__(
        self,
        seat: Seat,
        found: Found,
        nursery: Nursery,
        journal: Journal,
        limits: Limits,
        rules: Rules,
        companion: Companion | None = None,
    ) -> None:
        self.companion = companion
        self.seat, self.nursery, self.journal, self.limits, self.rules = seat, nursery, journal, limits, rules
        self.folder, self.state = Path(seat.folder), Path(seat.state)
        self.arbiter = Arbiter(self.folder / "generations", since=found.newest.number if found.newest else 0)
        self.newest, self.known = found.newest, found.after  # of what came since `after`, nothing has been heeded yet
        self.asked: list[int] = []
        self.asked_s: float | None = None
        self.tell_s = self.heard_s = 0.0  # when others are told next that the run is to stop; when one of them last heard it
        self.over: Over | None = None
        self.told: set[str] = set()  # errors of workers, in one line, that the screen has shown
        self.touched_s = now_s()
        self.slots = {number: Slot(number) for number in range(seat.slots)}
        for number, one in found.sitting.items():
            self.take_over(self.slots[number], one)

    @property
    def workers(self) -> list[Worker]:
        """Those who live, as far as we know."""
        return [slot.worker for slot in self.slots.values() if slot.worker]

    def watch(self, inbox: Inbox) -> tuple[int, str]:
        """(exit code, what to print) when nobody is left."""
        while (
            self.workers or self.nursery.expected or any(slot.due_s is not None for slot in self.slots.values()) or self.ends_with_the_run()
        ):
            self.ask_for_workers()
            for newborn in self.nursery.turn():
                self.admit(self.slots[newborn.slot], newborn)
            for number in inbox.wait(self.pause_s(), [*self.nursery.descriptors(), *[worker.handle for worker in self.workers]]):
                if number == signal.SIGINT and (number in self.asked or self.over):
                    end_all({worker.slot: worker.sitter for worker in self.workers})
                    return INTERRUPTED, "ended at once; start the same command again to go on from the newest checkpoint"
                if number in STOPPING:
                    self.pass_on(number)
            self.keep_state()
            self.look()  # before anybody is buried: who ended because the run did is not started again
            for worker in ended(self.workers):
                self.bury(worker)
            self.tell_the_run()
            self.press()
            if self.companion:
                self.companion.turn()
            if not self.nursery.expected:  # one of them may have died already, and nobody knows its number
                reap_strangers(
                    {worker.pid for worker in self.workers} | self.nursery.pids() | (self.companion.pids() if self.companion else set())
                )
        code, text = self.verdict()
        if self.companion and not code and not self.drains:
            self.let_score(self.companion, inbox)
        return code, text

    def let_score(self, companion: Companion, inbox: Inbox) -> None:
        """The run is done: let the evaluator score the last checkpoint, until a signal comes."""
        until_s = now_s() + self.limits.score_s
        while companion.at_work and now_s() < until_s and not set(STOPPING) & set(inbox.wait(self.limits.look_s, [])):
            pass

    def pause_s(self) -> float:
        """How long to sleep when nothing happens."""
        waits = [slot.due_s - now_s() for slot in self.slots.values() if slot.due_s is not None]
        return max(0.0, min([self.limits.look_s, *waits]))

    def keep_state(self) -> None:
        """Touch the state folder once an hour: systemd-tmpfiles removes from /tmp what nobody has touched for ten days, locks too."""
        if now_s() > self.touched_s + TOUCH_S:
            self.touched_s = now_s()
            with suppress(OSError):
                for path in (self.state, *self.state.iterdir()):
                    os.utime(path)

    def verdict(self) -> tuple[int, str]:
        """(exit code, what to print) now that all have ended."""
        if self.over:
            return self.over.code, self.over.text
        ends = [slot.end for slot in self.slots.values() if slot.end]
        if not ends and self.drains:
            return 0, ""
        if not ends:
            name = signal.Signals(self.asked[0]).name
            return 128 + self.asked[0], str(LockstepError(f"{name} came before a worker had started", f"{self.seat.host}, {self.folder}"))
        left = [end for end in ends if kind(end) == "left"]
        return verdict(left or ends, asked=self.asked, grace_s=self.limits.grace_s)

    def close(self) -> None:
        """Let go of everything. Workers that are still there live on under `launch`, and end under `train`."""
        self.nursery.close()
        if self.companion:
            self.companion.close()
        if self.seat.agent:
            end_all({worker.slot: worker.sitter for worker in self.workers})
        for worker in self.workers:
            os.close(worker.handle)
        reap_strangers(set())

    # -- stopping -------------------------------------------------------------------------------------------------------------

    def pass_on(self, number: int) -> None:
        """Tell the workers of a signal, once. Nobody is started from now on."""
        if number in self.asked:
            return
        self.asked.append(number)
        self.asked_s = self.asked_s or now_s()
        self.start_nobody()
        self.journal.note("signal passed on", f"the agent was sent {signal.Signals(number).name}")
        standing_by = set() if self.is_drain(number) else {one.pid for one in self.room() if one.host == self.seat.host}
        for worker in self.workers:
            if worker.pid not in standing_by:  # they have nothing to save, and end when the run does
                worker.asked = True
                worker.signal(number)

    def is_drain(self, number: int) -> bool:
        """Whether a signal means that only this host is taken away."""
        return number == signal.SIGUSR1 and self.seat.drain

    @property
    def drains(self) -> bool:
        """Whether this host is taken away, and the run goes on without it."""
        return any(map(self.is_drain, self.asked)) and not self.stop_asked

    @property
    def stop_asked(self) -> str:
        """The signal with which the run is to stop; "" while nobody has asked for it here."""
        return next((signal.Signals(number).name for number in self.asked if not self.is_drain(number)), "")

    def room(self) -> list[Member]:
        """Who waits in the run folder."""
        with suppress(OSError):
            return list(waiting.members(self.folder))
        return []

    def others(self) -> list[Member]:
        """Who may be told that the run is to stop: members and those who wait, of this host only while they live."""
        pids = {worker.pid for worker in self.workers}
        return [one for one in control.listeners(self.newest, self.room()) if one.host != self.seat.host or one.pid in pids]

    def tell_the_run(self) -> None:
        """Tell somebody of the run that it is to stop, when no worker here that knows it has a vote. Takes a second at most, or two."""
        if not self.stop_asked or self.over or now_s() < self.tell_s:
            return
        members = {member.pid for member in self.newest.members if member.host == self.seat.host} if self.newest else set()
        heeded = not any(map(self.is_drain, self.asked))  # a worker heeds the first signal that it is sent
        if heeded and any(worker.asked and worker.pid in members for worker in self.workers):
            return
        heard = control.tell_to_stop(self.folder, self.others(), self.stop_asked, within_s=TELL_S, each_s=TELL_S)
        if heard and not self.heard_s:
            self.journal.note("stop passed on", f"{heard.id.rpartition('/')[0]} was told, as no worker of this host has a vote")
        self.heard_s = now_s() if heard else self.heard_s
        self.tell_s = now_s() + TELL_S

    def ends_with_the_run(self) -> bool:
        """Whether the agent waits, without workers, for the end of a run that it has asked to stop."""
        if not self.stop_asked or self.over or self.asked_s is None:
            return False
        until_s = min(max(self.asked_s, self.heard_s) + self.limits.answer_s, self.asked_s + self.limits.grace_s)
        return now_s() < until_s and bool(self.others())

    def start_nobody(self) -> None:
        """No worker is started from now on."""
        self.nursery.forget()
        for slot in self.slots.values():
            slot.due_s = None

    def finish(self, code: int, text: str, why: str) -> None:
        """End the run: on this host now, on the others by the log."""
        self.over = Over(code, text, now_s())
        self.start_nobody()
        self.journal.note("run ended", why)
        # A host of the same name whose loopback network is another one is another host.
        at_work = {member.host if within_reach(member.loopback) else "" for member in self.newest.members} if self.newest else set()
        if only_here(code, at_work, self.seat.host):
            return
        number, step = (self.newest.number, self.newest.step) if self.newest else (0, 0)
        try:
            while True:
                ours = Record(number + 1, new_token(), (), "", step, why, end=arbiter.End(code, text))
                won = self.arbiter.propose(ours)
                if won.end:
                    break
                number, step = won.number, won.step
        except OSError as error:
            self.journal.warn("the end of the run cannot be written down, and other hosts may not hear of it", error)

    def press(self) -> None:
        """End those who should have left, and did not."""
        now = now_s()
        for worker in self.workers:
            if not worker.doomed and (account := read_account(self.state, worker.slot)) and not account.finished:
                worker.doomed = now + self.limits.told_s, f"it failed, and had not ended {self.limits.told_s:g} s later"
            number, why = pressure(now, worker.sent, doomed=worker.doomed, over=self.over, asked_s=self.asked_s, limits=self.limits)
            if number:
                worker.sent.append(number)
                self.journal.note(f"{signal.Signals(number).name} sent", why, slot=worker.slot, pid=worker.pid)
                worker.signal(number)

    # -- the log of generations -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Heed what was written into the log since."""
        try:
            newest = self.arbiter.newest(self.known)
            last = newest.number if newest else 0
            for number in range(self.known + 1, last + 1):
                before = self.newest if self.newest and self.newest.number == number - 1 else self.read(number - 1)
                try:
                    self.newest = self.arbiter.read(number)
                except DamagedFileError as error:
                    if number == last:
                        raise
                    self.journal.warn(f"generation {number} is passed over", error)
                    continue
                self.known = number
                self.heed(self.newest, before)
        except OSError as error:
            self.journal.warn("the log of generations cannot be read", error)

    def read(self, number: int) -> Record | None:
        """The record of a number, if it can be had."""
        with suppress(OSError):
            return self.arbiter.read(number)
        return None

    def heed(self, record: Record, before: Record | None) -> None:
        """Kill workers of ours that this generation goes on without; end with it when it is the end."""
        members = {member.id: member for member in before.members} if before else {}
        for out in record.out:
            member = members.get(out.id)
            slot = self.slots.get(member.slot) if member and member.host == self.seat.host else None
            if member and slot and slot.worker and slot.worker.pid == member.pid:
                # Who leaves because this host is taken away needs a moment for it.
                spare_s = self.limits.leave_s if signal.SIGUSR1 in self.asked else 0.0
                slot.worker.doomed = now_s() + spare_s, f"generation {record.number} goes on without it: {out.why}"
        if record.end and not self.over:
            self.over = Over(record.end.code, record.end.text, now_s())
            self.start_nobody()

    # -- workers --------------------------------------------------------------------------------------------------------------

    def ask_for_workers(self) -> None:
        """Ask for the workers whose time has come."""
        for slot in self.slots.values():
            if slot.due_s is not None and slot.due_s <= now_s():
                try:
                    self.ask_for(slot)
                    slot.due_s = None
                except OSError as error:  # out of descriptors
                    self.journal.warn(f"a worker for slot {slot.number} cannot be asked for", error)
                    slot.due_s = now_s() + RETRY_S

    def ask_for(self, slot: Slot) -> None:
        """Ask for a worker, with our terminal for slot 0 and a log for the others."""
        with suppress(OSError):
            last_words(self.state, slot.number).unlink(missing_ok=True)
            waiting.sweep(self.folder, self.seat.host, slot.number)
        seat = replace(self.seat, slot=slot.number, known=self.known)
        if slot.number == 0:
            self.nursery.expect(seat, 1, 2, again=slot.again)
            return
        try:
            output, _ = open_output(self.folder, slot.number, self.seat.host, make=False)
        except UsageError as error:
            self.journal.warn(f"the output of slot {slot.number} goes to the terminal", error)
            self.nursery.expect(seat, 2, 2, again=slot.again)
            return
        assert output is not None
        with output:
            slot.begun_at_byte = output.tell()
            self.nursery.expect(seat, output.fileno(), output.fileno(), again=slot.again)

    def admit(self, slot: Slot, one: Newborn) -> None:
        """Write down who sits in `slot` now, and open the gate."""
        who = sitter(one.pid, slot.begun_at_byte)
        slot.worker, slot.again = Worker(slot.number, who, os.pidfd_open(one.pid), True, now_s()), True
        try:
            note_sitter(self.state, slot.number, who)
        except OSError as error:
            self.journal.warn(f"who sits in slot {slot.number} cannot be written down, and another agent would not find it", error)
        self.journal.note("worker started", one.how, slot=slot.number, pid=one.pid)  # before it can do anything
        with suppress(BrokenPipeError):
            os.write(one.opener, b".")
        os.close(one.opener)

    def take_over(self, slot: Slot, one: Sitter) -> None:
        """Look after a worker that an earlier agent has started."""
        try:
            handle = os.pidfd_open(one.pid)
        except ProcessLookupError:
            return
        if not one.alive:  # the handle may be another process's
            os.close(handle)
            return
        slot.worker, slot.again, slot.due_s = Worker(slot.number, one, handle, False, now_s()), True, None
        self.journal.note("worker taken over", "its agent had died, and it trained on", slot=slot.number, pid=one.pid)
        log.info("slot %d (pid %d) trains on without its agent: taken over", slot.number, one.pid)

    def bury(self, worker: Worker) -> None:
        """Note the end of a worker, end what it left behind, and do what follows."""
        slot = self.slots[worker.slot]
        slot.worker = None
        end = slot.end = self.end_of(worker)
        with suppress(OSError):
            waiting.sweep(self.folder, self.seat.host, worker.slot)
        doing = self.last_seen(worker)
        follows, slot.past = after(
            end,
            slot.past,
            lived_s=end.at_s - worker.began_s,
            # Who was killed is given the others' progress; a crash is its own, and so is the step.
            step=doing.step - 1 if doing and crashed(end) else self.newest.step if self.newest else -1,
            place=place_of(doing),
            stopping=bool(self.asked or self.over),
            rules=self.rules,
        )
        self.journal.note("worker ended", follows.why, slot=worker.slot, pid=worker.pid)
        if follows.what == "restart":
            words = in_short(end)  # what a user's function raises, it raises in every worker, and again in every new one
            log.warning(
                "%s: %s", end, follows.why.replace(words, "the same error") if own_fault(end) and words in self.told else follows.why
            )
            self.told.add(words)
            slot.due_s = now_s() + follows.wait_s
        elif follows.what == "end":
            self.finish(follows.code, follows.text, f"{end} on {self.seat.host}: {follows.why}")

    def last_seen(self, worker: Worker) -> Doing | None:
        """What its board says that it was doing; None when it had none of its own yet."""
        with suppress(OSError):
            doing = board.look(self.state / f"{worker.slot}.board")
            return doing if doing.pid == worker.pid else None
        return None

    def end_of(self, worker: Worker) -> End:
        """How a worker ended. Nothing of it is left."""
        os.close(worker.handle)
        if worker.child:
            kill_group(worker.pid)  # while nobody has waited for it, its number, which is its group's too, cannot be given to a stranger
            code: int | None = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        else:
            if not Path(f"/proc/{worker.pid}").exists():  # a number that a group still has is given to nobody
                kill_group(worker.pid)
            code = -worker.sent[-1] if worker.sent else None
        account = read_account(self.state, worker.slot)
        if not account and self.drains and code in (None, -signal.SIGUSR1):  # it stood by, or had not begun: it had nothing to hand over
            account = Account(0, now_s(), finished=True, drained=True)
            worker.sent.append(signal.SIGUSR1)
        if not account:
            with suppress(OSError):
                waiting.sweep(self.folder, self.seat.host, worker.slot)
        path = self.folder / "logs" / f"{self.seat.host}-{worker.slot}.log"
        shown = tail = ""
        with suppress(OSError):
            before = self.slots[worker.slot].end
            if account and account.trace:
                again = bool(before and before.account and before.account.trace == account.trace)
                with open(path, "ab", opener=regular) as output:
                    output.write(b"the same error again\n" if again else account.trace.encode("utf-8", "backslashreplace"))
            elif worker.slot and not account:
                with open(path, "rb", opener=regular) as output:
                    tail = last_lines(output, worker.sitter.begun_at_byte)
            shown = str(path) if path.exists() else ""
        return End(worker.slot, worker.pid, code, now_s(), tuple(worker.sent), account, shown, tail, title="slot")


def pressure(
    now_s: float,
    sent: Sequence[int],
    *,
    doomed: tuple[float, str] | None,
    over: Over | None,
    asked_s: float | None,
    limits: Limits,
) -> tuple[int, str]:
    """(the signal that a worker is to be sent now, why); 0: none.

    sent     to it so far, to end it
    doomed   (when it is killed, why)
    over     how and when the run ended; asked_s: when the workers were asked to stop
    """
    due: tuple[int, str] = (0, "")
    if over:
        spare_s = limits.leave_s if over.code else limits.grace_s
        if now_s >= over.at_s + spare_s:
            kill = now_s >= over.at_s + spare_s + limits.leave_s
            due = signal.SIGKILL if kill else signal.SIGTERM, f"the run had ended {spare_s:g} s before, and it had not left"
    elif asked_s is not None and now_s >= asked_s + limits.grace_s:
        due = signal.SIGKILL, f"it did not stop within {limits.grace_s:g} s"
    if doomed and now_s >= doomed[0]:
        due = signal.SIGKILL, doomed[1]
    return (0, "") if due[0] in sent else due


def place_of(doing: Doing | None) -> str:
    """Where in which step a worker was; "" when in none."""
    return f"{doing.phase} phase of step {doing.step}" if doing and doing.step > 0 and doing.phase in IN_A_STEP else ""


def read_account(state: Path, slot: int) -> Account | None:
    """The last words of the worker in `slot`, if it has said any."""
    with suppress(OSError, ValueError, TypeError):
        return Account.from_line(read_bytes(last_words(state, slot)))
    return None


def ended(workers: Sequence[Worker]) -> list[Worker]:
    """Those that have ended."""
    ready, _, _ = select.select([worker.handle for worker in workers], [], [], 0)
    return [worker for worker in workers if worker.handle in ready]


def reap_strangers(known: set[int]) -> None:
    """Wait for what our workers have left to us, so that it does not stay a zombie; not for the processes in `known`."""
    with suppress(ChildProcessError):
        while (one := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and one.si_pid not in known:
            os.waitpid(one.si_pid, 0)
