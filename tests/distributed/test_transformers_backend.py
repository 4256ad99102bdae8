"""llama.backend=transformers: the losses of a plain loop of `transformers`; save, resume, export."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed.test_llama_training import CHATS, TEXT, evaluated, losses, trained
from support.ranks import run_ranks
from unit.models.test_families import SIZES, random_model

from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.data.order import UniformOrder
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.data.text.packing import CutRows
from lockstep.data.text.prepare import open_prepared
from lockstep.errors import CheckpointError, ConfigError, UsageError
from lockstep.models.hub import CONFIG_FILE, open_hub
from lockstep.models.llama_io import load_llama
from lockstep.models.transformers_model import TransformersConfig
from lockstep.record.metrics import read_metrics

BACKEND = {**TEXT, "llama.backend": "transformers", "compute.precision": "fp32", "optim.learning_rate": "3e-3"}
BACKEND = {key: value for key, value in BACKEND.items() if key not in ("tokenizer.vocab_size", "llama.size")}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True},  # final_logit_softcapping: no chunks
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def hub_folder(kind: str, folder: Path, run: Path, **more: Any) -> Path:
    """A random model of `kind` with the tokenizer of `run`."""
    random_model(kind, {**FAMILIES.get(kind, {}), "vocab_size": 330, **more}, folder)
    for path in (run / "tokenizer").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    words = ["the", "cat", "dog", "saw", "42", "ran,", "over\n", "def", "return"]
    texts = [" ".join(words[(number * k) % 9] for k in range(1, 10 + number % 30)) for number in range(150)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    return path


@pytest.fixture(scope="module")
def start(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Llama, for its tokenizer."""
    folder = tmp_path_factory.mktemp("start") / "run"
    run_ranks(trained, 1, str(folder), {**TEXT, "data.train": str(corpus)}, 1)
    return folder


def plain_losses(hub: Path, run: Path, steps: int) -> list[float]:
    """Train in a plain loop: each document of a row alone, gradients added, AdamW of torch."""
    transformers = pytest.importorskip("transformers")
    options = resolve({}, {**BACKEND, "llama.init_from": str(hub), "data.train": "x", "steps": str(steps)}).run
    model = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32, attn_implementation="eager").train()
    rows = CutRows(open_prepared(run / "data", ChatTokenizer.load(run / "tokenizer", {})).train, options.batch.seq_len)
    k = options.batch.micro_batches
    order = UniformOrder(len(rows), k * options.batch.tokens // options.batch.seq_len, k, options.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": options.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = options.optim.beta1, options.optim.beta2
    optimizer = torch.optim.AdamW(groups, lr=options.optim.learning_rate, betas=betas, eps=options.optim.epsilon)
    curve = []
    for step in range(steps):
        total, count = 0.0, 0
        for micro_batch in range(k):
            for row in order.ids(step, micro_batch):
                tokens, labels, documents = (torch.from_numpy(column) for column in rows.row(int(row)))
                for document in documents.unique():
                    inside = documents == document
                    logits = model(tokens[inside][None]).logits[0]
                    loss = F.cross_entropy(logits, labels[inside], reduction="sum", ignore_index=-100)
                    total, count = total + float(loss.detach()), count + int((labels[inside] != -100).sum())
                    loss.backward()
        for parameter in model.parameters():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(total / count)
    return curve


@pytest.mark.parametrize("kind", FAMILIES)
def test_losses_of_two_replicas_equal_those_of_a_plain_loop(kind: str, corpus: Path, start: Path, tmp_path: Path) -> None:
    hub = hub_folder(kind, tmp_path / "hub", start)
    flags = {**BACKEND, "data.train": str(corpus), "llama.init_from": str(hub), "memory.activation_checkpoint": "full"}
    digests = run_ranks(trained, 2, str(tmp_path / "run"), flags, 20)
    curve = [loss for loss, _ in losses(tmp_path / "run")]
    assert curve[-1] < curve[0] - 0.5
    assert curve == pytest.approx(plain_losses(hub, tmp_path / "run", 20), rel=1e-4)
    resumed = tmp_path / "resumed"
    for steps in (2, 20) if kind == "mistral" else ():
        alone = run_ranks(trained, 1, str(resumed), flags, steps)
    assert kind != "mistral" or alone[0] == digests[0]


def test_a_run_of_chats_is_scored_and_exported(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    hub, run = hub_folder("gemma3_text", tmp_path / "hub", start), tmp_path / "run"
    flags = {**BACKEND, **{key: CHATS[key] for key in ("task", "data.kind", "data.pairs", "batch.tokens", "batch.seq_len")}}
    run_ranks(trained, 2, str(run), {**flags, "data.pairs": "60", "data.held_out_share": "0.1", "llama.init_from": str(hub)}, 2)
    run_ranks(evaluated, 1, str(run), "test")
    record = read_metrics(run / "evaluations.jsonl")[0]
    assert record["chats"] > 0 and 0 <= record["exact_match"] <= 1 and record["loss"] > 0
    before = transformers.AutoModelForCausalLM.from_pretrained(hub)
    assert main(["checkpoint", "export", str(run), "2", "--out", str(tmp_path / "export")]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert after.config.model_type == "gemma3_text" and (tmp_path / "export" / "tokenizer.json").is_file()
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(changed)
    capsys.readouterr()
    assert main(["generate", str(run), "a"]) == 2
    assert "checkpoint export" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", ["llama", "gemma", "gemma2", "phi", "phi3", "gpt2", "cohere", "granite", "olmo2", "stablelm", "starcoder2"]
)
def test_every_family_has_the_loss_of_its_documents_alone(kind: str, tmp_path: Path) -> None:
    more = {"granite": {"logits_scaling": 2.0}, "gemma2": {"head_dim": 8}}.get(kind, {})
    plain = random_model(kind, {**more, "tie_word_embeddings": False}, tmp_path)
    folder = open_hub(tmp_path, "transformers")
    assert isinstance(folder.config, TransformersConfig)
    model = load_llama(tmp_path, device=torch.device("cpu"), backend="transformers").model
    tokens = torch.randint(3, 199, (2, 24))
    documents = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [0] * 24])
    labels = torch.randint(3, 199, (2, 24))
    labels[0, 5] = -100
    expected = 0.0
    with torch.no_grad():
        for row in range(2):
            for document in documents[row].unique():
                inside = documents[row] == document
                expected += float(F.cross_entropy(plain(tokens[row, inside][None]).logits[0], labels[row, inside], reduction="sum"))
        loss = float(model(tokens, labels, documents))
    assert math.isclose(loss, expected, rel_tol=1e-5) and model.chunked == (kind not in ("phi", "cohere", "granite", "gemma2"))


@pytest.mark.parametrize(
    ("kind", "more"), [("mamba", {"state_size": 4}), ("bloom", {}), ("falcon", {}), ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32})]
)
def test_models_that_mix_the_documents_of_a_row_are_refused(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    random_model(kind, more, tmp_path)
    model = load_llama(tmp_path, device=torch.device("cpu"), backend="transformers").model
    with pytest.raises(UsageError, match="mixes the documents of a row"):
        model(torch.arange(8)[None], torch.arange(8)[None])


def test_values_that_the_backend_does_not_support_are_refused(tmp_path: Path) -> None:
    for more in ({"lora.rank": "4"}, {"layout.shard": "2"}, {"memory.weights": "bf16"}, {"llama.init_from": ""}):
        with pytest.raises(ConfigError, match="whole replicas"):
            resolve({}, {**BACKEND, "data.train": "x", "llama.init_from": "HF", **more})
    random_model("llama", {}, tmp_path)
    for key, value in (("model_type", "unheard"), ("quantization_config", {"bits": 4}), ("hidden_size", 64)):
        config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], key: value}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            open_hub(tmp_path, "transformers")
