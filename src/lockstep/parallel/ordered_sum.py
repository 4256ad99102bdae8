"""Sum the K micro-batches of a step in one fixed binary tree, for any number of ranks.

Floating-point addition is not associative: an all-reduce gives different bits for each number of
processes. Here the leaves are the K micro-batches, and additions follow the tree over [0, K):

    network/subtrees.py  which rank computes which leaves
    SumTree              merges equal neighbors on arrival: at most log2(K) partial sums
    exchange.py          adds the partial sums of all ranks in tree order
    FlatSum              the sum of one buffer, from its leaves to the result on all ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.network.subtrees import Subtree
from lockstep.parallel.exchange import Traffic, tree_all_reduce
from lockstep.runtime.work import WorkWaiter

Value = TypeVar("Value")


@dataclass
class SumTree(Generic[Value]):
    """Partial sums of adjacent subtrees, left to right, merged on arrival. Tensors are added in
    place, to the left operand.

    If K is not a power of two, several subtrees remain; `total` adds them from the right, as if the
    missing leaves of the full tree were zeros.
    """

    stack: list[tuple[Subtree, Value]] = field(default_factory=list)

    def add(self, subtree: Subtree, value: Value) -> None:
        self.stack.append((subtree, value))
        while len(self.stack) > 1 and self.stack[-2][0].sibling_of(self.stack[-1][0]):
            (left, x), (_, y) = self.stack[-2:]
            x += y  # type: ignore[operator]
            self.stack[-2:] = [(Subtree(left.first, 2 * left.leaves), x)]

    def total(self) -> Value:
        value = self.stack[-1][1]
        for _, left in reversed(self.stack[:-1]):
            left += value  # type: ignore[operator]
            value = left
        return value


class FlatSum:
    """The sum of one buffer over the leaves of a step, which travels as it is.

    shares  number of leaves by rank
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.tree: SumTree[Any] = SumTree()

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Return the parts of a buffer that `encode` and `all_reduce` take."""
        return [flat]

    def encode(self, k: int, parts: Sequence[Tensor]) -> Tensor:
        """Return leaf `k` as it travels."""
        flat = [part.reshape(-1) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def add(self, k: int, flat: Tensor) -> None:
        """Add leaf `k`, which may be overwritten."""
        self.tree.add(Subtree(k, 1), flat)

    def compact(self) -> None:
        """Copy partial sums out of larger storages, which can then be freed."""
        self.replace(
            (subtree, flat.clone() if flat.untyped_storage().nbytes() > flat.nbytes else flat)
            for subtree, flat in self.tree.stack
        )

    def replace(self, partials: Iterable[tuple[Subtree, Tensor]]) -> None:
        """Take other partial sums, from left to right."""
        tree = SumTree[Any]()
        for subtree, flat in partials:
            tree.add(subtree, flat)
        self.tree = tree

    def all_reduce(
        self,
        out: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        waits: WorkWaiter,
        traffic: Traffic | None = None,
        tag: int = 0,
    ) -> Tensor:
        """Collective. Write the sum of all leaves of all ranks to `out`, the parts of a buffer.

        Return the slice of it that this rank owns. group None: this rank has all leaves.
        """
        (whole,) = out
        partials = self.tree.stack
        self.tree = SumTree()
        return tree_all_reduce(partials, self.shares, group, whole, waits, traffic, tag)


def merged_subtrees(leaves: Iterable[int]) -> list[Subtree]:
    """Return the subtrees that remain when these leaves, ascending, are added to a SumTree."""
    tree: SumTree[int] = SumTree()
    for k in leaves:
        tree.add(Subtree(k, 1), 0)
    return [subtree for subtree, _ in tree.stack]
