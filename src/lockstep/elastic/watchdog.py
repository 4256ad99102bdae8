"""The hub's eye on the members of its generation: what each does, as it says with every beat; and, when nothing moves, a verdict.

The verdict itself is hang.py's. It is asked for twice: once to see that something hangs, and again with the stacks of those to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.elastic.generation_log import Member, Record
from lockstep.elastic.hang import Limits, Seen, Verdict, judge
from lockstep.runtime import status_board as board
from lockstep.runtime.status_board import Doing
from lockstep.runtime.worker_env import look

LOOK_S = 1.0
STACK_S = 1.0  # how long a culprit has to say where it is


@dataclass
class Watch:
    """What a hub knows of the others.

    host       where it lives: of processes there it sees whether they are stopped
    ask_stack  asks a member for its main thread's stack; `stack` has the answer, if it comes
    """

    limits: Limits
    host: str
    ask_stack: Callable[[str], None]
    told: dict[str, tuple[Doing, float]] = field(default_factory=dict)  # id -> what it last said, and when that came
    stacks: dict[str, str] = field(default_factory=dict)
    _looked_s: float = 0.0
    _suspects: tuple[str, ...] = ()
    _suspected_s: float = 0.0
    _said: tuple[Any, ...] = ()

    def beat(self, id: str, doing: Mapping[str, Any] | None, now_s: float) -> None:
        """A member said what it does."""
        if doing:
            self.told[id] = (Doing(**doing), now_s)

    def stack(self, id: str, text: str) -> None:
        """A member said where its main thread is."""
        self.stacks[id] = text

    def forget(self) -> None:
        """Another generation: what was known of the last one is of no use."""
        self.told, self.stacks, self._suspects, self._said = {}, {}, (), ()

    def due(self, record: Record, now_s: float) -> Verdict | None:
        """The verdict, once, when something hangs; None otherwise, and while culprits are asked for their stacks."""
        if now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        verdict = judge([seen for rank, one in enumerate(record.members) if (seen := self._seen(one, rank, now_s))], self.limits)
        if verdict is None:
            self._suspects, self.stacks = (), {}  # whoever hangs next hangs elsewhere
            return None
        if verdict.culprits and self._suspects != verdict.culprits:
            self._suspects, self._suspected_s = verdict.culprits, now_s
            for id in verdict.culprits:
                if id not in self.stacks:
                    self.ask_stack(id)
            return None
        if now_s - self._suspected_s < STACK_S and any(id not in self.stacks for id in verdict.culprits):
            return None
        if self._said == (verdict.culprits, verdict.action):
            return None
        self._said = (verdict.culprits, verdict.action)
        return verdict

    def _seen(self, member: Member, rank: int, now_s: float) -> Seen | None:
        if member.id not in self.told:
            return None
        doing, at_s = self.told[member.id]
        state = ""
        with suppress(OSError):
            state = look(member.pid)[0] if member.host == self.host else "R"
        age_s = now_s - at_s
        return Seen(member.id, member.host, member.slot, rank, doing.after(age_s), age_s, state, self.stacks.get(member.id, ""))


def doing_at(path: Path) -> dict[str, Any] | None:
    """What the board at `path` says, as JSON; None when there is none."""
    try:
        return asdict(board.look(path))
    except OSError:
        return None
