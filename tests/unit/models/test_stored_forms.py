"""Folders whose tensors `transformers` converts as it reads them, and text models of multimodal
ones: the same logits, and the same bits in an export."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from unit.models.test_families import SIZES, V, random_model

from lockstep.config.resolve import resolve
from lockstep.config.schema import LoraOptions
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import write_json
from lockstep.models.hub import CONFIG_FILE, WEIGHTS_FILE, open_hub, write_hub
from lockstep.models.llama_io import InitialWeights, RunModel, load_llama, peft_config_of
from lockstep.models.transformers_model import TransformersConfig

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 43).view(2, 20)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
}  # fmt: skip
PLAIN_VISION = {**VISION, "model_type": "clip_vision_model"}
MULTIMODAL: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "gemma3",
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
        {**VISION, "model_type": "siglip_vision_model"},
        "Gemma3ForCausalLM",
    ),
    ("llava", {"model_type": "llama"}, PLAIN_VISION, "LlamaForCausalLM"),
    (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 8},
        {**VISION, "model_type": "pixtral"},
        "MistralForCausalLM",
    ),
    ("idefics3", {"model_type": "llama"}, VISION, "LlamaForCausalLM"),
]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt_neox", {}),
        ("mixtral", EXPERTS),
        ("phimoe", EXPERTS),
        ("qwen2_moe", QWEN_EXPERTS),
        ("qwen3_moe", {**QWEN_EXPERTS, "head_dim": 8}),
    ],
)
@torch.no_grad()
def test_converted_tensors_have_the_logits_and_are_exported_as_they_were(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    theirs = random_model(kind, more, tmp_path / "hub")
    folder = open_hub(tmp_path / "hub", "transformers")
    assert isinstance(folder.config, TransformersConfig)
    ours = load_llama(tmp_path / "hub", device=CPU, backend="transformers").model
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)
    write_hub(tmp_path / "export", folder.hf_config, folder.config.as_stored(folder.tensors))
    before, after = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("hub", "export"))
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.parametrize("name", ["embed_out.weight", "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"])
def test_a_missing_tensor_of_a_converted_model_is_refused(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    random_model("gpt_neox", {}, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    del tensors[name]
    safetensors.save_file(tensors, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    folder = open_hub(tmp_path, "transformers")
    with pytest.raises(CheckpointError) as caught:
        next(iter(folder.tensors.values()))
    assert name.rpartition(".")[0].replace("embed_out", "lm_head") in str(caught.value)


def test_converted_tensors_are_in_memory_from_their_first_use_to_their_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model("gpt_neox", {}, tmp_path)
    read: list[weakref.ref[torch.Tensor]] = []
    convert = TransformersConfig.convert

    def counted(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = convert(*arguments)
        read.append(weakref.ref(next(iter(tensors.values()))))
        return tensors

    monkeypatch.setattr(TransformersConfig, "convert", counted)
    run = resolve(
        None,
        {
            "task": "pretrain",
            "data.kind": "stdlib",
            "llama.backend": "transformers",
            "llama.init_from": str(tmp_path),
        },
    ).run
    initial = InitialWeights.of(run, V)
    meta = initial.meta_model()
    assert not read and initial.start
    sha256 = initial.start.sha256()
    for name, parameter in meta.named_parameters():
        assert initial.init_param(name, parameter.shape).shape == parameter.shape
    assert len(read) == 1 and read[0]() is not None
    initial.release()
    gc.collect()
    assert read[0]() is None
    assert initial.start.sha256() == sha256 and len(read) == 2


@torch.no_grad()
def test_buffers_that_older_versions_stored_are_not_counted(tmp_path: Path) -> None:
    """As in published Pythia folders: in half precision beside a mask and float32 frequencies."""
    safetensors = pytest.importorskip("safetensors.torch")
    random_model("gpt_neox", {}, tmp_path)
    tensors = {name: t.half() for name, t in load_file(tmp_path / WEIGHTS_FILE).items()}
    buffers = {
        "bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(2),
    }
    buffers = {f"gpt_neox.layers.0.attention.{name}": buffer for name, buffer in buffers.items()}
    safetensors.save_file(tensors | buffers, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    folder = open_hub(tmp_path, "transformers")
    assert isinstance(folder.config, TransformersConfig)
    assert folder.dtype == "float16"
    stored = folder.config.as_stored(folder.tensors)
    assert {f"inner.{name}" for name in tensors} == stored.keys()
    assert all(torch.equal(stored[f"inner.{name}"], tensors[name]) for name in tensors)
    name = "gpt_neox.layers.0.attention.dense.weight"
    mixed = tensors | buffers | {name: tensors[name].float()}
    safetensors.save_file(mixed, tmp_path / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="dtypes F16, F32"):
        open_hub(tmp_path, "transformers")


@pytest.mark.parametrize(("kind", "text", "vision", "architecture"), MULTIMODAL)
@torch.no_grad()
def test_the_text_model_of_a_multimodal_folder_has_its_logits(
    kind: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    architecture: str,
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(
        kind, text_config={**SIZES, **text}, vision_config=vision, image_token_index=V - 1
    )
    theirs = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in theirs.eval().parameters():
        parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    theirs.save_pretrained(tmp_path / "hub")
    folder = open_hub(tmp_path / "hub", "transformers")
    assert folder.hf_config["architectures"] == [architecture]
    ours = load_llama(tmp_path / "hub", device=CPU, backend="transformers").model
    logits = theirs(input_ids=TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), logits, rtol=0, atol=1e-4)
    assert isinstance(folder.config, TransformersConfig)
    write_hub(tmp_path / "export", folder.hf_config, folder.config.as_stored(folder.tensors))
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert type(exported).__name__ == architecture
    torch.testing.assert_close(exported(TOKENS).logits, logits, rtol=0, atol=1e-4)
    with pytest.raises(CheckpointError, match=r"architecture is .*ForConditionalGeneration"):
        open_hub(tmp_path / "hub")


def test_a_multimodal_folder_without_a_causal_text_model_is_refused(tmp_path: Path) -> None:
    hf_config = {"model_type": "qwen2_vl", "text_config": {**SIZES, "model_type": "qwen2_vl_text"}}
    with pytest.raises(CheckpointError, match="qwen2_vl_text is not a causal language model"):
        TransformersConfig(hf_config).text_part()


@pytest.mark.parametrize(("kind", "text", "vision", "architecture"), MULTIMODAL)
def test_adapters_of_a_multimodal_folder_are_not_exported(
    kind: str, text: dict[str, Any], vision: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """`peft` would find no module of their names in the folder, and only warn."""
    hf_config = {
        "model_type": kind,
        "text_config": {**SIZES, **text},
        "vision_config": vision,
    }
    config = TransformersConfig(hf_config).text_part()
    run = RunModel(
        config, dict(config.hf_config), LoraOptions(rank=2), str(tmp_path), "", "float32"
    )
    assert peft_config_of(tmp_path / "run", run)["r"] == 2
    write_json(tmp_path / CONFIG_FILE, hf_config)
    with pytest.raises(UsageError, match="is multimodal") as caught:
        peft_config_of(tmp_path / "run", run)
    assert "merged text model" in caught.value.hint
