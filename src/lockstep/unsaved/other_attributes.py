"""Attributes of modules, optimizers and callbacks that no checkpoint can hold, seen to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from lockstep.log import log
from lockstep.units import join_names
from lockstep.unsaved.values import Look, Unfinished, attributes
from lockstep.unsaved.watch import held_ids

SECONDS_OF_A_LOOK = 0.05


class OtherAttributes:
    """Compares attributes that are neither plain values nor tensors: a set, a generator of random
    numbers, an object of a user's class.

    held   objects that checkpoints hold
    state  objects in session.state, which may refer to others
    """

    def __init__(self, held: Iterable[Any], state: Iterable[Any]) -> None:
        self._held = held_ids(held)
        for value in state:
            self._held.add(id(value))
            with suppress(Exception):  # a value of any class
                self._held |= {id(part) for _, part in attributes(value)}
        self._marks: dict[str, int] = {}  # in the newest look
        self._named: set[str] = set()

    def look(self, values: Mapping[str, Any]) -> set[str]:
        """Return the names of the values that have changed since the newest look."""
        look = Look(self._held, set(), SECONDS_OF_A_LOOK)
        marks: dict[str, int] = {}
        for name, value in values.items():
            try:
                marks[name] = look.hash_of(value)
            except Unfinished:
                log.debug("not all attributes were compared: %d objects", look.objects)
                break
            except Exception as error:  # a value of any class
                log.debug("%s was not compared: %s: %s", name, type(error).__name__, error)
        before = self._marks
        self._marks = marks
        return {name for name in marks.keys() & before.keys() if marks[name] != before[name]}

    def warn_of(self, names: set[str]) -> None:
        if new := sorted(names - self._named):
            self._named |= names
            log.warning(
                "attributes change that no checkpoint can hold: %s. After a resume, and in a "
                "worker that joins, each has its value from before the loop. Keep numbers, "
                "strings, tensors, or lists and dicts of them in an attribute; an object with "
                "state_dict and load_state_dict: session.state(name=object)",
                join_names(new),
            )
