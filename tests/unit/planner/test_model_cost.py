"""The counted cost of the built-in models equals that of real modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.resolve import resolve
from lockstep.config.schema import ModelOptions, RunConfig
from lockstep.layout import Layout
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LlamaConfig
from lockstep.models.translator import build_translator, translator_on_meta
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import plan_of
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.planner.count_model import run_cost
from lockstep.planner.model_cost import Mode, ModelCost

CPU = torch.device("cpu")
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor], precision: str) -> int:
    """Return the bytes that autograd keeps besides the parameters, each storage once."""
    kept: dict[int, Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            kept[pointer] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def assert_same(
    cost: ModelCost, model: nn.Module, loss: Callable[[], Tensor], precision: str, tensor: int
) -> None:
    assert [p.on(tensor) for unit in cost.units for p in unit.parameters] == [
        p.numel() for p in model.parameters()
    ]
    assert sum(unit.saved["none"].on(tensor) for unit in cost.units) == saved_bytes(
        model, loss, precision
    )


def run_with(precision: str, task: str = "pretrain") -> RunConfig:
    flags = {"compute.precision": precision, "task": task}
    return resolve(flags=flags | ({"data.kind": "stdlib"} if task == "pretrain" else {})).run


@PRECISIONS
@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype"
)  # of torch, about its norm without a fused kernel
@pytest.mark.parametrize(
    "values", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tie_embeddings": False}], ids=str
)
def test_llama(values: dict[str, bool], precision: str) -> None:
    config = LlamaConfig(
        512,
        96,
        2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=40,
        ffn_dim=176,
        **({"tie_embeddings": True} | values),
    )
    model, tokens = build_llama(config, device=CPU, seed=1), torch.randint(0, 512, (2, 48))
    cost = run_cost(run_with(precision), config.meta_model, [(2, 48)])
    assert_same(cost, model, lambda: model(tokens, tokens), precision, 1)
    assert cost.parameters == config.num_parameters


@PRECISIONS
def test_translator(precision: str) -> None:
    options = ModelOptions(dim=96, n_heads=4, ffn_dim=176, encoder_layers=2, decoder_layers=3)
    model = build_translator(options, vocab_size=512, device=CPU, seed=1)
    source, target = torch.randint(1, 512, (3, 20)), torch.randint(1, 512, (3, 24))
    build = partial(translator_on_meta, options, 512, "cpu", 24)
    cost = run_cost(run_with(precision, "translate"), build, [(3, 20), (3, 24)])
    assert_same(cost, model, lambda: model(source, target, target, smoothing=0.1), precision, 1)


def test_a_rank_of_the_tensor_axis() -> None:
    config = LlamaConfig(
        512, 96, 2, n_heads=4, n_kv_heads=2, head_dim=40, ffn_dim=176, tie_embeddings=True
    )
    model, tokens = build_llama(config, device=CPU, seed=1), torch.randint(0, 512, (2, 48))
    apply_tensor_parallel(model, plan_of(model), ProcessGroups(Layout(tensor=2)), 0, 2)
    assert_same(
        run_cost(run_with("fp32"), config.meta_model, [(2, 48)]),
        model,
        lambda: model(tokens, tokens),
        "fp32",
        2,
    )


def test_products_and_sums_of_a_layer() -> None:
    config = LlamaConfig(
        512, 96, 5, n_heads=4, n_kv_heads=2, head_dim=40, ffn_dim=176, tie_embeddings=True
    )
    cost = run_cost(run_with("fp32"), config.meta_model, [(2, 48)])
    tokens = 2 * 48
    weights = 96 * (2 * 160 + 2 * 80) + 3 * 96 * 176
    assert [unit.kind for unit in cost.units] == ["embedding", *["layer"] * 5, "output"]
    for layer in cost.blocks:
        assert layer.macs == (0, tokens * (weights + 2 * 48 * 160))
        assert layer.sums == ([tokens * 96] * 2, [tokens * 96] * 2)
    assert (cost.embedding.macs, cost.output.macs) == ((0, 0), (tokens * 96 * 512, 0))
    assert (cost.heads, cost.layers, cost.passed, cost.tokens) == ((4, 2, 176), 5, tokens * 96, 96)


@PRECISIONS
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_checkpointed_layer_keeps_what_its_second_pass_needs(mode: Mode, precision: str) -> None:
    """The second layer: the first one also keeps what all layers share."""
    config = LlamaConfig(512, 96, 2, n_heads=4, n_kv_heads=2, head_dim=40, ffn_dim=176)
    cost = run_cost(run_with(precision), config.meta_model, [(2, 48)])
    tokens = 2 * 48
    narrow = 4 if precision == "fp32" else 2
    products = narrow * tokens * (2 * 96 + 2 * 160 + 2 * 80 + 2 * 176) + 4 * tokens * 4
    kept = 4 * tokens * 96 + (products if mode == "selective" else 0)
    assert cost.blocks[1].saved[mode].on(1) == kept
