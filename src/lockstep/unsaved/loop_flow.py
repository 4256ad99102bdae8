"""The effects of statements of a user's loop on the values of variables, as data.

The value of a variable is a set of keys: the variables whose values before the statements it
depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

CLOCK = "clock"  # the source of times
Keys = frozenset[str]
Values = dict[str, Keys]  # by key of a variable; a variable without one has its value from before
NOTHING = Keys()


class End(Enum):
    """Where values arrive."""

    EFFECT = auto()
    RESULT = auto()  # of the function
    PRINT = auto()


@dataclass(frozen=True)
class Change:
    """Where statements change a variable.

    kinds   "assign", "augment", "append", "mutate"; "lazy": only in its first use
    values  what the new values depend on
    """

    label: str
    file: str
    line: int
    kinds: set[str]
    values: set[Keys]


@dataclass
class Flow:
    """What statements do: the values of variables after them, and what reaches an end, all as keys
    of the variables before them."""

    after: Values = field(default_factory=dict)
    ends: dict[End, Keys] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    extremes: set[str] = field(default_factory=set)  # keys: `best = max(best, score)`

    def reach(self, end: End, keys: Keys) -> None:
        self.ends[end] = self.ends.get(end, NOTHING) | keys

    def change(self, key: str, change: Change) -> None:
        first = self.changes.get(key, change)
        line = min(first.line, change.line) if change.file == first.file else first.line
        kinds, values = first.kinds | change.kinds, first.values | change.values
        self.changes[key] = Change(first.label, first.file, line, kinds, values)

    def take_changes(self, other: Flow, known: Values, own: str) -> None:
        """Add the changes of a function that is called, as `replaced`."""
        for key, change in other.changes.items():
            if not key.startswith(own):
                values = {replaced(keys, known, own) for keys in change.values}
                self.change(key, replace(change, values=values))
        self.extremes |= other.extremes


def live_at_head(flow: Flow, step: Values, *ends: End) -> set[str]:
    """Return the variables whose values at the head of the loop reach one of these ends.

    step  the values after the body of the loop
    """
    live = set[str]()
    pending = NOTHING.union(*(flow.ends.get(end, NOTHING) for end in ends))
    while pending:
        live |= pending
        pending = NOTHING.union(*(step.get(key, NOTHING) for key in pending)) - live
    return live


def is_clock(key: str, changes: Mapping[str, Change], seen: Keys = NOTHING) -> bool:
    """Return whether all values of a variable come from a clock."""
    if key not in changes or key in seen:
        return False
    seen |= {key}
    return all(
        CLOCK in values
        and all(is_clock(other, changes, seen) for other in values & changes.keys() - {key})
        for values in changes[key].values
    )


def replaced(keys: Keys, known: Values, own: str) -> Keys:
    """Return the keys with what the caller knows in their place; without local variables that have
    no value yet, whose keys start with `own`."""
    return NOTHING.union(
        *(known.get(key, NOTHING if key.startswith(own) else Keys([key])) for key in keys)
    )


def merged(branches: Sequence[Values]) -> Values:
    """Return the values after one of these branches."""
    keys = set[str]().union(*branches)
    return {
        key: NOTHING.union(*(values.get(key, Keys([key])) for values in branches)) for key in keys
    }
