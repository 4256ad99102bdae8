"""Small random folders of `transformers`: equal logits, or a refusal that names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import CheckpointError
from lockstep.generation.decoder import Decoder
from lockstep.generation.sampling import sample_tokens
from lockstep.models import hub, llama_io
from lockstep.models.llama_config import FAMILIES

CPU = torch.device("cpu")
V = 199
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **values}}


LONG = rope(
    rope_type="longrope",
    short_factor=[1.0] * 4,
    long_factor=[2.0] * 4,
    original_max_position_embeddings=32,
)
EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("llama", {"head_dim": 12, "rope_parameters": LLAMA_3}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": None, "head_dim": 16, **rope(rope_theta=1e6)}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "sliding_window": 16, "rms_norm_eps": 1e-3}),
    ("qwen2", {"num_key_value_heads": 1, "rope_parameters": LLAMA_3}),
    ("qwen3", {"head_dim": 8}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    ("phi3", {}),
    ("phi3", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    ("smollm3", {"no_rope_layer_interval": 2, "num_hidden_layers": 5, "rope_parameters": LLAMA_3}),
    ("smollm3", {}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", rope(rope_type="linear", factor=2.0), "rope_type"),
    ("llama", rope(rope_type="dynamic", factor=2.0), "rope_type"),
    ("llama", rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=32), "rope_type"),
    ("mistral", {"sliding_window": 16}, "sliding_window"),
    ("mistral", {"sliding_window": None, "hidden_act": "gelu"}, "hidden_act"),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "sliding",
    ),
    ("qwen2", rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=32), "rope_type"),
    ("qwen3", {"head_dim": 8, "attention_bias": True}, "attention_bias"),
    (
        "qwen3",
        {
            "head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
        },
        "sliding",
    ),
    ("phi3", {"sliding_window": 16}, "sliding_window"),
    ("phi3", LONG, "rope_type"),
    ("phi3", rope(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop"),
    ("gemma", {"head_dim": 8}, "GemmaForCausalLM"),
    ("gemma2", {"head_dim": 8}, "Gemma2ForCausalLM"),
    ("gemma3_text", {"head_dim": 8}, "Gemma3ForCausalLM"),
    ("phi", {}, "PhiForCausalLM"),
    ("olmo2", {}, "Olmo2ForCausalLM"),
    ("granite", {"logits_scaling": 2.0}, "GraniteForCausalLM"),
    ("cohere", {}, "CohereForCausalLM"),
    ("starcoder2", {}, "Starcoder2ForCausalLM"),
    ("gpt_neox", {}, "GPTNeoXForCausalLM"),
    ("stablelm", {}, "StableLmForCausalLM"),
    ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True}, "attention_bias"),
    (
        "smollm3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 16,
        },
        "sliding",
    ),
]


def random_model(kind: str, more: dict[str, Any], folder: Path) -> Any:
    """Save a model whose every parameter is random, biases and norms too; return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("kind", "more"), EQUAL)
@torch.no_grad()
def test_accepted_folders_have_the_logits_of_transformers(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Also greedy decoding with a cache, and the model that `transformers` reads from the export."""
    transformers = pytest.importorskip("transformers")
    theirs, tokens = random_model(kind, more, tmp_path / "hub"), torch.randint(3, V, (2, 60))
    ours = llama_io.load_llama(tmp_path / "hub", device=CPU).model
    assert ours.config.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    logits = theirs(tokens).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=1e-4)
    continued = theirs.generate(
        tokens[:, :20], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[:, 20:]
    continuation = list(sample_tokens(Decoder(ours, rows=2), tokens[:, :20].tolist(), tokens=20))
    assert torch.tensor(continuation).T.tolist() == continued.tolist()
    llama_io.import_hub(tmp_path / "hub", tmp_path / "run")
    llama_io.export_run(tmp_path / "run", None, tmp_path / "export")
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager"
    ).eval()
    assert torch.equal(exported(tokens).logits, logits) or kind == "phi3"
    torch.testing.assert_close(exported(tokens).logits, logits, rtol=0, atol=1e-4)
    before, after = (hub.open_hub(tmp_path / name).tensors for name in ("hub", "export"))
    assert list(before) == list(after) and all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_every_family_is_tried_here_and_named_in_the_docs() -> None:
    assert [*FAMILIES] == [*dict.fromkeys(kind for kind, _ in EQUAL)]
    page = (Path(__file__).parents[3] / "docs/llama.md").read_text()
    assert not [f.architecture for f in FAMILIES.values() if f"`{f.architecture}`" not in page]


@pytest.mark.parametrize(("kind", "more", "key"), REFUSED)
def test_other_folders_are_refused_with_the_key(
    kind: str, more: dict[str, Any], key: str, tmp_path: Path
) -> None:
    random_model(kind, more, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        hub.open_hub(tmp_path)
    assert key in caught.value.what


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("mistral", "sliding_window"),
        ("qwen2", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("phi3", "rms_norm_eps"),
        ("smollm3", "no_rope_layers"),
    ],
)
def test_missing_keys_whose_default_differs_between_families_are_refused(
    kind: str, key: str, tmp_path: Path
) -> None:
    random_model(kind, {"head_dim": 8, "sliding_window": None}, tmp_path)
    hub.open_hub(tmp_path)
    config = json.loads((tmp_path / hub.CONFIG_FILE).read_text())
    del config[key]
    (tmp_path / hub.CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        hub.open_hub(tmp_path)


@torch.no_grad()
def test_a_smollm3_without_the_keys_that_transformers_4_leaves_out_has_its_logits(
    tmp_path: Path,
) -> None:
    """transformers 4 writes no tie_word_embeddings that is true; its defaults are not Llama's."""
    transformers = pytest.importorskip("transformers")
    random_model("smollm3", {"num_hidden_layers": 4}, tmp_path)
    config = json.loads((tmp_path / hub.CONFIG_FILE).read_text())
    del config["tie_word_embeddings"]
    del config["rope_parameters"]
    (tmp_path / hub.CONFIG_FILE).write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.tie_word_embeddings
    tokens = torch.arange(3, 63)[None]
    ours = llama_io.load_llama(tmp_path, device=CPU).model
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [*FAMILIES])
def test_missing_keys_have_the_defaults_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    default = type(transformers.AutoConfig.for_model(kind))()
    assert FAMILIES[kind].tied == default.tie_word_embeddings
    assert FAMILIES[kind].theta == default.rope_parameters["rope_theta"]
