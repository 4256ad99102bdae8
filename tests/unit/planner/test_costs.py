"""Seconds and bytes of a step in a layout, against numbers that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep.config.schema import RunConfig
from lockstep.layout import Layout
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.network.moves import Link
from lockstep.planner.count_model import run_cost
from lockstep.planner.devices import Cluster
from lockstep.planner.exchange_cost import all_to_all_seconds, halving_seconds, tree_all_reduce_cost
from lockstep.planner.memory_cost import memory_cost
from lockstep.planner.model_cost import CHECKPOINT_MODES, ModelCost
from lockstep.planner.step_cost import (
    StepCost,
    Timeline,
    Timing,
    Workload,
    mean_timing,
    play_pipeline,
    step_cost,
)
from lockstep.tasks.optim import bytes_of, make_optimizers

RUN = replace(
    RunConfig(), compute=replace(RunConfig().compute, precision="fp32")
)  # 8 micro-batches


def llama(size: str, run: RunConfig) -> ModelCost:
    return run_cost(replace(run, task="pretrain"), LLAMA_CONFIGS[size].meta_model, [(2, 256)])


MODEL = llama("5M", RUN)
BF16 = replace(RUN, parallel=replace(RUN.parallel, wire="bf16"))
PASSES = {
    ("layer", 1): (0.01, 0.02),
    ("embedding", 1): (0.001, 0.002),
    ("output", 1): (0.003, 0.004),
}
TIMING = Timing(PASSES, 0.0, 6e-9, 0.0, 0.0, "by hand")
MICRO_S = 6 * 0.03 + 0.01
FAST = Link(0.0, 1e15)


def cluster(link: Link, hosts: int = 2, per_host: int = 1) -> Cluster:
    return Cluster(hosts, per_host, "cpu", 1 << 40, FAST, link)


def cost(layout: Layout, link: Link = FAST, run: RunConfig = RUN) -> StepCost:
    return priced(layout, run, cluster(link, layout.workers))


def priced(layout: Layout, run: RunConfig, of: Cluster, timing: Timing = TIMING) -> StepCost:
    return step_cost(Workload(MODEL, run, of, timing), layout)


def test_two_ranks_send_the_bytes_once_and_wait_for_two_latencies() -> None:
    assert tree_all_reduce_cost((0, 1), 4, 1e6, cluster(Link(0.25, 1e6))) == (
        pytest.approx(1.5),
        1e6,
    )
    assert halving_seconds((0, 1), 1e6, cluster(Link(0.25, 1e6))) == pytest.approx(1.5)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_the_formula_for_many_ranks_equals_the_messages_of_equal_shares(size: int) -> None:
    link = cluster(Link(1e-3, 1e6), size)
    played, _ = tree_all_reduce_cost(tuple(range(size)), 2 * size, 1e6, link)
    assert played == pytest.approx(halving_seconds(range(size), 1e6, link), rel=0.01)


def test_workers_of_a_host_share_its_link() -> None:
    alone, shared = cluster(Link(0.0, 1e6), 2, 1), cluster(Link(0.0, 1e6), 2, 4)
    assert all_to_all_seconds((0, 1), 1e6, alone) == pytest.approx(1.0)
    assert all_to_all_seconds((0, 4), 1e6, shared) == pytest.approx(4.0)
    assert all_to_all_seconds((0, 1), 1e6, shared) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("layout", [Layout(2), Layout(4), Layout(1, 2), Layout(2, 2)], ids=str)
def test_without_communication_a_step_is_its_passes_and_the_copies_of_shards(
    layout: Layout,
) -> None:
    step, passes = cost(layout), 8 / layout.data_parallel_size
    copies_s = TIMING.copy_s * MODEL.parameters * passes if layout.shard > 1 else 0
    assert step.seconds == pytest.approx(passes * MICRO_S + copies_s, rel=1e-3)
    assert step.bubble_s == 0


def test_messages_slow_down_computation_only_while_they_are_sent() -> None:
    timeline = Timeline(load=0.25)
    timeline.send(2.0)
    timeline.compute(1.0)
    assert timeline.now_s == 1.25
    timeline.compute(4.0)
    assert timeline.now_s == 5.25 + 0.25 * 0.75
    link = Link(0.0, 1e8)
    waits, slowed = (
        priced(Layout(1, 2), RUN, cluster(link), replace(TIMING, message_s=s)).seconds
        for s in (0.0, 5e-9)
    )
    assert waits < slowed < 1.5 * waits


def test_timings_of_several_workers_are_averaged() -> None:
    twice = Timing(
        {key: (2 * forward_s, 2 * backward_s) for key, (forward_s, backward_s) in PASSES.items()},
        2.0,
        3e-9,
        2e-9,
        2e-3,
        "",
        4.0,
    )
    mean = mean_timing([TIMING, twice])
    assert mean.passes["layer", 1] == pytest.approx((0.015, 0.03)) and mean.source == "by hand"
    assert (mean.update_s, mean.copy_s, mean.message_s, mean.exchange_s) == pytest.approx(
        (1.0, 4.5e-9, 1e-9, 1e-3)
    )
    assert mean.accumulate_s == 2.0


def test_a_slow_link_is_exposed_except_beside_the_last_backward_pass() -> None:
    step, nbytes = cost(Layout(2), Link(0.0, 1e6)), 4 * MODEL.parameters
    assert step.seconds >= 4 * MICRO_S + nbytes / 1e6 - 0.13
    assert step.exposed_s <= nbytes / 1e6
    assert cost(Layout(2), Link(0.0, 1e6), BF16).exposed_s == pytest.approx(
        step.exposed_s - nbytes / 2e6, rel=0.02
    )
    assert step.sent_bytes == pytest.approx(nbytes)


def test_learners_exchange_once_in_their_steps() -> None:
    run, link, nbytes = (
        replace(RUN, diloco=replace(RUN.diloco, learners=4, every=50)),
        Link(0.0, 1e6),
        4 * MODEL.parameters,
    )
    step = cost(Layout(2), link, run)
    assert step.compute_s == pytest.approx(4 * MICRO_S) and step.exposed_s == pytest.approx(
        nbytes / 1e6 / 50
    )
    assert step.sent_bytes == pytest.approx(nbytes / 50)
    plain, learning = (memory_cost(MODEL, values, Layout(2), "cpu") for values in (RUN, run))
    assert learning.weights - plain.weights == (8 + 4 * 2) * MODEL.parameters


def test_shards_of_a_learner_exchange_in_each_step_and_replicas_once() -> None:
    """Two learners in two replicas, each with the half of the micro-batches."""
    run, half = (replace(RUN, batch=replace(RUN.batch, micro_batches=n)) for n in (8, 4))
    run, slow, rows = (
        replace(run, diloco=replace(run.diloco, learners=2, every=50)),
        Link(0.0, 1e6),
        4 * MODEL.parameters / 2,
    )
    inside, both = (priced(Layout(1, 2), half, cluster(link)) for link in (FAST, slow))
    step = priced(Layout(2, 2), run, replace(cluster(slow, 2, 2), same_host=FAST))
    assert step.compute_s == pytest.approx(inside.compute_s) and step.sent_bytes == pytest.approx(
        inside.sent_bytes + rows / 50
    )
    assert step.exposed_s == pytest.approx(inside.exposed_s + 2 * rows / 1e6 / 50), (
        "two workers share the link of a host"
    )
    assert priced(Layout(1, 2), run, cluster(slow)).exposed_s == pytest.approx(2 * both.exposed_s)


def test_shards_gather_twice_and_send_gradients_of_each_pass() -> None:
    rows = 4 * MODEL.parameters / 2
    assert cost(Layout(1, 2)).sent_bytes == pytest.approx(4 * 3 * rows)
    once = replace(RUN, fsdp=replace(RUN.fsdp, reduce="per_step"))
    assert cost(Layout(1, 2), run=once).sent_bytes == pytest.approx((4 * 2 + 1) * rows)
    assert (
        cost(Layout(1, 2), Link(0.0, 1e6), once).seconds
        < cost(Layout(1, 2), Link(0.0, 1e6)).seconds
    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 4), (4, 16)])
def test_a_pipeline_is_idle_for_all_stages_but_one(stages: int, micro_batches: int) -> None:
    assert max(play_pipeline([(1.0, 2.0)] * stages, micro_batches, 1, 0, FAST)) == pytest.approx(
        3.0 * (micro_batches + stages - 1)
    )


def test_chunks_shorten_the_idle_time_of_a_pipeline() -> None:
    one, two = (max(play_pipeline([(1.0 / n, 2.0 / n)] * 4, 8, n, 0, FAST)) for n in (1, 2))
    assert two == pytest.approx(3 * 8 + (one - 3 * 8) / 2)


def test_activations_of_a_pipeline_wait_for_the_link() -> None:
    slow = max(play_pipeline([(1.0, 2.0)] * 2, 1, 1, 1e6, Link(0.5, 1e6)))
    assert slow == pytest.approx(2 * 3.0 + 2 * 1.5)


def test_shards_take_less_memory_than_replicas_and_checkpoints_less_than_none() -> None:
    totals = [memory_cost(MODEL, RUN, Layout(2 // shard, shard), "cuda").total for shard in (1, 2)]
    assert totals[1] < totals[0]
    modes = [
        replace(RUN, memory=replace(RUN.memory, activation_checkpoint=mode))
        for mode in CHECKPOINT_MODES
    ]
    activations = [memory_cost(MODEL, run, Layout(1), "cuda").activations for run in modes]
    assert activations == sorted(activations, reverse=True)
    whole = memory_cost(MODEL, RUN, Layout(1), "cuda")
    assert (whole.weights, whole.optimizer) == (4 * MODEL.parameters, 8 * MODEL.parameters)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "muon"])
@pytest.mark.parametrize("size", ["1M", "5M"])
def test_the_optimizer_takes_the_bytes_of_its_state(kind: Any, size: str) -> None:
    module = LLAMA_CONFIGS[size].meta_model()
    optim = replace(RUN.optim, kind=kind)
    optimizers = make_optimizers(module, optim)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    real = sum(bytes_of(state) for optimizer in optimizers for state in optimizer.state.values())
    run = replace(RUN, optim=optim)
    assert memory_cost(llama(size, run), run, Layout(1), "cuda").optimizer == real


def test_factored_state_takes_little_and_an_average_of_the_weights_four_bytes() -> None:
    optim = replace(RUN.optim, kind="adafactor")
    for decay, each in ((0.0, 0.0), (0.99, 4.0)):
        run = replace(RUN, optim=replace(optim, ema_decay=decay))
        state = memory_cost(llama("5M", run), run, Layout(1), "cuda").optimizer
        assert each * MODEL.parameters < state < (each + 0.04) * MODEL.parameters


def test_state_in_bf16_and_of_bf16_weights_is_counted() -> None:
    for weights, each in (("fp32", 4), ("bf16", 8)):  # the latter have master weights
        memory: Any = replace(RUN.memory, weights=weights, optimizer_state="bf16")
        run = replace(RUN, memory=memory)
        cost = memory_cost(llama("1M", run), run, Layout(1), "cuda")
        assert cost.optimizer == each * llama("1M", RUN).parameters
        offloaded = replace(run, memory=replace(memory, offload="optimizer"))
        model = llama("1M", offloaded)
        assert memory_cost(model, offloaded, Layout(1), "cuda").optimizer == 0
        assert memory_cost(model, offloaded, Layout(1), "cpu").optimizer == cost.optimizer


def test_a_bucket_in_memory_has_the_size_that_the_device_asks_for() -> None:
    model = llama("100M", RUN)
    by_device = [memory_cost(model, RUN, Layout(1), device).gathered for device in ("cpu", "cuda")]
    assert by_device == [25_000_000, 100_000_000]
