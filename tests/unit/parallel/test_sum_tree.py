"""The tree of ordered_sum: siblings, whole subtrees, and the order in which `total` adds."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.network.subtrees import Subtree, assign_subtrees, leaves_of_rank, refuse_idle_ranks, whole_subtrees
from lockstep.parallel.ordered_sum import SumTree, merged_subtrees
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
    assert whole_subtrees(block) == expected


def test_six_leaves_are_added_as_if_the_tree_of_eight_had_zeros() -> None:
    tree: SumTree[str] = SumTree()
    for leaf, text in enumerate("abcdef"):
        tree.add(Subtree(leaf, 1), text)
    assert [subtree for subtree, _ in tree.stack] == [Subtree(0, 4), Subtree(4, 2)]
    assert tree.total() == "abcdef"


def test_each_rank_has_a_main_subtree_and_the_rest_is_cut_up() -> None:
    assert assign_subtrees(4, 8) == tuple((Subtree(first, 2),) for first in (0, 2, 4, 6))
    assert [leaves_of_rank(rank, 3, 8) for rank in range(3)] == [[0, 1, 6], [2, 3, 7], [4, 5]]
    assert sum(map(len, assign_subtrees(7, 64))) == 11


def test_every_leaf_has_one_rank_and_no_rank_has_more_than_its_share() -> None:
    for leaves in range(1, 70):
        for size in range(1, leaves + 1):
            own = [leaves_of_rank(rank, size, leaves) for rank in range(size)]
            assert sorted(k for ks in own for k in ks) == list(range(leaves))
            assert min(map(len, own)) >= 1 and max(map(len, own)) == -(-leaves // size)
            assert all(ks == sorted(ks) for ks in own) and own[0][0] == 0
            assert [merged_subtrees(ks) for ks in own] == [list(subtrees) for subtrees in assign_subtrees(size, leaves)]


def test_more_ranks_than_leaves_are_refused() -> None:
    refuse_idle_ranks(4, 4)
    with pytest.raises(UsageError) as caught:
        refuse_idle_ranks(5, 4)
    assert caught.value.hint == "start 4 processes or fewer, or set batch.micro_batches=5"


def test_shard_without_a_micro_batch_left_joins_the_last_pass() -> None:
    passes = plan_passes([4, 5, 6, 7, 12], 1, 2, reduce_once_per_step=False)
    assert passes == [ShardPass(5, True, (4, 5), False), ShardPass(7, True, (6, 7), False), ShardPass(12, False, (12,), True)]
    passes = plan_passes(range(4, 9), 1, 2, reduce_once_per_step=True)
    assert [(each.k, each.counts) for each in passes] == [(7, True), (8, True), (8, False)]
