"""Habits of PyTorch loops give the exact sum of gradients, or an error that names parameters."""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.parallel.bucket_source import BucketSource
from lockstep.parallel.buckets import Bucket
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.replica import Replica
from lockstep.training.replica_group import ReplicaGroup


class Transposed(nn.Module):
    """Parameters in channels_last, transposed, with gaps in memory, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.across = nn.Parameter(torch.randn(8, 6).t())
        self.gaps = nn.Parameter(torch.randn(4, 12)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.convolution(images).mean((2, 3)) @ self.across.t() @ self.gaps.t()
        return (features * self.scale).square().sum()


def images(step: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(100 * step + k)).to(
        dtype
    )


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(one.detach().contiguous().numpy().tobytes() for one in tensors.values())
    ).hexdigest()


def column_major(runtime: ElasticRuntime, leaves: int, bucket_bytes: int) -> tuple[str, float]:
    """Return (digest, largest error relative to float64) of the gradients of two steps."""
    model, error, seen = Transposed(), 0.0, ""
    with build_replica(model, micro_batches=leaves, bucket_bytes=bucket_bytes) as replica:
        for step in range(2):
            for k in replica.micro_batches(step):
                replica.backward(replica(images(step, k, torch.float32)))
            plain = Transposed().double()
            for k in range(leaves):
                plain(images(step, k, torch.float64)).backward()
            expected = gradients_of(plain)
            for name, got in gradients_of(model).items():
                error = max(
                    error, float((got - expected[name]).abs().max() / expected[name].abs().max())
                )
            seen += digest(gradients_of(model))
    return seen, error


def all_column_major(runtime: ElasticRuntime) -> list[tuple[str, float]]:
    return [
        column_major(runtime, leaves, bucket)
        for leaves in (3, 4, 7)
        for bucket in (100, 25_000_000)
    ]


def test_gradients_in_any_memory_order_are_summed_to_the_same_bits_on_1_to_3_workers() -> None:
    digests = [answer for size in (1, 2, 3) for answer in run_ranks(all_column_major, size)]
    assert max(error for answer in digests for _, error in answer) < 1e-5
    assert {str([bits for bits, _ in answer]) for answer in digests} == {
        str([bits for bits, _ in digests[0]])
    }


def change_memory_format(runtime: ElasticRuntime, leaves: int) -> float:
    """Return the largest error relative to float64 when the memory format changes between steps."""
    model, error = nn.Conv2d(3, 8, 3), 0.0
    with build_replica(model, micro_batches=leaves) as replica:
        for step in range(4):
            if step:
                memory_format = torch.channels_last if step % 2 else torch.contiguous_format
                model.to(memory_format=memory_format)
            for k in replica.micro_batches(step):
                replica.backward(replica(images(step, k, torch.float32)).square().sum())
            plain = copy.deepcopy(model).double()
            plain.zero_grad()
            for k in range(leaves):
                plain(images(step, k, torch.float64)).square().sum().backward()
            expected = gradients_of(plain)
            for name, got in gradients_of(model).items():
                error = max(
                    error, float((got - expected[name]).abs().max() / expected[name].abs().max())
                )
    return error


def test_memory_format_may_change_between_steps() -> None:
    """model.to() replaces the memory of .grad too, which then no longer lies in its bucket."""
    for leaves in (2, 3, 7):
        assert max(run_ranks(change_memory_format, 2, leaves)) < 1e-5


def replace_gradient_memory(runtime: ElasticRuntime) -> str:
    model = nn.Conv2d(3, 8, 3)
    try:
        with build_replica(model, micro_batches=2) as replica:
            for k in replica.micro_batches(0):
                replica.backward(replica(images(0, k, torch.float32)).square().sum())
                model.to(memory_format=torch.channels_last)
    except UsageError as error:
        return str(error)
    return "accepted"


def test_gradient_whose_memory_is_replaced_within_a_step_is_refused() -> None:
    """The second micro-batch is added to the new memory, and the bucket has the first one only."""
    assert "the memory of the gradients changed" in run_ranks(replace_gradient_memory, 1)[0]


# Permitted uses of gradients in a loop.


class Branches(nn.Module):
    """`late` is used first, so that its gradient comes last and its bucket is the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.late, self.side, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, side: bool = True) -> torch.Tensor:
        x = self.late(x)
        x = x + self.side(x) if side else x
        return self.head(x).square().mean()


class MicroBatch(NamedTuple):
    """The objects of a loop in one micro-batch."""

    replicas: ReplicaGroup
    optimizer: torch.optim.Optimizer
    model: Branches
    x: torch.Tensor

    def backward(self) -> None:
        self.replicas.backward(self.replicas(self.x))

    def plain_backward(self) -> None:
        self.replicas(self.x).backward()


def clears_before(batch: MicroBatch) -> None:
    batch.optimizer.zero_grad()
    batch.backward()


def zeroes_before(batch: MicroBatch) -> None:
    batch.optimizer.zero_grad(set_to_none=False)
    batch.backward()


def clears_after(batch: MicroBatch) -> None:
    batch.backward()
    batch.optimizer.zero_grad()


def zeroes_after(batch: MicroBatch) -> None:
    batch.backward()
    batch.optimizer.zero_grad(set_to_none=False)


def clips(batch: MicroBatch) -> None:
    batch.backward()
    nn.utils.clip_grad_norm_(batch.model.parameters(), 1e-3)


def two_backwards(batch: MicroBatch) -> None:
    batch.backward()
    batch.backward()


def no_backward(batch: MicroBatch) -> None:
    batch.replicas(batch.x)


def both_backwards(batch: MicroBatch) -> None:
    batch.plain_backward()
    batch.backward()


def plain_after(batch: MicroBatch) -> None:
    batch.backward()
    batch.model(batch.x).backward()


CHANGED = "the gradients of 6 of 6 parameters were changed in micro-batch {k} of step 1"
BEFORE = CHANGED + ", before backward(): late.weight"
AFTER = CHANGED + ", after backward(): late.weight"
NO_GRADIENT = (
    "no gradient arrived for the 6 parameters in micro-batch {k} of step 1:"
    " backward() was not called"
)
HABITS: dict[Callable[[MicroBatch], None], str] = {
    clears_before: BEFORE,
    zeroes_before: BEFORE,
    clears_after: AFTER,
    zeroes_after: AFTER,
    clips: AFTER,
    two_backwards: "backward() was called twice in micro-batch {k} of step 1",
    no_backward: NO_GRADIENT,
    MicroBatch.plain_backward: NO_GRADIENT,
    both_backwards: BEFORE,
    plain_after: AFTER,
}


def error_of_habit(
    runtime: ElasticRuntime, habit: Callable[[MicroBatch], None], leaves: int
) -> str:
    """Return the error of the first step of a loop with the habit; one bucket per layer."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with ReplicaGroup(runtime, model, micro_batches=leaves, bucket_bytes=20) as replicas:
            for _ in replicas.micro_batches(0):
                habit(MicroBatch(replicas, optimizer, model, torch.randn(3, 4)))
    except UsageError as error:
        return str(error)
    return "accepted"


def errors_of_habits(runtime: ElasticRuntime, leaves: int) -> list[str]:
    return [error_of_habit(runtime, habit, leaves) for habit in HABITS]


@pytest.mark.parametrize("leaves", [1, 2, 4])
def test_habits_that_change_the_sum_are_refused(leaves: int) -> None:
    """On one worker: a refusal on several ranks is not a collective."""
    texts = run_ranks(errors_of_habits, 1, leaves)[0]
    for (habit, expected), text in zip(HABITS.items(), texts, strict=True):
        assert any(expected.format(k=k) in text for k in range(leaves)), f"{habit.__name__}: {text}"


def skip_a_parameter(runtime: ElasticRuntime, at: int) -> str:
    """Leave `side` out of micro-batch `at` of step 2; return the error.

    With one bucket for each layer, `side` and after it `late` would not be summed.
    """
    model = Branches()
    try:
        with ReplicaGroup(runtime, model, micro_batches=4, bucket_bytes=20) as replicas:
            for step in range(3):
                for k in replicas.micro_batches(step):
                    replicas.backward(replicas(torch.ones(3, 4), side=(step, k) != (2, at)))
    except UsageError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("at", [1, 3])
def test_parameter_without_a_gradient_is_refused_by_name(at: int) -> None:
    text = run_ranks(skip_a_parameter, 1, at)[0]
    assert (
        f"no gradient arrived for 2 of 6 parameters in micro-batch {at} of step 3: side.weight, side.bias"
        in text
    )


def gradients_with_a_layer_left_out(runtime: ElasticRuntime, unused: str) -> str:
    """Return the digest of the gradients of two steps, in which `side` takes part in some micro-batches.

    unused  "" to give the gradient of zero by hand
    """
    model, seen = Branches(), ""
    options: Any = {"unused": unused} if unused else {}
    with build_replica(model, micro_batches=5, bucket_bytes=20, **options) as replica:
        for step in range(2):
            for k in replica.micro_batches(step):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + k))
                loss = replica(x, side=step == 1 and k in (1, 3))
                replica.backward(
                    loss if unused else loss + 0.0 * sum(p.sum() for p in model.side.parameters())
                )
            assert step or not model.side.weight.grad.any(), "no micro-batch has used it"  # type: ignore[union-attr]
            seen += digest(gradients_of(model))
    return seen


def test_parameter_without_a_gradient_has_zeros_on_request_on_1_to_3_workers() -> None:
    expected = run_ranks(gradients_with_a_layer_left_out, 1, "")[0]
    for size in (1, 2, 3):
        assert set(run_ranks(gradients_with_a_layer_left_out, size, "zero")) == {expected}


class Checkpointed(Branches):
    """`side` is recomputed in two reentrant backward passes inside the backward pass."""

    def forward(self, x: torch.Tensor, *, side: bool = True) -> torch.Tensor:
        x = self.late(x)
        for _ in range(2):
            x = x + checkpoint(self.side, x, use_reentrant=True)
        return self.head(x).square().mean()


def test_gradient_that_arrives_twice_in_one_backward_pass_is_refused() -> None:
    expected = (
        "arrived twice in one backward pass, in micro-batch 0 of step 1: side.bias, side.weight"
    )
    with pytest.raises(AssertionError, match=expected):
        run_ranks(train_checkpointed, 1)


def train_checkpointed(runtime: ElasticRuntime) -> None:
    with build_replica(Checkpointed(), micro_batches=2, bucket_bytes=20) as replica:
        for _ in replica.micro_batches(0):
            replica.backward(replica(torch.ones(3, 4)))


def buckets_of(replica: Replica) -> list[Bucket]:
    assert isinstance(replica.source, BucketSource) and replica.source.buckets
    return replica.source.buckets.buckets


def bucket_orders(runtime: ElasticRuntime) -> tuple[list[list[int]], str]:
    """Return (parameters of each bucket in step 2, digest of the gradients of three steps).

    Rank 1 runs `side` and `late` in another order than rank 0.
    """
    model, seen = Branches(), ""
    with build_replica(model, micro_batches=4, bucket_bytes=20) as replica:
        for step in range(3):
            for k in replica.micro_batches(step):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + k))
                late_first = model.late(x)
                x = model.side(x) + late_first if runtime.world.rank else late_first + model.side(x)
                replica.backward(model.head(x).square().mean())
            seen += digest(gradients_of(model))
        return [list(bucket.indices) for bucket in buckets_of(replica)], seen


def test_all_workers_take_the_order_in_which_gradients_become_ready_on_rank_0() -> None:
    (buckets, bits), other = run_ranks(bucket_orders, 2)
    assert (buckets, bits) == other
    assert buckets[0][0] in (4, 5) and sorted(i for bucket in buckets for i in bucket) == list(
        range(6)
    )
    assert run_ranks(bucket_orders, 1)[0][1] == bits


def gradient_without_the_replica(runtime: ElasticRuntime, call: str) -> str:
    model, seen = Branches(), ""
    with build_replica(model, micro_batches=5) as replica:
        for step in range(2):
            for k in replica.micro_batches(step):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + k))
                replica.backward({"replica": replica, "model": model}[call](x))
            seen += digest(gradients_of(model))
    return seen


def test_model_may_be_called_itself() -> None:
    assert (
        len(
            {
                bits
                for call in ("replica", "model")
                for bits in run_ranks(gradient_without_the_replica, 2, call)
            }
        )
        == 1
    )


def bytes_during_a_step(runtime: ElasticRuntime) -> list[int]:
    """Return the bytes of gradients and partial sums: in the last micro-batch, and released."""
    model = nn.Linear(1000, 100, bias=False)  # 400,000 bytes

    def float_bytes() -> int:
        gc.collect()
        tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
        return sum(
            {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in tensors
                if t.numel() >= 1000
            }.values()
        )

    with build_replica(model, micro_batches=7) as replica:
        idle, sizes = float_bytes(), []
        for k in replica.micro_batches(0):
            if k == 6:  # before its backward pass, after which the reducer works beside this thread
                sizes.append((float_bytes() - idle) // 400_000)
            replica.backward(replica(torch.ones(1, 1000)).sum())
        sizes.append((float_bytes() - idle) // 400_000)
        replica.release_groups()
        sizes.append((float_bytes() - idle) // 400_000)
    return sizes


def test_no_partial_sum_outlives_its_step() -> None:
    """Leaves 0 to 3 and 4 to 5 are partial sums of seven; the buffer of leaf 6 is static."""
    assert run_ranks(bytes_during_a_step, 1)[0] == [2, 0, 0]


def leave_early(runtime: ElasticRuntime, how: str) -> tuple[bool, str]:
    """Return (True when the update was skipped, the error of the next step or of the end)."""
    model = Branches()
    before = digest(dict(model.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with ReplicaGroup(runtime, model, micro_batches=4, rehearse=how != "break") as replicas:
            for _, x in zip(replicas.micro_batches(0), torch.ones(4, 3, 4), strict=False):
                replicas.backward(replicas(x))
                if how == "break":
                    break
            optimizer.step()
            untouched = digest(dict(model.named_parameters())) == before
            if how == "the next step":
                next(replicas.micro_batches(1))
    except UsageError as error:
        return untouched, str(error)
    return untouched, "accepted"


@pytest.mark.parametrize("how", ["break", "the next step"])
def test_loop_that_ends_early_changes_no_weights_and_is_refused(how: str) -> None:
    untouched, text = run_ranks(leave_early, 1, how)[0]
    assert untouched and "the micro-batch loop of step 1 ended early" in text


# Layers frozen and unfrozen between steps.


def unfreeze_and_freeze(runtime: ElasticRuntime, at: int) -> list[str]:
    """Return the digest of the weights after each step.

    `side` is trained from step `at`, `late` until step `at`.
    """
    model, seen = Branches(), []
    model.side.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ReplicaGroup(runtime, model, micro_batches=4) as replicas:
        for step in range(5):
            model.side.requires_grad_(step >= at)
            model.late.requires_grad_(step <= at)
            for _ in replicas.micro_batches(step):
                replicas.backward(replicas(torch.randn(3, 4)))
            optimizer.step()
            seen.append(digest(dict(model.named_parameters())))
            assert len(replicas.replica.parameters) == (4 if step != at else 6)
    return seen


def test_layers_can_be_frozen_and_unfrozen_between_steps() -> None:
    digests = [run_ranks(unfreeze_and_freeze, size, 2) for size in (1, 2, 3)]
    assert all(rank == digests[0][0] for ranks in digests for rank in ranks)
    assert all(before != after for before, after in pairwise(digests[0][0]))


def frozen_on_rank_1(runtime: ElasticRuntime) -> str:
    model = Branches()
    model.side.bias.requires_grad_(runtime.world.rank != 1)
    try:
        with ReplicaGroup(runtime, model, micro_batches=4) as replicas:
            next(replicas.micro_batches(0))
    except UsageError as error:
        return str(error)
    return "accepted"


def test_workers_that_train_different_parameters_are_refused() -> None:
    for text in run_ranks(frozen_on_rank_1, 2):
        assert "not all workers train the same parameters: side.bias" in text


# Parameters that cannot be summed or saved.


class Odd(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)


ODD = {
    "not real floating-point numbers: phase (torch.complex64)": lambda: Odd(
        phase=nn.Parameter(torch.ones(2, dtype=torch.complex64))
    ),
    "sparse gradients are not supported: table": lambda: Odd(table=nn.Embedding(5, 2, sparse=True)),
    "cannot hold these parameters or buffers: turns (torch.complex128)": lambda: Odd(
        turns=torch.ones(2, dtype=torch.complex128)
    ),
    "the model has no parameter to train": lambda: Odd().requires_grad_(False),
}


@pytest.mark.parametrize("expected", ODD)
def test_parameters_that_cannot_be_summed_or_saved_are_refused_by_name(expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        build_replica(ODD[expected](), micro_batches=2)


# Data and random numbers.


def train_with_noise(runtime: ElasticRuntime) -> list[str]:
    """Return the digest of the weights after steps with noise from each global generator."""
    model, seen = Branches(), []
    with ReplicaGroup(runtime, model, micro_batches=5) as replicas:
        for step in range(4):
            for _ in replicas.micro_batches(step):
                x = (
                    torch.randn(3, 4)
                    + torch.from_numpy(np.random.randn(3, 4)).float()
                    + random.random()
                )
                replicas.backward(replicas(x))
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p -= (
                        0.1 * p.grad
                        + 0.01 * torch.randn(p.shape)
                        + 0.01 * float(np.random.rand())
                        + 0.01 * random.random()
                    )
            seen.append(digest(dict(model.named_parameters())))
    return seen


def test_noise_on_data_and_gradients_has_the_same_bits_on_1_to_3_workers() -> None:
    digests = [rank for size in (1, 2, 3) for rank in run_ranks(train_with_noise, size)]
    assert all(rank == digests[0] for rank in digests) and len(set(digests[0])) == 4


def error_of_unkeyed_data(runtime: ElasticRuntime, habit: str) -> str:
    """Return the error of a loop whose data does not follow from step and micro-batch."""
    points = torch.arange(64.0).view(16, 4)
    if habit == "an unseeded data set":
        points = torch.rand(16, 4, generator=torch.Generator().manual_seed(runtime.world.rank))
    batches = iter(DataLoader(points, batch_size=2))  # type: ignore[arg-type]
    ahead = next(batches)
    try:
        with ReplicaGroup(runtime, Branches(), micro_batches=4) as replicas:
            for k in replicas.micro_batches(0):
                if habit == "a DataLoader":
                    x = next(batches)
                elif habit == "a prefetched batch":
                    x, ahead = ahead, next(batches)
                elif habit == "a generator of the rank":
                    x = torch.rand(
                        2, 4, generator=torch.Generator().manual_seed(10 * runtime.world.rank + k)
                    )
                else:
                    x = points[2 * k : 2 * k + 2]
                replicas.backward(replicas(x))
    except (UsageError, RuntimeError) as error:
        return str(error)
    return "accepted"


def errors_of_unkeyed_data(runtime: ElasticRuntime, habits: list[str]) -> list[str]:
    return [error_of_unkeyed_data(runtime, habit) for habit in habits]


def test_data_that_does_not_follow_from_the_micro_batch_is_refused() -> None:
    for habit in ("a DataLoader", "a prefetched batch"):
        assert (
            "the loss of micro-batch 0 of step 1 is 0."
            in run_ranks(error_of_unkeyed_data, 1, habit)[0]
        )
    for texts in run_ranks(
        errors_of_unkeyed_data, 2, ["a generator of the rank", "an unseeded data set"]
    ):
        assert all(
            "is not the same on all workers: " in text and " on rank 1" in text for text in texts
        ), texts
    assert run_ranks(error_of_unkeyed_data, 2, "none") == ["accepted"] * 2


def count_in_a_buffer(runtime: ElasticRuntime) -> int:
    """Return how many micro-batches of one step a buffer has counted."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with ReplicaGroup(runtime, model, micro_batches=2) as replicas:
        for k in replicas.micro_batches(0):
            replicas.backward(replicas(torch.ones(3, 4) * k).sum())
    return int(model[1].num_batches_tracked)  # type: ignore[arg-type]


def is_rehearsed_in_buckets(runtime: ElasticRuntime) -> bool:
    model = nn.Linear(4, 4)
    with build_replica(model, micro_batches=1) as replica:
        rehearsal = replica.rehearsal(0)
        next(rehearsal)
        replica.backward(replica(torch.ones(2, 4)).sum())
        views = {view.data_ptr() for bucket in buckets_of(replica) for view in bucket.views}
        used = {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
        assert list(rehearsal) == []
        return used == views and all(p.grad is None for p in model.parameters())


def test_rehearsal_needs_no_memory_for_gradients_of_its_own() -> None:
    assert run_ranks(is_rehearsed_in_buckets, 1) == [True]


def test_rehearsal_leaves_buffers_unchanged() -> None:
    assert run_ranks(count_in_a_buffer, 1) == [2]
