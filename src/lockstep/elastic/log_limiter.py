"""Rate limit for log lines about events that may repeat a hundred times a second."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_KEYS = 256  # more share one counter: an unauthenticated peer could cause any number of them


@dataclass
class LogLimiter:
    """Allow a line for each key at its first event, then at most every `every_s` seconds."""

    every_s: float
    _logged_s: dict[Hashable, float] = field(default_factory=dict)
    _counts: dict[Hashable, int] = field(default_factory=dict)

    def due(self, key: Hashable, now_s: float) -> int:
        """Count an event. Return the count since the last line if a line is due, else 0."""
        if key not in self._logged_s and len(self._logged_s) >= MAX_KEYS:
            key = None
        self._counts[key] = self._counts.get(key, 0) + 1
        if now_s - self._logged_s.get(key, now_s - self.every_s) < self.every_s:
            return 0
        self._logged_s[key] = now_s
        return self._counts.pop(key)
