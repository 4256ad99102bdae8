"""Sums of encoded leaves: one set of bits for any number of ranks, and the bytes that were counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.queue_group import QueueGroup, run_in_threads, start_exchange
from support.traffic import Traffic
from support.wire_bytes import sent_bytes
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.network.wire_format import FORMATS, Wire, wire_order
from lockstep.parallel import wire_sum
from lockstep.parallel.wire_sum import WireSum, row_lengths

ENCODED = [wire for wire, form in FORMATS.items() if not form.is_exact]
SHAPES = [(7, 64), (64,), (3, 5, 7), (4, 257), (2, 96), (), (9, 512)]


def leaf(k: int) -> list[Tensor]:
    """Return the gradients of micro-batch k; their sizes differ by up to 2**20."""
    generator = torch.Generator().manual_seed(k)
    return [torch.randn(shape, generator=generator) * 2.0 ** (k % 21 - 10) for shape in SHAPES]


def reduce_in_threads(
    wire: Wire, shares: tuple[int, ...], make_leaf: Callable[[int], list[Tensor]] = leaf
) -> tuple[list[Tensor], list[Traffic]]:
    """Return (the flat sum, traffic) of each rank."""
    size = len(shares)
    results, traffic = [torch.empty(0) for _ in range(size)], [Traffic() for _ in range(size)]

    def run(group: QueueGroup) -> None:
        rank, total = group.rank(), WireSum(wire, row_lengths(leaf(0)), (3, 11), shares)
        for k in leaves_of_rank(rank, shares):
            total.add(k, total.encode(k, make_leaf(k)))
        traffic[rank] = group.traffic
        out = [torch.empty(shape) for shape in SHAPES]
        total.all_reduce(out, group if size > 1 else None, group)  # type: ignore[arg-type]
        results[rank] = torch.cat([tensor.reshape(-1) for tensor in out])

    run_in_threads(size, run)
    return results, traffic


@pytest.fixture(autouse=True)
def queues_for_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_sum, "start_exchange", start_exchange)


@pytest.mark.parametrize("wire", ENCODED)
@pytest.mark.parametrize("leaves", [*range(1, 9), 16])
def test_sum_has_one_set_of_bits_on_1_to_8_ranks(wire: Wire, leaves: int) -> None:
    (expected,), _ = reduce_in_threads(wire, (leaves,))
    exact = sum(
        torch.cat([tensor.reshape(-1) for tensor in leaf(k)]).double() for k in range(leaves)
    )
    assert 0 < float((expected - exact).norm() / exact.norm()) < 0.02
    for size in range(2, min(leaves, 8) + 1):
        uneven = (leaves - size + 1, *(1,) * (size - 1))
        for shares in {equal_shares(size, leaves), uneven}:
            results, _ = reduce_in_threads(wire, shares)
            assert all(torch.equal(result, expected) for result in results), shares


@pytest.mark.parametrize("wire", ENCODED)
def test_a_nan_of_one_micro_batch_is_in_the_sum_of_every_rank(wire: Wire) -> None:
    def with_nan(k: int) -> list[Tensor]:
        gradients = leaf(k)
        gradients[6][8, 300] = torch.nan if k == 2 else 1.0
        return gradients

    results, _ = reduce_in_threads(wire, equal_shares(3, 4), with_nan)
    assert all(result[-512 + 300].isnan() and result[:-512].isfinite().all() for result in results)


@pytest.mark.parametrize("wire", ENCODED)
@pytest.mark.parametrize(("size", "leaves"), [(2, 2), (4, 8), (3, 8), (5, 16)])
def test_bytes_on_the_network_are_those_of_the_plan(wire: Wire, size: int, leaves: int) -> None:
    _, sections = wire_order(wire, row_lengths(leaf(0)))
    _, traffic = reduce_in_threads(wire, equal_shares(size, leaves))
    assert [sent.bytes for sent in traffic] == [
        sent_bytes(wire, sections, rank, equal_shares(size, leaves)) for rank in range(size)
    ]


def test_memory_format_of_gradients_does_not_change_the_bits() -> None:
    gradients = leaf(5)
    total = WireSum("int8", row_lengths(gradients), (3, 11), (8,))
    strided = [
        gradient.T.contiguous().T if gradient.dim() == 2 else gradient for gradient in gradients
    ]
    assert torch.equal(total.encode(5, strided), total.encode(5, gradients))


def test_other_dtypes_are_refused() -> None:
    total = WireSum("bf16", [(6, 3)], (3, 11), (8,))
    with pytest.raises(UsageError, match=r"torch\.float32, these are torch\.float64"):
        total.encode(0, [torch.ones(2, 3, dtype=torch.float64)])
