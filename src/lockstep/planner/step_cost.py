"""Seconds of a step in a layout: computation, what it waits for, and the update.

A small simulation plays what the engine does: micro-batches one after the other; parameters of a
unit gathered ahead; gradients sent by one thread, in order, beside the backward pass; the passes of
a pipeline in the order of network/pipeline_schedule.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
DEFAULT_BUCKET_BYTES = {"cuda": 100_000_000, "cpu": 25_000_000}  # as in runtime/device.py


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

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(timings)

    passes = {
        key: (mean(t.passes[key][0] for t in timings), mean(t.passes[key][1] for t in timings))
        for key in timings[0].passes
    }
    means = {
        name: mean(getattr(t, name) for t in timings)
        for name in ("update_s", "copy_s", "message_s", "exchange_s", "accumulate_s")
    }
    return Timing(passes, source=timings[0].source, **means)


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
        self.port_s = max(self.port_s, self.now_s) + seconds if seconds else self.port_s
        return max(self.port_s, self.now_s) if seconds else self.now_s


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
    run, cluster = work.run, work.cluster
    if run.diloco.learners:
        return learners_cost(work, layout)
    leaves = -(-run.batch.micro_batches // layout.replicate)
    passes = -(-leaves // layout.shard)
    stages = [Stage(work, layout, number) for number in range(layout.pipeline)]
    compute_s = max(stage.compute_s for stage in stages) * passes
    sent = max(stage.sent_bytes(passes) for stage in stages)
    update_s = max(stage.update_s for stage in stages)
    if layout.pipeline == 1:
        (stage,) = stages
        timeline = stage.timeline()
        for _ in range(passes - 1):
            stage.play_pass(timeline, stage.sends())
        stage.play_pass(timeline, stage.last_sends())
        total_s = max(timeline.now_s, timeline.port_s)
        return StepCost(compute_s, total_s - compute_s, 0.0, update_s, sent)
    chunks, width = run.layout.pipeline_chunks, layout.shard * layout.tensor
    edge = cluster.link(0, width, min(width, cluster.per_host))
    times = [stage.pass_seconds() for stage in stages]
    ends = play_pipeline(
        [(f / chunks, b / chunks) for f, b, _ in times], passes, chunks, stages[0].passed, edge
    )
    total_s = max(end + last_s for end, (_, _, last_s) in zip(ends, times, strict=True))
    if work.model.tied:
        nbytes = 4 * work.model.embedding.elements(1) / layout.shard
        total_s += halving_seconds((0, (layout.pipeline - 1) * width), nbytes, cluster)
    computing = [(stage.compute_s / 3 / chunks, stage.compute_s / 1.5 / chunks) for stage in stages]
    bubble_s = max(play_pipeline(computing, passes, chunks, 0, Link(0.0, 1.0))) - compute_s
    return StepCost(compute_s, max(0.0, total_s - compute_s - bubble_s), bubble_s, update_s, sent)


def learners_cost(work: Workload, layout: Layout) -> StepCost:
    """Return the cost of a step of a replica's learners: each as a run of one replica, and an H-th
    of the exchange."""
    learners, every = work.run.diloco.learners, work.run.diloco.every
    each = -(-learners // layout.replicate)
    inner = work.with_values("diloco", learners=0).with_values("parallel", wire="fp32")
    inner = inner.with_values("batch", micro_batches=work.run.batch.micro_batches // learners)
    step = step_cost(inner, replace(layout, replicate=1))
    stage = Stage(work.with_values("batch", micro_batches=learners), layout, 0)
    sent = stage.tree(4 * stage.elements / layout.shard)[1]
    sends = chain(*stage.last_sends().values())
    if layout.shard > 1:
        sends = chain(part.last_s for part in (*stage.parts, stage.root))
    return StepCost(
        each * step.compute_s,
        each * step.exposed_s + sum(sends) / every,
        0.0,
        each * step.update_s + stage.update_s / every,
        each * step.sent_bytes + sent / every,
    )


class Stage:
    """The units of a pipeline stage, or of the whole model, as one rank runs them."""

    def __init__(self, work: Workload, layout: Layout, number: int) -> None:
        model = work.model
        self.run = work.run
        self.cluster = work.cluster
        self.timing = work.timing
        self.layout = layout
        self.wire = FORMATS[self.run.parallel.wire].share
        self.narrow = 2 if self.run.compute.precision == "bf16" else 4  # bytes of an activation
        self.units = units_of_stage(model, layout.pipeline, self.run.layout.pipeline_chunks, number)
        self.outer = outer_units(model, layout.pipeline, number)
        self.passed = 4 * model.passed if layout.pipeline > 1 else 0  # bytes
        rank = number * layout.shard * layout.tensor
        self.ranks = {
            axis: tuple(layout.ranks_along(rank, axis)) for axis in ("replicate", "shard", "tensor")
        }
        self.parts = [self.part(unit) for unit in self.units]
        outer = [self.part(unit) for unit in self.outer]
        self.root = Part(
            sum(part.forward_s for part in outer),
            sum(part.backward_s for part in outer) + self.timing.accumulate_s,
            *self.exchanged(sum(unit.elements(layout.tensor) for unit in self.outer)),
        )
        self.compute_s = self.root.forward_s + self.root.backward_s
        self.compute_s += sum(
            sum(self.timing.of(unit, layout.tensor)) + self.recomputed_s(unit)
            for unit in self.units
        )

    def timeline(self) -> Timeline:
        rate = self.cluster.link(0, self.layout.workers - 1).bytes_per_s
        return Timeline(min(1.0, self.timing.message_s * rate), self.timing.exchange_s)

    @property
    def update_s(self) -> float:
        own = self.elements / self.layout.shard
        return own * self.timing.update_s + 4 * self.cluster.other_host.latency_s

    @property
    def elements(self) -> int:
        return sum(unit.elements(self.layout.tensor) for unit in (*self.units, *self.outer))

    def recomputed_s(self, unit: Unit) -> float:
        share = {"none": 0.0, "selective": 0.1, "full": 1.0}[self.run.memory.activation_checkpoint]
        return share * self.timing.of(unit, self.layout.tensor)[0]

    def sums(self, unit: Unit) -> tuple[float, float]:
        """Return the seconds of the sums over the tensor axis in a forward and a backward pass."""

        def seconds(width: int, elements: Sequence[float]) -> float:
            ranks = self.ranks["tensor"]
            return sum(halving_seconds(ranks, width * size, self.cluster) for size in elements)

        forward, backward = unit.sums
        return seconds(self.narrow, forward), seconds(4, backward)

    def part(self, unit: Unit) -> Part:
        forward_s, backward_s = self.timing.of(unit, self.layout.tensor)
        forward_sums_s, backward_sums_s = self.sums(unit)
        elements = unit.elements(self.layout.tensor)
        copy_s = self.timing.copy_s * elements if self.layout.workers_per_replica > 1 else 0
        forward_s += forward_sums_s + copy_s / 3  # a third of it gathers for the forward pass
        recomputed_s = self.recomputed_s(unit)
        backward_s += backward_sums_s + recomputed_s + copy_s * 2 / 3
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
        leaves = max(self.run.batch.micro_batches, self.layout.replicate)
        return tree_all_reduce_cost(
            self.ranks["replicate"], leaves, nbytes * self.wire, self.cluster
        )

    @property
    def reduces_once(self) -> bool:
        return self.run.fsdp.reduce == "per_step"

    def sends(self) -> dict[int, list[float]] | None:
        """Return what is sent after each unit of a pass that is not the last one; None: each
        unit."""
        return {} if self.reduces_once or self.layout.shard == 1 else None

    def last_sends(self) -> dict[int, list[float]]:
        """Return the seconds that are sent after each unit of the last backward pass."""
        root = len(self.units)
        if self.layout.workers_per_replica > 1:
            parts = enumerate((*self.parts, self.root))
            return {i: [part.reduce_s + part.last_s] for i, part in parts}
        first, *others = self.outer
        in_model_order = [
            (root, first),
            *enumerate(self.units),
            *((root, unit) for unit in others),
        ]
        parameters = [(i, 4 * int(p.on(1))) for i, unit in in_model_order for p in unit.parameters]
        size = self.run.parallel.bucket_bytes or DEFAULT_BUCKET_BYTES[self.cluster.device_type]
        sends: dict[int, list[float]] = {}
        # The root is complete last: its first parameter, the embedding, gets the last gradient.
        for bucket in group_by_size(
            [("fp32", nbytes) for _, nbytes in parameters], size, range(len(parameters))[::-1]
        ):
            numbers = [parameters[j][0] for j in bucket]
            ready = root
            if 0 not in bucket:
                ready = min((i for i in numbers if i < root), default=root - 1)
            sends.setdefault(ready, []).append(self.tree(sum(parameters[j][1] for j in bucket))[0])
        return sends

    def play_pass(self, timeline: Timeline, buckets: Mapping[int, Sequence[float]] | None) -> float:
        """Play a forward and a backward pass; return when the forward pass was done.

        buckets  {index of a part: seconds of the buckets that are complete after it}, instead of
                 sending each unit; len(parts) is the root. None: units, and not the last pass
        """
        parts, root, ahead = self.parts, self.root, self.run.fsdp.prefetch_units
        jobs = [timeline.now_s] * UNITS_IN_FLIGHT

        def through(indices: Sequence[int], gathers: bool, backward: bool) -> None:
            ready = dict[int, float]()
            for number, i in enumerate(indices):
                for j in indices[number : number + 1 + ahead]:
                    if j not in ready:
                        ready[j] = timeline.send(parts[j].gather_s if gathers else 0)
                exchange_s = timeline.exchange_s if gathers and parts[i].gather_s else 0
                seconds = parts[i].backward_s if backward else parts[i].forward_s
                timeline.compute(seconds + exchange_s, ready[i])
                if backward:
                    finish(i, parts[i])

        def finish(i: int, part: Part) -> None:
            if part.reduce_s and (buckets is None or buckets.get(i)):
                timeline.compute(timeline.exchange_s)
            if buckets is None and part.reduce_s:
                timeline.compute(0.0, jobs.pop(0))
                jobs.append(timeline.send(part.reduce_s))
            for seconds in buckets.get(i, ()) if buckets else ():
                timeline.send(seconds)

        timeline.compute(0.0, timeline.send(root.gather_s))
        through(range(len(parts)), True, False)
        timeline.compute(root.forward_s)
        forward_end_s = timeline.now_s
        timeline.compute(root.backward_s)
        through(range(len(parts))[::-1], self.run.fsdp.reshard_after_forward, True)
        finish(len(parts), root)
        return forward_end_s

    def pass_seconds(self) -> tuple[float, float, float]:
        """Return the seconds of a forward pass, of a backward pass, and what the last one waits
        for more."""
        usual, last = self.timeline(), self.timeline()
        forward_s = self.play_pass(usual, self.sends())
        self.play_pass(last, self.last_sends())
        return forward_s, usual.now_s - forward_s, max(0.0, last.port_s - usual.now_s)

    def sent_bytes(self, passes: int) -> float:
        """Return the bytes that a rank of this stage sends in a step."""
        rows = 4 * self.elements / self.layout.shard
        others = rows * (self.layout.shard - 1)
        gathers = passes * (2 if self.run.fsdp.reshard_after_forward else 1) * others
        reduces = (1 if self.reduces_once else passes) * others * self.wire
        ring = 2 * (self.layout.tensor - 1) / self.layout.tensor
        sums = (self.narrow * sum(u.sums[0]) + 4 * sum(u.sums[1]) for u in self.units)
        activations = passes * (ring * sum(sums) + 2 * self.passed)
        return gathers + reduces + activations + self.tree(rows)[1]


def outer_units(model: ModelCost, stages: int, number: int) -> list[Unit]:
    """Return the parts of a stage beside its blocks."""
    is_first, is_last = number == 0, number == stages - 1
    embedding = [model.embedding] if is_first or (is_last and model.tied) else []
    return [*embedding, model.output] if is_last else embedding


def units_of_stage(model: ModelCost, stages: int, chunks: int, number: int) -> tuple[Unit, ...]:
    """Return the blocks of a stage, of all its chunks; a norm belongs to the layer before it."""
    layers: list[list[Unit]] = []
    for unit in model.blocks:
        if unit.is_layer or not layers:
            layers.append([])
        layers[-1].append(unit)
    ranges = adjacent_blocks(range(len(layers)), stages * chunks if stages > 1 else 1)
    own = [ranges[chunk] for chunk in (range(number, len(ranges), stages) if stages > 1 else [0])]
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
    stages, last_edge = len(passes_s), len(passes_s) * chunks - 1
    schedules = [pipeline_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]
    clocks, ports, numbers = [0.0] * stages, [0.0] * stages, [0] * stages
    arrivals: dict[tuple[str, int, int], float] = {}
    while any(number < len(schedule) for number, schedule in zip(numbers, schedules, strict=True)):
        for stage, schedule in enumerate(schedules):
            while numbers[stage] < len(schedule):
                kind, chunk, micro = schedule[numbers[stage]]
                edge, forward = chunk * stages + stage, kind == "forward"
                awaited = (kind, edge - 1 if forward else edge, micro)
                needs = edge > 0 if forward else edge < last_edge
                if needs and awaited not in arrivals:
                    break
                clocks[stage] = (
                    max(clocks[stage], arrivals.get(awaited, 0.0)) + passes_s[stage][not forward]
                )
                if edge < last_edge if forward else edge > 0:
                    ports[stage] = max(ports[stage], clocks[stage]) + nbytes / link.bytes_per_s
                    arrivals[kind, edge if forward else edge - 1, micro] = (
                        ports[stage] + link.latency_s
                    )
                numbers[stage] += 1
    return clocks
