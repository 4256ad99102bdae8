"""Where the time of a run went: every instant since its first start belongs to one category, so they add up to the wall time.

The ledger stands in one category at any time and is switched to the next. What is only known afterwards is moved: the part of the training
in which the loop waited for data or for the network, and the part that was lost because it had to be done again. Time is passed in.

Each process may keep its own, by its own monotonic clock. A member that joins, and a run that starts again, go on from another's sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from lockstep.units import show_seconds

Category = Literal[
    "training",
    "communication",  # exposed: not behind the backward pass
    "data",
    "saving",
    "evaluating",
    "lost",  # trained, and done again after a failure
    "regrouping",
    "starting",
    "other",
    "down",  # nobody ran
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
NAMES: dict[Category, str] = {"communication": "exposed communication", "data": "data wait", "lost": "lost work"}


class Ledger:
    """A run's time, from `now_s` on in `category`. Every now_s is of one monotonic clock."""

    def __init__(self, now_s: float, category: Category = "starting") -> None:
        self.category = category
        self._since_s = now_s
        self._sums_s = dict.fromkeys(CATEGORIES, 0.0)

    def switch(self, category: Category, now_s: float) -> Category:
        """Be in `category` from now on; the one before, to switch back to."""
        self._book(now_s)
        before, self.category = self.category, category
        return before

    def move(self, source: Category, target: Category, seconds: float, now_s: float) -> float:
        """Count `seconds` that were booked as `source` as `target`; how many there were: none becomes negative."""
        self._book(now_s)
        moved_s = min(max(seconds, 0.0), self._sums_s[source])
        self._sums_s[source] -= moved_s
        self._sums_s[target] += moved_s
        return moved_s

    def lost(self, seconds: float, now_s: float) -> float:
        """Count `seconds` of training as lost: they are done again."""
        return self.move("training", "lost", seconds, now_s)

    def summary(self, now_s: float) -> dict[str, float]:
        """goodput (training's share of 1), wall_s, and the seconds of each category: training_s, communication_s and so on."""
        self._book(now_s)
        wall_s = math.fsum(self._sums_s.values())
        goodput = self._sums_s["training"] / wall_s if wall_s else 0.0
        return {"goodput": goodput, "wall_s": wall_s} | {f"{category}_s": seconds for category, seconds in self._sums_s.items()}

    def curves(self, now_s: float) -> dict[str, float]:
        """What is worth seeing over the steps: goodput, and the seconds that failures and saves have cost so far."""
        values = self.summary(now_s)
        cost = {f"{category}_seconds_so_far": round(values[f"{category}_s"], 4) for category in ("lost", "regrouping", "saving", "down")}
        return {"goodput": round(values["goodput"], 4), **cost}

    def show(self, now_s: float) -> str:
        """A line such as: goodput 93.1%: training 93.1%, exposed communication 2.0%, saving 4.9%, of 12 min."""
        values = self.summary(now_s)
        wall_s = values["wall_s"]
        if not wall_s:
            return "goodput: no time has passed"
        shares = {category: values[f"{category}_s"] / wall_s for category in CATEGORIES}
        parts = [f"{NAMES.get(name, name)} {share:.1%}" for name, share in shares.items() if share >= 0.0005 or name == "training"]
        return f"goodput {values['goodput']:.1%}: {', '.join(parts)}, of {show_seconds(wall_s)}"

    def to_json(self, now_s: float, wall_clock_s: float) -> dict[str, Any]:
        """The sums, for somebody who goes on from them. wall_clock_s: seconds since 1970, by which a later start knows the gap."""
        self._book(now_s)
        return {"wall_clock_s": wall_clock_s, "seconds": dict(self._sums_s)}

    @staticmethod
    def from_json(
        value: Mapping[str, Any],
        now_s: float,
        category: Category = "starting",
        *,
        wall_clock_s: float | None = None,
        gap: Category = "down",
    ) -> Ledger:
        """A ledger that goes on from another's sums. KeyError, TypeError or ValueError when the value holds none.

        wall_clock_s  now, when the sums come from an earlier start: the time between is counted as `gap`. None when they have just been
                      taken by a living process, whose clock may be another host's
        """
        ledger = Ledger(now_s, category)
        held = dict(value["seconds"])
        for name in ledger._sums_s:
            ledger._sums_s[name] = sound(held.get(name, 0.0))
        if wall_clock_s is not None:
            ledger._sums_s[gap] += max(0.0, wall_clock_s - sound(value["wall_clock_s"]))
        return ledger

    def _book(self, now_s: float) -> None:
        """Count the time until now."""
        self._sums_s[self.category] += max(0.0, now_s - self._since_s)
        self._since_s = max(now_s, self._since_s)


def sound(seconds: Any) -> float:
    """A number of seconds. ValueError when it is none that a ledger can hold."""
    number = float(seconds)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{seconds!r} is no number of seconds")
    return number
