"""The rules that find guilty micro-batches, and a ReplicaGroup of one process that leaves them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError, UsageError
from lockstep.record.events import read_events
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.learners import Learners
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.rollback import (
    MIN_STEPS,
    MicroBatchResult,
    Rollback,
    SkippedMicroBatches,
    choose_rollback,
    find_guilty,
    loss_limit,
)

K = 4
DEFAULT = Rollback()
LossOf = Callable[[int, int, Tensor], Tensor]


class Points:
    """Two points in each micro-batch; their numbers are 2 * k and 2 * k + 1."""

    sample_kind = "points"

    def samples(self, step: int, k: int) -> list[int]:
        return [2 * k, 2 * k + 1]


@pytest.fixture
def runtime() -> Iterator[ElasticRuntime]:
    with ElasticRuntime.join() as runtime:
        yield runtime


def run_steps(
    runtime: ElasticRuntime,
    folder: Path,
    steps: int,
    loss_of: LossOf,
    options: Rollback = DEFAULT,
    form: str = "count",
) -> tuple[list[Tensor], dict[str, Any], SkippedMicroBatches]:
    """Train; return the gradient of the last step, the facts for a checkpoint, and what was
    skipped.

    form  of the losses: sums with a "count"; "mean": shares of a mean
    """
    torch.manual_seed(0)
    runtime.loop_state, model = {}, nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Checkpointer(folder / "checkpoints", runtime, model, optimizer) as checkpointer:
        rollback = SkippedMicroBatches(
            options,
            K,
            checkpointer,
            Points(),
        )
        with ReplicaGroup(
            runtime, model, checkpointer, micro_batches=K, rehearse=False, rollback=rollback
        ) as replicas:
            for step in range(steps):
                for k in replicas.micro_batches(step):
                    loss = loss_of(step, k, replicas(torch.full((2, 3), 1.0 + k)))
                    divisor = 2 * K if form == "mean" else 1
                    replicas.backward(loss / divisor, 2 if form == "count" else None)
                optimizer.step()
            checkpointer.run_facts["loss"] = replicas.loss
        return [cast(Tensor, p.grad) for p in model.parameters()], checkpointer.run_facts, rollback


def plain(step: int, k: int, out: Tensor) -> Tensor:
    return out.square().sum()


def test_a_spike_is_measured_by_the_median_and_its_distances() -> None:
    losses = [2.0, 2.1, 1.9, 2.2, 1.8] * 4
    assert loss_limit(losses, 10.0) == pytest.approx(2.0 + 10 * 1.4826 * 0.1)
    assert loss_limit(losses, 10.0, parts=4) == pytest.approx(2.0 + 20 * 1.4826 * 0.1)
    assert loss_limit([2.0] * 20, 10.0) == pytest.approx(2.4)  # at least 2% of the median
    assert loss_limit([*losses[:-1], 1e9], 10.0) < 4  # one spike in the window changes little
    assert loss_limit(losses[: MIN_STEPS - 1], 10.0) == loss_limit(losses, 0.0) == math.inf


def test_guilty_are_those_not_finite_then_those_above_the_limit_but_not_all() -> None:
    good, high = MicroBatchResult(1.0, True), MicroBatchResult(9.0, True)
    nan, no_gradient = MicroBatchResult(math.nan, True), MicroBatchResult(1.0, False)
    assert find_guilty({3: nan, 0: high, 1: no_gradient, 2: good}, 5.0) == [1, 3]
    assert find_guilty({0: good, 1: high}, 5.0) == [1]
    assert find_guilty({0: high, 1: high}, 5.0) == find_guilty({0: good, 1: good}, 5.0) == []
    assert find_guilty({0: nan, 1: nan}, 5.0) == [0, 1]


def test_a_step_is_retried_without_a_loss_and_a_gradient_that_are_not_finite(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    def poisoned(step: int, k: int, out: Tensor) -> Tensor:
        if step == 1 and k == 1:
            return (out.sum() * 0).sqrt()  # loss 0, gradient NaN
        return out.sum() * math.inf if step == 1 and k == 2 else plain(step, k, out)

    gradients, facts, rollback = run_steps(runtime, tmp_path, 2, poisoned)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sum(plain(1, k, model(torch.full((2, 3), 1.0 + k))) for k in (0, 3)).backward()  # type: ignore[union-attr]
    for ours, p in zip(gradients, model.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(ours, p.grad / 4)  # samples of two micro-batches
    assert (rollback.trained(0), rollback.trained(1)) == (None, [0, 3])
    assert facts["rollback"]["skipped"] == {"2": [1, 2]} and [
        step for step, _ in facts["rollback"]["losses"]
    ] == [0, 1]
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "rolled back"]
    assert event["step"] == 2 and [row["points"] for row in event["micro_batches"]] == [
        [2, 3],
        [4, 5],
    ]
    assert [
        (row["k"], row["gradient_finite"], math.isfinite(float(row["loss"])))
        for row in event["micro_batches"]
    ] == [
        (1, False, True),
        (2, False, False),
    ]

    given, _, _ = run_steps(
        runtime,
        tmp_path / "given",
        2,
        plain,
        Rollback(max_skipped=0, spike=0.0, skip=["2:1", "2:2"]),
    )
    assert all(map(torch.equal, gradients, given))


def test_a_resumed_run_and_a_joiner_know_what_was_skipped(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    _, facts, _ = run_steps(
        runtime, tmp_path, 1, lambda step, k, out: out.sum() * (math.nan if k == 3 else 1)
    )
    received = runtime.loop_state
    for loop_state, saved in ((received, {}), ({}, facts)):
        model = nn.Linear(3, 1)
        with Checkpointer(
            tmp_path, runtime, model, torch.optim.SGD(model.parameters(), lr=0.0)
        ) as checkpointer:
            runtime.loop_state, checkpointer.facts = loop_state, saved
            again = SkippedMicroBatches(Rollback(), K, checkpointer, Points())
            assert again.trained(0) == [0, 1, 2] and again.to_json() == facts["rollback"]


def test_a_spike_of_one_micro_batch_is_skipped_and_one_of_all_is_trained(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    def spiking(step: int, k: int, out: Tensor) -> Tensor:
        scale = {(20, 2): 50.0, (21, k): 50.0}.get((step, k), 1.0)
        return out.square().sum() * 0 + scale * (1 + 0.01 * (step % 5))

    _, facts, _ = run_steps(runtime, tmp_path, 23, spiking)
    assert facts["rollback"]["skipped"] == {"21": [2]}
    assert [
        (event["event"], event["step"])
        for event in read_events(tmp_path)
        if event["event"] in ("rolled back", "spike")
    ] == [
        ("rolled back", 21),
        ("spike", 22),
    ]
    _, facts, _ = run_steps(runtime, tmp_path / "off", 23, spiking, Rollback(spike=0))
    assert facts["rollback"]["skipped"] == {}


@pytest.mark.parametrize(
    ("bad", "allowed", "what"),
    [
        (
            {0, 1, 2, 3},
            100,
            "none of the 4 micro-batches of step 1 is finite: the cause is the weights",
        ),
        (
            {1, 2},
            1,
            r"micro-batch 2 \(loss nan, gradient not finite; points 4, 5\); with 0 skipped before, that is more than 1",
        ),
    ],
)
def test_a_run_ends_when_nothing_or_too_little_is_left(
    runtime: ElasticRuntime, tmp_path: Path, bad: set[int], allowed: int, what: str
) -> None:
    with pytest.raises(DivergedError, match=what) as caught:
        run_steps(
            runtime,
            tmp_path,
            1,
            lambda step, k, out: out.sum() * (math.nan if k in bad else 1),
            Rollback(max_skipped=allowed),
        )
    assert (
        caught.value.exit_code == 4
        and "agreed by all processes" in caught.value.where
        and caught.value.hint
    )
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "diverged"]
    assert {row["k"] for row in event["micro_batches"]} == bad


@pytest.mark.parametrize("form", ["mean", "count"])
def test_the_mean_is_that_of_the_micro_batches_that_are_left(
    form: str, runtime: ElasticRuntime, tmp_path: Path
) -> None:
    def spiking(step: int, k: int, out: Tensor) -> Tensor:
        return plain(step, k, out) * (100 if (step, k) == (17, 2) else 1)

    gradients, facts, _ = run_steps(runtime, tmp_path, 18, spiking, Rollback(spike=100), form)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    losses = [plain(0, k, model(torch.full((2, 3), 1.0 + k))) / 2 for k in range(K)]
    (sum(losses[k] for k in (0, 1, 3)) / 3).backward()  # type: ignore[union-attr]
    means = [float(loss.detach()) for loss in losses]
    left = (means[0] + means[1] + means[3]) / 3
    for ours, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad)
    assert facts["loss"] == pytest.approx(left)
    rollback = facts["rollback"]
    assert rollback["skipped"] == {"18": [2]}
    assert [loss for _, loss in rollback["losses"]] == pytest.approx([sum(means) / K] * 17 + [left])
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "rolled back"]
    assert event["micro_batches"][0]["loss"] == pytest.approx(100 * means[2])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Rollback(max_skipped=-1), "not a number of at least 0"),
        (lambda: Rollback(max_skipped=1.5), "not a number of at least 0"),
        (lambda: Rollback(spike=math.nan), "not a number of at least 0"),
        (lambda: Rollback(skip="3:1"), "skip is a text"),
        (lambda: Rollback(skip=["0:1"]), "skip has another form than STEP:K"),
        (lambda: Rollback(skip=[(3, 1)]), "skip has another form than STEP:K"),
        (lambda: choose_rollback("pray", K, "raise"), "on_divergence='pray'"),
        (lambda: choose_rollback(Rollback, K, "raise"), "on_divergence=<class"),
        (lambda: choose_rollback("rollback", K, "ignore"), "with on_nonfinite='ignore'"),
        (lambda: choose_rollback(Rollback(skip=["3:4"]), K, "raise"), "skip has 3:4, and"),
        (
            lambda: choose_rollback(Rollback(skip=[f"3:{k}" for k in range(K)]), K, "raise"),
            "skip leaves no micro-batch of step 3",
        ),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        make()
    assert caught.value.where and caught.value.hint


@pytest.mark.parametrize("skip", [[], ["1:0"]])
def test_learners_of_diloco_are_refused(
    skip: list[str], runtime: ElasticRuntime, tmp_path: Path
) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(tmp_path, runtime, model, optimizer)
    with checkpointer, pytest.raises(UsageError, match="not supported with DiLoCo learners"):
        rollback = SkippedMicroBatches(Rollback(skip=skip), K, checkpointer, Points())
        declared: Any = SimpleNamespace(micro_batches=K, optimizers=[], state={})
        leaves = Learners([optimizer], declared, count=K, steps=2)
        ReplicaGroup(
            runtime, model, checkpointer, micro_batches=K, leaves=leaves, rollback=rollback
        )
