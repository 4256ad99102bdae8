"""Seconds of a step in a layout: computation, what it waits for, and the update.

A small simulation plays what the engine does: micro-batches one after the other; parameters of a
unit gathered ahead; gradients sent by one thread, in order, beside the backward pass; the passes of
a pipeline in the order of network/pipeline_schedule.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any

from lockstep.config.schema import RunConfig
from lockstep.layout import Layout
from lockstep.network.bucket_sizes import group_by_size
from lockstep.network.moves import Link
from lockstep.network.pipeline_schedule import adjacent_blocks, pipeline_schedule
from lockstep.network.wire_format import FORMATS
from lockstep.planner.devices import Cluster
from lockstep.planner.exchange_cost import all_to_all_seconds, halving_seconds, tree_all_reduce_cost
from lockstep.planner.model_cost import ModelCost, Unit

UNITS_IN_FLIGHT = 2  # as in parallel/unit_source.py
# {index of a part: seconds of the buckets that are complete after it}; len(parts) is the root.
# None: each unit is sent.
Sends = Mapping[int, Sequence[float]] | None


@dataclass(frozen=True)
class Timing:
    """Seconds of a model's parts on one device.

    passes        {(kind of unit, tensor size): (forward, backward)} over a micro-batch
    update_s      of norm, clipping and optimizer, per parameter
    copy_s        of a micro-batch in a replica of several workers, beside its passes, per
                  parameter: whole units are copied, their gradients are copied and added
    message_s     of a worker's core, per byte that it sends and receives
    exchange_s    by which an exchange of a unit between shards lengthens the computation beside it,
                  without its bytes: threads wake up, and wait for a core
    source        where the seconds come from
    accumulate_s  of the gradients of a micro-batch in a replica of one worker, beside its passes
    """

    passes: Mapping[tuple[str, int], tuple[float, float]]
    update_s: float
    copy_s: float
    message_s: float
    exchange_s: float
    source: str
    accumulate_s: float = 0.0

    def of(self, unit: Unit, tensor: int) -> tuple[float, float]:
        if (unit.kind, tensor) in self.passes:
            return self.passes[unit.kind, tensor]
        forward_s, backward_s = self.passes[unit.kind, 1]
        share = unit.macs.on(tensor) / (unit.macs.on(1) or 1) if unit.macs.split else 1
        return forward_s * share, backward_s * share


ASSUMED = {
    "cuda": Timing({}, 0.0, copy_s=4e-12, message_s=0.0, exchange_s=0.0, source=""),
    "cpu": Timing({}, 0.0, copy_s=6e-9, message_s=0.5e-9, exchange_s=1e-3, source=""),
}


def timing_from_flops(model: ModelCost, flops: float, device_type: str, source: str) -> Timing:
    """Return the seconds at `flops` FLOP/s; a backward pass takes two forward passes."""
    seconds = {(unit.kind, 1): 2 * unit.macs.on(1) / flops for unit in model.units}
    passes = {key: (forward_s, 2 * forward_s) for key, forward_s in seconds.items()}
    return replace(ASSUMED[device_type], passes=passes, update_s=100 / flops, source=source)


def mean_timing(timings: Sequence[Timing]) -> Timing:
    """Return the mean of timings of the same parts."""
    passes = {}
    first = timings[0]
    means: dict[str, Any] = {
        name: fmean(getattr(timing, name) for timing in timings)
        for name in vars(first).keys() - {"passes", "source"}
    }
    for key in first.passes:
        forward_s, backward_s = zip(*(timing.passes[key] for timing in timings), strict=True)
        passes[key] = fmean(forward_s), fmean(backward_s)
    return replace(first, passes=passes, **means)


@dataclass(frozen=True)
class StepCost:
    """A step of the slowest rank. exposed_s: communication that no computation hides, and what its
    messages slow down computation."""

    compute_s: float
    exposed_s: float
    bubble_s: float
    update_s: float
    sent_bytes: float  # by a rank, of all axes

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s + self.update_s


@dataclass(frozen=True)
class Part:
    """A unit in a layout: seconds of its passes, of the gathering of its parameters, and of sending
    its gradients: after each pass, and once more after the last one."""

    forward_s: float
    backward_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0
    last_s: float = 0.0


@dataclass
class Timeline:
    """One rank: the time of its computation, and until when its sends are queued.

    load        share of a core that messages take while they are sent
    exchange_s  see Timing
    """

    load: float
    exchange_s: float = 0.0
    now_s: float = 0.0
    port_s: float = 0.0

    def compute(self, seconds: float, ready_s: float = 0.0) -> None:
        """Compute, once the computation before is done and at `ready_s`."""
        start_s = max(self.now_s, ready_s)
        self.now_s = start_s + seconds + self.load * max(0.0, min(self.port_s - start_s, seconds))

    def send(self, seconds: float) -> float:
        """Queue a transfer; return when it is done."""
        if not seconds:
            return self.now_s
        self.port_s = max(self.port_s, self.now_s) + seconds
        return self.port_s


@dataclass(frozen=True)
class Workload:
    """A run of a model on a cluster, with the seconds of the model's parts there."""

    model: ModelCost
    run: RunConfig
    cluster: Cluster
    timing: Timing

    def with_values(self, section: str, **values: Any) -> Workload:
        """Return the same with other values in a section of the run's configuration."""
        changed = replace(getattr(self.run, section), **values)
        return replace(self, run=replace(self.run, **{section: changed}))


def step_cost(work: Workload, layout: Layout) -> StepCost:
    """Return the cost of a step; with DiLoCo of an inner step, with its share of the outer one."""
    run = work.run
    if run.diloco.learners:
        return learners_cost(work, layout)
    leaves = -(-run.batch.micro_batches // layout.replicate)
    passes = -(-leaves // layout.shard)
    stages = [Stage(work, layout, number) for number in range(layout.pipeline)]
    compute_s = max(stage.compute_s for stage in stages) * passes
    bubble_s = 0.0
    if layout.pipeline == 1:
        exposed_s = stages[0].step_seconds(passes) - compute_s
    else:
        total_s, idle_s = pipeline_seconds(work, stages, passes)
        bubble_s = idle_s - compute_s
        exposed_s = max(0.0, total_s - compute_s - bubble_s)
    return StepCost(
        compute_s,
        exposed_s,
        bubble_s,
        update_s=max(stage.update_s for stage in stages),
        sent_bytes=max(stage.sent_bytes(passes) for stage in stages),
    )


def pipeline_seconds(work: Workload, stages: Sequence[Stage], passes: int) -> tuple[float, float]:
    """Return the seconds of the passes of all stages, and what they would be without messages."""
    layout, chunks = stages[0].layout, work.run.layout.pipeline_chunks
    width = layout.shard * layout.tensor
    edge = work.cluster.link(0, width, min(width, work.cluster.per_host))
    times = [stage.pass_seconds() for stage in stages]
    each = [(forward_s / chunks, backward_s / chunks) for forward_s, backward_s, _ in times]
    ends = play_pipeline(each, passes, chunks, stages[0].passed, edge)
    total_s = max(end + last_s for end, (_, _, last_s) in zip(ends, times, strict=True))
    if work.model.tied:
        nbytes = 4 * work.model.embedding.elements(1) / layout.shard
        total_s += halving_seconds((0, (layout.pipeline - 1) * width), nbytes, work.cluster)
    alone = [(stage.compute_s / 3 / chunks, stage.compute_s / 1.5 / chunks) for stage in stages]
    return total_s, max(play_pipeline(alone, passes, chunks, 0, Link(0.0, 1.0)))


def learners_cost(work: Workload, layout: Layout) -> StepCost:
    """Return the cost of a step of a replica's learners: each as a run of one replica, and an H-th
    of the exchange."""
    learners, every = work.run.diloco.learners, work.run.diloco.every
    each = -(-learners // layout.replicate)
    inner = work.with_values("diloco", learners=0).with_values("parallel", wire="fp32")
    inner = inner.with_values("batch", micro_batches=work.run.batch.micro_batches // learners)
    step = step_cost(inner, replace(layout, replicate=1))
    stage = Stage(work.with_values("batch", micro_batches=learners), layout, 0)
    if layout.shard > 1:
        exchange_s = sum(part.last_s for part in (*stage.parts, stage.root))
    else:
        exchange_s = sum(chain(*stage.last_sends().values()))
    return StepCost(
        each * step.compute_s,
        each * step.exposed_s + exchange_s / every,
        0.0,
        each * step.update_s + stage.update_s / every,
        each * step.sent_bytes + stage.tree(stage.rows)[1] / every,
    )


class Stage:
    """The units of a pipeline stage, or of the whole model, as one rank runs them."""

    def __init__(self, work: Workload, layout: Layout, number: int) -> None:
        self.run = work.run
        self.cluster = work.cluster
        self.timing = work.timing
        self.layout = layout
        self.units = units_of_stage(
            work.model, layout.pipeline, self.run.layout.pipeline_chunks, number
        )
        self.outer = outer_units(work.model, layout.pipeline, number)
        self.passed = 4 * work.model.passed if layout.pipeline > 1 else 0  # bytes
        rank = number * layout.shard * layout.tensor
        axes = ("replicate", "shard", "tensor")
        self.ranks = {axis: tuple(layout.ranks_along(rank, axis)) for axis in axes}
        self.wire = FORMATS[self.run.parallel.wire].share
        self.narrow = 2 if self.run.compute.precision == "bf16" else 4  # bytes of an activation
        self.reduces_once = self.run.fsdp.reduce == "per_step"
        elements = sum(self.elements(unit) for unit in self.outer)
        self.rows = 4 * (elements + sum(map(self.elements, self.units))) / layout.shard  # bytes
        self.parts = [self.part(unit) for unit in self.units]
        outer = [self.part(unit) for unit in self.outer]
        self.root = Part(
            sum(part.forward_s for part in outer),
            sum(part.backward_s for part in outer) + self.timing.accumulate_s,
            *self.exchanged(elements),
        )
        self.compute_s = self.root.forward_s + self.root.backward_s
        for unit in self.units:
            seconds = sum(self.timing.of(unit, layout.tensor))
            self.compute_s += seconds + self.recomputed_s(unit)

    def elements(self, unit: Unit) -> int:
        return unit.elements(self.layout.tensor)

    def timeline(self) -> Timeline:
        rate = self.cluster.link(0, self.layout.workers - 1).bytes_per_s
        return Timeline(min(1.0, self.timing.message_s * rate), self.timing.exchange_s)

    @property
    def update_s(self) -> float:
        return self.rows / 4 * self.timing.update_s + 4 * self.cluster.other_host.latency_s

    def recomputed_s(self, unit: Unit) -> float:
        share = {"none": 0.0, "selective": 0.1, "full": 1.0}[self.run.memory.activation_checkpoint]
        return share * self.timing.of(unit, self.layout.tensor)[0]

    def sums_s(self, width: int, elements: Sequence[float]) -> float:
        """Return the seconds of sums over the tensor axis of so many elements each."""
        ranks = self.ranks["tensor"]
        return sum(halving_seconds(ranks, width * size, self.cluster) for size in elements)

    def part(self, unit: Unit) -> Part:
        forward_s, backward_s = self.timing.of(unit, self.layout.tensor)
        forward_sums, backward_sums = unit.sums
        elements = self.elements(unit)
        copy_s = self.timing.copy_s * elements if self.layout.workers_per_replica > 1 else 0
        # A third of the copies gathers for the forward pass.
        forward_s += self.sums_s(self.narrow, forward_sums) + copy_s / 3
        backward_s += self.sums_s(4, backward_sums) + self.recomputed_s(unit) + copy_s * 2 / 3
        return Part(forward_s, backward_s, *self.exchanged(elements))

    def exchanged(self, elements: float) -> tuple[float, float, float]:
        """Return the seconds to gather a unit, to send the gradients of a pass, and the last
        sum."""
        if self.layout.workers_per_replica == 1 or not elements:
            return 0.0, 0.0, 0.0
        row = 4 * elements / self.layout.shard
        shards = self.ranks["shard"]
        gather_s = all_to_all_seconds(shards, row, self.cluster)
        reduce_s = all_to_all_seconds(shards, row * self.wire, self.cluster)
        return gather_s, reduce_s, self.tree(row)[0]

    def tree(self, nbytes: float) -> tuple[float, float]:
        """Return (seconds, bytes that the busiest rank sends) of the sum over all replicas."""
        leaves = max(self.run.batch.micro_batches, self.layout.replicate)
        ranks = self.ranks["replicate"]
        return tree_all_reduce_cost(ranks, leaves, nbytes * self.wire, self.cluster)

    def sends(self) -> Sends:
        """Return what is sent after each unit of a pass that is not the last one."""
        return {} if self.reduces_once or self.layout.shard == 1 else None

    def last_sends(self) -> dict[int, list[float]]:
        """Return the seconds that are sent after each unit of the last backward pass."""
        root = len(self.units)
        if self.layout.workers_per_replica > 1:
            parts = enumerate((*self.parts, self.root))
            return {i: [part.reduce_s + part.last_s] for i, part in parts}
        first, *others = self.outer
        units = [(root, first), *enumerate(self.units), *((root, unit) for unit in others)]
        numbers = [i for i, unit in units for _ in unit.parameters]
        sizes = [("fp32", 4 * int(p.on(1))) for _, unit in units for p in unit.parameters]
        limit = self.run.parallel.bucket_size(self.cluster.device_type)
        sends: dict[int, list[float]] = {}
        for bucket in group_by_size(sizes, limit, range(len(sizes))[::-1]):
            ready = min((numbers[j] for j in bucket if numbers[j] < root), default=root - 1)
            if 0 in bucket:
                ready = root  # complete last: the embedding gets the last gradient
            seconds, _ = self.tree(sum(sizes[j][1] for j in bucket))
            sends.setdefault(ready, []).append(seconds)
        return sends

    def play_pass(self, timeline: Timeline, sends: Sends) -> float:
        """Play a forward and a backward pass; return when the forward pass was done."""
        parts = self.parts
        root = self.root
        ahead = self.run.fsdp.prefetch_units
        jobs = [timeline.now_s] * UNITS_IN_FLIGHT

        def through(indices: Sequence[int], *, gathers: bool, backward: bool) -> None:
            ready = dict[int, float]()
            for number, i in enumerate(indices):
                for j in indices[number : number + 1 + ahead]:
                    if j not in ready:
                        ready[j] = timeline.send(parts[j].gather_s if gathers else 0)
                seconds = parts[i].backward_s if backward else parts[i].forward_s
                if gathers and parts[i].gather_s:
                    seconds += timeline.exchange_s
                timeline.compute(seconds, ready[i])
                if backward:
                    finish(i, parts[i])

        def finish(i: int, part: Part) -> None:
            if part.reduce_s and (sends is None or sends.get(i)):
                timeline.compute(timeline.exchange_s)
            if sends is None and part.reduce_s:
                timeline.compute(0.0, jobs.pop(0))
                jobs.append(timeline.send(part.reduce_s))
            for seconds in sends.get(i, ()) if sends else ():
                timeline.send(seconds)

        order = range(len(parts))
        timeline.compute(0.0, timeline.send(root.gather_s))
        through(order, gathers=True, backward=False)
        timeline.compute(root.forward_s)
        forward_end_s = timeline.now_s
        timeline.compute(root.backward_s)
        through(order[::-1], gathers=self.run.fsdp.reshard_after_forward, backward=True)
        finish(len(parts), root)
        return forward_end_s

    def step_seconds(self, passes: int) -> float:
        """Return the seconds of all passes of a step, without a pipeline."""
        timeline = self.timeline()
        for sends in (*[self.sends()] * (passes - 1), self.last_sends()):
            self.play_pass(timeline, sends)
        return max(timeline.now_s, timeline.port_s)

    def pass_seconds(self) -> tuple[float, float, float]:
        """Return the seconds of a forward pass, of a backward pass, and what the last one waits
        for more."""
        usual, last = self.timeline(), self.timeline()
        forward_s = self.play_pass(usual, self.sends())
        self.play_pass(last, self.last_sends())
        return forward_s, usual.now_s - forward_s, max(0.0, last.port_s - usual.now_s)

    def sent_bytes(self, passes: int) -> float:
        """Return the bytes that a rank of this stage sends in a step."""
        others = self.rows * (self.layout.shard - 1)
        gathers = passes * (2 if self.run.fsdp.reshard_after_forward else 1) * others
        reduces = (1 if self.reduces_once else passes) * others * self.wire
        ring = 2 * (self.layout.tensor - 1) / self.layout.tensor
        sums = (self.narrow * sum(u.sums[0]) + 4 * sum(u.sums[1]) for u in self.units)
        activations = passes * (ring * sum(sums) + 2 * self.passed)
        return gathers + reduces + activations + self.tree(self.rows)[1]


def outer_units(model: ModelCost, stages: int, number: int) -> list[Unit]:
    """Return the parts of a stage beside its blocks."""
    is_last = number == stages - 1
    has_embedding = number == 0 or (is_last and model.tied)
    return [model.embedding] * has_embedding + [model.output] * is_last


def units_of_stage(model: ModelCost, stages: int, chunks: int, number: int) -> tuple[Unit, ...]:
    """Return the blocks of a stage, of all its chunks; a norm belongs to the layer before it."""
    if stages == 1:
        return model.blocks
    layers: list[list[Unit]] = []
    for unit in model.blocks:
        if unit.is_layer or not layers:
            layers.append([])
        layers[-1].append(unit)
    own = adjacent_blocks(range(len(layers)), stages * chunks)[number::stages]
    return tuple(unit for chunk in own for layer in chunk for unit in layers[layer])


def play_pipeline(
    passes_s: Sequence[tuple[float, float]],
    micro_batches: int,
    chunks: int,
    nbytes: float,
    link: Link,
) -> list[float]:
    """Play the schedule of all stages; return when each has done its last pass.

    passes_s  (forward, backward) of a chunk, by stage
    nbytes    activations between two chunks; a stage sends them one after the other
    """
    stages = len(passes_s)
    schedules = [pipeline_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]
    clocks = [0.0] * stages
    ports = [0.0] * stages
    numbers = [0] * stages
    arrivals: dict[tuple[str, int, int], float] = {}
    while any(map(operator.lt, numbers, map(len, schedules))):
        for stage, schedule in enumerate(schedules):
            for op in schedule[numbers[stage] :]:
                receives, sends = op.edges(stage, stages, chunks)
                awaited = op.kind, receives, op.micro
                if receives >= 0 and awaited not in arrivals:
                    break
                clocks[stage] = max(clocks[stage], arrivals.get(awaited, 0.0))
                clocks[stage] += passes_s[stage][op.kind == "backward"]
                if sends >= 0:
                    ports[stage] = max(ports[stage], clocks[stage]) + nbytes / link.bytes_per_s
                    arrivals[op.kind, sends, op.micro] = ports[stage] + link.latency_s
                numbers[stage] += 1
    return clocks
