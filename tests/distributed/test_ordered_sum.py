"""The ordered sum: the correct gradient, with the same bits on any number of processes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks
from support.traffic import counted_traffic
from torch import nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.network.subtrees import Subtree, equal_shares, leaves_of_rank
from lockstep.parallel import digest as digest_module
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.digest import digest_of
from lockstep.parallel.ordered_sum import SumTree, dtypes_added_once, tree_all_reduce
from lockstep.runtime.work import WorkWaiter


@given(st.integers(1, 20), st.data())
@settings(max_examples=200, deadline=None)
def test_order_of_additions_does_not_depend_on_the_ranks_of_the_leaves(
    leaves: int, data: st.DataObject
) -> None:
    """Sums are text, so another order of additions gives another value."""

    class Text(str):
        def __add__(self, other: str) -> Text:
            return Text(f"({self}+{other})")

    def by(size: int) -> str:
        sums: list[tuple[Subtree, Text]] = []
        for rank in range(size):
            own: SumTree[Text] = SumTree()
            for k in leaves_of_rank(rank, equal_shares(size, leaves)):
                own.add(Subtree(k, 1), Text(k))
            sums += own.stack
        whole: SumTree[Text] = SumTree()
        for subtree, value in sorted(sums, key=lambda entry: entry[0]):
            whole.add(subtree, value)
        return whole.total()

    assert by(data.draw(st.integers(1, leaves))) == by(1)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:16]


def reduced(runtime: ElasticRuntime, leaves: int, length: int) -> str:
    values = torch.randn(leaves, length, generator=torch.Generator().manual_seed(leaves))
    tree: SumTree[torch.Tensor] = SumTree()
    shares = equal_shares(runtime.world.size, leaves)
    for k in leaves_of_rank(runtime.world.rank, shares):
        tree.add(Subtree(k, 1), values[k].clone())
    out = torch.empty(length)
    assert dist.group.WORLD is not None
    right = values.sum(0)  # the partial sums are overwritten
    tree_all_reduce(tree.stack, shares, dist.group.WORLD, out, WorkWaiter())
    torch.testing.assert_close(out, right, atol=1e-4, rtol=1e-4)
    return digest(out)


def reduce_all(runtime: ElasticRuntime) -> list[str]:
    return [
        reduced(runtime, leaves, length)
        for leaves in (4, 6, 7, 8)
        for length in (1, 2, 5, 64, 1001)
    ]


def test_tree_all_reduce_has_one_hash_for_1_to_4_processes_and_every_length() -> None:
    hashes = [run_ranks(reduce_all, size) for size in (1, 2, 3, 4)]
    assert {str(answer) for answers in hashes for answer in answers} == {str(hashes[0][0])}
    assert len(set(hashes[0][0])) == len(hashes[0][0])


def tiny(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Dropout(0.1), nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 50)
    ).to(dtype)


def ragged(k: int, step: int, leaves: int) -> torch.Tensor:
    """Return a micro-batch; its size depends on k."""
    rows = 1 + (3 * k + step) % 5
    return torch.randint(
        0, 50, (rows, 3 + k % 3), generator=torch.Generator().manual_seed(100 * step + k + leaves)
    )


def gradient(
    runtime: ElasticRuntime,
    leaves: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    dropout: bool,
) -> tuple[str, float]:
    """Return (digest of three steps' summed gradients, largest error relative to one big batch)."""
    model = tiny(dtype).train(dropout)
    error, seen = 0.0, []
    with build_replica(model, micro_batches=leaves, bucket_bytes=bucket_bytes) as replica:
        for step in range(3):
            for k in replica.micro_batches(step):
                ids = ragged(k, step, leaves)
                replica.backward(
                    nn.functional.cross_entropy(
                        replica(ids).flatten(0, 1), ids.flatten(), reduction="sum"
                    )
                )
            got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            seen.append(digest(got))
            if not dropout:
                alone = tiny(dtype).eval()
                torch.stack(
                    [
                        nn.functional.cross_entropy(
                            alone(ids).flatten(0, 1), ids.flatten(), reduction="sum"
                        )
                        for ids in (ragged(k, step, leaves) for k in range(leaves))
                    ]
                ).sum().backward()
                right = torch.cat(
                    [p.grad.flatten() for p in alone.parameters() if p.grad is not None]
                )
                error = max(error, float((got - right).abs().max() / right.abs().max()))
    return ",".join(seen), error


def gradients(runtime: ElasticRuntime, dtype: str, dropout: bool) -> list[tuple[str, float]]:
    return [
        gradient(runtime, leaves, getattr(torch, dtype), bucket, dropout)
        for leaves in (4, 5, 8)
        for bucket in (500, 25_000_000)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradient_equals_that_of_one_big_batch(size: int) -> None:
    for answers in run_ranks(gradients, size, "float64", False):
        assert max(error for _, error in answers) < 1e-6


def test_gradient_has_the_same_bits_on_1_to_4_processes_with_dropout() -> None:
    digests = [
        [d for d, _ in answers]
        for size in (1, 2, 3, 4)
        for answers in run_ranks(gradients, size, "float32", True)
    ]
    assert all(row == digests[0] for row in digests)
    assert digests[0][0] == digests[0][1], "the size of a bucket must not change bits"


def messages(runtime: ElasticRuntime, dtype: torch.dtype) -> dict[int, int]:
    """Return how many messages of the exchange a rank sends in a step, by the number of micro-batches."""
    sent = {}
    for leaves in (2, 3, 5, 6, 8):
        with (
            build_replica(tiny(dtype), micro_batches=leaves) as replica,
            counted_traffic() as traffic,
        ):
            for k in replica.micro_batches(0):
                replica.backward(replica(ragged(k, 0, leaves)).sum())
            sent[leaves] = traffic.messages
    return sent


def test_two_ranks_with_one_subtree_each_need_no_exchange() -> None:
    """One addition, in float32 or float64, has the bits of the tree in any all-reduce (compared above)."""
    for sent in run_ranks(messages, 2, torch.float32):
        assert {leaves for leaves, count in sent.items() if count} == {5, 6}
    assert all(all(sent.values()) for sent in run_ranks(messages, 2, torch.bfloat16))


def skip_backward(runtime: ElasticRuntime) -> str:
    model = tiny(torch.float32)
    try:
        with build_replica(model, micro_batches=2) as replica:
            for _ in replica.micro_batches(0):
                pass
    except UsageError as error:
        return str(error)
    return ""


class Backend:
    """In place of a GPU's backend: gloo, whose sums on one rank are off by a unit in the last place
    where the numbers have `odd` as their dtype."""

    def __init__(self, rank: int, odd: torch.dtype | None) -> None:
        self.is_odd = rank == 1 and odd is not None
        self.odd = odd
        self.sums = 0

    def all_reduce(self, tensor: torch.Tensor, **options: Any) -> dist.Work:
        self.sums += 1
        work = ALL_REDUCE(tensor, **options)
        if self.is_odd and tensor.dtype == self.odd:
            work.wait()
            tensor.view(torch.uint8)[0] ^= 1
        return work


ALL_REDUCE = dist.all_reduce


class OnGPU(torch.Tensor):
    is_cuda = True


def summed_on_gpus(
    runtime: ElasticRuntime, odd: torch.dtype | None
) -> tuple[set[torch.dtype], int, bool]:
    """Return the dtypes that the ranks agree to add once, the all-reduces of a step, and whether
    its sums are right."""
    backend = Backend(runtime.world.rank, odd)
    model = nn.ModuleDict(
        {"a": nn.Linear(3, 5, dtype=torch.float32), "b": nn.Linear(3, 5, dtype=torch.float64)}
    )
    with build_replica(model, micro_batches=2) as replica, pytest.MonkeyPatch.context() as patch:
        source = replica.source
        for _ in replica.micro_batches(0):  # learns the order of the gradients
            replica.backward(sum(p.double().sum() for p in model.parameters()))
        patch.setattr(dist, "all_reduce", backend.all_reduce)
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        exact = dtypes_added_once(
            [bucket.buffer.as_subclass(OnGPU) for bucket in source.buckets.buckets],
            source.groups.replica_group,
            source.groups.waits,
        )
        patch.undo()
        patch.setattr(source, "agree", lambda: setattr(source, "_added_once", exact))
        patch.setattr(dist, "all_reduce", backend.all_reduce)
        backend.sums, backend.is_odd = 0, False
        replica._is_agreed = False
        for k in replica.micro_batches(1):
            replica.backward((k + 1) * sum(p.double().sum() for p in model.parameters()))
        sums = [p.grad is not None and bool((p.grad == 3).all()) for p in replica.parameters]
        return exact, backend.sums, all(sums)


@pytest.mark.parametrize(
    ("odd", "exact"),
    [
        (None, {torch.float32, torch.float64}),
        (torch.float32, {torch.float64}),
        (torch.float64, {torch.float32}),
    ],
)
def test_two_gpus_use_an_all_reduce_that_has_proven_one_addition(
    odd: torch.dtype | None, exact: set[torch.dtype]
) -> None:
    """Where it has not on one rank, both exchange and add."""
    for found, all_reduces, is_right in run_ranks(summed_on_gpus, 2, odd):
        assert found == exact and is_right
        assert all_reduces == len(exact)


def test_step_without_a_backward_pass_is_refused() -> None:
    assert "no gradient arrived" in run_ranks(skip_backward, 1)[0]


def use_one_micro_batch_too_few(runtime: ElasticRuntime) -> str:
    try:
        build_replica(tiny(torch.float32), micro_batches=1)
    except UsageError as error:
        return str(error)
    return ""


def test_more_processes_than_micro_batches_are_refused_on_every_rank() -> None:
    assert all(
        "2 processes are running, a step has 1 micro-batches" in text
        for text in run_ranks(use_one_micro_batch_too_few, 2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("by", ["words", "hash"])
def test_every_flipped_bit_shows_in_a_digest(
    dtype: torch.dtype, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hash` is the path for tensors on an accelerator."""
    tensors = [
        -torch.ones(3, dtype=dtype),
        torch.zeros(0, dtype=dtype),
        torch.full((), 5, dtype=dtype),
    ]
    if by == "hash":
        monkeypatch.setattr(digest_module, "words_of", lambda tensor: None)
    whole = digest_of(tensors)
    assert 0 <= whole < 2**64
    for tensor in (tensors[0], tensors[2]):
        raw = tensor.view(-1).view(torch.uint8)
        for bit in range(8 * len(raw)):
            raw[bit // 8] ^= 1 << bit % 8
            assert digest_of(tensors) != whole
            raw[bit // 8] ^= 1 << bit % 8
    assert digest_of(tensors) == whole
