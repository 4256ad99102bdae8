"""Llama: compared with `transformers`, cached decoding, packing, import, export, commands."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from support.launching import run_command, run_lockstep
from support.ranks import run_ranks
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from lockstep.checkpoint.state_dict import digest, get_state_dict
from lockstep.cli.main import main
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, DataError, LockstepError, UsageError
from lockstep.generation.decoder import Decoder, choose_layout
from lockstep.generation.sampling import (
    SamplingParams,
    TextStream,
    apply_tensor_parallel,
    refuse_indivisible,
    sample_next,
    sample_tokens,
    stream_continuations,
)
from lockstep.models import hub, llama_config, llama_io
from lockstep.models.llama import IGNORE_INDEX, Llama, build_llama
from lockstep.models.llama_config import LLAMA_CONFIGS, LlamaConfig, RopeScaling

V = 300
SMALL = LlamaConfig(V, 48, 3, 6, 2, 8, 80, max_seq_len=256, rope_theta=10_000.0)
CPU = torch.device("cpu")
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"num_key_value_heads": 1, "rope_parameters": LLAMA_3},
    "wide heads": {"num_key_value_heads": 2, "head_dim": 24},
}
TEXT = [
    "The cat sat on the mat, the dog lay on the log.",
    "Ein Hund und eine Katze: über Häuser, süße Äpfel.",
    "def step(n):\n    return n + 1",
] * 4
TEMPLATE = (  # with the tag that some templates have around the tokens to train on
    "{{ bos_token }}{% for m in messages %}<|role|>{{ m['role'] }}\n"
    "{% generation %}{{ m['content'] | trim }}{% endgeneration %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def transformers_llama(**other: Any) -> Any:
    """Build a small random model of `transformers`, with logits as large as a trained model's."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": V,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    sizes |= {
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **other})).eval()


@pytest.fixture
def small() -> Llama:
    return build_llama(SMALL, device=CPU, seed=1).double().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let `transformers` write a folder with two shards, tokenizer and chat template."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("hub") / "small"
    transformers_llama(num_key_value_heads=2).save_pretrained(path, max_shard_size="300KB")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|end|>", "<|role|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=V, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        ),
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    names = {
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|role|>"],
    }
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=TEMPLATE, **names
    ).save_pretrained(path)
    assert (path / hub.INDEX_FILE).exists()
    return path


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """Copy the folder, with other values in its config.json."""
    shutil.copytree(folder, to)
    value = json.loads((to / hub.CONFIG_FILE).read_text())
    (to / hub.CONFIG_FILE).write_text(json.dumps(value | config))
    return to


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_and_greedy_continuations_equal_those_of_transformers(
    variant: str, tmp_path: Path
) -> None:
    """With 200 positions: more than the original context of the scaled RoPE."""
    expected = transformers_llama(**VARIANTS[variant])
    expected.save_pretrained(tmp_path / "hub")
    llama = llama_io.load_llama(tmp_path / "hub", device=CPU).model
    tokens = torch.randint(V, (3, 200))
    torch.testing.assert_close(llama(tokens), expected(tokens).logits, rtol=0, atol=1e-4)
    continued = expected.generate(
        tokens[:, :40], max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
    )[:, 40:]
    continuations = list(sample_tokens(Decoder(llama, rows=3), tokens[:, :40].tolist(), tokens=60))
    assert torch.tensor(continuations).T.tolist() == continued.tolist()


def test_scaled_rope_changes_the_logits() -> None:
    """So the test above would detect missing scaling."""
    plain = build_llama(SMALL, device=CPU, seed=1)
    scaled = build_llama(
        LlamaConfig(**{**vars(SMALL), "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)}),
        device=CPU,
        seed=1,
    )
    tokens = torch.randint(V, (1, 100))
    assert not torch.allclose(plain(tokens), scaled(tokens), atol=1e-3)


@torch.no_grad()
def test_cached_decoding_equals_the_forward_pass(small: Llama) -> None:
    """Each row, of different lengths, is compared with forward passes of the row alone."""
    tokens, lengths = torch.randint(V, (4, 30)), [3, 11, 7, 1]
    decoder = Decoder(small, rows=4)
    cache = decoder.new_cache(4, capacity=20)
    logits = decoder.prefill(tokens[:, :11], torch.tensor(lengths), cache)
    for further in range(9):
        for row, length in enumerate(lengths):
            written = torch.cat((tokens[row, :length], tokens[row, 20 : 20 + further]))
            torch.testing.assert_close(
                logits[row], small(written[None])[0, -1], rtol=1e-10, atol=1e-10
            )
        logits = decoder.step(
            tokens[:, 20 + further], cache, window=12 + further if further % 2 else 20
        )


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_every_weight_layout_generates_the_same_tokens(dtype: torch.dtype, bound: float) -> None:
    assert [choose_layout("cpu", torch.float32, rows) for rows in (1, 2)] == ["columns", "packed"]
    assert choose_layout("cpu", torch.bfloat16, 1) == "packed"
    assert (
        choose_layout("cpu", torch.float64, 1)
        == choose_layout("cuda", torch.bfloat16, 8)
        == "plain"
    )
    model = build_llama(SMALL, device=CPU, seed=1).to(dtype).eval()
    tokens, logits_by_layout = torch.randint(V, (3, 9)), {}
    for layout in ("plain", "columns", "packed"):
        decoder = Decoder(model, layout=layout)
        cache = decoder.new_cache(3, 16)
        first = decoder.prefill(tokens, torch.tensor([9, 2, 5]), cache)
        logits_by_layout[layout] = torch.stack(
            [first, *(decoder.step(tokens[:, place], cache, 16) for place in range(5))]
        )
    for layout in ("columns", "packed"):
        torch.testing.assert_close(
            logits_by_layout[layout], logits_by_layout["plain"], rtol=0, atol=bound
        )


def test_decoder_with_release_takes_the_weights(small: Llama) -> None:
    expected = list(sample_tokens(Decoder(small), [[5, 6, 7]], tokens=10))
    taken = Decoder(small, release=True)
    assert list(sample_tokens(taken, [[5, 6, 7]], tokens=10)) == expected
    assert not any(
        parameter.dim() == 2
        for name, parameter in small.named_parameters()
        if name != "embedding.weight"
    )


def test_packed_documents_equal_separate_rows(small: Llama) -> None:
    pieces = [torch.randint(V, (n,)) for n in (5, 1, 8, 2)]
    documents = torch.tensor([number for number, piece in enumerate(pieces) for _ in piece])
    packed = small(torch.cat(pieces)[None], documents=documents[None])[0].split(
        [len(piece) for piece in pieces]
    )
    for own, piece in zip(packed, pieces, strict=True):
        torch.testing.assert_close(own, small(piece[None])[0], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(small(torch.cat(pieces)[None])[0, -1], packed[-1][-1])


@pytest.mark.parametrize("tied", [False, True])
def test_loss_equals_the_cross_entropy_of_the_logits(tied: bool) -> None:
    """700 tokens, more than a chunk; some are ignored."""
    model = build_llama(
        LlamaConfig(**{**vars(SMALL), "tie_embeddings": tied}), device=CPU, seed=1
    ).double()
    tokens, labels = torch.randint(V, (7, 100)), torch.randint(V, (7, 100))
    labels[torch.rand(7, 100) < 0.3] = IGNORE_INDEX
    documents = torch.arange(100).expand(7, 100) // 30
    expected = F.cross_entropy(
        model(tokens, documents=documents).flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    loss = model(tokens, labels, documents)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    for own, grad in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(own, grad, rtol=1e-9, atol=1e-11)
    assert float(model(tokens, torch.full_like(labels, IGNORE_INDEX)).detach()) == 0.0


def test_negative_labels_have_no_loss_on_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes all rows, also ignored ones; here a CPU does the same."""
    states, weight = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels = torch.tensor([0, 1, IGNORE_INDEX, 3, 0, IGNORE_INDEX, 6, 5, 5])
    from lockstep.models import loss

    expected = F.cross_entropy(
        states @ weight.T, labels, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    grads = torch.autograd.grad(expected, [states, weight])
    for all_rows in (False, True):
        if all_rows:
            monkeypatch.setattr(loss, "counted_rows", lambda labels, ignore_index: slice(None))
        loss_sum = loss.output_cross_entropy(
            states, weight, labels, smoothing=0.0, ignore_index=IGNORE_INDEX
        )
        torch.testing.assert_close(loss_sum, expected)
        for own, grad in zip(torch.autograd.grad(loss_sum, [states, weight]), grads, strict=True):
            torch.testing.assert_close(own, grad)


def test_large_configs_have_the_published_number_of_parameters() -> None:
    published = {
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
        "70B": 70_553_706_496,
        "405B": 405_853_388_800,
    }
    for name, config in LLAMA_CONFIGS.items():
        with torch.device("meta"):
            model = Llama(config)
        assert (
            sum(parameter.numel() for parameter in model.parameters())
            == config.num_parameters
            == published.get(name, config.num_parameters)
        )
        assert config.num_parameters == pytest.approx(
            float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]], rel=0.25
        )
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = (build_llama(SMALL, device=CPU, seed=seed) for seed in (1, 1, 2))
    assert (
        digest(get_state_dict(first))
        == digest(get_state_dict(again))
        != digest(get_state_dict(other))
    )
    layer = first.get_submodule("layers.1")
    assert layer.get_submodule("attention.query").weight.std().item() == pytest.approx(
        48**-0.5, rel=0.1
    )  # type: ignore[union-attr, operator]
    assert layer.get_submodule("feed_forward.out").weight.std().item() == pytest.approx(
        (80 * 6) ** -0.5, rel=0.1
    )  # type: ignore[union-attr, operator]
    tokens = torch.randint(V, (2, 50))
    assert float(first(tokens, tokens).detach() / 100) < 2 * float(torch.tensor(V).log())


# -- folders ----------------------------------------------------------------------------------------------------------


def states_of(path: Path) -> dict[str, Tensor]:
    import safetensors.torch

    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_import_and_export_change_no_bit(
    folder: Path, tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run, back = tmp_path / "source", tmp_path / "run", tmp_path / "back"
    transformers_llama(num_key_value_heads=2, rope_parameters=LLAMA_3).to(dtype).save_pretrained(
        source, max_shard_size="200KB"
    )
    for path in folder.glob("*token*"):
        shutil.copy(path, source)
    assert main(["checkpoint", "import", str(source), "--out", str(run)]) == 0
    assert main(["checkpoint", "import", str(source), "--out", str(run)]) == 0, (
        "a repeated import changes nothing"
    )
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert (
        main(["checkpoint", "export", str(run), "--out", str(back), "--shard-bytes", "60 KB"]) == 0
    )
    assert "written to" in capsys.readouterr().out
    before, after = states_of(source), states_of(back)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) and before[name].dtype == dtype for name in before
    )
    assert json.loads((source / hub.CONFIG_FILE).read_text()) == json.loads(
        (back / hub.CONFIG_FILE).read_text()
    )
    for path in [path for path in source.iterdir() if path.name in hub.COMPANION_FILES]:
        assert (back / path.name).read_bytes() == path.read_bytes()
    index = json.loads((back / hub.INDEX_FILE).read_text())
    assert index["weight_map"].keys() == before.keys()
    assert len(list(back.glob("*.safetensors"))) > 5
    assert main(["checkpoint", "export", str(run), "--out", str(back)]) == 2, (
        "nothing is overwritten"
    )


@torch.no_grad()
def test_transformers_reads_an_exported_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = LlamaConfig(
        V,
        48,
        2,
        6,
        2,
        8,
        80,
        max_seq_len=128,
        rope_theta=20_000.0,
        rope_scaling=RopeScaling(4.0, 1.0, 4.0, 64),
        tie_embeddings=True,
    )
    model = build_llama(config, device=CPU, seed=3).eval()
    hub.write_hub(
        tmp_path / "made", llama_config.config_to_hf(config), dict(model.named_parameters())
    )
    assert hub.open_hub(tmp_path / "made").config == config
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "made")
    tokens = torch.randint(V, (2, 100))
    torch.testing.assert_close(model(tokens), expected(tokens).logits, rtol=0, atol=1e-4)
    made = json.loads((tmp_path / "made" / hub.CONFIG_FILE).read_text())
    assert made == llama_config.config_to_hf(config) | {"torch_dtype": "float32"}
    assert llama_config.config_to_write(config, made) == made
    for stale in ({"vocab_size": 1}, {"rope_theta": 1.0}):
        old = llama_config.config_to_hf(config) | stale
        assert llama_config.config_to_write(config, old) == llama_config.config_to_hf(config)


def test_configs_of_transformers_4_and_5_give_the_same_config() -> None:
    four = llama_config.config_to_hf(
        LlamaConfig(**{**vars(SMALL), "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64)})
    )
    five = {key: value for key, value in four.items() if not key.startswith("rope_")} | {
        "rope_parameters": LLAMA_3
    }
    assert llama_config.config_from_hf(four, "") == llama_config.config_from_hf(five, "")


def test_import_and_export_take_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """240 MB of weights in a process that may grow by 80 MB."""
    config = LlamaConfig(10_000, 512, 16, 8, 8, 64, 1536)
    hub.write_hub(
        tmp_path / "hub",
        llama_config.config_to_hf(config),
        {name: torch.rand(p.shape) for name, p in config.meta_model().named_parameters()},
    )
    script = Path(__file__).parents[1] / "support/memory/import_export.py"
    result = run_command([sys.executable, script, str(tmp_path)], check=True)
    assert (
        int(result.stdout)
        < 80e6
        < 240e6
        < sum(path.stat().st_size for path in (tmp_path / "hub").glob("*.safetensors"))
    )


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def damage(folder: Path, to: Path, how: str) -> Path:
    """Copy the folder and damage one thing."""
    if how in ("GemmaForCausalLM", "quantization_config", "hidden_size", "num_hidden_layers"):
        values = {
            "GemmaForCausalLM": {"architectures": [how]},
            "quantization_config": {how: {"bits": 4}},
            "hidden_size": {how: 128},
        }
        return changed(folder, to, **values.get(how, {how: 2}))
    shutil.copytree(folder, to)
    if how == "missing shard":
        shards(to)[0].unlink()
    elif how == "cut off":
        with open(shards(to)[1], "r+b") as file:
            file.truncate(file.seek(0, 2) - 10)
    elif how == "cut off in the header":
        with open(shards(to)[1], "r+b") as file:
            file.truncate(40)
    elif how == "no header":
        shards(to)[1].write_bytes(b"\x10" + bytes(7) + b"this is not json" * 4)
    elif how == "no index, no file":
        (to / hub.INDEX_FILE).unlink()
    elif how == "pickled":
        (to / hub.INDEX_FILE).unlink()
        (to / "pytorch_model.bin").touch()
    elif how == "missing tensor":
        index = json.loads((to / hub.INDEX_FILE).read_text())
        del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
        (to / hub.INDEX_FILE).write_text(json.dumps(index))
    elif how == "outside":
        (to / hub.INDEX_FILE).write_text(
            json.dumps({"weight_map": {"lm_head.weight": "../secret"}})
        )
    elif how == "torn config":
        (to / hub.CONFIG_FILE).write_text('{"architectures": ["Lla')
    return to


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "GemmaForCausalLM",
            "others train with --llama.backend transformers --llama.init_from FOLDER",
        ),
        ("quantization_config", "quantization_config is"),
        (
            "hidden_size",
            "of another shape: model.embed_tokens.weight is (300, 64), config.json makes it (300, 128)",
        ),
        ("num_hidden_layers", "unexpected: model.layers.2"),
        ("missing shard", "shards are missing: model-00001"),
        ("missing tensor", "missing: model.layers.1.mlp.up_proj.weight"),
        ("cut off", "is truncated"),
        ("cut off in the header", "is truncated"),
        ("no header", "no valid safetensors header"),
        ("no index, no file", "model.safetensors is missing"),
        ("pickled", "pickled weights"),
        ("outside", "outside the folder"),
        ("torn config", "config.json cannot be read"),
    ],
)
def test_damaged_folder_is_refused_with_a_three_part_error(
    folder: Path, tmp_path: Path, how: str, message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        llama_io.import_hub(damage(folder, tmp_path / "bad", how), tmp_path / "run")
    error = caught.value
    assert message in str(error)
    assert error.what and str(tmp_path) in error.where and error.hint
    assert not (tmp_path / "run").exists()


def test_folder_without_a_model_and_folder_of_another_run_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    cases: list[tuple[type[LockstepError], list[str]]] = [
        (UsageError, ["checkpoint", "import", str(tmp_path), "--out", str(tmp_path / "run")]),
        (UsageError, ["checkpoint", "import", str(folder)]),
        (UsageError, ["generate", str(tmp_path), "Hello"]),
        (UsageError, ["generate", str(folder), "Hello", "--temperature", "-1"]),
        (UsageError, ["generate", str(folder), "Hello", "--step", "3"]),
    ]
    for kind, words in cases:
        assert main(words) == kind.exit_code, words
    llama_io.import_hub(folder, tmp_path / "run")
    other = changed(folder, tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(UsageError, match="another run"):
        llama_io.import_hub(other, tmp_path / "run")
    (tmp_path / "translator").mkdir()
    (tmp_path / "translator" / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="translator"):
        llama_io.load_llama(tmp_path / "translator")


# -- continuations ----------------------------------------------------------------------------------------------------


def test_draws_follow_their_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.1, 0.25, 0.15])).expand(4000, 4)
    draws = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000

    def drawn(**how: Any) -> list[float]:
        return (
            sample_next(logits, draws, SamplingParams(**how)).bincount(minlength=4) / 4000
        ).tolist()

    assert drawn() == [1, 0, 0, 0]
    assert drawn(temperature=1.0) == pytest.approx([0.5, 0.1, 0.25, 0.15], abs=1e-3)
    assert drawn(temperature=1.0, top_k=2) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=1e-3)
    assert drawn(temperature=1.0, top_p=0.7) == pytest.approx([2 / 3, 0, 1 / 3, 0], abs=1e-3)
    assert drawn(temperature=1.0, top_k=3, top_p=0.8) == pytest.approx(
        [2 / 3, 0, 1 / 3, 0], abs=1e-3
    ), "top-p applies to the tokens that top-k keeps"
    assert drawn(temperature=1.0, top_p=1e-9) == [1, 0, 0, 0]
    squares = torch.tensor([0.5, 0.1, 0.25, 0.15]) ** 2
    assert drawn(temperature=0.5) == pytest.approx((squares / squares.sum()).tolist(), abs=1e-3)
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert int(sample_next(torch.zeros(1, 5), last, SamplingParams(1.0, top_k=3))[0]) == 2


def test_row_depends_on_seed_and_number_but_not_on_its_batch(small: Llama) -> None:
    prompts = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15]]
    sampling = SamplingParams(temperature=1.3, seed=4)
    decoder = Decoder(small)
    together = list(
        zip(*sample_tokens(decoder, prompts, tokens=12, sampling=sampling), strict=True)
    )
    for row, prompt in enumerate(prompts):
        alone = zip(
            *sample_tokens(decoder, [prompt], tokens=12, sampling=sampling, first=row), strict=True
        )
        assert [together[row]] == list(alone)
    others = zip(
        *sample_tokens(
            decoder, prompts, tokens=12, sampling=SamplingParams(temperature=1.3, seed=5)
        ),
        strict=True,
    )
    assert together != list(others)


def test_text_is_emitted_in_whole_characters_and_ends_before_a_stop_text(folder: Path) -> None:
    tokenizer = ChatTokenizer.load(folder, {})
    ids = tokenizer.encode("süße Äpfel: END of it")[1:]

    def emitted(stops: list[str], ids: list[int]) -> list[str]:
        row = TextStream(tokenizer, [0], stops)
        return [*(row.add(token) for token in ids), row.close()]

    assert "".join(emitted([], ids)) == "süße Äpfel: END of it"
    assert not any("\ufffd" in part for part in emitted([], ids))
    assert "".join(emitted(["END"], ids)) == "süße Äpfel: "
    assert "".join(emitted(["ENDING", "of them"], ids)) == "süße Äpfel: END of it", (
        "a false start of a stop text is emitted later"
    )
    assert "".join(emitted([], [*ids[:5], 1, *ids[5:]])) == tokenizer.decode(ids[:5]), (
        "<|end|> ends it"
    )
    torn = tokenizer.encode("ß")[1:2]
    assert "".join(emitted([], torn)) == tokenizer.decode(torn), (
        "half a character is emitted at the end"
    )


def test_chats_are_rendered_as_transformers_renders_them(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = ChatTokenizer.load(folder, {})
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello <b>&</b>\n"},
    ]
    assert (
        tokenizer.encode_chat(messages)
        == expected.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    assert tokenizer.encode("Hello there") == expected("Hello there")["input_ids"]
    assert tokenizer.eos_ids == {1}
    for template, message in (
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ open('/etc/passwd') }}", "undefined"),
        ("{% for %}", "xpected"),
    ):
        bad = ChatTokenizer(
            tokenizer.inner, template, tokenizer.special_tokens, tokenizer.eos_ids, tmp_path
        )
        with pytest.raises(DataError, match=message):
            bad.render(messages)
    dated = ChatTokenizer(
        tokenizer.inner,
        "{{ strftime_now('%d %b %Y') }}{{ messages | tojson }}",
        {},
        tokenizer.eos_ids,
        tmp_path,
    )
    assert (
        dated.render(messages[:1], now=datetime(2024, 7, 26))
        == '26 Jul 2024[{"role": "system", "content": "Be brief."}]'
    )
    with pytest.raises(DataError, match="no chat template"):
        ChatTokenizer(tokenizer.inner, "", {}, tokenizer.eos_ids, tmp_path).render(messages)


def test_generate_prints_only_the_continuation(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the folder and for its import; equal to the continuation by `transformers`."""
    transformers = pytest.importorskip("transformers")
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    given = words("The cat", return_tensors="pt")["input_ids"]
    expected = words.decode(
        model.generate(given, max_new_tokens=20, do_sample=False)[0, given.shape[1] :],
        skip_special_tokens=True,
    )
    assert main(["checkpoint", "import", str(folder), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    for source in (folder, tmp_path / "run"):
        assert main(["generate", str(source), "The cat", "--tokens", "20"]) == 0
        assert capsys.readouterr().out == expected + "\n"
    assert main(["generate", str(folder), "The cat", "The dog", "--tokens", "20"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == expected and len(lines) == 2
    assert (
        main(["generate", str(folder), "The cat", "--tokens", "20", "--stop", expected[4:6]]) == 0
    )
    assert capsys.readouterr().out == expected[: expected.find(expected[4:6])] + "\n"
    assert main(["generate", str(folder), "The cat", "--tokens", "5", "--chat"]) == 0
    drawn = [
        "generate",
        str(folder),
        "The cat",
        "--tokens",
        "9",
        "--temperature",
        "1",
        "--top-k",
        "9",
        "--top-p",
        "0.9",
        "--seed",
    ]
    printed = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        assert main([*drawn, seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_compiled_step_generates_the_same_tokens(small: Llama, folder: Path) -> None:
    """No graph break, one trace for all tokens. Eager backend: inductor takes half a minute."""
    decoder = Decoder(small)
    step = torch.compile(decoder.step, dynamic=False, backend="eager", fullgraph=True)
    prompts = [[5, 6, 7], [9]]
    assert list(sample_tokens(decoder, prompts, tokens=15, step=step)) == list(
        sample_tokens(decoder, prompts, tokens=15)
    )
    assert list(
        stream_continuations(
            ChatTokenizer.load(folder, {}), prompts, sample_tokens(decoder, prompts, tokens=3)
        )
    )


def generate_split(
    runtime: ElasticRuntime, folder: Path, prompts: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Return (tokens of a model split over the world, number of elements in this process)."""
    torch.set_grad_enabled(False)
    model = llama_io.load_llama(folder, device=CPU).model
    group = apply_tensor_parallel(model, runtime, "--tensor")
    decoder = Decoder(model, rows=len(prompts), layout="plain", group=group)
    return list(sample_tokens(decoder, prompts, tokens=20)), sum(
        buffer.numel() for buffer in decoder.buffers()
    )


def test_model_split_over_two_processes_generates_the_same_tokens(folder: Path) -> None:
    prompts = [[5, 6, 7], [9], [20, 30, 40, 50]]
    model = llama_io.load_llama(folder, device=CPU).model
    decoder = Decoder(model, rows=3, layout="plain")
    expected, numbers = (
        list(sample_tokens(decoder, prompts, tokens=20)),
        sum(buffer.numel() for buffer in decoder.buffers()),
    )
    results = run_ranks(generate_split, 2, folder, prompts)
    split_numbers = sum(
        parameter.numel() for parameter in model.layers.parameters() if parameter.dim() == 2
    )
    assert [tokens for tokens, _ in results] == [expected, expected]
    assert [count for _, count in results] == [numbers - split_numbers // 2] * 2
    with pytest.raises(
        UsageError,
        match=r"tensor 3 does not divide 4, 2, 112 \(heads, key-value heads, inner width\)",
    ):
        refuse_indivisible(model.parallel_plan(), 3, "--tensor")


def test_generate_splits_a_model_and_reads_a_file(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("The cat\nEin Hund\n")
    words = ["generate", str(folder), "--file", str(tmp_path / "lines"), "--tokens", "8"]
    assert main(words) == 0
    expected = capfd.readouterr().out
    result = run_lockstep(*words, "--tensor", "2", check=True)
    assert result.stdout == expected and expected.count("\n") == 2
    assert main([*words, "--tensor", "2", "--compile"]) == UsageError.exit_code
