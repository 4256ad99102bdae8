"""Stop and drain signals of an agent, and how they reach a worker that has a vote.

A stop signal is forwarded to the local workers, which include it in their vote. Workers that wait
to join have no vote. If no local worker has one, the agent asks a worker of another host to stop
the run (elastic/control.py), and exits with the run.
"""

import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lockstep.agent.config import AgentTimeouts
from lockstep.agent.run_logs import EventLog
from lockstep.agent.slots import Worker
from lockstep.elastic import control, waiting_room
from lockstep.elastic.generation_log import Generation, Member
from lockstep.runtime.processes import now_s

STOP_REQUEST_S = 1.0  # between two attempts to make another worker stop the run; also the time limit of each attempt


class StopRequests:
    """The stop and drain signals that one agent received. drains: SIGUSR1 drains only this host."""

    def __init__(self, folder: Path, host: str, events: EventLog, timeouts: AgentTimeouts, *, drains: bool) -> None:
        self.folder, self.host, self.events, self.timeouts, self.drains = folder, host, events, timeouts, drains
        self.received: list[int] = []  # in order
        self.received_s: float | None = None  # monotonic time of the first one
        self.next_request_s = self.accepted_s = 0.0  # accepted: when a worker of another host last accepted the stop

    def is_drain(self, number: int) -> bool:
        return number == signal.SIGUSR1 and self.drains

    @property
    def is_draining(self) -> bool:
        """Whether this host leaves and the run continues without it."""
        return any(map(self.is_drain, self.received)) and not self.stop_signal

    @property
    def stop_signal(self) -> str:
        """Name of the first signal that stops the run; "" for none."""
        return next((signal.Signals(number).name for number in self.received if not self.is_drain(number)), "")

    def forward(self, number: int, workers: Collection[Worker]) -> None:
        """Send a signal to the workers that do not wait to join; the waiting ones exit with the run."""
        self.received.append(number)
        self.received_s = self.received_s or now_s()
        self.events.add("signal passed on", f"the agent received {signal.Signals(number).name}")
        waiting = [] if self.is_drain(number) else self.waiting_members()
        waiting_pids = {member.pid for member in waiting if member.host == self.host}
        for worker in workers:
            if worker.pid not in waiting_pids:
                worker.stop_sent = True
                worker.signal(number)

    def waiting_members(self) -> list[Member]:
        with suppress(OSError):
            return list(waiting_room.registered_members(self.folder))
        return []

    def recipients(self, newest: Generation, workers: Collection[Worker]) -> list[Member]:
        """Return the workers that can be asked to stop the run; local ones only while they run."""
        pids = {worker.pid for worker in workers}
        members = control.stop_recipients(newest, self.waiting_members())
        return [member for member in members if member.host != self.host or member.pid in pids]

    def request_elsewhere(self, newest: Generation, workers: Collection[Worker]) -> None:
        """Ask another worker to stop the run if no local one has a vote. Blocks up to 2 s."""
        if not self.stop_signal or now_s() < self.next_request_s:
            return
        voters = {member.pid for member in newest.members if member.host == self.host}
        drained_first = any(map(self.is_drain, self.received))  # a worker only obeys the first signal that it receives
        if not drained_first and any(worker.stop_sent and worker.pid in voters for worker in workers):
            return
        recipient = control.request_stop(
            self.folder, self.recipients(newest, workers), self.stop_signal, within_s=STOP_REQUEST_S, each_s=STOP_REQUEST_S
        )
        if recipient and not self.accepted_s:
            self.events.add("stop passed on", f"{recipient.id.rpartition('/')[0]} accepted the stop; no worker of this host has a vote")
        self.accepted_s = now_s() if recipient else self.accepted_s
        self.next_request_s = now_s() + STOP_REQUEST_S

    def awaits_run_end(self, newest: Generation, workers: Collection[Worker]) -> bool:
        if not self.stop_signal or self.received_s is None:
            return False
        until_s = min(max(self.received_s, self.accepted_s) + self.timeouts.stop_reply_s, self.received_s + self.timeouts.grace_s)
        return now_s() < until_s and bool(self.recipients(newest, workers))
