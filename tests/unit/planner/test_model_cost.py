"""The counted cost of the built-in models equals that of real modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.schema import ModelOptions
from lockstep.layout import Layout
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LlamaConfig
from lockstep.models.translator import build_translator
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import plan_of
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.planner.model_cost import MicroBatch, ModelCost, llama_cost, translator_cost

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
    units = (cost.embedding, *cost.blocks, cost.output)
    assert [p.on(tensor) for unit in units for p in unit.parameters] == [
        p.numel() for p in model.parameters()
    ]
    assert sum(unit.saved["none"].bytes(tensor, precision) for unit in units) == saved_bytes(
        model, loss, precision
    )


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
    cost = llama_cost(config, MicroBatch(2, 48), precision)
    assert_same(cost, model, lambda: model(tokens, tokens), precision, 1)
    assert cost.parameters == config.num_parameters


@PRECISIONS
def test_translator(precision: str) -> None:
    options = ModelOptions(dim=96, n_heads=4, ffn_dim=176, encoder_layers=2, decoder_layers=3)
    model = build_translator(options, vocab_size=512, device=CPU, seed=1)
    source, target = torch.randint(1, 512, (3, 20)), torch.randint(1, 512, (3, 24))
    cost = translator_cost(options, 512, MicroBatch(3, 24, 20), precision)
    assert_same(cost, model, lambda: model(source, target, target, smoothing=0.1), precision, 1)


def test_a_rank_of_the_tensor_axis() -> None:
    config = LlamaConfig(
        512, 96, 2, n_heads=4, n_kv_heads=2, head_dim=40, ffn_dim=176, tie_embeddings=True
    )
    model, tokens = build_llama(config, device=CPU, seed=1), torch.randint(0, 512, (2, 48))
    apply_tensor_parallel(model, plan_of(model), ProcessGroups(Layout(tensor=2)), 0, 2)
    assert_same(
        llama_cost(config, MicroBatch(2, 48), "fp32"),
        model,
        lambda: model(tokens, tokens),
        "fp32",
        2,
    )
