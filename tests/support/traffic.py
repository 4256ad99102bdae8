"""The messages that this process sends for sums of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.parallel import ordered_sum


@dataclass
class Traffic:
    messages: int = 0
    bytes: int = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        self.messages += len(tensors)
        self.bytes += sum(tensor.nbytes for tensor in tensors)


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the messages that are sent while this is entered."""
    traffic, start = Traffic(), ordered_sum.start_p2p

    def counting(sends: Any, *arguments: Any) -> Any:
        traffic.add([tensor for _, tensor in sends])
        return start(sends, *arguments)

    ordered_sum.start_p2p = counting
    try:
        yield traffic
    finally:
        ordered_sum.start_p2p = start
