"""Every layout trains the same model: loss and gradient of one process, the same bits if promised.

Cases: {translator, Llama} x layouts x {plain, compiled, recomputed} x {1, 4 micro-batches per
worker}, in float64 against one plain process; then ten steps in float32. torch.compile runs with
aot_eager, without the C++ compiler.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config.schema import LoraOptions, MemoryOptions, ModelOptions, OptimOptions
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models import llama, lora, translator
from lockstep.network.wire_format import Wire
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.parallelize import LocalModel, parallelize
from lockstep.parallel.plans import plan_of
from lockstep.parallel.replica import Replica
from lockstep.tasks.optim import make_optimizers
from lockstep.tensor_slice import TensorSlice

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
    """A model to test layouts with: constructor, initial values, inputs."""

    name: str
    make: Callable[[], nn.Module]
    value: Callable[[str, torch.Size], Tensor]

    def inputs(self, step: int, k: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the inputs of micro-batch `k`."""
        chance = torch.Generator().manual_seed(1000 * step + k)
        rows, length = 2, 9
        tokens = torch.randint(3, VOCABULARY, (rows, length + 1), generator=chance)
        if self.name != "translator":
            documents = (torch.arange(length) > 4).long().expand(rows, length)
            return (tokens[:, :-1], tokens[:, 1:].contiguous(), documents), {}
        source = torch.randint(3, VOCABULARY, (rows, 7), generator=chance)
        return (source, tokens[:, :-1], tokens[:, 1:].contiguous()), {"smoothing": 0.1}


CONFIG = llama.LlamaConfig(VOCABULARY, 32, 4, 4, 2, 8, 56, 64, 10_000.0, tie_embeddings=True)


def make_translator(dropout: float) -> Callable[[], nn.Module]:
    options = ModelOptions(32, 4, 2, 2, 56, dropout=dropout, attention="plain")
    return lambda: translator.Translator(VOCABULARY, options)


def make_adapted() -> nn.Module:
    return lora.add_adapters(
        llama.Llama(CONFIG), LoraOptions(4, 8.0, LoraOptions().targets, dropout=0.3)
    )


def init_adapted_param(key: str, size: torch.Size) -> Tensor:
    """Initial values, but lora_up is not zero, because lora_down would then have no gradient."""
    if lora.is_adapter(key):
        return lora.init_param(key.replace(lora.UP, ".up" + lora.DOWN), size, 1)
    return llama.init_param(key, size, CONFIG.n_layers, 1)


FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"unrotated_layers": (1,)},
}


def model_named(name: str, dropout: float = 0.0) -> Model:
    if name == "adapted":
        return Model(name, make_adapted, init_adapted_param)
    if name in FEATURES:
        config = replace(CONFIG, **FEATURES[name])
        return Model(
            name,
            lambda: llama.Llama(config),
            lambda key, size: llama.init_param(key, size, CONFIG.n_layers, 1),
        )
    return Model(
        name, make_translator(dropout), lambda key, size: translator.init_param(key, size, 1)
    )


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Compute each block again in the backward pass."""
    for block in blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)  # type: ignore[method-assign]


def compile_blocks(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.compile(backend="aot_eager", dynamic=False)


INSIDE: dict[str, Callable[[list[nn.Module]], None] | None] = {
    "plain": None,
    "compiled": compile_blocks,
    "recomputed": checkpoint_blocks,
}


def build_local_model(
    runtime: ElasticRuntime,
    model: Model,
    layout: Layout,
    dtype: torch.dtype,
    inside: str = "plain",
    **options: Any,
) -> LocalModel:
    with torch.device("meta"):
        made = model.make().to(dtype)
    value = lambda name, size: model.value(name, size).to(dtype)  # noqa: E731
    if prepare_blocks := INSIDE[inside]:
        prepare_blocks([made.get_submodule(name) for name in plan_of(made).units])
    return parallelize(
        made,
        layout,
        layout.coordinates(runtime.world.rank),
        value,
        CPU,
        **options,
    )


def replica_of(
    local: LocalModel, micro_batches: int, reduce_once_per_step: bool = False, wire: Wire = "fp32"
) -> Replica:
    if local.layout.workers_per_replica > 1:
        return build_replica(
            local,
            micro_batches=micro_batches,
            seed=3,
            wire=wire,
            reduce_once_per_step=reduce_once_per_step,
        )
    return build_replica(
        local.module, micro_batches=micro_batches, seed=3, wire=wire, bucket_bytes=20_000
    )


def assemble(local: LocalModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Assemble whole tensors from the slices of all workers."""
    if local.layout.workers_per_replica == 1:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        per_rank, {name: (local.slices[name], tensor) for name, tensor in tensors.items()}
    )
    assembled: dict[str, Tensor] = {}
    for slices in per_rank:
        for name, (piece, tensor) in slices.items():
            target = assembled.setdefault(
                name, torch.full(piece.shape, float("nan"), dtype=tensor.dtype)
            )
            piece.copy_to(TensorSlice.whole(piece.shape), tensor, target)
    assert all(not tensor.isnan().any() for tensor in assembled.values())
    return assembled


def one_step(
    local: LocalModel,
    replica: Replica,
    model: Model,
    step: int,
    *,
    narrow: bool = False,
    shares: tuple[int, ...] = (),
) -> dict[int, float]:
    for k in replica.micro_batches(step, shares=shares):
        inputs, named = model.inputs(step, k)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = replica(*inputs, **named)
        replica.backward(loss)
    return replica.losses()


def all_losses(own: dict[int, float]) -> float:
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, [*own.values()])
    return float(sum(map(sum, per_rank)))


# -- parity -----------------------------------------------------------------------------------------------------------

Case = tuple[str, Layout, str, int]


def cases_of(workers: int) -> Iterator[Case]:
    for name, layout, inside, each in product(
        [*FEATURES, "adapted", "translator"], TABLE, INSIDE, [1, 4]
    ):
        # recomputing and compiling do not depend on the layout: once per axis is enough
        shown = {
            "plain": True,
            "recomputed": each == 1 and workers == 2,
            "compiled": each == 1 and workers == 2 and (name == "llama" or layout.shard == 2),
        }
        if name not in ("llama", "translator"):
            shown = {"plain": each == 1, "recomputed": False, "compiled": False}
        if name == "adapted" and each == 1:  # recomputation must repeat the masks of dropout
            shown |= {"recomputed": layout.pipeline > 1, "compiled": layout == Layout(1, 2)}
        if layout.workers == workers and shown[inside]:
            yield name, layout, inside, each


def losses_and_gradients(
    runtime: ElasticRuntime, cases: list[Case]
) -> list[tuple[float, dict[str, Any], float]]:
    results = []
    for name, layout, inside, each in cases:
        model = model_named(name)
        local = build_local_model(runtime, model, layout, torch.float64, inside)
        with replica_of(local, each * layout.data_parallel_size) as replica:
            loss = all_losses(one_step(local, replica, model, 0))
            gradients = {key: p.grad for key, p in local.local_params.items() if p.grad is not None}
            grad_norm_squared = replica.grad_norm_squared()
            norm = commit_gradient(list(local.parameters()), grad_norm_squared, 1).clip_(math.inf)
            results.append(
                (
                    loss,
                    {key: gradient.numpy() for key, gradient in assemble(local, gradients).items()},
                    float(norm),
                )
            )
    return results


@pytest.mark.parametrize(
    "workers", [*WORKERS[:-1], pytest.param(WORKERS[-1], marks=pytest.mark.long)]
)
def test_loss_gradient_and_norm_equal_those_of_one_process(workers: int) -> None:
    cases = list(cases_of(workers))
    alone = [
        (name, Layout(), "plain", each * layout.data_parallel_size)
        for name, layout, _, each in cases
    ]
    unlike = sorted(set(alone), key=str)
    truth = dict(zip(unlike, run_ranks(losses_and_gradients, 1, unlike)[0], strict=True))
    assert len(cases) > 10
    for case, single, (loss, gradients, norm) in zip(
        cases, alone, run_ranks(losses_and_gradients, workers, cases)[0], strict=True
    ):
        right_loss, expected, right_norm = truth[single]
        assert loss == pytest.approx(right_loss, rel=1e-12), case
        assert norm == pytest.approx(right_norm, rel=1e-6), case  # the norm is float32
        assert gradients.keys() == expected.keys(), case
        for key, gradient in gradients.items():
            assert np.linalg.norm(gradient - expected[key]) <= 1e-11 * np.linalg.norm(
                expected[key]
            ), (case, key)


def error_of_habit(runtime: ElasticRuntime, habit: str) -> str:
    """Return the error of a habit that a sharded model refuses."""
    model = model_named("llama")
    local = build_local_model(runtime, model, Layout(1, 2), torch.float32)
    block = local.module.layers[1]  # type: ignore[index, union-attr]
    try:
        with replica_of(local, 4) as replica:
            one_step(local, replica, model, 0)
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


def all_refused(runtime: ElasticRuntime, habits: list[str]) -> list[str]:
    return [error_of_habit(runtime, habit) for habit in habits]


def test_sharded_models_refuse_what_would_change_the_sum() -> None:
    expected = {
        "calls loss.backward": "backward() was not called",
        "calls it twice": "backward() was called twice in micro-batch",
        "leaves a layer out": "no gradient arrived for 9 of 38 parameters",
    }
    for texts in run_ranks(all_refused, 2, list(expected)):
        for text, words in zip(texts, expected.values(), strict=True):
            assert words in text


def losses_of_five_steps(
    runtime: ElasticRuntime, names: list[str], layout: Layout
) -> list[list[float]]:
    """Train five steps in float32; return the losses of each model."""
    losses_by_model = []
    for name in names:
        model = model_named(name)
        local = build_local_model(runtime, model, layout, torch.float32)
        optimizer = make_optimizers(local, OptimOptions(learning_rate=3e-3))[0]
        losses = []
        with replica_of(local, 4) as replica:
            for step in range(5):
                losses.append(all_losses(one_step(local, replica, model, step % 2)) / 72)
                commit_gradient(list(local.parameters()), replica.grad_norm_squared(), 72).clip_(
                    1.0
                )
                optimizer.step()
        losses_by_model.append(losses)
    return losses_by_model


def test_losses_of_five_steps_equal_those_of_one_process() -> None:
    names = ["llama", "translator"]
    truth = run_ranks(losses_of_five_steps, 1, names, Layout())[0]
    assert all(losses[-1] < losses[0] - 0.2 for losses in truth), "the loss falls"
    # The other layouts have the bits of one process or of one of these, as the digests below show.
    for layout in (Layout(1, 2, 2), Layout(1, 2, 1, 2), Layout(1, 1, 2, 2)):
        for losses, expected in zip(
            run_ranks(losses_of_five_steps, layout.workers, names, layout)[0], truth, strict=True
        ):
            assert losses == pytest.approx(expected, rel=2e-5), layout


# -- the same bits ----------------------------------------------------------------------------------------------------


def digest_after(
    runtime: ElasticRuntime, name: str, layout: Layout, options: dict[str, Any]
) -> str:
    """Train two steps with dropout, bf16 products and clipping; return the digest of the weights."""
    model, shares, reduce_once_per_step, wire, memory = (
        model_named(name, dropout=0.1),
        options.pop("shares", ()),
        options.pop("reduce_once_per_step", False),
        options.pop("wire", "fp32"),
        options.pop("memory", MemoryOptions()),
    )
    local = build_local_model(
        runtime,
        model,
        layout,
        torch.bfloat16 if memory.weights == "bf16" else torch.float32,
        **options,
    )
    optimizer = make_optimizers(local, OptimOptions(learning_rate=1e-2), memory)[0]
    with replica_of(local, 8, reduce_once_per_step, wire) as replica:
        for step in range(2):
            one_step(local, replica, model, step, narrow=True, shares=shares)
            commit_gradient(list(local.parameters()), replica.grad_norm_squared(), 144).clip_(0.5)
            optimizer.step()
    state = assemble(local, {key: p.detach() for key, p in local.local_params.items()})
    return hashlib.sha256(
        b"".join(state[key].float().numpy().tobytes() for key in sorted(state))
    ).hexdigest()


DigestCase = tuple[Layout, dict[str, Any]]


def digests_of_rank(runtime: ElasticRuntime, name: str, cases: list[DigestCase]) -> list[str]:
    return [digest_after(runtime, name, layout, dict(options)) for layout, options in cases]


def digests_of(name: str, cases: list[DigestCase]) -> list[tuple[DigestCase, str]]:
    """Return the digest of each case; those of one number of workers share their processes."""
    digests = []
    for workers in sorted({layout.workers for layout, _ in cases}):
        fitting = [case for case in cases if case[0].workers == workers]
        digests += zip(fitting, run_ranks(digests_of_rank, workers, name, fitting)[0], strict=True)
    return digests


@pytest.mark.parametrize("name", ["llama", "adapted", "translator"])
def test_replicas_and_shards_have_one_digest(name: str) -> None:
    layouts: list[DigestCase] = [(Layout(n), {}) for n in (1, 2, 3, 4)]
    layouts += [
        (Layout(1, 2), {"prefetch_units": 0}),
        (Layout(1, 3), {}),
        (Layout(1, 4), {"prefetch_units": 3}),
    ]
    layouts += [(Layout(2, 2), {"reshard_after_forward": False})]
    layouts += [
        (Layout(1, 3), {"reduce_once_per_step": True}),
        (Layout(2, 2), {"reduce_once_per_step": True}),
    ]
    if name == "llama":
        layouts += [
            (Layout(1, 8), {}),
            (Layout(2, 2), {"shares": (6, 2)}),
            (Layout(2, 2), {"shares": (3, 5), "reduce_once_per_step": True}),
        ]
    else:  # the same code sums and shards all models
        layouts = [
            (Layout(), {}),
            (Layout(3), {}),
            (Layout(1, 3), {}),
            (Layout(2, 2), {"reduce_once_per_step": True}),
        ]
    digests = digests_of(name, layouts)
    assert len({digest for _, digest in digests}) == 1, digests


def digests_of_wire_formats(runtime: ElasticRuntime, name: str, layout: Layout) -> list[str]:
    return [
        digest_after(runtime, name, layout, {"wire": wire}) for wire in ("fp32", "bf16", "int8")
    ]


@pytest.mark.parametrize("name", ["llama", "adapted"])
def test_each_wire_format_has_one_digest_for_replicas_and_shards(name: str) -> None:
    layouts = (
        [Layout(), Layout(2), Layout(3), Layout(1, 2), Layout(2, 2)]
        if name == "llama"
        else [Layout(2), Layout(1, 2)]
    )
    digests = {
        layout: run_ranks(digests_of_wire_formats, layout.workers, name, layout)[0]
        for layout in layouts
    }
    assert len({str(of_formats) for of_formats in digests.values()}) == 1, digests
    assert len(set(digests[Layout(2)])) == 3


@pytest.mark.parametrize(
    "memory",
    [MemoryOptions(optimizer_state="bf16", weights="bf16"), MemoryOptions(offload="optimizer")],
    ids=["bf16", "offloaded"],
)
def test_memory_options_have_one_digest_for_all_layouts(memory: MemoryOptions) -> None:
    layouts = (Layout(), Layout(2), Layout(1, 3), Layout(2, 2))
    digests = digests_of("llama", [(layout, {"memory": memory}) for layout in layouts])
    assert len({digest for _, digest in digests}) == 1, digests


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param(
            "translator", [Layout(1, 1, 2), Layout(2, 1, 2), Layout(1, 2, 2)], id="tensor 2"
        ),
        pytest.param("adapted", [Layout(1, 1, 2), Layout(1, 2, 2)], id="tensor 2, adapters"),
        pytest.param(
            "translator",
            [Layout(1, 1, 1, 2), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2)],
            id="pipeline 2",
        ),
    ],
)
def test_layouts_with_equal_tensor_and_pipeline_sizes_have_one_digest(
    name: str, layouts: list[Layout]
) -> None:
    digests = digests_of(name, [(layout, {}) for layout in layouts])
    assert len({digest for _, digest in digests}) == 1, digests


@pytest.mark.parametrize("name", ["llama", "adapted"])
def test_pipeline_schedules_give_the_same_bits(name: str) -> None:
    layout = Layout(1, 1, 1, 2)
    digests = digests_of(name, [(layout, {"pipeline_chunks": parts}) for parts in (1, 2)])
    # The masks of adapters follow from the layer.
    assert len({digest for _, digest in digests}) == 1, digests


# -- memory -----------------------------------------------------------------------------------------------------------


def local_bytes(runtime: ElasticRuntime, layout: Layout) -> int:
    """Return the bytes of parameters, gradients and optimizer state after a step."""
    model = model_named("llama")
    local = build_local_model(runtime, model, layout, torch.float32)
    optimizer = make_optimizers(local, OptimOptions())[0]
    with replica_of(local, 4) as replica:
        one_step(local, replica, model, 0)
        optimizer.step()
        tensors = [
            t
            for p in local.local_params.values()
            for t in (p, p.grad, *optimizer.state[p].values())
            if isinstance(t, Tensor) and t.dim()
        ]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors
            if t.numel()
        }
    return sum(storages.values())


def test_bytes_per_worker_fall_with_the_number_of_shards() -> None:
    truth = run_ranks(local_bytes, 1, Layout())[0]
    assert truth >= 16 * CONFIG.num_parameters
    for shards in (2, 4):
        for local in run_ranks(local_bytes, shards, Layout(1, shards)):
            assert local == pytest.approx(truth / shards, rel=0.02)
