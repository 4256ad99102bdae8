"""Layers dealt to stages; micro-batches flow through them, several at once.

    stage 0   F0 F1 F2 B0 F3 B1 .. B2 B3        1F1B (Narayanan et al. 2019, "PipeDream"; 2021 for the interleaved one): as soon as a
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3        micro-batch comes back, one goes forward, so no stage keeps more than there are stages
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3

With `parts` > 1 each stage holds several parts of the model, a lap of all stages apart: shorter idle times at both ends, more messages.

Which stage does what, and when, is a pure function (`actions`). Everybody knows each micro-batch, since the order is arithmetic, so only
states travel, of shapes that both sides know; sends are not waited for before the end. Gradients are added per micro-batch in the tree, so
the schedule decides no bits. By hand rather than by torch.distributed.pipelining, which wants equal shapes, one group for life, and adds
gradients in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.llama import IGNORED, Llama, Rotation, places_in, visible_in
from lockstep.models.loss import output_cross_entropy
from lockstep.models.translator import Memory, Translator, hidden_score
from lockstep.parallel.groups import Wires


class Action(NamedTuple):
    """Micro-batch `micro` (counted within the step, on this worker) goes forward or backward through part `part` of the stage."""

    what: Literal["forward", "backward"]
    part: int
    micro: int


class Message(NamedTuple):
    """What travels between two parts: onward the states of a micro-batch, back their slopes. Edge n leads from part n of all to n + 1."""

    micro: int
    edge: int
    what: Literal["states", "slopes"]

    def tag(self, number: int) -> int:
        """Of its tensor `number`; no two messages between two workers have one at a time."""
        return ((self.micro * 1024 + self.edge) * 2 + (self.what == "slopes")) * 8 + number


def actions(stage: int, stages: int, micro_batches: int, parts: int = 1) -> list[Action]:
    """What a stage does in a step, in order.

    With several parts the laps go by `stages` micro-batches; where their number is no multiple of that, all go forward before one goes
    back.
    """
    total = micro_batches * parts
    if parts > 1 and micro_batches % stages:
        every = [(part, micro) for part in range(parts) for micro in range(micro_batches)]
        back = [(part, micro) for part in reversed(range(parts)) for micro in range(micro_batches)]
        return [Action("forward", *one) for one in every] + [Action("backward", *one) for one in back]

    def unit(number: int) -> tuple[int, int]:
        lap, within = divmod(number, stages * parts)
        return within // stages, lap * stages + within % stages

    ahead = stages - stage - 1 if parts == 1 else 2 * (stages - stage - 1) + (parts - 1) * stages
    ahead = min(total, ahead)
    forward = [Action("forward", *(unit(i) if parts > 1 else (0, i))) for i in range(total)]
    backward = [Action("backward", *((parts - 1 - unit(i)[0], unit(i)[1]) if parts > 1 else (0, i))) for i in range(total)]
    found = forward[:ahead]
    for number in range(total - ahead):
        found += [forward[ahead + number], backward[number]]
    return found + backward[total - ahead :]


def dealt(layers: int, stages: int) -> list[range]:
    """The layers of each of `stages` stages: adjacent ones, whose numbers differ by one at most; the last stages, which also have the
    output, get fewer."""
    each, rest = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + each + (stage < rest))
    return [range(a, b) for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class Stage:
    """What a worker has of a model that is dealt to stages.

    parts     the layers of each of its parts, and whether it is the first and the last of all
    modules   the names of the modules of each of its parts
    borrowed  parameters that the first stage has too, and saves
    lent      parameters of the first stage that the last one has too
    """

    number: int
    stages: int
    parts: tuple[tuple[range, bool, bool], ...]
    modules: tuple[tuple[str, ...], ...]
    borrowed: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()

    def holds(self, part: int, name: str) -> bool:
        """Whether a parameter is one of this part's."""
        return any(name.startswith(f"{module}.") for module in self.modules[part])


def keep(model: nn.Module, stage: int, stages: int, parts: int) -> Stage:
    """Take all layers but those of this stage out of the model, on the meta device, in place; its forward pass is then that of a part.

    The parts are dealt in laps: part p of stage s is number p * stages + s of all.
    """
    names = names_of_layers(model)
    ranges = dealt(len(names), stages * parts)
    last = stages * parts - 1
    mine = tuple((ranges[n], n == 0, n == last) for n in range(stage, stages * parts, stages))
    wanted = {names[layer] for layers, _, _ in mine for layer in layers}
    for name in names:
        if name not in wanted:
            remove(model, name)
    first, end = mine[0][1], mine[-1][2]
    turn = names[len(model.encoder) - 1] if isinstance(model, Translator) else ""
    ends = ("embedding", "norm", "output", "decoder_norm")
    modules = []
    for layers, begins, closes in mine:
        of_part = [names[layer] for layer in layers]
        modules.append((*of_part, *(ends if begins or closes else ()), *(("encoder_norm",) if turn in of_part else ())))
    embedding = "embedding.weight"
    if isinstance(model, Llama):
        tied = model.output is None
        if not end:
            remove(model, "norm")
            if not tied:
                remove(model, "output")
        if not (first or (end and tied)):
            remove(model, "embedding")
        run: Callable[..., tuple[Tensor, ...]] = run_llama
    else:
        assert isinstance(model, Translator)
        tied = True
        if turn not in wanted:
            remove(model, "encoder_norm")
        if not end:
            remove(model, "decoder_norm")
        if not (first or end):
            remove(model, "embedding")
        run = run_translator
    model.forward = lambda received, part, inputs, named: run(model, mine[part], received, *inputs, **named)  # type: ignore[method-assign, assignment]
    shared = (embedding,) if tied and stages > 1 else ()
    return Stage(stage, stages, mine, tuple(modules), shared if end and not first else (), shared if first and not end else ())


def names_of_layers(model: nn.Module) -> list[str]:
    """In the order of the forward pass."""
    if isinstance(model, Llama):
        return [f"layers.{i}" for i in range(len(model.layers))]
    assert isinstance(model, Translator)
    return [f"encoder.{i}" for i in range(len(model.encoder))] + [f"decoder.{i}" for i in range(len(model.decoder))]


def remove(model: nn.Module, name: str) -> None:
    """Put nothing in the place of a submodule."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Identity())


Part = tuple[range, bool, bool]


def run_llama(
    model: Llama,
    part: Part,
    received: Sequence[Tensor],
    tokens: Tensor,
    labels: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A part of Llama.forward: (states,) (B, T, D), or the loss at the end."""
    layers, first, last = part
    if documents is None:
        places, visible = torch.arange(tokens.shape[1], device=tokens.device)[None], None
    else:
        places, visible = places_in(documents), visible_in(documents)
    states = model.embedding(tokens) if first else received[0]
    rotation = Rotation.of(places, model.shape, states.dtype)
    for number in layers:
        states = model.layers[number](states, rotation, visible)
    if not last:
        return (states,)
    assert labels is not None, "a pipeline trains"
    return (output_cross_entropy(model.norm(states), model.output_weight, labels, smoothing=0.0, pad=IGNORED),)


def run_translator(
    model: Translator,
    part: Part,
    received: Sequence[Tensor],
    source: Tensor,
    target: Tensor,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
) -> tuple[Tensor, ...]:
    """A part of Translator.forward: (source states (B, S, D), target states (B, T, D)), or the loss at the end."""
    layers, first, last = part
    dtype = next(model.parameters()).dtype
    past = torch.arange(source.shape[1], device=source.device) == 0
    bias = hidden_score(((source == model.pad) & ~past)[:, None, None], dtype)
    future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
    causal = hidden_score(future[None, None], dtype)
    states, wanted = (model.embed(source), model.embed(target)) if first else (received[0], received[1])
    for number in layers:
        if number < len(model.encoder):
            states = model.encoder[number](states, bias)
            if number == len(model.encoder) - 1:
                states = model.encoder_norm(states)
        else:
            wanted = model.decoder[number - len(model.encoder)](wanted, causal, Memory(states, bias))
    if not last:
        return states, wanted
    return (output_cross_entropy(model.decoder_norm(wanted), model.embedding.weight, labels, smoothing=smoothing, pad=model.pad),)


def travelling(model: nn.Module, dtype: torch.dtype, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Empty tensors of the shapes in which states of a micro-batch travel."""
    assert isinstance(model, Llama | Translator)
    width = model.shape.width if isinstance(model, Llama) else model.width
    shaped = inputs[:1] if isinstance(model, Llama) else inputs[:2]
    return [torch.empty(*one.shape, width, dtype=dtype, device=one.device) for one in shaped]


@dataclass
class Flow:
    """One step of one stage.

    run    (received, part, micro-batch) -> states, or the loss: a forward pass
    back   (micro-batch, part): called before each backward pass
    empty  micro-batch -> tensors to receive into
    """

    stage: Stage
    wires: Wires
    run: Callable[[list[Tensor], int, int], tuple[Tensor, ...]]
    back: Callable[[int, int], None]
    empty: Callable[[int], list[Tensor]]

    def step(self, micro_batches: int) -> list[Tensor]:
        """The losses of the micro-batches, in their order, on the last stage; else []. That a peer is lost is told by `wires.failure`."""
        self.sent: list[dist.Work] = []
        kept: dict[tuple[int, int], tuple[list[Tensor], tuple[Tensor, ...]]] = {}
        losses: dict[int, Tensor] = {}
        stage, stages = self.stage.number, self.stage.stages
        before, after = (stage - 1) % stages, (stage + 1) % stages
        for what, part, micro in actions(stage, stages, micro_batches, len(self.stage.parts)):
            _, first, last = self.stage.parts[part]
            edge = part * stages + stage  # from this part to the next one
            if what == "forward":
                received = [] if first else self._receive(self.empty(micro), before, Message(micro, edge - 1, "states"))
                received = [one.requires_grad_() for one in received]
                kept[part, micro] = received, self.run(received, part, micro)
                out = [one.detach() for one in kept[part, micro][1]]
                if last:
                    losses[micro] = out[0]
                else:
                    self._send(out, after, Message(micro, edge, "states"))
                continue
            received, outs = kept.pop((part, micro))
            slopes = None if last else self._receive([torch.empty_like(one) for one in outs], after, Message(micro, edge, "slopes"))
            self.back(micro, part)
            torch.autograd.backward(outs, slopes)
            if not first:
                gone = [torch.zeros_like(one) if one.grad is None else one.grad for one in received]
                self._send(gone, before, Message(micro, edge - 1, "slopes"))
        self.wires.wait(self.sent)
        return [losses[micro] for micro in sorted(losses)]

    def _send(self, tensors: list[Tensor], peer: int, message: Message) -> None:
        group, flat = self.wires.stages, [one.contiguous() for one in tensors]
        self.wires.board.collective(sum(one.nbytes for one in flat))
        self.sent += self.wires.guard(
            lambda: [dist.isend(one, group=group, group_dst=peer, tag=message.tag(number)) for number, one in enumerate(flat)]
        )

    def _receive(self, into: list[Tensor], peer: int, message: Message) -> list[Tensor]:
        group, into = self.wires.stages, [one.detach() for one in into]
        self.wires.wait(
            self.wires.guard(
                lambda: [dist.irecv(one, group=group, group_src=peer, tag=message.tag(number)) for number, one in enumerate(into)]
            )
        )
        return into
