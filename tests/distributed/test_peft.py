"""LoRA against `peft`: equal losses, folders that both read, equal merged weights; refusals by key."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_llama_training import FROM_HUB, TEXT, losses, trained
from support.plain_fine_tuning import plain_losses, write_corpus
from support.ranks import run_ranks
from unit.models.test_families import random_model

from lockstep.cli.main import main
from lockstep.config.adapter_config import ADAPTER_CONFIG, read_adapter_config
from lockstep.config.resolve import resolve
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.llama_io import load_llama

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # in peft
STEPS = 10
FLAGS = {
    **FROM_HUB,
    "compute.precision": "fp32",
    "batch.micro_batches": "4",
    "optim.learning_rate": "1e-2",
}
LAYOUTS = [(2, {}), (2, {"layout.shard": "2"}), (4, {"layout.shard": "2"})]
TOKENS = torch.arange(60).view(2, 30) * 7 % 330


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def hub(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of transformers, with the tokenizer of a run over the corpus."""
    folder = tmp_path_factory.mktemp("hub")
    run_ranks(trained, 1, str(folder / "run"), {**TEXT, "data.train": str(corpus)}, 1)
    random_model("llama", {"vocab_size": 330}, folder / "hub")
    for path in (folder / "run" / "tokenizer").iterdir():
        shutil.copyfile(path, folder / "hub" / path.name)
    return folder / "hub"


def base_model(hub: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        hub, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(scope="module")
def adapter(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random adapters that peft has saved, of another rank and scale than the default."""
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        lora_dropout=0.25,
        target_modules=["v_proj", "o_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base_model(hub), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapted(
    hub: Path, adapter: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps that starts from the adapters."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    run_ranks(trained, 1, str(folder), flags(hub, adapter, corpus), 2)
    return folder


def flags(hub: Path, adapter: Path, corpus: Path, **more: str) -> dict[str, str]:
    return {
        **FLAGS,
        "llama.init_from": str(hub),
        "lora.init_from": str(adapter),
        "data.train": str(corpus),
        **more,
    }


def export(run: Path, target: Path, *options: str) -> Path:
    assert main(["checkpoint", "export", str(run), "--out", str(target), *options]) == 0
    return target


def with_sorted_targets(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    return config | {
        "target_modules": sorted(config["target_modules"])
    }  # peft writes a set, in any order


@torch.no_grad()
def test_exported_adapters_are_those_of_peft_byte_for_byte(
    hub: Path, adapted: Path, tmp_path: Path
) -> None:
    ours = export(adapted, tmp_path / "ours", "--adapter")
    model = peft.PeftModel.from_pretrained(base_model(hub), ours).eval()
    logits, plain = model(TOKENS).logits, base_model(hub)(TOKENS).logits
    torch.testing.assert_close(load_llama(adapted).model(TOKENS), logits, rtol=0, atol=1e-4)
    assert (logits - plain).abs().max() > 0.1, "the adapters make a difference"
    model.save_pretrained(tmp_path / "theirs")
    name = "adapter_model.safetensors"
    assert (tmp_path / "theirs" / name).read_bytes() == (ours / name).read_bytes()
    assert with_sorted_targets(tmp_path / "theirs") == with_sorted_targets(ours)
    assert with_sorted_targets(ours)["r"] == 3 and with_sorted_targets(ours)["lora_dropout"] == 0.25


def test_adapters_of_peft_keep_their_bits_through_a_run(
    hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    still = flags(hub, adapter, corpus, **{"optim.learning_rate": "0"})
    run_ranks(trained, 2, str(tmp_path / "run"), still, 1)
    exported = export(tmp_path / "run", tmp_path / "exported", "--adapter")
    assert (exported / "adapter_model.safetensors").read_bytes() == (
        adapter / "adapter_model.safetensors"
    ).read_bytes()
    run_ranks(trained, 1, str(tmp_path / "run"), {"lora.init_from": str(adapter)}, 2)  # resumed
    changed = tmp_path / "changed" / adapter.name
    shutil.copytree(adapter, changed)
    path = changed / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(AssertionError, match=r"belongs to another run: adapter (was|has changed)"):
        run_ranks(trained, 1, str(tmp_path / "run"), {"lora.init_from": str(changed)}, 3)


@torch.no_grad()
def test_merged_weights_equal_those_of_peft(hub: Path, adapted: Path, tmp_path: Path) -> None:
    adapters = export(adapted, tmp_path / "adapter", "--adapter")
    theirs = (
        peft.PeftModel.from_pretrained(base_model(hub), adapters).merge_and_unload().state_dict()
    )
    ours = base_model(export(adapted, tmp_path / "merged")).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-6)
    again = export(adapted, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()


def test_losses_of_ten_steps_equal_those_of_a_plain_loop_of_peft(
    hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    undropped = flags(hub, adapter, corpus, **{"lora.dropout": "0"})
    digests = set()
    for number, (workers, layout) in enumerate(LAYOUTS):
        digests.add(
            run_ranks(
                trained, workers, str(tmp_path / str(number)), {**undropped, **layout}, STEPS
            )[0]
        )
    curve = [loss for loss, _ in losses(tmp_path / "0")]
    assert len(digests) == 1 and curve[-1] < curve[0] - 0.3
    model = peft.PeftModel.from_pretrained(
        base_model(hub), adapter, is_trainable=True
    ).eval()  # without dropout
    options = resolve({}, {**FLAGS, "data.train": "x", "steps": str(STEPS)}).run
    assert curve == pytest.approx(plain_losses(model, tmp_path / "0", options), rel=1e-5)


def test_adapters_train_in_the_transformers_backend_as_in_a_plain_loop_of_peft(
    hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    more = {"lora.dropout": "0", "llama.backend": "transformers"}
    undropped = flags(hub, adapter, corpus, **more)
    digests = set()
    for name, workers, layout in (("run", 1, {}), ("shards", 2, {"layout.shard": "2"})):
        folder = str(tmp_path / name)
        digests.add(run_ranks(trained, workers, folder, {**undropped, **layout}, STEPS)[0])
    assert len(digests) == 1
    run = tmp_path / "run"
    model = peft.PeftModel.from_pretrained(base_model(hub), adapter, is_trainable=True).eval()
    options = resolve({}, {**FLAGS, "data.train": "x", "steps": str(STEPS)}).run
    curve = [loss for loss, _ in losses(run)]
    assert curve == pytest.approx(plain_losses(model, run, options), rel=1e-5)
    exported = export(run, tmp_path / "exported", "--adapter")
    merged = base_model(export(run, tmp_path / "merged"))
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base_model(hub), exported).eval()
        expected = adapted(TOKENS).logits
        for ours in (load_llama(run).model(TOKENS), merged.eval()(TOKENS).logits):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
        assert not torch.allclose(base_model(hub)(TOKENS).logits, expected, atol=0.1)


def test_dropout_of_adapters_has_the_same_bits_in_replicas_and_shards(
    hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    digests = {
        f"{workers} {layout}": run_ranks(
            trained,
            workers,
            str(tmp_path / str(number)),
            {**flags(hub, adapter, corpus), **layout},
            3,
        )[0]
        for number, (workers, layout) in enumerate([(1, {}), *LAYOUTS])
    }
    assert len(set(digests.values())) == 1, digests
    undropped = run_ranks(
        trained,
        1,
        str(tmp_path / "undropped"),
        flags(hub, adapter, corpus, **{"lora.dropout": "0"}),
        3,
    )[0]
    assert undropped not in digests.values()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 4}),
        ("alpha_pattern", {"q_proj": 4}),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [1]),
        ("layer_replication", [(0, 2)]),
        ("exclude_modules", ["k_proj"]),
        ("trainable_token_indices", [3]),
        ("init_lora_weights", "pissa"),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1]),
        ("target_modules", "all-linear"),
        ("target_modules", r".*\.q_proj"),
        ("target_modules", ["q_proj", "lm_head"]),
        ("task_type", "SEQ_CLS"),
    ],
)
def test_configs_of_peft_that_are_not_implemented_are_refused_by_key(
    key: str, value: Any, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.LoraConfig(**{"target_modules": ["q_proj"], key: value}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"CheckpointError: {key} is "):
        read_adapter_config(tmp_path)


def test_other_methods_of_peft_and_damaged_configs_are_refused(tmp_path: Path) -> None:
    peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no r"):
        read_adapter_config(tmp_path)
    peft.LoHaConfig(target_modules=["k_proj"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: it has no lora_alpha"):
        read_adapter_config(tmp_path)
    peft.AdaLoraConfig(target_modules=["k_proj"], total_step=9).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"CheckpointError: peft_type is \"ADALORA\""):
        read_adapter_config(tmp_path)
    for content in ("[]", "7", "{", ""):
        (tmp_path / ADAPTER_CONFIG).write_text(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_adapter_config(tmp_path)


def test_every_key_that_peft_writes_is_known(tmp_path: Path) -> None:
    """A new version with a new key: decide whether it may change what an adapter computes."""
    from lockstep.config.adapter_config import PLAIN, READ

    peft.LoraConfig().save_pretrained(tmp_path)
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text()).keys() == PLAIN.keys() | READ.keys()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"lora.rank": "4"}, r"lora.rank is 4, and the adapters in .* have 3"),
        ({"lora.rank": "3", "lora.alpha": "6"}, r"lora.alpha is 6"),
        (
            {"lora.rank": "3", "lora.alpha": "5", "lora.targets": "query"},
            r"lora.targets is \['query'\]",
        ),
    ],
)
def test_values_other_than_those_of_the_folder_are_refused(
    changed: dict[str, str], text: str, hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=text):
        run_ranks(trained, 1, str(tmp_path / "run"), flags(hub, adapter, corpus, **changed), 1)


def test_tensors_that_do_not_fit_the_model_are_refused(
    hub: Path, adapter: Path, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    for number, (key, value, text) in enumerate(
        [
            (
                "target_modules",
                ["v_proj", "o_proj"],
                r"adapter_config\.json(?s:.*)unexpected: .*layers\.0\.mlp\.down_proj\.lora_A\.weight",
            ),
            (
                "target_modules",
                ["v_proj", "q_proj", "o_proj", "down_proj"],
                r"missing: .*layers\.0\.self_attn\.q_proj\.lora_A\.weight",
            ),
            ("r", 4, r"lora_A\.weight is \(3, 32\), adapter_config.json makes it \(4, 32\)"),
        ]
    ):
        (tmp_path / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(config | {key: value}))
        with pytest.raises(AssertionError, match=text):
            run_ranks(
                trained,
                1,
                str(tmp_path / f"run-{number}"),
                flags(hub, tmp_path / "adapter", corpus),
                1,
            )


def test_only_adapters_that_fit_a_model_of_transformers_are_exported(
    hub: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random_model("phi3", {"vocab_size": 330}, tmp_path / "phi3")
    for path in (hub.parent / "run" / "tokenizer").iterdir():
        shutil.copyfile(path, tmp_path / "phi3" / path.name)
    new = {
        **FLAGS,
        "llama.init_from": str(tmp_path / "phi3"),
        "lora.rank": "2",
        "data.train": str(corpus),
    }
    run_ranks(trained, 1, str(tmp_path / "run"), new, 1)
    for run, text in (
        (tmp_path / "run", "packs query, key and value"),
        (hub.parent / "run", "trains no adapters"),
    ):
        assert (
            main(["checkpoint", "export", str(run), "--adapter", "--out", str(tmp_path / "out")])
            == 2
        )
        assert text in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_values_of_a_folder_have_their_origin(
    adapter: Path,
) -> None:
    resolved = resolve(
        None,
        {
            "task": "sft",
            "data.kind": "drills",
            "llama.init_from": "x",
            "lora.init_from": str(adapter),
        },
    )
    lora = resolved.run.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (
        3,
        5.0,
        0.25,
        ("value", "out", "down"),
    )
    assert resolved.origin["lora.rank"] == f"adapter_config.json in {adapter}"
    with pytest.raises(ConfigError, match=r"needs lora\.rank, which is 0"):
        resolve(
            None,
            {
                "task": "sft",
                "data.kind": "drills",
                "llama.init_from": "x",
                "lora.init_from": "y",
                "lora.rank": "0",
            },
        )
