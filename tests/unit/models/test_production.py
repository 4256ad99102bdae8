"""An exported folder is read by transformers, and has the format that vLLM and SGLang read (docs/production.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors
import torch

from lockstep.cli.main import main
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.models import hub, llama_io
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LlamaConfig, config_to_hf

CPU = torch.device("cpu")
TEXTS = ["How much is 41 + 1?", "Which is larger, 17 or 41?"]
# Parameters of vLLM's and SGLang's LlamaForCausalLM, and the parts that they pack into one of them.
SERVED = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.(qkv_proj|o_proj)"
    r"|mlp\.(gate_up_proj|down_proj)))\.weight|lm_head\.weight"
)
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module", params=[None, "20 KB"], ids=["one file", "shards"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `checkpoint export` has written."""
    folder = tmp_path_factory.mktemp("production")
    config = LlamaConfig(420, 32, 2, 4, 2, 8, 48, max_seq_len=128)
    weights = dict(build_llama(config, device=CPU, seed=1).named_parameters())
    hub.write_hub(folder / "made", config_to_hf(config), weights)
    Tokenizer.train_on_documents(TEXTS * 5, vocab_size=400, min_frequency=1).save_for_llama(
        folder / "made"
    )
    assert main(["checkpoint", "import", str(folder / "made"), "--out", str(folder / "run")]) == 0
    shards = ["--shard-bytes", request.param] if request.param else []
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(folder / "run"),
                "--out",
                str(folder / "exported"),
                *shards,
            ]
        )
        == 0
    )
    return folder / "exported"


@torch.no_grad()
def test_a_pipeline_of_transformers_reads_the_folder_without_arguments(exported: Path) -> None:
    transformers = pytest.importorskip("transformers")
    generate = transformers.pipeline("text-generation", str(exported))
    ids = generate.tokenizer(TEXTS[0], return_tensors="pt").input_ids
    ours = llama_io.load_llama(exported, device=CPU)
    torch.testing.assert_close(generate.model(ids).logits, ours.model(ids), rtol=0, atol=1e-4)
    text = generate(TEXTS[0], max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text.startswith(TEXTS[0])
    chat = generate([{"role": "user", "content": TEXTS[1]}], max_new_tokens=4, do_sample=False)[0][
        "generated_text"
    ]
    assert [message["role"] for message in chat] == ["user", "assistant"]


def test_the_folder_has_what_the_loaders_of_vllm_and_sglang_read(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
    assert (
        config["torch_dtype"] == "float32"
        and config["num_key_value_heads"] == 2
        and config["vocab_size"] > 300
    )
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    } <= {p.name for p in exported.iterdir()}
    shapes = {}
    files = sorted(exported.glob("*.safetensors"))
    for file in files:
        with safetensors.safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            assert not shapes.keys() & set(names), "a tensor in two files is loaded twice"
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    if len(files) > 1:  # the loaders take exactly the files of the index
        index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == shapes.keys() and {
            exported / name for name in index.values()
        } == set(files)
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    packed = {
        name.replace(part, whole)
        for name in shapes
        for whole, parts in PACKED.items()
        for part in parts
        if part in name
    }
    others = {
        name
        for name in shapes
        if not any(part in name for parts in PACKED.values() for part in parts)
    }
    assert all(SERVED.fullmatch(name) for name in packed | others), packed | others
    assert len(packed) == 2 * 2 and len(others) == 2 * 4 + (
        2 if config["tie_word_embeddings"] else 3
    )
