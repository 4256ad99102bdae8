"""Sum the K micro-batches of a step in one fixed binary tree, for any number of ranks.

Floating-point addition is not associative: an all-reduce gives different bits for each number of
processes. Here the leaves are the K micro-batches, and additions follow the tree over [0, K):

    network/subtrees.py  which rank computes which leaves
    SumTree              merges equal neighbors on arrival: at most log2(K) partial sums
    exchange.py          adds the partial sums of all ranks in tree order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from lockstep.network.subtrees import Subtree

Value = TypeVar("Value")


@dataclass
class SumTree(Generic[Value]):
    """Partial sums of adjacent subtrees, left to right, merged on arrival.

    If K is not a power of two, several subtrees remain; `total` adds them from the right, as if the
    missing leaves of the full tree were zeros.
    """

    stack: list[tuple[Subtree, Value]] = field(default_factory=list)

    def add(self, subtree: Subtree, value: Value) -> None:
        self.stack.append((subtree, value))
        while len(self.stack) > 1 and self.stack[-2][0].sibling_of(self.stack[-1][0]):
            (left, x), (_, y) = self.stack[-2:]
            self.stack[-2:] = [(Subtree(left.first, 2 * left.leaves), x + y)]  # type: ignore[operator]

    def total(self) -> Value:
        value = self.stack[-1][1]
        for _, left in reversed(self.stack[:-1]):
            value = left + value  # type: ignore[operator]
        return value


@dataclass
class PartialSum:
    """A slice of a sum; adding overwrites the left operand."""

    tensor: Tensor

    def __add__(self, right: PartialSum) -> PartialSum:
        self.tensor.add_(right.tensor)
        return self

    def compact(self) -> None:
        """Copy a slice out of a larger storage, which can then be freed."""
        if self.tensor.untyped_storage().nbytes() > self.tensor.nbytes:
            self.tensor = self.tensor.clone()


def merged_subtrees(leaves: Iterable[int]) -> list[Subtree]:
    """Return the subtrees that remain when these leaves, ascending, are added to a SumTree."""
    tree: SumTree[int] = SumTree()
    for k in leaves:
        tree.add(Subtree(k, 1), 0)
    return [subtree for subtree, _ in tree.stack]
