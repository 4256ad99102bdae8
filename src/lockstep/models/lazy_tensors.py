"""Tensors by name, each computed when it is accessed: memory holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of these names, in order; `compute(name)` returns one."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self.names, self.compute = dict.fromkeys(names), compute

    def __getitem__(self, name: str) -> Tensor:
        return self.compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
