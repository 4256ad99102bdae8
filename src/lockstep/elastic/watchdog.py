"""The coordinator's watchdog: collects the status of members and reports hangs.

It calls `hang.diagnose` twice: to detect a hang, and again with the stacks of the culprits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.elastic.generation_log import Generation, Member
from lockstep.elastic.hang import HangVerdict, MemberSnapshot, diagnose
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.runtime import status_board as board
from lockstep.runtime.status_board import Status
from lockstep.runtime.worker_env import process_stat

CHECK_S = 1.0  # interval between diagnoses
STACK_S = 1.0  # how long to wait for the stack of a culprit


@dataclass
class Watchdog:
    """Collects heartbeats and stacks."""

    limits: ElasticLimits
    host: str  # of the coordinator, where it can see the state of processes
    ask_stack: Callable[[str], None]  # requests the stack of a member's main thread; `on_stack` takes the answer
    statuses: dict[str, tuple[Status, float]] = field(default_factory=dict)  # id -> (newest, when)
    stacks: dict[str, str] = field(default_factory=dict)
    _checked_s: float = 0.0
    _suspects: tuple[str, ...] = ()
    _suspected_s: float = 0.0
    _reported: tuple[Any, ...] = ()

    def on_heartbeat(self, id: str, status: Mapping[str, Any] | None, now_s: float) -> None:
        if status:
            self.statuses[id] = (Status(**status), now_s)

    def on_stack(self, id: str, text: str) -> None:
        self.stacks[id] = text

    def reset(self) -> None:
        """Forget the previous generation."""
        self.statuses, self.stacks, self._suspects, self._reported = {}, {}, (), ()

    def new_verdict(self, generation: Generation, now_s: float) -> HangVerdict | None:
        """Return each verdict once; None while nothing hangs or stacks are awaited."""
        if now_s - self._checked_s < CHECK_S:
            return None
        self._checked_s = now_s
        snapshots = [self._snapshot(member, rank, now_s) for rank, member in enumerate(generation.members)]
        verdict = diagnose([snapshot for snapshot in snapshots if snapshot], self.limits)
        if verdict is None:
            self._suspects, self.stacks = (), {}  # the next hang is elsewhere
            return None
        missing = [id for id in verdict.culprits if id not in self.stacks]
        if verdict.culprits and self._suspects != verdict.culprits:
            self._suspects, self._suspected_s = verdict.culprits, now_s
            for id in missing:
                self.ask_stack(id)
            return None
        if missing and now_s - self._suspected_s < STACK_S:
            return None
        if self._reported == (verdict.culprits, verdict.action):
            return None
        self._reported = (verdict.culprits, verdict.action)
        return verdict

    def _snapshot(self, member: Member, rank: int, now_s: float) -> MemberSnapshot | None:
        if member.id not in self.statuses:
            return None
        status, at_s = self.statuses[member.id]
        state = ""
        with suppress(OSError):
            state = process_stat(member.pid)[0] if member.host == self.host else "R"
        age_s, stack = now_s - at_s, self.stacks.get(member.id, "")
        return MemberSnapshot(member.id, member.host, member.slot, rank, status.after(age_s), age_s, state, stack)


def read_status(path: Path) -> dict[str, Any] | None:
    """Read the status board at `path` as JSON; None when there is none."""
    try:
        return asdict(board.read_status(path))
    except OSError:
        return None
