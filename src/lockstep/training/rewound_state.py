"""The objects of session.state around the learners of an outer step.

All learners of an outer step start from the same state. What their steps change, such as a
scheduler, is the same after each of them: it is put back before the next one, and the state after
the last one holds from the outer step on.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from torch import Tensor

from lockstep.checkpoint.json_tree import JSON_SUFFIX, pack, unpack
from lockstep.checkpoint.stateful import Stateful
from lockstep.errors import UsageError
from lockstep.parallel.digest import digest_of
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.units import join_names


class Taken(NamedTuple):
    """The state of one object. text: its numbers; digest: of its tensors, None if it has none."""

    text: Tensor
    digest: int | None

    def mark(self) -> tuple[int, int | None]:
        return self.number(), self.digest

    def number(self) -> int:
        """Return 60 bits that tell two texts apart."""
        return int(sha256(bytes(bytes_of(self.text))).hexdigest()[:15], 16)


class RewoundState:
    """`state` by name. Objects that hold tensors, such as an average of the weights, must not
    change in the steps of a learner."""

    def __init__(self, state: Mapping[str, Stateful]) -> None:
        self.state = state

    def take(self) -> dict[str, Taken]:
        taken = {}
        for name, value in self.state.items():
            tensors = pack(name, value.state_dict())
            text = tensors.pop(name + JSON_SUFFIX)
            taken[name] = Taken(text, digest_of(tensors.values()) if tensors else None)
        return taken

    def put(self, taken: Mapping[str, Taken]) -> None:
        """Give the objects without tensors the state that was taken."""
        for name, state in taken.items():
            if state.digest is not None:
                continue
            value = self.state[name]
            text = pack(name, value.state_dict())[name + JSON_SUFFIX]
            if bytes_of(text) != bytes_of(state.text):
                value.load_state_dict(unpack(name, {name + JSON_SUFFIX: state.text}))

    def refuse_changed_tensors(
        self, before: Mapping[str, Taken], now: Mapping[str, Taken], learner: int
    ) -> None:
        """UsageError for an object with tensors that has changed in a learner's steps."""
        if changed := [
            name
            for name, state in before.items()
            if state.digest is not None and state.mark() != now[name].mark()
        ]:
            raise UsageError(
                f"session state {join_names(changed)} changed in the steps of learner {learner}",
                "each learner has other weights, and the outer step has their mean",
                "update an average or a tensor after outer.step(), where the weights are common",
            )
