"""Plans: which weights the tensor axis splits, and which modules a pipeline stage keeps."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from lockstep.config import schema as config
from lockstep.config.schema import LoraOptions
from lockstep.errors import UsageError
from lockstep.layout import LayoutLimits
from lockstep.models.llama import Llama
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.models.lora import add_adapters
from lockstep.models.translator import Translator, translator_on_meta
from lockstep.parallel.plans import build_stage, plan_of, styles_of
from lockstep.parallel.tensor_parallel import tensor_slices


def llama() -> Llama:
    with torch.device("meta"):
        return Llama(LLAMA_CONFIGS["1M"])


def translator() -> Translator:
    section = config.ModelOptions(dim=16, n_heads=4, encoder_layers=2, decoder_layers=2, ffn_dim=24)
    return translator_on_meta(section, 30, "cpu", 1)


@pytest.mark.parametrize("model", [llama(), translator()], ids=["llama", "translator"])
def test_slices_of_all_parts_cover_each_split_weight_once(model: nn.Module) -> None:
    parts = [tensor_slices(model, plan_of(model), part, 2) for part in (0, 1)]
    for name, parameter in model.named_parameters():
        sizes = [torch.Size(part[name].local_shape).numel() for part in parts]
        whole = parts[0][name].is_whole
        assert whole == parts[1][name].is_whole == ("norm" in name or "embedding" in name)
        assert sum(sizes) == parameter.numel() * (2 if whole else 1)
        assert whole or 0 in parts[0][name].intersection(parts[1][name]).local_shape


def test_limits_of_a_plan_name_what_an_axis_must_divide() -> None:
    assert plan_of(llama()).layout_limits(8) == LayoutLimits(8, (4, 2, 384), 4)
    assert plan_of(translator()).layout_limits(8) == LayoutLimits(8, (4, 24), 4)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("gpt2", {}, "no plan of the layers of GPT2LMHeadModel"),
        (
            "qwen3_moe",
            {"num_experts": 4},
            "not supported: packed_colwise of model.layers.*.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_models_of_transformers_without_a_supported_plan_are_refused(
    kind: str, more: dict[str, int], message: str
) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **more)
        )
    with pytest.raises(UsageError, match=re.escape(message)):
        styles_of(model, "auto")


def test_adapters_are_split_with_their_weights() -> None:
    model = add_adapters(llama(), LoraOptions(2, 4.0, ("query", "down")))
    slices = tensor_slices(model, plan_of(model), 0, 2)
    whole = {name for name, part in slices.items() if "lora" in name and part.is_whole}
    assert whole == {
        f"layers.{i}.{name}"
        for i in range(4)
        for name in ("attention.query.lora_down", "feed_forward.out.lora_up")
    }


@pytest.mark.parametrize(
    ("stage", "kept"),
    [(0, ("encoder.0", "encoder.1", "encoder_norm")), (1, ("decoder.0", "decoder.1"))],
)
def test_plan_within_a_stage_has_only_its_units(stage: int, kept: tuple[str, ...]) -> None:
    model = translator()
    plan = plan_of(model)
    pipeline_stage = build_stage(model, stage, 2, 1)
    within = plan.within(model)
    assert within.units == kept
    assert {region.rpartition(".")[0] for region in within.regions} == {
        name for name in kept if name != "encoder_norm"
    }
    assert isinstance(model.decoder_norm, nn.Identity) == (stage == 0)
    assert (pipeline_stage.lent, pipeline_stage.borrowed) == (
        (("embedding.weight",), ()) if stage == 0 else ((), ("embedding.weight",))
    )


def test_middle_stage_of_a_llama_has_neither_embedding_nor_norm() -> None:
    model = llama()
    build_stage(model, 1, 4, 1)
    names = {name.partition(".")[0] for name, _ in model.named_parameters()}
    assert names == {"layers"} and model.output is None


def test_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="Linear cannot be sharded or split"):
        plan_of(nn.Linear(2, 2))
