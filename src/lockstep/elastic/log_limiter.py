"""What may happen a hundred times a second is said now and then, with how often it was."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

MOST = 256  # things that are told apart: a stranger may think of as many as it likes


@dataclass
class Seldom:
    """Who is to speak, and when. Each thing is said the first time, and then at most every `every_s`."""

    every_s: float
    _said_s: dict[Hashable, float] = field(default_factory=dict)
    _times: dict[Hashable, int] = field(default_factory=dict)

    def due(self, what: Hashable, now_s: float) -> int:
        """How often `what` has happened since it was said last, this time too, when it is to be said now; otherwise 0."""
        if what not in self._said_s and len(self._said_s) >= MOST:
            what = None  # one of many more
        self._times[what] = self._times.get(what, 0) + 1
        if now_s - self._said_s.get(what, now_s - self.every_s) < self.every_s:
            return 0
        self._said_s[what] = now_s
        return self._times.pop(what)
