"""Pipeline parallelism: layers split into stages, several micro-batches in flight.

    stage 0   F0 F1 F2 B0 F3 B1 .. B2 B3        1F1B (Narayanan et al. 2019, "PipeDream"; 2021):
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3        a forward pass follows each backward pass, so at
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3     most `stages` micro-batches keep activations

With several chunks per stage, each stage holds chunks of the model that are `stages` apart: less
idle time at both ends, more messages.

Every stage knows each micro-batch, because the data order is arithmetic, so only activations are
sent; those of a user's model after an envelope with their shapes. Gradients are added per
micro-batch in the tree, so the schedule decides no bits. Not torch.distributed.pipelining, which
needs equal shapes and one permanent group, and adds gradients in order of arrival.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.data.order import splitmix64
from lockstep.errors import UsageError
from lockstep.network.pipeline_schedule import PipelineOp, pipeline_schedule
from lockstep.parallel.fsdp_units import UnitOrder
from lockstep.parallel.gradient_source import GradientSource, PassPhase, StepPlan
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.plans import PendingMicroBatch, PipelineStage, StagedModel
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.parallel.unit_source import UnitSource
from lockstep.runtime.numerics import (
    generator_states,
    pack_generators,
    restore_generators,
    seed_generators,
)
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of

ENVELOPE_BYTES = 4096
RECEIVES_AHEAD = 2  # of a stage, each the activations of a micro-batch
MAX_TENSORS = 31  # between two chunks


class P2PMessage(NamedTuple):
    """Activations (forward), or their gradients, between the model's chunks n and n + 1: edge n."""

    micro: int
    edge: int
    kind: Literal["forward", "backward"]
    peer: int = 0  # the other stage

    def tag(self, number: int) -> int:
        """Return the tag of tensor `number`; unique among the messages of two workers."""
        kind = (self.micro * 1024 + self.edge) * 2 + (self.kind == "backward")
        return kind * (MAX_TENSORS + 1) + number


class Activations(NamedTuple):
    """What a chunk passes to the next one: its output, a tensor or a tuple of tensors, the states
    of the generators after it, and the digest of the micro-batch."""

    output: Any
    generators: Tensor
    data: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.output if isinstance(self.output, tuple) else (self.output,)

    def pack(self) -> Tensor:
        """Return all but the elements of the tensors as bytes: (ENVELOPE_BYTES + generators,)."""
        described = [
            [DTYPES[t.dtype], t.shape, torch.empty_like(t, device="meta").stride(), t.requires_grad]
            for t in self.tensors
        ]
        envelope = json.dumps([isinstance(self.output, tuple), self.data, described])
        text = envelope.encode().ljust(ENVELOPE_BYTES)
        if len(text) > ENVELOPE_BYTES or len(described) > MAX_TENSORS:
            raise UsageError(
                f"a stage of a pipeline passes {len(described)} tensors to the next one",
                "the output of a block",
                f"pass at most {MAX_TENSORS}, of few dimensions",
            )
        return torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), self.generators])


@dataclass(frozen=True)
class ChunkForward:
    """The forward pass of a stage: (activations received, chunk, number of `pending`) -> its own.

    after  called with the micro-batch after each pass
    """

    module: nn.Module
    stage: PipelineStage
    pending: Sequence[PendingMicroBatch]
    seed: Sequence[int]  # of the step
    device: torch.device
    after: Callable[[int], None] = lambda k: None

    def expected(self, micro: int) -> list[Tensor]:
        """Return empty tensors for the activations of a micro-batch."""
        model = cast(StagedModel, self.module)
        dtype = next(model.parameters()).dtype
        shapes = model.activation_shapes(*self.pending[micro].inputs)
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]

    def __call__(self, received: Activations | None, chunk: int, micro: int) -> Activations:
        k, inputs, named, autocast_dtype, generators, data = self.pending[micro]
        where = f"micro-batch {k}, stage {self.stage.number} of a pipeline"
        passes_generators = self.stage.passes_generators
        if received and received.data != data:
            raise UsageError(
                "the inputs and targets are not those of the stage before",
                where,
                "let the data follow from the step and the micro-batch alone: "
                "no DataLoader consumed in the loop, no rank in a seed (docs/loop.md)",
            )
        if passes_generators:
            restore_generators(received.generators if received else generators, self.device)
        else:
            follows_layers = cast(StagedModel, self.module).masks_follow_layers
            position = () if follows_layers else (chunk * self.stage.stages + self.stage.number,)
            seed_generators(splitmix64(*self.seed, k, *position) >> 1, self.device)
        others = generator_states(self.device)[2:]
        with torch.autocast(self.device.type, autocast_dtype, enabled=autocast_dtype is not None):
            # hidden in a function: FSDP's hook would give a gradient of zeros to tensors that get
            # none
            output = self.module(
                (lambda: received.output) if received else tuple, chunk, inputs, named
            )
        own = Activations(output, generators, data)
        if wrong := [type(t).__name__ for t in own.tensors if not isinstance(t, Tensor)]:
            raise UsageError(
                f"a {wrong[0]} cannot be passed to another stage",
                where,
                "return a tensor or a tuple of tensors from the blocks, and a tensor from the loss",
            )
        if passes_generators:
            own = own._replace(generators=pack_generators(self.device))
            if generator_states(self.device)[2:] != others:
                raise UsageError(
                    "a forward pass drew numbers from NumPy's or Python's generator",
                    where,
                    "use torch's generators in the model, torch.rand(())",
                )
        self.after(k)
        return own


@dataclass
class PipelineRunner:
    """Run one step, or an evaluation, of one stage.

    forward   the last chunk returns the loss
    backward  called with (outputs, their gradients, micro-batch, chunk) for each backward pass
    """

    forward: ChunkForward
    groups: ProcessGroups
    backward: Callable[[list[Tensor], Sequence[Tensor] | None, int, int], None] = lambda *_: None
    sends: list[dist.Work] = field(default_factory=list)
    # Those that have started; the passes whose backward pass follows: (gradients, outputs).
    receives: dict[P2PMessage, tuple[Sequence[Tensor], list[dist.Work]]] = field(
        default_factory=dict
    )
    in_flight: dict[tuple[int, int], tuple[list[Tensor | None], list[Tensor]]] = field(
        default_factory=dict
    )

    def step(self, micro_batches: int) -> list[Tensor]:
        """Return the losses, on the last stage; else []. Raises the error of a lost peer."""
        stage = self.forward.stage
        losses: dict[int, Tensor] = {}
        schedule = pipeline_schedule(stage.number, stage.stages, micro_batches, len(stage.chunks))
        for number, op in enumerate(schedule):
            incoming, outgoing = self._messages(op)
            if op.kind == "backward" and not self.in_flight[op.chunk, op.micro][1]:
                incoming = None
            received = self._receive(incoming, self._expected(op)) if incoming else None
            self._receive_ahead(schedule[number + 1 :])
            if op.kind == "forward":
                inputs = [t for t in received.tensors if t.requires_grad] if received else []
                followed = follow_gradients(inputs)
                own = self.forward(received, op.chunk, op.micro)
                outputs = [tensor for tensor in own.tensors if tensor.requires_grad]
                self.in_flight[op.chunk, op.micro] = followed, outputs
                if outgoing:
                    self._send(own, outgoing)
                else:
                    losses[op.micro] = own.tensors[0].detach()
                continue
            followed, outputs = self.in_flight.pop((op.chunk, op.micro))
            self.backward(outputs, received.tensors if received else None, op.micro, op.chunk)
            gradients = tuple(gradient for gradient in followed if gradient is not None)
            if len(gradients) < len(followed):
                raise UsageError(
                    "a stage computes no gradient for some of the tensors that it receives, "
                    "and the stages before it need them",
                    "the forward passes of a pipeline",
                    "return only tensors that later blocks use; detach() the others",
                )
            if gradients and outgoing:
                self._send(own._replace(output=gradients), outgoing)
        self.groups.wait(self.sends)
        return [losses[micro] for micro in sorted(losses)]

    def _messages(self, op: PipelineOp) -> tuple[P2PMessage | None, P2PMessage | None]:
        """Return what a pass receives, and what it sends."""
        number, stages = self.forward.stage.number, self.forward.stage.stages
        edges = op.edges(number, stages, len(self.forward.stage.chunks))
        ahead = 1 if op.kind == "forward" else -1
        incoming, outgoing = (
            P2PMessage(op.micro, edge, op.kind, peer % stages) if edge >= 0 else None
            for edge, peer in zip(edges, (number - ahead, number + ahead), strict=True)
        )
        return incoming, outgoing

    def _expected(self, op: PipelineOp) -> list[Tensor]:
        """Return empty tensors for what a pass receives; of a user's model none: unknown."""
        if self.forward.stage.passes_generators:
            return []
        if op.kind == "forward":
            return self.forward.expected(op.micro)
        _, outputs = self.in_flight.get((op.chunk, op.micro), ((), ()))
        return [torch.empty_like(output) for output in outputs]

    def _receive_ahead(self, upcoming: Sequence[PipelineOp]) -> None:
        """Start to receive what the next two passes need that receive anything, beside the pass
        before them.

        gloo sends nothing before the receiver asks for it. On NCCL a receive would hold up the
        sends that follow, and the tensors of a user's model have unknown shapes.
        """
        if self.forward.device.type != "cpu" or self.forward.stage.passes_generators:
            return
        incoming = ((op, self._messages(op)[0]) for op in upcoming)
        awaited = ((op, message) for op, message in incoming if message)
        for op, message in islice(awaited, RECEIVES_AHEAD):
            self._start_receive(message, self._expected(op))

    def evaluate(self) -> Activations:
        """Collective in the stages. Return the activations of the last stage, on all of them."""
        stage, last = self.forward.stage.number, self.forward.stage.stages - 1

        def message(edge: int, peer: int) -> P2PMessage:
            return P2PMessage(0, edge, "forward", peer)

        received = self._receive(message(stage - 1, stage - 1)) if stage else None
        own = self.forward(received, 0, 0)
        for peer in range(last) if stage == last else [stage + 1]:
            self._send(own, message(stage, peer))
        if stage < last:
            own = self._receive(message(last, last))
        self.groups.wait(self.sends)
        self.groups.raise_failure()
        return own

    def _send(self, activations: Activations, message: P2PMessage) -> None:
        group = self.groups.pipeline_group
        tensors = enumerate(activations.tensors, 1)
        parts = {number: tensor.detach().contiguous() for number, tensor in tensors}
        if self.forward.stage.passes_generators:
            parts = {0: activations.pack(), **parts}
        self.groups.board.enter_collective(sum(part.nbytes for part in parts.values()))
        self.sends += self.groups.start_works(
            lambda: [
                dist.isend(part, group=group, group_dst=message.peer, tag=message.tag(number))
                for number, part in parts.items()
            ]
        )

    def _receive(self, message: P2PMessage, expected: Sequence[Tensor] = ()) -> Activations:
        """Return what the peer has sent, with its strides: they may decide which kernels run.

        expected  tensors to receive into, where the model is a built-in one, which sends no
                  envelope
        """
        generators = self.forward.pending[0].generators
        if expected:
            self._start_receive(message, expected)
            expected, works = self.receives.pop(message)
            self._wait_for(works)
            output = tuple(tensor.requires_grad_(message.kind == "forward") for tensor in expected)
            return Activations(output, generators, 0)
        envelope = torch.empty(ENVELOPE_BYTES + generators.numel(), dtype=torch.uint8)
        self._wait_for(self._start([envelope], 0, message))
        is_tuple, data, described = json.loads(bytes(bytes_of(envelope[:ENVELOPE_BYTES])))
        parts = [
            torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.forward.device)
            for dtype, shape, _, _ in described
        ]
        self._wait_for(self._start(parts, 1, message))
        for number, (_, _, strides, trained) in enumerate(described):
            part = parts[number]
            if strides != list(part.stride()):
                part = part.new_empty_strided(part.shape, strides).copy_(part)
            parts[number] = part.requires_grad_(trained)
        return Activations(tuple(parts) if is_tuple else parts[0], envelope[ENVELOPE_BYTES:], data)

    def _start_receive(self, message: P2PMessage, expected: Sequence[Tensor]) -> None:
        if expected and message not in self.receives:
            works = self._start([tensor.detach() for tensor in expected], 1, message)
            self.receives[message] = expected, works

    def _start(self, parts: list[Tensor], first: int, message: P2PMessage) -> list[dist.Work]:
        group = self.groups.pipeline_group
        return self.groups.start_works(
            lambda: [
                dist.irecv(part, group=group, group_src=message.peer, tag=message.tag(number))
                for number, part in enumerate(parts, first)
            ]
        )

    def _wait_for(self, works: list[dist.Work]) -> None:
        self.groups.wait(works)
        self.groups.raise_failure()


def follow_gradients(inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Return a list that receives the gradients of `inputs` as the backward pass computes them:
    `grad` would have other strides."""
    gradients: list[Tensor | None] = [None for _ in inputs]
    for number, tensor in enumerate(inputs):
        tensor.register_hook(partial(gradients.__setitem__, number))
    return gradients


class StageSource(UnitSource):
    """The units of a stage. Its parameters are the same in all steps."""

    runs_at_once = False
    measures_passes = False

    def _watch_forward_passes(self) -> UnitOrder:
        return UnitOrder({})

    def follow_parameters(self) -> bool:
        return False

    def agree(self) -> None:
        """Do nothing: the stages train different parameters."""

    def start_step(self, plan: StepPlan) -> None:
        super().start_step(plan)
        self._pending: list[PendingMicroBatch] = []

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Store the inputs."""
        stage = self.local.stage
        assert stage is not None
        self.count_backward("forward_backward")
        device = self.parameters[0].device
        self._pending.append(stage.pend(self.now.k, inputs, named, device))
        return torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """Do nothing: `run_passes` does."""

    def end_pass(self) -> None:
        GradientSource.end_pass(self)  # the gradients follow

    def run_passes(self, statistics: RunningStatistics) -> list[Tensor]:
        """Run the forward and backward passes; return the losses, on the last stage."""
        local, passes = self.local, self.plan.passes
        assert local.stage is not None
        stage = local.stage

        def backward(
            outputs: list[Tensor], gradients: Sequence[Tensor] | None, micro: int, chunk: int
        ) -> None:
            self.now = passes[micro]
            self._reduced_units.clear()
            names = {name for name in self.names if stage.holds(chunk, name)}
            for name, p in zip(self.names, self._sharded, strict=True):
                p.grad = None if name in names else p.grad
            if outputs:
                torch.autograd.backward(outputs, gradients)
            where = f"micro-batch {self.now.k} of step {self.plan.key[1] + 1}"
            self.refuse_missing(self._missing(names), where)

        own = {now.k for now in passes if now.counts}
        is_first = self.groups.position.at.tensor == 0

        def after_forward(k: int) -> None:
            statistics.end_micro_batch(k, counts=k in own and is_first)

        device = self.parameters[0].device
        forward = ChunkForward(
            local.module, stage, self._pending, self.plan.key, device, after_forward
        )
        losses = PipelineRunner(forward, self.groups, backward).step(len(passes))
        self.phase = PassPhase.OUTSIDE
        return [loss for loss, now in zip(losses, passes, strict=False) if now.counts]


def evaluate_in_stages(local: LocalModel | None, inputs: Any, *, in_loop: bool) -> Any:
    """Collective in the replica. Return the output of the model, on all stages. in_loop: called
    from the micro-batch loop."""
    assert local and local.stage
    if torch.is_grad_enabled() or in_loop:
        raise UsageError(
            "the model was called with gradients, or in the micro-batch loop",
            f"layout {local.layout}",
            "call session.forward_backward(x, y, loss_fn) for each micro-batch; "
            "evaluate with session.evaluate",
        )
    if not local.groups.formed:
        local.groups.form()
    device = next(local.parameters()).device
    pending = [local.stage.pend(0, (inputs,), {}, device)]
    forward = ChunkForward(local.module, local.stage, pending, (), device)
    activations = PipelineRunner(forward, local.groups).evaluate()
    restore_generators(activations.generators, device)
    cast(FSDPModule, local.module).reshard()  # a later pass must gather new weights
    return activations.output
