"""Pipeline parallelism: layers split into stages, several micro-batches in flight.

    stage 0   F0 F1 F2 B0 F3 B1 .. B2 B3        1F1B (Narayanan et al. 2019, "PipeDream"; 2021):
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3        a forward pass follows each backward pass, so at
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3     most `stages` micro-batches keep activations

With several chunks per stage, each stage holds chunks of the model that are `stages` apart: less
idle time at both ends, more messages.

Every stage knows each micro-batch, because the data order is arithmetic, so only activations are
sent. Gradients are added per micro-batch in the tree, so the schedule decides no bits. Not
torch.distributed.pipelining, which needs equal shapes and one permanent group, and adds gradients
in order of arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.llama import IGNORE_INDEX, Llama, RotaryEmbedding, positions_and_mask
from lockstep.models.loss import output_cross_entropy
from lockstep.models.translator import EncodedSource, Translator, causal_bias, source_bias
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.shard_passes import adjacent_blocks


class PipelineOp(NamedTuple):
    """A pass of micro-batch `micro` (its index on this worker) through a chunk of the stage."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro: int


class P2PMessage(NamedTuple):
    """Activations, or their gradients, between the model's chunks n and n + 1: edge n."""

    micro: int
    edge: int
    kind: Literal["states", "grads"]

    def tag(self, number: int) -> int:
        """Return the tag of tensor `number`; unique among the messages of two workers."""
        return ((self.micro * 1024 + self.edge) * 2 + (self.kind == "grads")) * 8 + number


def pipeline_schedule(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[PipelineOp]:
    """Return the operations of a stage in a step, in order.

    With several chunks, micro-batches go in rounds of `stages`; if their number is no multiple of
    that, all forward passes come before all backward passes.
    """
    total = micro_batches * chunks
    if chunks > 1 and micro_batches % stages:
        forward = [PipelineOp("forward", chunk, micro) for chunk in range(chunks) for micro in range(micro_batches)]
        return forward + [PipelineOp("backward", chunk, micro) for chunk in reversed(range(chunks)) for micro in range(micro_batches)]

    def unit(number: int) -> tuple[int, int]:
        cycle, within = divmod(number, stages * chunks)
        return within // stages, cycle * stages + within % stages

    warmup = min(total, stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages)
    forward = [PipelineOp("forward", *unit(i)) for i in range(total)]
    backward = [PipelineOp("backward", chunks - 1 - chunk, micro) for chunk, micro in map(unit, range(total))]
    steady = [op for pair in zip(forward[warmup:], backward, strict=False) for op in pair]
    return forward[:warmup] + steady + backward[total - warmup :]


class Chunk(NamedTuple):
    """Adjacent layers of the model, and whether they are the model's first and last."""

    layers: Sequence[int]
    first: bool
    last: bool


class PendingMicroBatch(NamedTuple):
    """Inputs of a micro-batch for the pipeline, and autocast's dtype; None: disabled."""

    k: int
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    autocast_dtype: torch.dtype | None


@dataclass(frozen=True)
class PipelineStage:
    """A worker's part of a model that is split into stages."""

    number: int
    stages: int
    chunks: tuple[Chunk, ...]
    modules: tuple[tuple[str, ...], ...]  # names of the modules of each chunk
    borrowed: tuple[str, ...] = ()  # copies of parameters of the first stage, which saves them
    lent: tuple[str, ...] = ()  # parameters of the first stage that the last stage has too

    def holds(self, chunk: int, name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in self.modules[chunk])


def build_stage(model: nn.Module, stage: int, stages: int, chunks_per_stage: int) -> PipelineStage:
    """Remove the layers of other stages from a model on the meta device, in place.

    The forward pass becomes that of a chunk. Chunk c of stage s is chunk c * stages + s of all.
    """
    names = layer_names(model)
    total = stages * chunks_per_stage
    ranges = adjacent_blocks(range(len(names)), total)
    chunks = tuple(Chunk(ranges[n], n == 0, n == total - 1) for n in range(stage, total, stages))
    kept = {names[layer] for chunk in chunks for layer in chunk.layers}
    first, last = chunks[0].first, chunks[-1].last
    last_encoder = names[len(model.encoder) - 1] if isinstance(model, Translator) else ""
    outer = ("embedding", "norm", "output", "decoder_norm")
    modules = []
    for chunk in chunks:
        layers = [names[layer] for layer in chunk.layers]
        modules.append((*layers, *(outer if chunk.first or chunk.last else ()), *(("encoder_norm",) if last_encoder in layers else ())))
    tied = isinstance(model, Translator) or model.output is None
    uses = {"embedding": first or (last and tied), "norm": last, "output": last, "decoder_norm": last, "encoder_norm": last_encoder in kept}
    for name in [name for name in names if name not in kept] + [name for name, used in uses.items() if not used]:
        remove_module(model, name)
    run: Callable[..., tuple[Tensor, ...]] = forward_llama_chunk if isinstance(model, Llama) else forward_translator_chunk
    model.forward = lambda received, chunk, inputs, named: run(model, chunks[chunk], received, *inputs, **named)
    shared = ("embedding.weight",) if tied and stages > 1 else ()
    return PipelineStage(stage, stages, chunks, tuple(modules), shared if last and not first else (), shared if first and not last else ())


def layer_names(model: nn.Module) -> list[str]:
    if isinstance(model, Llama):
        return [f"layers.{i}" for i in range(len(model.layers))]
    assert isinstance(model, Translator)
    return [f"encoder.{i}" for i in range(len(model.encoder))] + [f"decoder.{i}" for i in range(len(model.decoder))]


def remove_module(model: nn.Module, name: str) -> None:
    """Replace a module, if the model has it, so that later layers keep their numbers."""
    path, _, last = name.rpartition(".")
    if getattr(model.get_submodule(path), last, None) is not None:
        setattr(model.get_submodule(path), last, nn.Identity())


def forward_llama_chunk(
    model: Llama, chunk: Chunk, received: Sequence[Tensor], tokens: Tensor, labels: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run a chunk of Llama.forward: (states,) (B, T, D), or the loss at the end."""
    positions, mask = positions_and_mask(tokens, documents)
    states = model.embedding(tokens) if chunk.first else received[0]
    rotary = RotaryEmbedding.of(positions, model.config, states.dtype)
    for number in chunk.layers:
        states = model.layers[number](states, rotary, mask)
    if not chunk.last:
        return (states,)
    return (output_cross_entropy(model.norm(states), model.output_weight, labels, smoothing=0.0, ignore_index=IGNORE_INDEX),)


def forward_translator_chunk(
    model: Translator, chunk: Chunk, received: Sequence[Tensor], source: Tensor, target: Tensor, labels: Tensor, *, smoothing: float = 0.0
) -> tuple[Tensor, ...]:
    """Run a chunk of Translator.forward: (source states, target states), or the loss."""
    dtype = next(model.parameters()).dtype
    bias, causal = source_bias(source, model.pad, dtype), causal_bias(target, dtype)
    states, target_states = (model.embed(source), model.embed(target)) if chunk.first else (received[0], received[1])
    for number in chunk.layers:
        if number < len(model.encoder):
            states = model.encoder[number](states, bias)
            if number == len(model.encoder) - 1:
                states = model.encoder_norm(states)
        else:
            target_states = model.decoder[number - len(model.encoder)](target_states, causal, EncodedSource(states, bias))
    if not chunk.last:
        return states, target_states
    normed = model.decoder_norm(target_states)
    return (output_cross_entropy(normed, model.embedding.weight, labels, smoothing=smoothing, ignore_index=model.pad),)


def empty_activations(model: nn.Module, dtype: torch.dtype, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return empty tensors to receive the activations of a micro-batch."""
    assert isinstance(model, Llama | Translator)
    dim, streams = (model.config.dim, 1) if isinstance(model, Llama) else (model.dim, 2)
    return [torch.empty(*tokens.shape, dim, dtype=dtype, device=tokens.device) for tokens in inputs[:streams]]


@dataclass
class PipelineRunner:
    """Run one step of one stage."""

    stage: PipelineStage
    groups: ProcessGroups
    forward: Callable[[list[Tensor], int, int], tuple[Tensor, ...]]  # (received, chunk, micro-batch) -> activations, or the loss
    before_backward: Callable[[int, int], None]  # called with (micro-batch, chunk) before each backward pass
    empty: Callable[[int], list[Tensor]]  # micro-batch -> tensors to receive into

    def step(self, micro_batches: int) -> list[Tensor]:
        """Return the losses, on the last stage; else []. A lost peer sets `groups.failure`."""
        self.sends: list[dist.Work] = []
        in_flight: dict[tuple[int, int], tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        losses: dict[int, Tensor] = {}
        stage, stages = self.stage.number, self.stage.stages
        previous, following = (stage - 1) % stages, (stage + 1) % stages
        for kind, chunk, micro in pipeline_schedule(stage, stages, micro_batches, len(self.stage.chunks)):
            _, first, last = self.stage.chunks[chunk]
            edge = chunk * stages + stage  # from this chunk to the next one
            if kind == "forward":
                received = [] if first else self._receive(self.empty(micro), previous, P2PMessage(micro, edge - 1, "states"))
                received = [states.requires_grad_() for states in received]
                in_flight[chunk, micro] = received, self.forward(received, chunk, micro)
                outputs = [output.detach() for output in in_flight[chunk, micro][1]]
                if last:
                    losses[micro] = outputs[0]
                else:
                    self._send(outputs, following, P2PMessage(micro, edge, "states"))
                continue
            received, outs = in_flight.pop((chunk, micro))
            grads = None if last else self._receive([torch.empty_like(out) for out in outs], following, P2PMessage(micro, edge, "grads"))
            self.before_backward(micro, chunk)
            torch.autograd.backward(outs, grads)
            if not first:
                input_grads = [torch.zeros_like(states) if states.grad is None else states.grad for states in received]
                self._send(input_grads, previous, P2PMessage(micro, edge - 1, "grads"))
        self.groups.wait(self.sends)
        return [losses[micro] for micro in sorted(losses)]

    def _send(self, tensors: list[Tensor], peer: int, message: P2PMessage) -> None:
        group, flat = self.groups.pipeline_group, [tensor.contiguous() for tensor in tensors]
        self.groups.board.enter_collective(sum(tensor.nbytes for tensor in flat))
        self.sends += self.groups.start_works(
            lambda: [dist.isend(tensor, group=group, group_dst=peer, tag=message.tag(number)) for number, tensor in enumerate(flat)]
        )

    def _receive(self, into: list[Tensor], peer: int, message: P2PMessage) -> list[Tensor]:
        group, into = self.groups.pipeline_group, [tensor.detach() for tensor in into]
        works = self.groups.start_works(
            lambda: [dist.irecv(tensor, group=group, group_src=peer, tag=message.tag(number)) for number, tensor in enumerate(into)]
        )
        self.groups.wait(works)
        return into
