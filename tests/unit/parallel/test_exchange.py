"""The exchange of the ordered sum, run by up to 64 threads over queues in place of a network."""

from __future__ import annotations

from itertools import pairwise, product
from math import log2
from random import Random

import pytest
import torch
from support.queue_group import QueueGroup, run_in_threads, start_exchange
from support.traffic import Traffic
from torch import Tensor

from lockstep.network.moves import Link
from lockstep.network.subtrees import Subtree, equal_shares, leaves_of_rank
from lockstep.network.tree_exchange import WHOLE, rounds_of_rank
from lockstep.parallel import ordered_sum
from lockstep.parallel.ordered_sum import SumTree, tree_all_reduce
from lockstep.planner.devices import Cluster
from lockstep.planner.exchange_cost import tree_all_reduce_cost


def reduce_in_threads(
    values: Tensor, shares: tuple[int, ...]
) -> tuple[list[Tensor], list[Traffic]]:
    """Return (result, traffic) of each rank; values are those of the leaves, (K, length)."""
    size = len(shares)
    results, traffic = (
        [torch.empty(values.shape[1]) for _ in range(size)],
        [Traffic() for _ in range(size)],
    )

    def run(group: QueueGroup) -> None:
        tree, rank = SumTree[Tensor](), group.rank()
        for k in leaves_of_rank(rank, shares):
            tree.add(Subtree(k, 1), values[k].clone())
        traffic[rank] = group.traffic
        tree_all_reduce(tree.stack, shares, group, results[rank], group)  # type: ignore[arg-type]

    run_in_threads(size, run)
    return results, traffic


def total_of(values: Tensor) -> Tensor:
    tree: SumTree[Tensor] = SumTree()
    for k, value in enumerate(values):
        tree.add(Subtree(k, 1), value.clone())
    return tree.total()


@pytest.fixture(autouse=True)
def queues_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_sum, "start_exchange", start_exchange)


@pytest.mark.parametrize("size", range(1, 65))
def test_sum_has_the_bits_of_the_tree_on_1_to_64_ranks(size: int) -> None:
    """Any order but the tree's gives other bits: the summands differ by up to 2**40."""
    for leaves, length in ((64, 131), (size, 67), (size + 3, 5), (3 * size - 1, 1)):
        if leaves < size:
            continue
        generator = torch.Generator().manual_seed(100 * size + leaves)
        values = torch.randn(leaves, length, generator=generator) * 2.0 ** torch.randint(
            -20, 20, (leaves, 1), generator=generator
        )
        expected = total_of(values)
        results, _ = reduce_in_threads(values, equal_shares(size, leaves))
        assert all(torch.equal(result, expected) for result in results), (size, leaves, length)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_equal_shares_send_log_n_messages_and_the_bytes_of_a_ring(size: int) -> None:
    length = 64 * size
    _, traffic = reduce_in_threads(torch.ones(2 * size, length), (2,) * size)
    assert {(sent.messages, sent.bytes) for sent in traffic} == {
        (2 * int(log2(size)), 2 * (size - 1) * length * 4 // size)
    }


@pytest.mark.parametrize(("size", "leaves"), [(2, 4), (3, 8), (4, 4), (5, 11), (7, 64), (16, 16)])
def test_a_plan_counts_the_bytes_of_the_engine(size: int, leaves: int) -> None:
    length, link = 64 * 3 * 5 * 7 * 11, Link(1e-4, 1e6)
    _, traffic = reduce_in_threads(torch.ones(leaves, length), equal_shares(size, leaves))
    _, sent = tree_all_reduce_cost(
        tuple(range(size)), leaves, 4.0 * length, Cluster(size, 1, "cpu", 0, link, link)
    )
    assert sent == pytest.approx(
        max(rank.bytes for rank in traffic), abs=64
    )  # slices are rounded to elements


def test_largest_messages_go_to_the_nearest_neighbors() -> None:
    reduce, gather = rounds_of_rank(5, (2,) * 8)
    assert [(turn.sends[0].peer, turn.sends[0].stop - turn.sends[0].start) for turn in reduce] == [
        (4, WHOLE // 2),
        (7, WHOLE // 4),
        (1, WHOLE // 8),
    ]
    assert [turn.sends[0].peer for turn in gather] == [1, 7, 4]


def test_after_the_loss_of_one_of_eight_workers_the_bytes_are_at_most_1_3_of_a_ring() -> None:
    length = 64 * 7 * 30
    _, traffic = reduce_in_threads(torch.ones(64, length), equal_shares(7, 64))
    assert sum(sent.bytes for sent in traffic) <= 1.3 * 7 * (2 * 6 / 7 * length * 4)


def test_plan_for_4096_ranks_sends_24_messages_per_rank() -> None:
    for rank in (0, 1, 4095):
        reduce, gather = rounds_of_rank(rank, (2,) * 4096)
        assert sum(len(turn.sends) for turn in (*reduce, *gather)) == 24


def some_shares() -> list[tuple[int, ...]]:
    """Return all shares of up to 5 micro-batches, and 150 of up to 16 for 8 ranks."""
    draw = Random(1)
    cuts = [
        [0, *sorted(draw.sample(range(1, leaves), draw.randint(1, 7))), leaves]
        for leaves in (9, 13, 16)
        for _ in range(50)
    ]
    drawn = [tuple(stop - start for start, stop in pairwise(cut)) for cut in cuts]
    return [
        shares
        for size in range(1, 6)
        for shares in product(range(1, 6), repeat=size)
        if sum(shares) <= 5
    ] + drawn


def test_uneven_shares_have_the_bits_of_the_tree_and_at_most_three_times_the_bytes_of_a_ring() -> (
    None
):
    generator = torch.Generator().manual_seed(1)
    for shares in some_shares():
        size, leaves, length = len(shares), sum(shares), 840
        values = torch.randn(leaves, length, generator=generator) * 2.0 ** torch.randint(
            -20, 20, (leaves, 1), generator=generator
        )
        results, traffic = reduce_in_threads(values, shares)
        assert all(torch.equal(result, total_of(values)) for result in results), shares
        assert max(sent.bytes for sent in traffic) <= 3 * 2 * (size - 1) / size * length * 4, shares
