"""Every layout trains the same model: the loss and the gradient of one process, and the same bits where that is promised.

The table: {translator, Llama} x layouts x {plain, compiled, recomputed} x {one, four micro-batches a worker}, in float64 against one
process without any of it; then twenty steps in float32. The compiler's front end runs (aot_eager), not the C++ compiler behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config.schema import Memory, Optim
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models import llama, lora, translator
from lockstep.parallel.grad_norm import divide_and_clip
from lockstep.parallel.parallelize import Held, hold
from lockstep.parallel.replica import Replica
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.tensor_slice import Piece
from lockstep.testing.ranks import run_ranks
from lockstep.training.optim import adamw

CPU = torch.device("cpu")
VOCABULARY = 211
TABLE = [
    Layout(2),
    Layout(1, 2),
    Layout(1, 4),
    Layout(2, 2),
    Layout(1, 1, 2),
    Layout(1, 2, 2),
    Layout(1, 1, 1, 2),
    Layout(2, 1, 1, 2),
    Layout(1, 1, 2, 2),
    Layout(1, 2, 1, 2),
]
WORKERS = sorted({layout.workers for layout in TABLE})


@dataclass(frozen=True)
class Model:
    """A model to try layouts on: how it is made, its first values, and what goes into it."""

    name: str
    make: Callable[[], nn.Module]
    value: Callable[[str, torch.Size], Tensor]

    def inputs(self, step: int, k: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Of micro-batch `k`: different shapes are different numbers of rows."""
        chance = torch.Generator().manual_seed(1000 * step + k)
        rows, length = 2, 9
        tokens = torch.randint(3, VOCABULARY, (rows, length + 1), generator=chance)
        if self.name != "translator":
            documents = (torch.arange(length) > 4).long().expand(rows, length)
            return (tokens[:, :-1], tokens[:, 1:].contiguous(), documents), {}
        source = torch.randint(3, VOCABULARY, (rows, 7), generator=chance)
        return (source, tokens[:, :-1], tokens[:, 1:].contiguous()), {"smoothing": 0.1}


SHAPE = llama.Shape(VOCABULARY, 32, 4, 4, 2, 8, 56, 64, 10_000.0, tied=True)


def make_translator(dropout: float) -> Callable[[], nn.Module]:
    return lambda: translator.Translator(
        vocabulary=VOCABULARY,
        width=32,
        heads=4,
        encoder_layers=2,
        decoder_layers=2,
        feed_forward=56,
        dropout=dropout,
        attention="plain",
    )


def make_adapted() -> nn.Module:
    return lora.adapt(llama.Llama(SHAPE), lora.Lora(4, 8.0, tuple(lora.TARGETS)))


def value_of_adapted(key: str, size: torch.Size) -> Tensor:
    """As a training begins, but what goes up is no zeros, behind which what goes down would have no gradient."""
    if lora.is_adapter(key):
        return lora.first_value(key.replace(lora.UP, ".up" + lora.DOWN), size, 1)
    return llama.first_value(key, size, SHAPE.layers, 1)


def model_named(name: str, dropout: float = 0.0) -> Model:
    if name == "adapted":
        return Model(name, make_adapted, value_of_adapted)
    if name == "llama":
        return Model(name, lambda: llama.Llama(SHAPE), lambda key, size: llama.first_value(key, size, SHAPE.layers, 1))
    return Model(name, make_translator(dropout), lambda key, size: translator.first_value(key, size, 1))


def recomputed(blocks: list[nn.Module]) -> None:
    """Compute each block again in the backward pass."""
    for block in blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)  # type: ignore[method-assign]


def compiled(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.compile(backend="aot_eager", dynamic=False)


INSIDE: dict[str, Callable[[list[nn.Module]], None] | None] = {"plain": None, "compiled": compiled, "recomputed": recomputed}


def held_by(world: World, model: Model, layout: Layout, dtype: torch.dtype, inside: str = "plain", **options: Any) -> Held:
    with torch.device("meta"):
        made = model.make().to(dtype)
    value = lambda name, size: model.value(name, size).to(dtype)  # noqa: E731
    return hold(made, layout, layout.spot(world.rank), value, CPU, inside=INSIDE[inside], **options)


def replica_of(held: Held, micro_batches: int, together: bool = False) -> Replica | ShardedReplica:
    if held.layout.unit > 1:
        return ShardedReplica(held, micro_batches=micro_batches, seed=3, together=together)
    return Replica(held.module, micro_batches=micro_batches, seed=3)


def whole(held: Held, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors, from the pieces of all workers."""
    if held.layout.unit == 1:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {name: (held.pieces[name], tensor) for name, tensor in tensors.items()})
    found: dict[str, Tensor] = {}
    for one in everybody:
        for name, (piece, tensor) in one.items():
            target = found.setdefault(name, torch.full(piece.shape, float("nan"), dtype=tensor.dtype))
            piece.copy_to(Piece.whole(piece.shape), tensor, target)
    assert all(not tensor.isnan().any() for tensor in found.values())
    return found


def one_step(held: Held, replica: Replica | ShardedReplica, model: Model, step: int, *, narrow: bool = False) -> list[float]:
    for k in replica.micro_batches(step):
        inputs, named = model.inputs(step, k)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = replica(*inputs, **named)
        replica.backward(loss)
    return replica.losses()


def all_losses(own: list[float]) -> float:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return float(sum(sum(one) for one in everybody))


# -- parity -----------------------------------------------------------------------------------------------------------

Case = tuple[str, Layout, str, int]


def cases_of(workers: int) -> Iterator[Case]:
    for name, layout, inside, each in product(["llama", "adapted", "translator"], TABLE, INSIDE, [1, 4]):
        # what is done inside the blocks is the same whatever is around them: each axis shows it
        shown = {"plain": True, "recomputed": each == 1, "compiled": each == 1 and workers == 2 and (name == "llama" or layout.shard == 2)}
        if name == "adapted":
            shown = {"plain": each == 1, "recomputed": False, "compiled": False}
        if layout.workers == workers and shown[inside]:
            yield name, layout, inside, each


def losses_and_gradients(world: World, cases: list[Case]) -> list[tuple[float, dict[str, Any], float]]:
    found = []
    for name, layout, inside, each in cases:
        model = model_named(name)
        held = held_by(world, model, layout, torch.float64, inside)
        with replica_of(held, each * layout.loaders) as replica:
            loss = all_losses(one_step(held, replica, model, 0))
            gradients = {key: p.grad for key, p in held.named.items() if p.grad is not None}
            squares = replica.squares()
            norm = divide_and_clip(held.parameters(), divisor=1.0, clip_norm=0.0, squares=squares)
            found.append((loss, {key: one.numpy() for key, one in whole(held, gradients).items()}, float(norm)))
    return found


@pytest.mark.parametrize("workers", WORKERS)
def test_loss_gradient_and_norm_are_those_of_one_process(workers: int) -> None:
    cases = list(cases_of(workers))
    alone = [(name, Layout(), "plain", each * layout.loaders) for name, layout, _, each in cases]
    unlike = sorted(set(alone), key=str)
    truth = dict(zip(unlike, run_ranks(losses_and_gradients, 1, unlike)[0], strict=True))
    assert len(cases) > 10
    for case, single, (loss, gradients, norm) in zip(cases, alone, run_ranks(losses_and_gradients, workers, cases)[0], strict=True):
        right_loss, right, right_norm = truth[single]
        assert loss == pytest.approx(right_loss, rel=1e-12), case
        assert norm == pytest.approx(right_norm, rel=1e-6), case  # the norm is told in float32
        assert gradients.keys() == right.keys(), case
        for key, gradient in gradients.items():
            assert np.linalg.norm(gradient - right[key]) <= 1e-11 * np.linalg.norm(right[key]), (case, key)


def refused(world: World, habit: str) -> str:
    """What a sharded model is refused with, on every rank alike."""
    model = model_named("llama")
    held = held_by(world, model, Layout(1, 2), torch.float32)
    block = held.module.layers[1]  # type: ignore[index, union-attr]
    try:
        with replica_of(held, 4) as replica:
            one_step(held, replica, model, 0)
            if habit == "freezes a layer":
                block.requires_grad_(False)
            for number, k in enumerate(replica.micro_batches(1)):
                if habit == "leaves a layer out" and number == 1:
                    block.forward = lambda x, *rest: x
                loss = replica(*model.inputs(1, k)[0])
                if habit != "calls loss.backward":
                    replica.backward(loss)
                if habit != "leaves a layer out":
                    loss.backward() if habit == "calls loss.backward" else replica.backward(loss)
    except UsageError as error:
        return str(error)
    return "accepted"


def all_refused(world: World, habits: list[str]) -> list[str]:
    return [refused(world, habit) for habit in habits]


def test_sharded_models_refuse_what_would_change_the_sum() -> None:
    right = {
        "freezes a layer": "requires_grad has changed since the model was cut: layers.1.",
        "calls loss.backward": "team.backward was not called",
        "calls it twice": "team.backward was called twice in micro-batch",
        "leaves a layer out": "no gradient arrived for 9 of 38 parameters",
    }
    for texts in run_ranks(all_refused, 2, list(right)):
        for text, words in zip(texts, right.values(), strict=True):
            assert words in text


def curve(world: World, names: list[str], layout: Layout) -> list[list[float]]:
    """The losses of twenty steps in float32."""
    found = []
    for name in names:
        model = model_named(name)
        held = held_by(world, model, layout, torch.float32)
        optimizer = adamw(held, Optim(learning_rate=3e-3))
        losses = []
        with replica_of(held, 4) as replica:
            for step in range(20):
                losses.append(all_losses(one_step(held, replica, model, step % 2)) / 72)
                divide_and_clip(held.parameters(), divisor=72, clip_norm=1.0, squares=replica.squares())
                optimizer.step()
        found.append(losses)
    return found


def test_twenty_steps_go_the_way_of_one_process() -> None:
    names = ["llama", "translator"]
    truth = run_ranks(curve, 1, names, Layout())[0]
    assert all(losses[-1] < losses[0] - 0.5 for losses in truth), "it learns"
    for layout in TABLE:
        for losses, right in zip(run_ranks(curve, layout.workers, names, layout)[0], truth, strict=True):
            assert losses == pytest.approx(right, rel=2e-5), layout


# -- the same bits ----------------------------------------------------------------------------------------------------


def digest_after(world: World, name: str, layout: Layout, options: dict[str, Any]) -> str:
    """Four steps with dropout, bf16 products and clipping."""
    model, together, memory = model_named(name, dropout=0.1), options.pop("together", False), options.pop("memory", Memory())
    held = held_by(world, model, layout, torch.bfloat16 if memory.weights == "bf16" else torch.float32, **options)
    optimizer = adamw(held, Optim(learning_rate=1e-2), memory)
    with replica_of(held, 8, together) as replica:
        for step in range(4):
            one_step(held, replica, model, step, narrow=True)
            divide_and_clip(held.parameters(), divisor=144, clip_norm=0.5, squares=replica.squares())
            optimizer.step()
    state = whole(held, {key: p.detach() for key, p in held.named.items()})
    return hashlib.sha256(b"".join(state[key].float().numpy().tobytes() for key in sorted(state))).hexdigest()


@pytest.mark.parametrize("name", ["llama", "translator"])
def test_replicas_and_shards_have_one_digest(name: str) -> None:
    layouts: list[tuple[Layout, dict[str, Any]]] = [(Layout(n), {}) for n in (1, 2, 3, 4)]
    layouts += [(Layout(1, 2), {"units_ahead": 0}), (Layout(1, 3), {}), (Layout(1, 4), {"units_ahead": 3})]
    layouts += [(Layout(2, 2), {"free_after_forward": False})]
    layouts += [(Layout(1, 3), {"together": True}), (Layout(2, 2), {"together": True})]
    layouts += [(Layout(1, 8), {})] if name == "llama" else []
    found = [(layout, options, run_ranks(digest_after, layout.workers, name, layout, options)[0]) for layout, options in layouts]
    assert len({digest for _, _, digest in found}) == 1, found


@pytest.mark.parametrize("memory", [Memory(optimizer_state="bf16", weights="bf16"), Memory(offload="optimizer")], ids=["bf16", "offloaded"])
def test_what_saves_memory_has_one_digest_too(memory: Memory) -> None:
    layouts = [Layout(), Layout(2), Layout(1, 3), Layout(2, 2)]
    found = {layout: run_ranks(digest_after, layout.workers, "llama", layout, {"memory": memory})[0] for layout in layouts}
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("translator", [Layout(1, 1, 2), Layout(2, 1, 2), Layout(1, 2, 2)], id="tensor 2"),
        pytest.param("adapted", [Layout(1, 1, 2), Layout(1, 2, 2)], id="tensor 2, adapters"),
        pytest.param("translator", [Layout(1, 1, 1, 2), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2)], id="pipeline 2"),
    ],
)
def test_at_an_equal_size_of_the_other_axes_too(name: str, layouts: list[Layout]) -> None:
    found = {layout: run_ranks(digest_after, layout.workers, name, layout, {})[0] for layout in layouts}
    assert len(set(found.values())) == 1, found


def test_the_schedule_of_a_pipeline_decides_no_bits() -> None:
    layout = Layout(1, 1, 1, 2)
    plain, laps = (run_ranks(digest_after, 2, "llama", layout, {"parts_of_stages": parts})[0] for parts in (1, 2))
    assert plain == laps  # a Llama draws nothing at random


# -- memory -----------------------------------------------------------------------------------------------------------


def bytes_held(world: World, layout: Layout) -> int:
    """Of parameters, gradients and optimizer state, as they are after a step."""
    model = model_named("llama")
    held = held_by(world, model, layout, torch.float32)
    optimizer = adamw(held, Optim())
    with replica_of(held, 4) as replica:
        one_step(held, replica, model, 0)
        optimizer.step()
        tensors = [t for p in held.named.values() for t in (p, p.grad, *optimizer.state[p].values()) if isinstance(t, Tensor) and t.dim()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def test_what_a_worker_holds_falls_with_the_shards() -> None:
    truth = run_ranks(bytes_held, 1, Layout())[0]
    assert truth >= 16 * SHAPE.parameters
    for shards in (2, 4):
        for held in run_ranks(bytes_held, shards, Layout(1, shards)):
            assert held == pytest.approx(truth / shards, rel=0.02)
