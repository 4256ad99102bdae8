"""Split an nn.Sequential of the user's into the stages of a pipeline, and run one of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError, refuse
from lockstep.parallel.plans import Chunk, PipelineStage, remove_module
from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.runtime.torch_private import has_forward_hooks
from lockstep.units import join_names


def block_names(model: nn.Module) -> list[str]:
    """Return the names of the blocks of an nn.Sequential, in order; nested ones are flattened."""
    modules = list(model.named_modules(remove_duplicate=False))
    uses = Counter(id(module) for _, module in modules)

    def is_flat(module: nn.Module) -> bool:
        is_sequential = (
            isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        )
        return is_sequential and uses[id(module)] == 1 and not has_forward_hooks(module)

    if not is_flat(model):
        raise UsageError(
            "a pipeline splits an nn.Sequential without forward hooks, "
            f"and the model is a {type(model).__name__}",
            "session.prepare(model), layout.pipeline",
            "give nn.Sequential(block, ...), "
            "where each block takes the output of the one before; or use layout.shard",
        )
    flat = {name for name, module in modules if is_flat(module)}
    return [name for name, _ in modules if name not in flat and name.rpartition(".")[0] in flat]


def first_blocks(
    model: nn.Module, names: Sequence[str], stages: int, split_points: Sequence[str]
) -> list[int]:
    """Return the number of the first block of each stage: of equal bytes of parameters if possible.

    split_points  names of the first blocks of stages 1, 2, ...; (): chosen here
    """
    where = f"session.prepare(split_points={list(split_points)}), layout.pipeline {stages}"
    if len(names) < stages:
        raise UsageError(
            f"{stages} stages need as many blocks, the model has {len(names)}",
            where,
            "give fewer stages",
        )
    if split_points:
        starts = [0, *(names.index(name) for name in split_points if name in names[1:])]
        if len(starts) < stages or len(split_points) >= stages or starts != sorted(set(starts)):
            raise UsageError(
                f"{len(split_points)} split points do not give {stages} stages",
                where,
                f"give {stages - 1} names, in order, of the blocks {join_names(list(names[1:]))}",
            )
        return starts
    blocks = map(model.get_submodule, names)
    sizes = (sum(p.nbytes for p in block.parameters()) for block in blocks)
    passed = list(accumulate(sizes, initial=0))
    starts = [0]
    for stage in range(1, stages):
        possible = range(starts[-1] + 1, len(names) - (stages - stage) + 1)
        starts.append(min(possible, key=lambda n: abs(passed[n] - passed[-1] * stage / stages)))
    return starts


def build_sequential_stage(
    model: nn.Module, stage: int, stages: int, split_points: Sequence[str] = ()
) -> PipelineStage:
    """Remove the blocks of other stages from a model, in place; its forward pass becomes that of a
    stage. UsageError for modules that cannot be split so."""
    names = block_names(model)
    starts = first_blocks(model, names, stages, split_points)
    ranges = [range(*pair) for pair in pairwise([*starts, len(names)])]
    first_names = join_names([names[start] for start in starts])
    where = f"layout.pipeline {stages}; the stages begin with the blocks {first_names}"
    canonical = {id(p): name for name, p in model.named_parameters()}
    holders = defaultdict[int, set[int]](set)  # stages, by tensor
    for number, own in enumerate(ranges):
        blocks = [model.get_submodule(names[n]) for n in own]
        tensors = [t for block in blocks for t in (*block.parameters(), *block.buffers())]
        for tensor in tensors:
            holders[id(tensor)].add(number)
        if not any(tensor.requires_grad for tensor in tensors):
            raise UsageError(
                f"stage {number} has no parameter to train",
                where,
                "give other split_points, or fewer stages",
            )
    shared = {tensor: numbers for tensor, numbers in holders.items() if len(numbers) > 1}
    ends = [tensor for tensor, numbers in shared.items() if numbers == {0, stages - 1}]
    tied = {canonical[tensor] for tensor in ends if tensor in canonical}
    refuse(
        sorted({canonical.get(tensor, "a buffer") for tensor in shared} - tied),
        "stages share",
        where,
        "give other split_points: only the first and the last stage may share parameters",
    )
    chunk = Chunk(ranges[stage], stage == 0, stage == stages - 1)
    blocks = [model.get_submodule(names[n]) for n in chunk.layers]
    for name in {*names} - {names[n] for n in chunk.layers}:
        remove_module(model, name)
    model.forward = partial(forward_blocks, blocks, chunk)
    lent, borrowed = (tuple(sorted(tied)) if end else () for end in (chunk.first, chunk.last))
    return PipelineStage(stage, stages, (chunk,), (), borrowed, lent, passes_generators=True)


def forward_blocks(
    blocks: Sequence[nn.Module],
    chunk: Chunk,
    received: Callable[[], Any],
    _: int,
    inputs: tuple[Any, ...],
    __: Any,
) -> Any:
    """Run the blocks of a stage on what it has received, the first one on inputs[0].

    inputs  (of the model,), to evaluate; or (of the model, target, loss): the last stage returns
            loss(output, target)
    """
    states = inputs[0] if chunk.first else received()
    if not chunk.first:  # copies, which a block may change in place
        is_tuple = isinstance(states, tuple)
        states = tuple(tensor.clone() for tensor in states) if is_tuple else states.clone()
    for block in blocks:
        states = block(states)
    if chunk.last and len(inputs) > 1:
        _, target, loss = inputs
        result = loss(states, target)
        refuse_other_leaves(result, states)
        return result
    return states


def refuse_other_leaves(loss: Any, output: Any) -> None:
    """UsageError when the loss depends on parameters other than through the output."""
    passed = {tensor.grad_fn for tensor in tensors_of(output)}
    nodes = [loss.grad_fn] if isinstance(loss, Tensor) else []
    while nodes:
        node = nodes.pop()
        if node is None or node in passed:
            continue
        if hasattr(node, "variable"):  # of a leaf: the other stages' parameters are not here
            raise UsageError(
                "the loss depends on parameters other than through the model's output",
                "the loss function of session.forward_backward, in a pipeline",
                "use weight_decay, or layout.shard",
            )
        passed.add(node)
        nodes += [following for following, _ in node.next_functions]
