"""The peak memory of the busiest worker in a layout: an upper bound.

On a CPU it is the resident memory of the process, as `mem` in the line of a step shows it; on a GPU
what torch has allocated there. Rank 0 counts, which copies the state while it saves.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from itertools import accumulate

from lockstep.config.schema import RunConfig
from lockstep.layout import Layout
from lockstep.network.pipeline_schedule import pipeline_schedule
from lockstep.planner.model_cost import CHECKPOINT_MODES, ModelCost, Unit
from lockstep.planner.step_cost import outer_units, units_of_stage

# Of a CPU process: fitted to the measured peaks in docs/planning.md.
# Python, torch and its kernels: the peak of a model of 50,000 parameters.
RUNTIME_BYTES = 341_000_000
GROUP_BYTES = 1_600_000  # of each process group of gloo
# The allocator returns nothing to the system, and leaves more holes where micro-batches have many
# shapes.
# (bytes for each byte of activations, more for the sums over the tensor axis), by `ragged`
ALLOCATED = {False: (1.62, 1.45), True: (1.78, 2.25)}
# For each byte of a partial sum that waits in the tree.
STORED_BYTES, STORED_SHARD_BYTES = 2.4, 1.92
# oneDNN keeps 1,024 compiled products, and bf16 ones are large: rows of pairs have hundreds of
# shapes.
KERNEL_BYTES = 900_000_000
ALLOCATED_ON_GPU = 1.05  # not measured
LOSS_ROWS = {"cpu": 256, "cuda": 8192}  # as in models/loss.py


@dataclass(frozen=True)
class MemoryCost:
    """Bytes of one worker."""

    runtime: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    saving: float

    @property
    def total(self) -> int:
        parts: tuple[float, ...] = astuple(self)
        return math.ceil(sum(parts))


def memory_cost(model: ModelCost, run: RunConfig, layout: Layout, device_type: str) -> MemoryCost:
    """Return the bytes of the worker that needs most."""
    costs = [
        stage_memory(model, run, layout, device_type, number) for number in range(layout.pipeline)
    ]
    return max(costs, key=lambda cost: cost.total)


def stage_memory(
    model: ModelCost, run: RunConfig, layout: Layout, device_type: str, number: int
) -> MemoryCost:
    tensor, shards = layout.tensor, layout.shard
    blocks = units_of_stage(model, layout.pipeline, run.layout.pipeline_chunks, number)
    outer = outer_units(model, layout.pipeline, number)
    sizes = [unit.elements(tensor) for unit in blocks]
    root = sum(unit.elements(tensor) for unit in outer)
    own = (sum(sizes) + root) / shards
    weight = 2 if run.memory.weights == "bf16" else 4
    state = 0.0
    if run.memory.offload != "optimizer" or device_type == "cpu":
        state = sum(unit.state.on(tensor) for unit in (*blocks, *outer)) / shards
    return MemoryCost(
        runtime=runtime_bytes(model, run, layout) if device_type == "cpu" else 0,
        weights=(weight + learner_bytes(run, layout)) * own,
        gradients=weight * own * (1 + stored_sums(run, layout)),
        optimizer=state,
        activations=activation_bytes(model, run, layout, device_type, blocks, number),
        gathered=gathered_bytes(run, layout, device_type, sizes, root),
        saving=weight * own + state if device_type == "cpu" else 0,
    )


def runtime_bytes(model: ModelCost, run: RunConfig, layout: Layout) -> int:
    kernels = KERNEL_BYTES if model.ragged and run.compute.precision == "bf16" else 0
    groups = 2 * (layout.shard > 1) + (layout.tensor > 1) + 2 * (layout.pipeline > 1)
    groups += layout.workers_per_replica > 1 < layout.replicate  # besides that of all workers
    return RUNTIME_BYTES + GROUP_BYTES * groups + kernels


def learner_bytes(run: RunConfig, layout: Layout) -> int:
    """Return the bytes per parameter that DiLoCo adds: common weights, outer momentum, finished
    learners."""
    return 8 + 4 * -(-run.diloco.learners // layout.replicate) if run.diloco.learners else 0


def tree_depth(leaves: int, ranks: int = 1) -> int:
    """Return the depth of the tree over the leaves of one of so many ranks."""
    return math.ceil(math.log2(-(-leaves // ranks)))


def stored_sums(run: RunConfig, layout: Layout) -> float:
    """Return the gradients that partial sums take which wait for their sibling in the tree of a
    step."""
    learners, micro_batches = run.diloco.learners, run.batch.micro_batches
    leaves = -(-(learners or micro_batches) // layout.replicate)
    if layout.workers_per_replica == 1:
        return STORED_BYTES * max(0, tree_depth(leaves) - 1)
    if learners:  # sums of finished learners, and of a learner's micro-batches
        each = -(-micro_batches // learners)
        return STORED_SHARD_BYTES * (tree_depth(leaves) + tree_depth(each, layout.shard))
    if run.fsdp.reduce == "per_step" and layout.shard > 1:
        return 0.0
    return STORED_SHARD_BYTES * tree_depth(leaves, layout.shard)


def gathered_bytes(
    run: RunConfig, layout: Layout, device_type: str, units: list[int], root: int
) -> float:
    """Return the bytes of whole units: parameters that are gathered, and gradients on their way."""
    whole, largest = sum(units) + root, max([*units, 1])
    if layout.workers_per_replica == 1:
        return min(4 * whole, run.parallel.bucket_size(device_type))
    kept = len(units) if not run.fsdp.reshard_after_forward else 1 + run.fsdp.prefetch_units
    if run.fsdp.reduce == "per_step" and layout.shard > 1:
        leaves = -(-run.batch.micro_batches // (run.diloco.learners or layout.replicate))
        depth = max(1, tree_depth(leaves, layout.shard))
        return 4 * (kept * largest + root + depth * whole)
    return 4 * ((kept + 3) * largest + 2 * root)


def activation_bytes(
    model: ModelCost,
    run: RunConfig,
    layout: Layout,
    device_type: str,
    blocks: tuple[Unit, ...],
    number: int,
) -> float:
    """Return the bytes of the saved activations of all micro-batches in flight, and of their
    use."""
    mode, tensor = run.memory.activation_checkpoint, layout.tensor
    assert mode in CHECKPOINT_MODES
    saved = sum(unit.saved[mode].on(tensor) for unit in blocks)
    largest = max((unit.saved["none"].on(tensor) for unit in blocks), default=0.0)
    matrix = model.embedding.elements(1) if model.vocabulary else 0
    loss = 0.0
    if number == 0:
        saved += model.embedding.saved[mode].on(tensor)
        loss += 4 * matrix  # gradient of the embedding
    if number == layout.pipeline - 1:  # logits, scores and gradients of some rows; narrow matrix
        rows = min(LOSS_ROWS[device_type], model.tokens)
        loss += model.output.saved[mode].on(tensor) + 3 * 4 * rows * model.vocabulary
        loss += 2 * matrix if run.compute.precision == "bf16" else 0
    factor = ALLOCATED_ON_GPU
    if device_type == "cpu":
        factor, copies = ALLOCATED[model.ragged]
        factor += copies if tensor > 1 else 0
    return factor * (saved * passes_in_flight(run, layout, number) + loss + largest)


def passes_in_flight(run: RunConfig, layout: Layout, stage: int) -> float:
    """Return the most micro-batches whose forward pass through the stage is done, and not their
    backward pass."""
    if layout.pipeline == 1:
        return 1.0
    chunks = run.layout.pipeline_chunks
    micro_batches = max(1, run.batch.micro_batches // layout.data_parallel_size)
    schedule = pipeline_schedule(stage, layout.pipeline, micro_batches, chunks)
    return max(accumulate(1 if op.kind == "forward" else -1 for op in schedule)) / chunks
