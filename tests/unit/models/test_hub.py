"""Each key of config.json and field of a header is implemented, harmless, or refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.errors import CheckpointError, DataError, LockstepError, UsageError
from lockstep.models import hub, llama_config, llama_io
from lockstep.models.llama import Llama, build_llama
from lockstep.models.llama_config import LlamaConfig, RopeScaling
from lockstep.models.llama_io import InitialWeights

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    300, 16, 2, 2, 1, 8, 24, max_seq_len=64, rope_scaling=RopeScaling(4.0, 1.0, 4.0, 32)
)
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 10**9, 10**40, 1.5, -0.5, math.nan, math.inf, "", "x", "1", [], [1], ["x"], [None], {}, {"x": 1},
]  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer."""
    path = tmp_path_factory.mktemp("hub") / "small"
    weights = dict(build_llama(CONFIG, device=CPU, seed=1).named_parameters())
    hub.write_hub(path, llama_config.config_to_hf(CONFIG), weights)
    Tokenizer.train_on_documents(["a cat"] * 3, vocab_size=300, min_frequency=1).save_for_llama(
        path
    )
    (path / "generation_config.json").unlink()
    return path


def with_config(folder: Path, to: Path, config: dict[str, Any]) -> Path:
    """Copy the folder, with another config.json."""
    to.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name != hub.CONFIG_FILE and not (to / path.name).exists():
            (to / path.name).symlink_to(path)
    (to / hub.CONFIG_FILE).write_text(json.dumps(config))
    return to


def logits(folder: Path) -> torch.Tensor:
    loaded = llama_io.load_llama(folder, device=CPU)
    ChatTokenizer.load(loaded.tokenizer, loaded.hf_config)
    with torch.no_grad():
        found: torch.Tensor = loaded.model(torch.arange(50)[None])
    return found


@pytest.mark.slow
def test_odd_values_in_every_key_of_a_config_are_refused_or_change_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """A valid value may give another model, with finite logits, if its key is in READ_KEYS."""
    config = json.loads((folder / hub.CONFIG_FILE).read_text())
    expected = logits(folder)
    inner = [
        ("rope_scaling", key)
        for key in [*config["rope_scaling"], "rope_theta", "partial_rotary_factor", "unknown"]
    ]
    keys = [
        (key,)
        for key in sorted(
            {
                *llama_config.READ_KEYS,
                *llama_config.FIXED_KEYS,
                *llama_config.HARMLESS_KEYS,
                *config,
                "layer_types",
                "unknown",
            }
        )
    ]
    refused = 0
    for path in [*keys, *inner]:
        for value in (
            ODD
            if path[0] not in llama_config.HARMLESS_KEYS or path[0] == "eos_token_id"
            else ODD[6:16:3]
        ):
            changed = json.loads(json.dumps(config))
            (changed if len(path) == 1 else changed[path[0]])[path[-1]] = value
            try:
                new_logits = logits(with_config(folder, tmp_path / "odd", changed))
            except (CheckpointError, DataError) as error:
                refused += 1
                assert error.what and error.where and error.hint, (path, value)
                assert path[-1] in str(error) or path[-1] in llama_config.READ_KEYS, (
                    path,
                    value,
                    str(error),
                )
                continue
            assert torch.isfinite(new_logits).all(), (path, value)
            assert path[0] in llama_config.READ_KEYS or torch.equal(new_logits, expected), (
                path,
                value,
            )
            assert (
                path[0] not in llama_config.FIXED_KEYS
                or value is None
                or value == llama_config.FIXED_KEYS[path[0]]
            )
            assert value is None or path[-1] not in ("unknown", "layer_types") or value == []
    assert refused > 400


@pytest.mark.parametrize(
    "content", ["[]", "5", "{", '{"a":' * 5000, '{"vocab_size": ' + "9" * 5000 + "}", "\xff"]
)
def test_config_that_is_no_object_is_refused(folder: Path, tmp_path: Path, content: str) -> None:
    bad = with_config(folder, tmp_path / "bad", {})
    (bad / hub.CONFIG_FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError):
        logits(bad)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, "model_type is"),
        ({"sliding_window": 16}, "sliding_window is 16"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is NaN"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"residual_multiplier": 0.22}, "residual_multiplier is 0.22"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'scaled by rope_type "yarn"'),
        (
            {"rope_scaling": LLAMA_3, "rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters has rope_theta 5.0",
        ),
    ],
)
def test_unsupported_keys_are_refused_by_name(
    folder: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    config = json.loads((folder / hub.CONFIG_FILE).read_text()) | more
    with pytest.raises(CheckpointError) as caught:
        hub.open_hub(with_config(folder, tmp_path / "bad", config))
    assert message in caught.value.what


PUBLISHED = {  # keys that only some published Llamas have: Llama 3.2, SmolLM2, Falcon3
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}},
    "activation": "swiglu",
    "_name_or_path": "x",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "eos_token_id": [2, 6],
}


def test_the_keys_of_published_models_change_nothing(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / hub.CONFIG_FILE).read_text()) | PUBLISHED
    assert torch.equal(logits(with_config(folder, tmp_path / "published", config)), logits(folder))


ROPES: dict[str, dict[str, Any]] = {
    "scaling beside parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0},
        "rope_scaling": LLAMA_3,
    },
    "scaling beside a type alone": {
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": LLAMA_3,
    },
    "parameters alone": {
        "rope_parameters": LLAMA_3 | {"rope_theta": 5_000.0},
        "rope_scaling": None,
    },
    "parameters without a base": {"rope_parameters": LLAMA_3, "rope_scaling": None},
    "a base inside the scaling": {"rope_scaling": LLAMA_3 | {"rope_theta": 5_000.0}},
    "the old word for the type": {"rope_scaling": {"type": "default"}},
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_equal_those_of_transformers(
    folder: Path, tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    config = (
        json.loads((folder / hub.CONFIG_FILE).read_text()) | {"rope_theta": 20_000.0} | ROPES[name]
    )
    changed = with_config(folder, tmp_path / "rope", config)
    expected = transformers.LlamaForCausalLM.from_pretrained(changed, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(changed), expected(torch.arange(50)[None]).logits, rtol=0, atol=1e-4
        )


def test_odd_values_in_every_field_of_a_header_are_refused(folder: Path, tmp_path: Path) -> None:
    content = (folder / hub.WEIGHTS_FILE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = "model.norm.weight"
    begin, end = header[name]["data_offsets"]
    other = next(
        entry["data_offsets"]
        for key, entry in header.items()
        if key != name and entry.get("shape") == [16]
    )
    offsets = [
        [end, begin],
        [-begin, end],
        [begin - 64, end - 64],
        [begin, end + 4],
        [float(begin), float(end)],
        [begin],
        other,
        [0, 0],
    ]
    cases: list[Any] = [
        *({**header, name: {**header[name], "data_offsets": value}} for value in [*ODD, *offsets]),
        *({**header, name: {**header[name], "dtype": value}} for value in ODD),
        *(
            {**header, name: {**header[name], "shape": value}}
            for value in [*ODD, [16.0], [-16], [-4, -4], [True, 16], [4, 4]]
        ),
        *({**header, name: value} for value in ODD),
        *({**header, "__metadata__": value} for value in ODD if value not in ({}, None)),
        *ODD,
    ]
    for number, case in enumerate(cases):
        text = json.dumps(case).encode()
        bad = tmp_path / f"{number}.safetensors"
        bad.write_bytes(len(text).to_bytes(8, "little") + text + data)
        with pytest.raises(LockstepError) as caught:
            hub.match_tensors(hub.tensor_locations(bad), CONFIG, tmp_path)
        assert (
            isinstance(caught.value, CheckpointError) and caught.value.where and caught.value.hint
        ), case
    for text in (b'{"a":' * 5000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": {}, "a": {}}'):
        bad = tmp_path / "odd.safetensors"
        bad.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match="no valid safetensors header"):
            hub.tensor_locations(bad)


def test_names_of_the_tensors_are_those_of_the_model_in_order(folder: Path) -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
    assert list(hub.open_hub(folder).tensors) == [name for name, _ in model.named_parameters()]


def test_damaged_config_in_model_json_is_refused(folder: Path, tmp_path: Path) -> None:
    llama_io.import_hub(folder, tmp_path / "run")
    about = json.loads((tmp_path / "run" / llama_io.MODEL).read_text())
    keys = [key for key, _ in llama_config.SIZES.values()]
    for key in [*keys, "rope_theta", "rms_norm_eps", "tie_word_embeddings"]:
        for value in (-1, 0, math.nan, "x", [], {"x": 1}, 10**40):
            config = {**about["config"], key: value}
            (tmp_path / "run" / llama_io.MODEL).write_text(json.dumps(about | {"config": config}))
            with pytest.raises(LockstepError):
                llama_io.load_llama(tmp_path / "run", device=CPU)
    for damaged in ({}, {"config": None}, {"config": []}, {"config": "x"}, [], 7):
        (tmp_path / "run" / llama_io.MODEL).write_text(json.dumps(damaged))
        with pytest.raises(DataError):
            llama_io.load_llama(tmp_path / "run", device=CPU)


# -- generate and export -----------------------------------------------------------------------------------------------


def test_prompts_of_a_file_are_split_at_line_feeds_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_bytes("a cat\u2028a\x0cb\x85c\rd\r\na".encode())
    assert main(["generate", str(folder), "--file", str(tmp_path / "lines"), "--tokens", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    (tmp_path / "lines").write_bytes(b"a cat\n\n\xff")
    assert (
        main(["generate", str(folder), "--file", str(tmp_path / "lines"), "--tokens", "2"])
        == DataError.exit_code
    )
    assert "is not UTF-8: byte 0xff at offset 7" in capsys.readouterr().err
    assert (
        main(["generate", str(folder), "--file", str(tmp_path / "absent")]) == UsageError.exit_code
    )
    assert main(["generate", str(folder), "\udcff"]) == UsageError.exit_code


def test_options_are_accepted_before_and_between_prompts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["a cat", "a cat a"]
    assert main(["generate", str(folder), *texts, "--tokens", "3"]) == 0
    expected = capsys.readouterr().out
    for words in (
        ["--tokens", "3", *texts],
        [texts[0], "--tokens", "3", texts[1]],
        ["--tokens=3", "--seed", "0", *texts],
    ):
        assert main(["generate", str(folder), *words]) == 0
        assert capsys.readouterr().out == expected
    assert main(["generate", str(folder), "--token", "3", *texts]) == UsageError.exit_code
    assert "unknown option '--token'" in capsys.readouterr().err


def test_more_tokens_than_the_model_has_positions_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "a cat", "--tokens", "100000"]) == UsageError.exit_code
    assert "tokens with the prompt, and the model has" in capsys.readouterr().err


def test_prompt_with_a_token_beyond_the_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    larger = with_config(
        folder, tmp_path / "larger", json.loads((folder / hub.CONFIG_FILE).read_text())
    )
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_tokens([f"new{number}" for number in range(60)])
    (larger / "tokenizer.json").unlink()
    inner.save(str(larger / "tokenizer.json"))
    assert main(["generate", str(larger), "a cat", "--tokens", "2"]) == 0, (
        "accepted: no token of the prompt is beyond the vocabulary"
    )
    assert main(["generate", str(larger), "a new59", "--tokens", "2"]) == UsageError.exit_code


def test_changed_max_seq_len_keeps_the_token_ids_of_the_config(
    folder: Path, tmp_path: Path
) -> None:
    old = json.loads((folder / hub.CONFIG_FILE).read_text()) | {
        "bos_token_id": 1,
        "eos_token_id": [2, 6],
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    longer = replace(CONFIG, max_seq_len=128)
    written = llama_config.config_to_write(longer, old)
    assert llama_config.config_from_hf(written, "") == longer
    assert {key: written[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": 1,
        "eos_token_id": [2, 6],
        "pad_token_id": 0,
    }
    hub.write_hub(tmp_path / "hub", written, hub.open_hub(folder).tensors)
    exported = json.loads((tmp_path / "hub" / hub.CONFIG_FILE).read_text())
    assert exported == written | {"dtype": "float32"}


def test_export_has_the_dtype_of_the_import_or_the_requested_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Like a run that started from bf16 weights and trained them in fp32."""
    llama_io.import_hub(folder, tmp_path / "run")
    about = json.loads((tmp_path / "run" / llama_io.MODEL).read_text())
    for number, (began, asked, expected) in enumerate(
        [
            ("bfloat16", "", torch.bfloat16),
            ("", "", torch.float32),
            ("bfloat16", "float16", torch.float16),
        ]
    ):
        (tmp_path / "run" / llama_io.MODEL).write_text(
            json.dumps(about | ({"dtype": began} if began else {}))
        )
        words = [
            "checkpoint",
            "export",
            str(tmp_path / "run"),
            "--out",
            str(tmp_path / f"out{number}"),
            *(["--dtype", asked] if asked else []),
        ]
        assert main(words) == 0
        back = hub.open_hub(tmp_path / f"out{number}")
        first = hub.open_hub(folder).tensors
        assert all(
            torch.equal(back.tensors[name], first[name].to(expected))
            and back.tensors[name].dtype == expected
            for name in first
        )
        assert str(expected) == "torch." + back.hf_config["torch_dtype"]
    with pytest.raises(CheckpointError, match="x has values up to 1e"):
        llama_io.cast_tensor("x", torch.tensor([1e6]), torch.float16)
    begun = InitialWeights.of(
        resolve(
            None, {"task": "sft", "data.kind": "drills", "llama.init_from": str(tmp_path / "out0")}
        ).run,
        CONFIG.vocab_size,
    )
    assert begun.to_json()["dtype"] == "bfloat16"
