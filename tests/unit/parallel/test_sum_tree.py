"""The tree of ordered_sum: siblings, whole subtrees, and the order in which `total` adds."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.parallel.ordered_sum import Subtree, SumTree, leaves_of_rank, refuse_idle_ranks, subtrees
from lockstep.parallel.shard_passes import ShardPass, plan_passes


def test_only_halves_of_one_parent_are_siblings() -> None:
    assert Subtree(4, 2).sibling_of(Subtree(6, 2))
    assert not Subtree(2, 2).sibling_of(Subtree(4, 2))  # halves of two parents
    assert not Subtree(4, 2).sibling_of(Subtree(6, 1))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (range(3, 6), [Subtree(3, 1), Subtree(4, 2)]),
        (range(0, 7), [Subtree(0, 4), Subtree(4, 2), Subtree(6, 1)]),
        (range(4, 8), [Subtree(4, 4)]),
        (range(5, 5), []),
    ],
)
def test_block_is_split_into_whole_subtrees(block: range, expected: list[Subtree]) -> None:
    assert subtrees(block) == expected


def test_six_leaves_are_added_as_if_the_tree_of_eight_had_zeros() -> None:
    tree: SumTree[str] = SumTree()
    for leaf, text in enumerate("abcdef"):
        tree.add(Subtree(leaf, 1), text)
    assert [subtree for subtree, _ in tree.stack] == [Subtree(0, 4), Subtree(4, 2)]
    assert tree.total() == "abcdef"


def test_first_ranks_have_one_more_leaf() -> None:
    assert [leaves_of_rank(rank, 3, 8) for rank in range(3)] == [range(0, 3), range(3, 6), range(6, 8)]


def test_more_ranks_than_leaves_are_refused() -> None:
    refuse_idle_ranks(4, 4)
    with pytest.raises(UsageError) as caught:
        refuse_idle_ranks(5, 4)
    assert caught.value.hint == "start 4 processes or fewer, or set batch.micro_batches=5"


def test_shard_without_a_micro_batch_left_joins_the_last_pass() -> None:
    passes = plan_passes(range(4, 9), 1, 2, reduce_once_per_step=False)
    assert passes == [ShardPass(5, True, 4, 2, False), ShardPass(7, True, 6, 2, False), ShardPass(8, False, 8, 1, True)]
    passes = plan_passes(range(4, 9), 1, 2, reduce_once_per_step=True)
    assert [(one_pass.k, one_pass.counts) for one_pass in passes] == [(7, True), (8, True), (8, False)]
