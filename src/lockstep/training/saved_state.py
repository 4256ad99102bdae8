"""State of a user's loop in the checkpoints: plain values, and a tensor for each micro-batch.

saved = session.state(best=0.0, hidden=session.per_micro_batch(torch.zeros(8, 64)))
saved.best = max(saved.best, score)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.stateful import Stateful
from lockstep.errors import UsageError
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import version_of

PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    list,
    tuple,
    dict,
    deque,
    Tensor,
    np.ndarray,
    np.generic,
)
MARK_CHARS = 1000  # of an array or a tuple


class SavedState:
    """The values that session.state has received, as attributes. Assign to them: a resume and a
    join restore what was assigned."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})

    def __getattr__(self, name: str) -> Any:
        values = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(f"session.state has received no {name}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise UsageError(
                f"session.state has received no {name!r}",
                f"saved.{name} = ...",
                f"declare it before the loop: saved = session.state({name}=...)",
            )
        if not isinstance(self._values[name], PLAIN):
            kind = type(self._values[name]).__name__
            raise UsageError(
                f"{name!r} is a {kind}, not a plain value",
                f"saved.{name} = ...",
                "change the object itself, which checkpoints hold",
            )
        self._values[name] = value

    def add(self, values: Mapping[str, Any]) -> dict[str, Stateful]:
        """Add values; return what holds the state of each in a checkpoint."""
        self._values.update(values)
        return {
            name: PlainValue(self._values, name) if isinstance(value, PLAIN) else value
            for name, value in values.items()
        }


class PlainValue:
    """A value of a SavedState, with the methods of a stateful object."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def state_dict(self) -> Any:
        return self.values[self.name]

    def mark(self) -> Any:
        """Return what tells another value or another number of items, at no cost; not each
        change."""
        value = self.values[self.name]
        if isinstance(value, Tensor):
            return id(value), version_of(value)
        return (
            (id(value), len(value))
            if isinstance(value, list | dict | deque)
            else repr(value)[:MARK_CHARS]
        )

    def load_state_dict(self, value: Any) -> None:
        """Restore the value. Containers and tensors are filled: a variable of the loop may hold
        them."""
        current = self.values[self.name]
        if type(current) is not type(value):
            self.values[self.name] = value
        elif isinstance(current, list):
            current[:] = value
        elif isinstance(current, dict):
            current.clear()
            current.update(value)
        elif isinstance(current, deque) and current.maxlen == value.maxlen:
            current.clear()
            current.extend(value)
        elif isinstance(current, Tensor) and is_alike(current, value):
            current.detach().copy_(value)
        elif isinstance(current, np.ndarray) and is_alike(current, value):
            current[...] = value
        else:
            self.values[self.name] = value


def is_alike(tensor: Any, other: Any) -> bool:
    """Return whether two tensors, or arrays, have the same shape and dtype."""
    return bool(tensor.shape == other.shape and tensor.dtype == other.dtype)


class PerMicroBatch:
    """A tensor for each micro-batch of a step, such as the hidden state of truncated
    backpropagation through time: what micro-batch k assigns to `value` in one step, it finds there
    in the next.

    initial            of all micro-batches; its shape and dtype are those of all values
    micro_batches      K
    get_micro_batch    returns the number of the micro-batch that the loop is in; None outside
    """

    def __init__(
        self, initial: Tensor, micro_batches: int, get_micro_batch: Callable[[], int | None]
    ) -> None:
        # (K, *initial.shape)
        self._rows = initial.detach().expand(micro_batches, *initial.shape).clone()
        self._get_micro_batch = get_micro_batch
        self._assigned: dict[int, Tensor] = {}  # in this attempt, by micro-batch

    @property
    def rows(self) -> Tensor:
        """A copy of the values of all micro-batches: (micro_batches, *initial.shape)."""
        return self._rows.clone()

    @property
    def value(self) -> Tensor:
        return self._rows[self._micro_batch()].clone()

    @value.setter
    def value(self, value: Tensor) -> None:
        micro_batch = self._micro_batch()
        if not isinstance(value, Tensor) or not is_alike(value, self._rows[0]):
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"{value.dtype} {tuple(value.shape)}"
            raise UsageError(
                f"the value of micro-batch {micro_batch} is {got}, "
                f"the initial one {self._rows.dtype} {tuple(self._rows.shape[1:])}",
                "session.per_micro_batch(initial), value = ...",
                "keep shape and dtype",
            )
        self._assigned[micro_batch] = value.detach().clone()

    def _micro_batch(self) -> int:
        if (micro_batch := self._get_micro_batch()) is None:
            raise UsageError(
                "there is a value only in the micro-batch loop",
                "session.per_micro_batch(...).value",
                "use it in `for batch in loader(step)`",
            )
        return micro_batch

    def start_attempt(self) -> None:
        """Forget what an earlier attempt at the step, or the rehearsal, has assigned."""
        self._assigned = {}

    def exchange(
        self, group: dist.ProcessGroup | None, wait: Callable[[list[dist.Work | None]], None]
    ) -> None:
        """Collective. Receive the values of the micro-batches of other workers."""
        if group is None or group.size() == 1:
            return
        row_bytes = self._rows[0].nbytes
        sent = torch.zeros(
            len(self._rows), row_bytes + 1, dtype=torch.uint8, device=self._rows.device
        )
        for number, value in self._assigned.items():
            sent[number, :row_bytes] = as_bytes(value)
            sent[number, row_bytes] = 1
        wait([dist.all_reduce(sent, group=group, async_op=True)])  # exact: one worker has each row
        for number in torch.nonzero(sent[:, row_bytes]).flatten().tolist():
            content = sent[number, :row_bytes].clone()
            self._assigned[number] = content.view(self._rows.dtype).view(self._rows.shape[1:])

    def commit(self) -> None:
        """Take the values of all micro-batches for the next step."""
        for number, value in self._assigned.items():
            self._rows[number].copy_(value)
        self._assigned = {}

    def state_dict(self) -> dict[str, Tensor]:
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._rows.copy_(state["rows"])
