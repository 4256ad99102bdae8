"""Every layout of a run on a cluster: what a step costs, what a device holds, and what to
change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

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
    model, run, cluster = work.model, work.run, work.cluster
    limits = LayoutLimits(run.batch.micro_batches, model.heads, model.layers)
    fitting, refused = [], []
    for layout in layouts(cluster.devices):
        if why := problem_with(run, layout, limits):
            refused.append((0, layout, why))
            continue
        memory = memory_cost(model, run, layout, cluster.device_type)
        if memory.total > cluster.memory:
            why = f"it takes {format_bytes(memory.total)} per device, which has {format_bytes(cluster.memory)}"
            refused.append((memory.total, layout, why))
            continue
        step = step_cost(work, layout)
        fitting.append(PlannedLayout(layout, step, memory, describe(step)))
    fitting.sort(key=lambda planned: planned.step.seconds)
    refused.sort(key=lambda entry: entry[0] or float("inf"))
    plan = Plan(fitting, [(layout, why) for _, layout, why in refused])
    if not fitting:
        layout, why = plan.refused[0]
        raise UsageError(
            f"no layout of {cluster.devices} devices works; the nearest is {layout}: {why}",
            "--devices, [batch], [model]",
            "memory.activation_checkpoint=full, fewer batch.tokens, more devices, or a smaller model",
        )
    return plan


def layouts(devices: int) -> Iterator[Layout]:
    """Yield every layout of exactly so many devices."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for shard in sizes:
        for tensor in (size for size in sizes if devices % (shard * size) == 0):
            for pipeline in (size for size in sizes if devices % (shard * tensor * size) == 0):
                yield Layout(devices // (shard * tensor * pipeline), shard, tensor, pipeline)


def problem_with(run: RunConfig, layout: Layout, limits: LayoutLimits) -> str:
    """Return why the run does not work in the layout, or ""."""
    if why := next((what for what, _, _ in conflicts(with_layout(run, layout))), ""):
        return why
    if 0 < run.diloco.learners < layout.replicate:
        return f"{run.diloco.learners} learners keep {run.diloco.learners} of {layout.replicate} replicas busy"
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
    return (
        f"{seconds / step.seconds:.0%} {what}" if seconds > 0.02 * step.seconds else "computation"
    )


def advice(work: Workload, best: PlannedLayout) -> dict[str, tuple[object, str]]:
    """Return {key: (value, the reason with its number)} for the best layout."""
    run, layout, given = work.run, best.layout, best.step

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
        found["parallel.bucket_bytes"] = (
            size,
            f"a step of {format_duration(by_size[size])}; {BUCKET_BYTES[-1]:,}: {format_duration(by_size[BUCKET_BYTES[-1]])}",
        )
    found["batch.micro_batches"] = micro_batches(run, layout, given)
    by_mode = {mode: best_with(work, mode) for mode in CHECKPOINT_MODES}
    mode = min(by_mode, key=lambda mode: by_mode[mode][0])
    found["memory.activation_checkpoint"] = (
        mode,
        "; ".join(f"{name}: {text}" for name, (_, text) in by_mode.items()),
    )
    by_wire = {name: seconds("wire", name) for name in FORMATS if supports(name)}
    if layout.data_parallel_size > 1 and len(by_wire) > 1:
        computed_s = given.compute_s + given.bubble_s + given.update_s
        enough_s = max(computed_s / (1 - HIDDEN), 1.02 * min(by_wire.values()))
        wire = next(name for name in by_wire if by_wire[name] <= enough_s)
        found["parallel.wire"] = (
            wire,
            ", ".join(f"{name} {format_duration(value)}" for name, value in by_wire.items())
            + " a step",
        )
    if has_buckets:
        plain = step_cost(work.with_values("diloco", learners=0), layout)
        computed_s = plain.seconds - plain.exposed_s
        every = max(1, -int(-plain.exposed_s // (HIDDEN / (1 - HIDDEN) * computed_s)))
        share = plain.exposed_s / every / (computed_s + plain.exposed_s / every)
        found["diloco.every"] = (
            every,
            f"communication {share:.1%} of the time, {plain.exposed_s / plain.seconds:.0%} without",
        )
    return found


def best_with(work: Workload, mode: Mode) -> tuple[float, str]:
    """Return the seconds of a step with this activation checkpointing in its best layout, and a
    text."""
    try:
        best = make_plan(work.with_values("memory", activation_checkpoint=mode)).fitting[0]
    except UsageError:
        return float("inf"), "no layout fits"
    return (
        best.step.seconds,
        f"{format_duration(best.step.seconds)} and {format_bytes(best.memory.total)} with {best.layout}",
    )


def micro_batches(run: RunConfig, layout: Layout, step: StepCost) -> tuple[int, str]:
    """Return a number of micro-batches that keeps all ranks busy, and in which the sum is
    hidden."""
    now, parallel = run.batch.micro_batches, layout.data_parallel_size
    busy = now / (-(-now // parallel) * parallel)
    each = -(-now // parallel)
    computed_s = (step.compute_s) / each
    wanted = -(-(step.exposed_s + step.bubble_s) // (0.1 * computed_s)) if computed_s else each
    if busy == 1 and wanted <= each:
        return now, f"{each} for each of {parallel} data-parallel ranks"
    value = parallel * max(each, min(int(wanted), 64))
    reason = (
        f"ranks are busy {busy:.0%} of the time"
        if busy < 1
        else f"{(step.exposed_s + step.bubble_s) / step.seconds:.0%} of a step is waiting"
    )
    return value, f"with {now}, {reason}; more change the bits and the batch"
