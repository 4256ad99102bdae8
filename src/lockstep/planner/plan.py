"""Every layout of a run on a cluster: what a step costs, what a device holds, and what to
change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import itemgetter

from lockstep.config.rules import conflicts
from lockstep.config.schema import RunConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout, LayoutLimits
from lockstep.network.wire_format import FORMATS, Wire
from lockstep.planner.memory_cost import MemoryCost, memory_cost
from lockstep.planner.model_cost import CHECKPOINT_MODES, Mode
from lockstep.planner.step_cost import StepCost, Workload, step_cost
from lockstep.units import format_bytes, format_duration

BUCKET_BYTES = (1_000_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000)
HIDDEN = 0.05  # share of a step that communication may take


@dataclass(frozen=True)
class PlannedLayout:
    layout: Layout
    step: StepCost
    memory: MemoryCost
    reason: str


@dataclass(frozen=True)
class Plan:
    """fitting: the fastest first. refused: [(layout, why)], the smallest excess of memory first."""

    fitting: list[PlannedLayout]
    refused: list[tuple[Layout, str]]


def make_plan(work: Workload) -> Plan:
    """Return the plan of a run over all devices of its cluster. UsageError: no layout fits."""
    model = work.model
    run = work.run
    cluster = work.cluster
    limits = LayoutLimits(run.batch.micro_batches, model.heads, model.layers)
    fitting = list[PlannedLayout]()
    refused = list[tuple[float, Layout, str]]()
    for layout in layouts(cluster.devices):
        if why := problem_with(run, layout, limits):
            refused.append((math.inf, layout, why))
            continue
        memory = memory_cost(model, run, layout, cluster.device_type)
        if memory.total > cluster.memory:
            why = (
                f"it takes {format_bytes(memory.total)} per device, "
                f"which has {format_bytes(cluster.memory)}"
            )
            refused.append((memory.total, layout, why))
            continue
        step = step_cost(work, layout)
        fitting.append(PlannedLayout(layout, step, memory, describe(step)))
    fitting.sort(key=lambda planned: planned.step.seconds)
    refused.sort(key=itemgetter(0))
    if not fitting:
        _, layout, why = refused[0]
        raise UsageError(
            f"no layout of {cluster.devices} devices works; the nearest is {layout}: {why}",
            "--devices, [batch], [model]",
            "memory.activation_checkpoint=full, "
            "fewer batch.tokens, more devices, or a smaller model",
        )
    return Plan(fitting, [(layout, why) for _, layout, why in refused])


def layouts(devices: int) -> Iterator[Layout]:
    """Yield every layout of exactly so many devices."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for shard, tensor, pipeline in product(sizes, repeat=3):
        each = shard * tensor * pipeline
        if devices % each == 0:
            yield Layout(devices // each, shard, tensor, pipeline)


def problem_with(run: RunConfig, layout: Layout, limits: LayoutLimits) -> str:
    """Return why the run does not work in the layout, or ""."""
    if why := next((what for what, _, _ in conflicts(with_layout(run, layout))), ""):
        return why
    learners = run.diloco.learners
    if 0 < learners < layout.replicate:
        return f"{learners} learners keep {learners} of {layout.replicate} replicas busy"
    chunks = run.layout.pipeline_chunks if layout.pipeline > 1 else 1
    return limits.problem_with(replace(layout, pipeline=layout.pipeline * chunks))


def with_layout(run: RunConfig, layout: Layout) -> RunConfig:
    return replace(run, layout=replace(run.layout, **asdict(layout)))


def describe(step: StepCost) -> str:
    """Return what the step mostly waits for."""
    waits = {
        "waiting for data from other ranks": step.exposed_s,
        "idle stages of the pipeline": step.bubble_s,
        "the update": step.update_s,
    }
    what, seconds = max(waits.items(), key=lambda item: item[1])
    share = seconds / step.seconds
    return f"{share:.0%} {what}" if share > 0.02 else "computation"


def advice(work: Workload, best: PlannedLayout) -> dict[str, tuple[object, str]]:
    """Return {key: (value, the reason with its number)} for the best layout."""
    run = work.run
    layout = best.layout
    given = best.step

    def seconds(key: str, value: object) -> float:
        return step_cost(work.with_values("parallel", **{key: value}), layout).seconds

    def supports(wire: Wire) -> bool:
        changed = work.with_values("parallel", wire=wire).run
        return not any(conflicts(with_layout(changed, layout)))

    found: dict[str, tuple[object, str]] = {}
    has_buckets = layout.workers_per_replica == 1 < layout.replicate
    if has_buckets:
        by_size = {size: seconds("bucket_bytes", size) for size in BUCKET_BYTES}
        size = min(by_size, key=lambda size: (round(by_size[size], 4), -size))
        largest = BUCKET_BYTES[-1]
        reason = (
            f"a step of {format_duration(by_size[size])}; "
            f"{largest:,}: {format_duration(by_size[largest])}"
        )
        found["parallel.bucket_bytes"] = size, reason
    found["batch.micro_batches"] = micro_batches(run, layout, given)
    by_mode = {mode: best_with(work, mode) for mode in CHECKPOINT_MODES}
    mode = min(by_mode, key=lambda mode: by_mode[mode][0])
    reason = "; ".join(f"{name}: {text}" for name, (_, text) in by_mode.items())
    found["memory.activation_checkpoint"] = mode, reason
    by_wire = {name: seconds("wire", name) for name in FORMATS if supports(name)}
    if layout.data_parallel_size > 1 and len(by_wire) > 1:
        computed_s = given.compute_s + given.bubble_s + given.update_s
        enough_s = max(computed_s / (1 - HIDDEN), 1.02 * min(by_wire.values()))
        wire = next(name for name in by_wire if by_wire[name] <= enough_s)
        times = [f"{name} {format_duration(value)}" for name, value in by_wire.items()]
        found["parallel.wire"] = wire, f"{', '.join(times)} a step"
    if has_buckets:
        plain = step_cost(work.with_values("diloco", learners=0), layout)
        computed_s = plain.seconds - plain.exposed_s
        every = max(1, -int(-plain.exposed_s // (HIDDEN / (1 - HIDDEN) * computed_s)))
        share = plain.exposed_s / every / (computed_s + plain.exposed_s / every)
        reason = (
            f"communication {share:.1%} of the time, {plain.exposed_s / plain.seconds:.0%} without"
        )
        found["diloco.every"] = every, reason
    return found


def best_with(work: Workload, mode: Mode) -> tuple[float, str]:
    """Return the seconds of a step with this activation checkpointing in its best layout, and a
    text."""
    try:
        best = make_plan(work.with_values("memory", activation_checkpoint=mode)).fitting[0]
    except UsageError:
        return float("inf"), "no layout fits"
    seconds, memory = best.step.seconds, format_bytes(best.memory.total)
    return seconds, f"{format_duration(seconds)} and {memory} with {best.layout}"


def micro_batches(run: RunConfig, layout: Layout, step: StepCost) -> tuple[int, str]:
    """Return a number of micro-batches that keeps all ranks busy, and in which the sum is
    hidden."""
    now, parallel = run.batch.micro_batches, layout.data_parallel_size
    each = -(-now // parallel)
    busy = now / (each * parallel)
    computed_s = step.compute_s / each
    waiting_s = step.exposed_s + step.bubble_s
    wanted = int(-(-waiting_s // (0.1 * computed_s))) if computed_s else each
    if busy == 1 and wanted <= each:
        return now, f"{each} for each of {parallel} data-parallel ranks"
    reason = f"{waiting_s / step.seconds:.0%} of a step is waiting"
    if busy < 1:
        reason = f"ranks are busy {busy:.0%} of the time"
    value = parallel * max(each, min(wanted, 64))
    return value, f"with {now}, {reason}; more change the bits and the batch"
