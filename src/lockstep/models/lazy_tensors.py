"""Tensors by name, each computed when it is accessed: memory holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """Names of tensors, in order; a subclass computes the tensor of a name in `__getitem__`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = dict.fromkeys(names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ComputedTensors(LazyTensors):
    """Tensors that `compute(name)` returns."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        super().__init__(names)
        self.compute = compute

    def __getitem__(self, name: str) -> Tensor:
        return self.compute(name)
