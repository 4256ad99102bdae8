"""Goodput: the wall time of a run, split into categories that add up to it.

The ledger is in one category at any time. Time that is only attributed later is moved: training
that waited for data or communication, or that is repeated after a failure. The caller passes the
time. A joiner, and a restarted run, continue from the sums of another ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lockstep.units import format_duration

Category = Literal[
    "training",
    "communication",  # exposed: not overlapped with the backward pass
    "data",
    "saving",
    "evaluating",
    "lost",  # training that is repeated after a failure
    "regrouping",
    "starting",
    "compiling",  # by torch.compile
    "other",
    "down",  # no worker was running
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
MAX_SECONDS = 1e12  # 30,000 years: more is damage, and shares of it may overflow
NAMES: dict[Category, str] = {
    "communication": "exposed communication",
    "data": "data wait",
    "lost": "lost work",
}


class Ledger:
    """The time of a run by category. All `now_s` are readings of one monotonic clock."""

    def __init__(self, now_s: float, category: Category = "starting") -> None:
        self.category = category
        self._since_s = now_s
        self._sums_s = dict.fromkeys(CATEGORIES, 0.0)

    def switch(self, category: Category, now_s: float) -> Category:
        self._book(now_s)
        before, self.category = self.category, category
        return before

    def spent(self, category: Category, now_s: float) -> float:
        """Return the seconds in a category until now."""
        self._book(now_s)
        return self._sums_s[category]

    def move(self, source: Category, target: Category, seconds: float, now_s: float) -> float:
        """Move up to `seconds` from `source` to `target`; return the seconds moved."""
        self._book(now_s)
        moved_s = min(max(seconds, 0.0), self._sums_s[source])
        self._sums_s[source] -= moved_s
        self._sums_s[target] += moved_s
        return moved_s

    def summary(self, now_s: float) -> dict[str, float]:
        """Return goodput (training / wall time), wall_s, seconds per category: training_s, ..."""
        self._book(now_s)
        wall_s = math.fsum(self._sums_s.values())
        goodput = self._sums_s["training"] / wall_s if wall_s else 0.0
        return {"goodput": goodput, "wall_s": wall_s} | {
            f"{category}_s": seconds for category, seconds in self._sums_s.items()
        }

    def metrics(self, now_s: float) -> dict[str, float]:
        values = self.summary(now_s)
        lost = {
            f"{category}_seconds_so_far": round(values[f"{category}_s"], 4)
            for category in ("lost", "regrouping", "saving", "down")
        }
        return {"goodput": round(values["goodput"], 4), **lost}

    def describe(self, now_s: float) -> str:
        """Return "goodput 93.1%: training 93.1%, data wait 2.0%, saving 4.9%, of 12 min"."""
        values = self.summary(now_s)
        wall_s = values["wall_s"]
        if not wall_s:
            return "goodput: no time has passed"
        shares = {category: values[f"{category}_s"] / wall_s for category in CATEGORIES}
        parts = [
            f"{NAMES.get(name, name)} {share:.1%}"
            for name, share in shares.items()
            if share >= 0.0005 or name == "training"
        ]
        return f"goodput {values['goodput']:.1%}: {', '.join(parts)}, of {format_duration(wall_s)}"

    def to_json(self, now_s: float, wall_clock_s: float) -> dict[str, Any]:
        """Return the sums as JSON. wall_clock_s: since 1970, for the time until a later start."""
        self._book(now_s)
        return {"wall_clock_s": wall_clock_s, "seconds": dict(self._sums_s)}

    @staticmethod
    def from_json(
        value: Mapping[str, Any],
        now_s: float,
        category: Category = "starting",
        *,
        wall_clock_s: float | None = None,
    ) -> Ledger:
        """Return a ledger that continues from other sums. KeyError, TypeError, ValueError.
        wall_clock_s: now, for sums of an earlier start: the time since then counts as "down"; None
        for sums of a running process, maybe by another host's clock."""
        ledger = Ledger(now_s, category)
        sums = dict(value["seconds"])
        ledger._sums_s = {name: valid_seconds(sums.get(name, 0.0)) for name in CATEGORIES}
        if wall_clock_s is not None:
            ledger._sums_s["down"] += max(0.0, wall_clock_s - valid_seconds(value["wall_clock_s"]))
        return ledger

    def _book(self, now_s: float) -> None:
        self._sums_s[self.category] += max(0.0, now_s - self._since_s)
        self._since_s = max(now_s, self._since_s)


def valid_seconds(seconds: Any) -> float:
    number = float(seconds)
    if not 0.0 <= number < MAX_SECONDS:
        raise ValueError(f"{seconds!r} is not a valid number of seconds")
    return number
