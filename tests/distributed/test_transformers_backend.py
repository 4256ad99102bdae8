"""Fine-tuning of Hugging Face families: the losses of a plain loop; llama.backend=transformers."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed.test_llama_training import CHATS, FROM_HUB, TEXT, evaluated, losses, trained
from packaging.version import Version
from support.launching import lockstep_command, run_command
from support.plain_fine_tuning import plain_losses, write_corpus
from support.ranks import run_ranks
from unit.models.test_families import LONG, SIZES, random_model, rope

from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.models.hub import CONFIG_FILE, open_hub
from lockstep.models.llama_io import load_llama
from lockstep.models.transformers_model import TransformersConfig, TransformersModel
from lockstep.parallel.plans import plan_of
from lockstep.record.metrics import read_metrics
from lockstep.tasks.language_model import draw_greedily, refuse_long_rows

transformers = pytest.importorskip("transformers")
STEPS = 10
FALCON_MIXES = Version(transformers.__version__) < Version("5.24")
BACKEND = {
    **FROM_HUB,
    "llama.backend": "transformers",
    "compute.precision": "fp32",
    "optim.learning_rate": "3e-3",
}
SFT = {
    **BACKEND,
    **{key: CHATS[key] for key in ("task", "data.kind", "batch.tokens", "batch.seq_len")},
    "data.pairs": "60",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },  # final_logit_softcapping: no chunks
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
ORACLES = [  # kind, backend, task, more of its config
    ("qwen3", "lockstep", "sft", {}),
    pytest.param("mistral", "lockstep", "sft", {"sliding_window": None}, marks=pytest.mark.long),
    ("gemma3_text", "transformers", "sft", {}),
    ("gpt_neox", "transformers", "sft", {}),
    *(
        pytest.param(*values, {}, marks=pytest.mark.long)
        for values in [
            ("qwen2", "lockstep", "pretrain"),
            ("qwen3", "transformers", "pretrain"),
            ("mistral", "transformers", "sft"),
            ("gemma2", "transformers", "pretrain"),
            ("gemma3_text", "transformers", "pretrain"),
            ("llama4_text", "transformers", "pretrain"),
            ("mixtral", "transformers", "pretrain"),
        ]
    ),
    pytest.param("phi3", "transformers", "pretrain", LONG, marks=pytest.mark.long),
]
LAYOUTS = [(2, 1), (2, 2), (4, 2)]  # workers, shards of a replica


def hub_folder(kind: str, folder: Path, run: Path, **more: Any) -> Path:
    """A random model of `kind` with the tokenizer of `run`."""
    random_model(kind, {**FAMILIES.get(kind, {}), "vocab_size": 330, **more}, folder)
    for path in (run / "tokenizer").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def start(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Llama, for its tokenizer."""
    folder = tmp_path_factory.mktemp("start") / "run"
    run_ranks(trained, 1, str(folder), {**TEXT, "data.train": str(corpus)}, 1)
    return folder


def losses_of_transformers(hub: Path, run: Path, flags: dict[str, str]) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hub, dtype=torch.float32, attn_implementation="eager"
    ).train()
    return plain_losses(model, run, resolve({}, {**flags, "steps": str(STEPS)}).run)


@pytest.mark.parametrize(("kind", "backend", "task", "more"), ORACLES)
def test_fine_tuning_in_every_layout_has_the_losses_of_a_plain_loop(
    kind: str,
    backend: str,
    task: str,
    more: dict[str, Any],
    corpus: Path,
    start: Path,
    tmp_path: Path,
) -> None:
    hub = hub_folder(kind, tmp_path / "hub", start, **more)
    flags = {**BACKEND, "data.train": str(corpus)} if task == "pretrain" else SFT
    flags = {
        **flags,
        "llama.init_from": str(hub),
        "llama.backend": backend,
        "batch.micro_batches": "4",
    }
    flags["memory.activation_checkpoint"] = "full"
    expected, digests = [0.0], set()
    for workers, shards in LAYOUTS:
        folder = tmp_path / f"{workers}-{shards}"
        in_layout = {
            **flags,
            "layout.shard": str(shards),
            "layout.replicate": str(workers // shards),
        }
        digests.add(run_ranks(trained, workers, str(folder), in_layout, STEPS)[0])
        curve = [loss for loss, _ in losses(folder)]
        expected = expected if len(expected) > 1 else losses_of_transformers(hub, folder, flags)
        assert curve == pytest.approx(expected, rel=1e-4), (workers, shards)
    assert len(digests) == 1 and curve[-1] < curve[0] - 0.3


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("phi3", "llama", "qwen2", "mistral", "gemma2", "gemma3_text")
        ),
    ],
)
def test_split_families_have_the_losses_of_a_plain_loop(
    kind: str, corpus: Path, start: Path, tmp_path: Path
) -> None:
    hub = hub_folder(kind, tmp_path / "hub", start)
    flags = {**SFT, "llama.init_from": str(hub), "batch.micro_batches": "4", "layout.tensor": "2"}
    flags["memory.activation_checkpoint"] = "full" if kind == "qwen3" else "none"
    expected, digests = [0.0], set()
    for workers, shards in [(2, 1), (4, 1), (4, 2)]:
        folder = tmp_path / f"{workers}-{shards}"
        in_layout = {
            **flags,
            "layout.shard": str(shards),
            "layout.replicate": str(workers // shards // 2),
        }
        digests.add(run_ranks(trained, workers, str(folder), in_layout, STEPS)[0])
        curve = [loss for loss, _ in losses(folder)]
        expected = expected if len(expected) > 1 else losses_of_transformers(hub, folder, flags)
        assert curve == pytest.approx(expected, rel=1e-4), (workers, shards)
    assert len(digests) == 1 and curve[-1] < curve[0] - 0.3


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_a_compiled_model_of_the_backend_has_the_losses_of_a_plain_loop(
    shards: int, corpus: Path, start: Path, tmp_path: Path
) -> None:
    hub = hub_folder("qwen3", tmp_path / "hub", start)
    flags = {
        **SFT,
        "llama.init_from": str(hub),
        "batch.micro_batches": "4",
        "compute.compile": "true",
        "layout.shard": str(shards),
    }
    run_ranks(
        trained, 2, str(tmp_path / "run"), {**flags, "layout.replicate": str(2 // shards)}, STEPS
    )
    expected = losses_of_transformers(hub, tmp_path / "run", flags)
    assert [loss for loss, _ in losses(tmp_path / "run")] == pytest.approx(expected, rel=1e-4)


def test_a_split_run_of_the_backend_resumes_on_one_worker(
    corpus: Path, start: Path, tmp_path: Path
) -> None:
    hub = hub_folder("qwen3", tmp_path / "hub", start)
    flags = {**BACKEND, "data.train": str(corpus), "llama.init_from": str(hub)}
    run_ranks(trained, 1, str(tmp_path / "alone"), flags, 5)
    run_ranks(trained, 2, str(tmp_path / "resumed"), {**flags, "layout.tensor": "2"}, 2)
    run_ranks(trained, 1, str(tmp_path / "resumed"), {**flags, "layout.tensor": "1"}, 5)
    alone, resumed = (
        [loss for loss, _ in losses(tmp_path / name)] for name in ("alone", "resumed")
    )
    assert resumed == pytest.approx(alone, rel=1e-4)


def test_a_model_without_a_plan_is_not_split(corpus: Path, start: Path, tmp_path: Path) -> None:
    hub = hub_folder("gpt2", tmp_path / "hub", start, n_embd=32, n_layer=2, n_head=4)
    flags = {
        **BACKEND,
        "data.train": str(corpus),
        "llama.init_from": str(hub),
        "layout.tensor": "2",
    }
    with pytest.raises(AssertionError, match="this model does not support tensor parallelism"):
        run_ranks(trained, 2, str(tmp_path / "run"), flags, 1)


def test_a_sharded_run_of_the_backend_resumes_in_whole_replicas(
    corpus: Path, start: Path, tmp_path: Path
) -> None:
    hub = hub_folder("gemma2", tmp_path / "hub", start)
    flags = {**BACKEND, "data.train": str(corpus), "llama.init_from": str(hub)}
    alone = run_ranks(trained, 1, str(tmp_path / "alone"), flags, 5)
    run_ranks(trained, 2, str(tmp_path / "resumed"), {**flags, "layout.shard": "2"}, 2)
    assert (
        run_ranks(trained, 1, str(tmp_path / "resumed"), {**flags, "layout.shard": "1"}, 5) == alone
    )


@pytest.mark.long
def test_killed_shards_of_a_gemma_heal_with_the_same_bits(start: Path, tmp_path: Path) -> None:
    """In as many steps as a replacement needs to import `transformers` and to join."""
    hub = hub_folder("gemma3_text", tmp_path / "hub", start)
    flags = {
        **SFT,
        "llama.init_from": str(hub),
        "batch.micro_batches": "4",
        "layout.replicate": "2",
        "layout.shard": "2",
    }
    words = [
        "drill",
        "--faults",
        "2",
        "--seed",
        "3",
        "--steps",
        "300",
        "--out",
        str(tmp_path / "drill"),
    ]
    command = lockstep_command(
        *words, *(word for key, value in flags.items() for word in (f"--{key}", value))
    )
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = run_command(command, timeout=400, env=environ)
    assert result.returncode == 0 and "the same bits" in result.stdout, (
        result.stdout + result.stderr
    )


@pytest.mark.parametrize(
    ("kind", "backend", "more"),
    [
        ("qwen3", "lockstep", {}),
        pytest.param("mistral", "lockstep", {"sliding_window": None}, marks=pytest.mark.long),
        pytest.param("gemma2", "transformers", {}, marks=pytest.mark.long),
        pytest.param("mixtral", "transformers", {}, marks=pytest.mark.long),
        ("gpt_neox", "transformers", {}),
        ("gemma3_text", "transformers", {}),
    ],
)
def test_a_run_without_updates_exports_the_folder_that_it_started_from(
    kind: str, backend: str, more: dict[str, Any], corpus: Path, start: Path, tmp_path: Path
) -> None:
    """Also for `transformers`: tokenizer, chat template and generation config."""
    hub, export = hub_folder(kind, tmp_path / "hub", start, **more), tmp_path / "export"
    settings = {"do_sample": True, "temperature": 0.7, "eos_token_id": [1, 3]}
    (hub / "generation_config.json").write_text(json.dumps(settings))
    (hub / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    )
    flags = {
        **BACKEND,
        "data.train": str(corpus),
        "llama.init_from": str(hub),
        "optim.learning_rate": "0",
        "layout.shard": "2",
    }
    flags["llama.backend"] = backend
    run_ranks(trained, 2, str(tmp_path / "run"), flags, 1)
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--out", str(export)]) == 0
    tensors = [open_hub(path, backend).tensors for path in (hub, export)]
    assert list(tensors[0]) == list(tensors[1]) and all(
        torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]
    )
    models, tokenizers = (
        [auto.from_pretrained(path) for path in (hub, export)]
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    assert models[0].config.to_diff_dict() == models[1].config.to_diff_dict()
    assert models[0].generation_config.to_dict() == models[1].generation_config.to_dict()
    assert models[1].generation_config.temperature == 0.7 and models[
        1
    ].generation_config.eos_token_id == [1, 3]
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "saw 42"}]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in tokenizers]
    assert texts == ["<user>the cat<assistant>saw 42"] * 2
    ids = [
        tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        for tokenizer in tokenizers
    ]
    with torch.no_grad():
        assert torch.equal(ids[0], ids[1]) and torch.equal(
            models[0](ids[0]).logits, models[1](ids[1]).logits
        )


def test_a_run_of_chats_is_scored_and_exported(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, run = hub_folder("gemma3_text", tmp_path / "hub", start), tmp_path / "run"
    run_ranks(
        trained, 2, str(run), {**SFT, "data.held_out_share": "0.1", "llama.init_from": str(hub)}, 2
    )
    run_ranks(evaluated, 1, str(run), "test")
    record = read_metrics(run / "evaluations.jsonl")[0]
    assert record["chats"] > 0 and 0 <= record["exact_match"] <= 1 and record["loss"] > 0
    before = transformers.AutoModelForCausalLM.from_pretrained(hub)
    assert main(["checkpoint", "export", str(run), "2", "--out", str(tmp_path / "export")]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert (
        after.config.model_type == "gemma3_text"
        and (tmp_path / "export" / "tokenizer.json").is_file()
    )
    changed = [
        not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert all(changed)
    capsys.readouterr()
    assert main(["generate", str(run), "a"]) == 2
    assert "checkpoint export" in capsys.readouterr().err


DYNAMIC = rope(rope_type="dynamic", factor=2.0)
MORE = {
    "granite": {"logits_scaling": 2.0},
    "gemma2": {"head_dim": 8},
    "llama4_text": FAMILIES["llama4_text"],
}


@pytest.mark.parametrize(
    ("kind", "ropes"),
    [
        *(
            (kind, {})
            for kind in (
                "llama",
                "gemma",
                "gemma2",
                "phi",
                "phi3",
                "gpt2",
                "cohere",
                "granite",
                "olmo2",
                "stablelm",
                "starcoder2",
            )
        ),
        ("llama4_text", {}),
        *[("falcon", {})] * (not FALCON_MIXES),
        ("phi3", LONG),
        ("llama", DYNAMIC),
    ],
)
def test_every_family_has_the_loss_of_its_documents_alone(
    kind: str, ropes: dict[str, Any], tmp_path: Path
) -> None:
    more = MORE.get(kind, {}) | ropes
    plain = random_model(kind, {**more, "tie_word_embeddings": False}, tmp_path)
    folder = open_hub(tmp_path, "transformers")
    assert isinstance(folder.config, TransformersConfig)
    model = load_llama(tmp_path, device=torch.device("cpu"), backend="transformers").model
    units = plan_of(model).units
    assert len(units) == SIZES["num_hidden_layers"] and all(
        name.startswith("inner.") for name in units
    )
    tokens = torch.randint(3, 199, (2, 24))
    documents = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [0] * 24])
    labels = torch.randint(3, 199, (2, 24))
    labels[0, 5] = -100
    expected = 0.0
    with torch.no_grad():
        for row in range(2):
            for document in documents[row].unique():
                inside = documents[row] == document
                expected += float(
                    F.cross_entropy(
                        plain(tokens[row, inside][None]).logits[0],
                        labels[row, inside],
                        reduction="sum",
                    )
                )
        loss = float(model(tokens, labels, documents))
    assert math.isclose(loss, expected, rel_tol=1e-5)
    assert model.chunked == (kind not in ("phi", "cohere", "granite", "gemma2", "llama4_text"))


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
GRANITE_4 = {
    **MAMBA,
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 48,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mamba", {"state_size": 4}),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
        ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
        ("falcon_h1", {**MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 1, "head_dim": 8}),
        ("granitemoehybrid", GRANITE_4),
        ("xglm", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
        ("bloom", {}),
        *[("falcon", {})] * FALCON_MIXES,
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ],
)
def test_models_that_mix_the_documents_of_a_row_are_refused(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    random_model(kind, more, tmp_path)
    model = load_llama(tmp_path, device=torch.device("cpu"), backend="transformers").model
    with pytest.raises(UsageError, match="mixes the documents of a row"):
        model(torch.arange(8)[None], torch.arange(8)[None], torch.arange(8)[None])
    assert model(torch.arange(8)[None], torch.arange(8)[None]) > 0  # one document


@pytest.mark.parametrize(
    ("kind", "task", "more"),
    [
        ("bloom", "sft", {}),
        *[pytest.param("falcon", "pretrain", {}, marks=pytest.mark.long)] * FALCON_MIXES,
        pytest.param("mamba", "pretrain", {"state_size": 4}, marks=pytest.mark.long),
    ],
)
def test_a_model_that_mixes_documents_trains_on_rows_of_one(
    kind: str, task: str, more: dict[str, Any], corpus: Path, start: Path, tmp_path: Path
) -> None:
    hub = hub_folder(kind, tmp_path / "hub", start, **more)
    flags = {**BACKEND, "data.train": str(corpus)} if task == "pretrain" else SFT
    flags = {**flags, "llama.init_from": str(hub), "batch.micro_batches": "4"}
    flags["data.held_out_share"] = "0.1"
    with pytest.raises(AssertionError, match=r"mixes the documents of a row.*\n.*\n.*data.packing"):
        run_ranks(trained, 1, str(tmp_path / "packed"), flags, 1)
    flags["data.packing"] = "false"
    digests = set()
    for workers, shards in [(1, 1), (2, 2)]:
        folder = tmp_path / f"{workers}-{shards}"
        in_layout = {**flags, "layout.shard": str(shards)}
        digests.add(run_ranks(trained, workers, str(folder), in_layout, STEPS)[0])
        expected = losses_of_transformers(hub, folder, flags)
        assert [loss for loss, _ in losses(folder)] == pytest.approx(expected, rel=1e-4)
    assert len(digests) == 1
    run_ranks(evaluated, 1, str(folder), "test")
    assert read_metrics(folder / "evaluations.jsonl")[0]["loss"] > 0


@pytest.mark.parametrize(
    ("kind", "more", "positions", "message"),
    [
        ("gpt2", {"n_positions": 64}, 64, "above the 64 positions"),
        ("llama", {}, 64, "above the 64 positions"),
        ("llama", DYNAMIC, 64, "beyond 64 positions a rope of type dynamic"),
        (
            "phi3",
            {**LONG, "original_max_position_embeddings": 32},
            32,
            "beyond 32 positions a rope of type longrope",
        ),
        ("llama", rope(rope_type="linear", factor=2.0), 128, "above the 128 positions"),
        (
            "llama",
            rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
            128,
            "above the 128 positions",
        ),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 8}, 64, "above the 64 positions"),
        ("mamba", {"state_size": 4}, 0, ""),
    ],
)
def test_rows_longer_than_the_context_after_scaling_are_refused(
    kind: str, more: dict[str, Any], positions: int, message: str, tmp_path: Path
) -> None:
    more = more if kind != "mamba" else more | {"max_position_embeddings": None}
    random_model(kind, more, tmp_path)
    config = open_hub(tmp_path, "transformers").config
    assert config.max_seq_len == positions
    for length in (32, 64, 128, 256):
        flags = {
            "batch.seq_len": str(length),
            "batch.tokens": "256",
            "data.train": "x",
            "llama.init_from": str(tmp_path),
        }
        run = resolve({}, {**BACKEND, **flags}).run
        if not positions or length <= positions:
            refuse_long_rows(run, config)
            continue
        with pytest.raises(ConfigError, match=message) as caught:
            refuse_long_rows(run, config)
        assert (
            f"batch.seq_len={length}" in caught.value.what
            and f"batch.seq_len={positions}" in caught.value.hint
        )


def test_a_rope_that_depends_on_earlier_batches_is_refused_before_training(
    corpus: Path, start: Path, tmp_path: Path
) -> None:
    """transformers changes its frequencies with the longest document so far."""
    hub = hub_folder("llama", tmp_path / "hub", start, **DYNAMIC)
    flags = {
        **BACKEND,
        "data.train": str(corpus),
        "llama.init_from": str(hub),
        "batch.seq_len": "128",
        "batch.tokens": "128",
    }
    with pytest.raises(
        AssertionError,
        match="beyond 64 positions a rope of type dynamic follows the longest document",
    ):
        run_ranks(trained, 1, str(tmp_path / "run"), flags, 1)


def test_an_answer_ends_at_the_last_position_of_the_model(tmp_path: Path) -> None:
    random_model("gpt2", {"n_positions": 64}, tmp_path)
    model = load_llama(tmp_path, device=torch.device("cpu"), backend="transformers").model
    assert isinstance(model, TransformersModel)
    assert len(list(draw_greedily(model, [5] * 60, tokens=20))) == 5, (
        "the last one follows position 63"
    )


def test_values_that_the_backend_does_not_support_are_refused(tmp_path: Path) -> None:
    unsupported = {
        "llama.max_seq_len": "64",
        "memory.weights": "bf16",
        "layout.pipeline": "2",
    }
    for key, value in unsupported.items():
        with pytest.raises(
            ConfigError, match=f"llama.backend=transformers does not support {key}={value}\n"
        ) as caught:
            resolve({}, {**BACKEND, "data.train": "x", "llama.init_from": "HF", key: value})
        assert f"{key} from command line" in caught.value.where
    adapted = {"data.train": "x", "llama.init_from": "HF", "lora.rank": "4", "layout.tensor": "2"}
    with pytest.raises(
        ConfigError, match=r"does not support lora\.rank with layout\.tensor"
    ) as caught:
        resolve({}, {**BACKEND, **adapted})
    assert "layout.tensor from command line" in caught.value.where
    with pytest.raises(ConfigError, match=r"needs llama\.init_from, which is empty"):
        resolve({}, {**BACKEND, "data.train": "x"})
    random_model("llama", {}, tmp_path)
    for key, value in (
        ("model_type", "unheard"),
        ("quantization_config", {"bits": 4}),
        ("hidden_size", 64),
    ):
        config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], key: value}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            open_hub(tmp_path, "transformers")
