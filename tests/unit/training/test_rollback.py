"""The rules that find guilty micro-batches, and a ReplicaGroup of one process that leaves them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.resolve import resolve
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError
from lockstep.record.events import read_events
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.rollback import (
    MIN_STEPS,
    MicroBatchResult,
    Rollback,
    find_guilty,
    loss_limit,
)

K = 4
LossOf = Callable[[int, int, Tensor], Tensor]


class Points:
    """Two points in each micro-batch; their numbers are 2 * k and 2 * k + 1."""

    sample_kind = "points"

    def samples(self, step: int, k: int) -> list[int]:
        return [2 * k, 2 * k + 1]

    def tokens_in_step(self, step: int, micro_batches: Iterable[int] | None = None) -> int:
        return 2 * len([*range(K)] if micro_batches is None else [*micro_batches])


@pytest.fixture
def runtime() -> Iterator[ElasticRuntime]:
    with ElasticRuntime.join() as runtime:
        yield runtime


def run_steps(
    runtime: ElasticRuntime, folder: Path, steps: int, loss_of: LossOf, **values: str
) -> tuple[list[Tensor], dict[str, Any], Rollback]:
    """Train; return the gradient of the last step, the facts for a checkpoint, and the rollback."""
    torch.manual_seed(0)
    runtime.loop_state, model = {}, nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = resolve(None, {"on_divergence": "rollback", "batch.micro_batches": str(K), **values}).run
    with Checkpointer(folder / "checkpoints", runtime, model, optimizer) as checkpointer:
        rollback = Rollback(run, cast(Any, Points()), checkpointer)
        with ReplicaGroup(
            runtime, model, checkpointer, micro_batches=K, rehearse=False, rollback=rollback
        ) as replicas:
            for step in range(steps):
                for k in replicas.micro_batches(step):
                    replicas.backward(loss_of(step, k, replicas(torch.full((2, 3), 1.0 + k))))
                optimizer.step()
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
        torch.testing.assert_close(ours, p.grad)
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
        **{"divergence.skip": "2:1,2:2", "on_divergence": "stop"},
    )
    assert all(map(torch.equal, gradients, given))


def test_a_resumed_run_and_a_joiner_know_what_was_skipped(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    _, facts, _ = run_steps(
        runtime, tmp_path, 1, lambda step, k, out: out.sum() * (math.nan if k == 3 else 1)
    )
    run, received = (
        resolve(None, {"on_divergence": "rollback", "batch.micro_batches": str(K)}).run,
        runtime.loop_state,
    )
    for loop_state, saved in ((received, {}), ({}, facts)):
        model = nn.Linear(3, 1)
        with Checkpointer(
            tmp_path, runtime, model, torch.optim.SGD(model.parameters(), lr=0.0)
        ) as checkpointer:
            runtime.loop_state, checkpointer.facts = loop_state, saved
            again = Rollback(run, cast(Any, Points()), checkpointer)
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
    _, facts, _ = run_steps(runtime, tmp_path / "off", 23, spiking, **{"divergence.spike": "0"})
    assert facts["rollback"]["skipped"] == {}


@pytest.mark.parametrize(
    ("bad", "values", "what"),
    [
        (
            {0, 1, 2, 3},
            {},
            "none of the 4 micro-batches of step 1 is finite: the cause is the weights",
        ),
        (
            {1, 2},
            {"divergence.max_skipped": "1"},
            r"micro-batch 2 \(loss nan, gradient not finite; points 4, 5\); with 0 skipped before, that is more than 1",
        ),
    ],
)
def test_a_run_ends_when_nothing_or_too_little_is_left(
    runtime: ElasticRuntime, tmp_path: Path, bad: set[int], values: dict[str, str], what: str
) -> None:
    with pytest.raises(DivergedError, match=what) as caught:
        run_steps(
            runtime,
            tmp_path,
            1,
            lambda step, k, out: out.sum() * (math.nan if k in bad else 1),
            **values,
        )
    assert (
        caught.value.exit_code == 4
        and "agreed by all processes" in caught.value.where
        and caught.value.hint
    )
    (event,) = [event for event in read_events(tmp_path) if event["event"] == "diverged"]
    assert {row["k"] for row in event["micro_batches"]} == bad
