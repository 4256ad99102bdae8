"""The tree of ordered_sum: siblings, and the order in which `total` adds."""

from __future__ import annotations

from lockstep.network.subtrees import Subtree
from lockstep.parallel.gradient_source import Pass, plan_passes
from lockstep.parallel.ordered_sum import SumTree


def test_only_halves_of_one_parent_are_siblings() -> None:
    assert Subtree(4, 2).sibling_of(Subtree(6, 2))
    assert not Subtree(2, 2).sibling_of(Subtree(4, 2))  # halves of two parents
    assert not Subtree(4, 2).sibling_of(Subtree(6, 1))


def test_six_leaves_are_added_as_if_the_tree_of_eight_had_zeros() -> None:
    tree: SumTree[str] = SumTree()
    for leaf, text in enumerate("abcdef"):
        tree.add(Subtree(leaf, 1), text)
    assert [subtree for subtree, _ in tree.stack] == [Subtree(0, 4), Subtree(4, 2)]
    assert tree.total() == "abcdef"


def test_shard_without_a_micro_batch_left_joins_the_last_pass() -> None:
    passes = plan_passes([4, 5, 6, 7, 12], 1, 2, reduce_once_per_step=False)
    assert passes == [
        Pass(5, True, (4, 5), False),
        Pass(7, True, (6, 7), False),
        Pass(12, False, (12,), True),
    ]
    passes = plan_passes(range(4, 9), 1, 2, reduce_once_per_step=True)
    assert [(each.k, each.counts) for each in passes] == [(7, True), (8, True), (8, False)]
