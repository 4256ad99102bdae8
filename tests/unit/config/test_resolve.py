"""Sources of a configuration, and errors with three parts: what, where, and what to try."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from lockstep.config.resolve import (
    parse_flags,
    read_toml,
    refuse_unknown_variables,
    resolve,
)
from lockstep.config.saved_run import format_run, from_json, to_json
from lockstep.config.schema import config_fields
from lockstep.errors import ConfigError
from lockstep.runtime.environment import RESERVED_VARIABLES


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\n[optim]\nlearning_rate = 1e-3\nwarmup_steps = 3\n[parallel]\nbucket_bytes = "2 MiB"\ntimeout_s = "2 min"\n'
    )
    resolved = resolve(
        file,
        {"optim.warmup_steps": "5"},
        {"LOCKSTEP_OPTIM_WARMUP_STEPS": "4", "LOCKSTEP_SEED": "9", "HOME": "/"},
    )
    run = resolved.run
    assert (
        run.steps,
        run.optim.learning_rate,
        run.optim.warmup_steps,
        run.seed,
        run.batch.micro_batches,
    ) == (7, 1e-3, 5, 9, 8)
    assert (run.parallel.bucket_bytes, run.parallel.timeout_s) == (2 * 2**20, 120.0)
    assert resolved.origin["optim.warmup_steps"] == "command line" and resolved.origin[
        "seed"
    ].startswith("LOCKSTEP_")
    assert resolved.origin["steps"] == str(file) and resolved.origin["batch.tokens"] == "default"
    assert from_json(json.loads(json.dumps(to_json(resolved)))) == resolved
    shown = format_run(resolved).splitlines()
    assert len(shown) == len(config_fields()) and any(
        line.startswith("optim.warmup_steps") and line.endswith("command line") for line in shown
    )


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            {"optim.lr": "1"},
            ["unknown key 'optim.lr'", "command line", "perhaps optim.learning_rate"],
        ),
        ({"model.n_haeds": "1"}, ["unknown key 'model.n_haeds'", "perhaps model.n_heads"]),
        ({"batch.tokens": "many"}, ["batch.tokens = 'many'", "valid integer"]),
        ({"parallel.bucket_bytes": "3 parsecs"}, ["unknown unit 'parsecs'", "25 MB"]),
        ({"model.dropout": "1.5"}, ["model.dropout = '1.5'", "below 1"]),
        ({"model.n_heads": "5"}, ["model.dim=128", "model.n_heads=5", "try model.n_heads=4"]),
        ({"optim.schedule": "square"}, ["optim.schedule = 'square'", "'linear'"]),
        ({"data.kind": "files"}, ["data.train, which is empty", 'try data.train=["train.en.gz"']),
        ({"data.train": "a,b"}, ["data.kind=cldr", "not support data.train", "data.kind to files"]),
        (
            {"data.kind": "files", "data.train": "a,b", "data.dataset": "x"},
            ["data.kind=files does not support data.dataset=x", "huggingface"],
        ),
        (
            {"optim.lr": "1", "model.dropout": "x"},
            ["2 invalid values", "unknown key 'optim.lr'", "model.dropout = 'x'"],
        ),
    ],
)
def test_an_invalid_value_is_an_error_of_three_parts(
    flags: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, flags)
    assert caught.value.exit_code == 2 and caught.value.where
    for part in parts:
        assert part in str(caught.value)


def test_an_invalid_toml_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optim\nx=")
    with pytest.raises(ConfigError, match="is not TOML"):
        resolve(tmp_path / "run.toml")


def test_a_missing_run_file_offers_run_files_only(tmp_path: Path) -> None:
    for name, text in (
        ("pyproject", "[project]"),
        ("hosts", "[[host]]"),
        ("torn", "["),
        ("run", "[optim]\nlearning_rate = 1"),
    ):
        (tmp_path / f"{name}.toml").write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path / "absent.toml")
    assert caught.value.hint == f"available: {tmp_path / 'run.toml'}"
    (tmp_path / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"available: recipes/llama-lora\.toml"):
        read_toml(tmp_path / "absent.toml")


def test_flags_are_parsed_in_both_spellings_and_other_words_are_refused() -> None:
    assert parse_flags(["--a.b", "1", "--c=2"]) == {"a.b": "1", "c": "2"}
    for words in (["stray"], ["--a"], ["--a", "--b", "1"]):
        with pytest.raises(ConfigError):
            parse_flags(words)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LOCKSTEP_OPTIM_LR", "LOCKSTEP_OPTIM_LEARNING_RATE"),
        ("LOCKSTEP_MODEL_N_HEDS", "LOCKSTEP_MODEL_N_HEADS"),
        ("LOCKSTEP_DEVCE", "LOCKSTEP_DEVICE"),
        ("LOCKSTEP_XYZ", "unset it"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    refuse_unknown_variables(
        {"LOCKSTEP_TMP": "", "LOCKSTEP_SEED": "1", "LOCKSTEP_WORKER_ENV": "", "HOME": "/"},
        RESERVED_VARIABLES,
    )
    with pytest.raises(ConfigError, match=f"unknown variable {name}") as caught:
        refuse_unknown_variables({name: "1"}, RESERVED_VARIABLES)
    assert near in caught.value.hint


def test_a_recipe_is_found_by_its_name_where_there_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any folder, so also when installed from a wheel; an existing file takes precedence."""
    repository = Path(__file__).parents[3]
    monkeypatch.chdir(tmp_path)
    for path in sorted((repository / "recipes").glob("*.toml")):
        values = read_toml(path)
        assert values and all(
            read_toml(Path(name)) == values
            for name in (path.stem, path.name, f"recipes/{path.name}")
        )
    (tmp_path / "translate.toml").write_text("seed = 5")
    assert read_toml(Path("translate.toml")) == {"seed": 5}
    for absent in ("other/translate.toml", "absent", "translate.txt"):
        with pytest.raises(ConfigError, match=r"there is no run file") as caught:
            read_toml(Path(absent))
        assert (
            "recipes/llama-sft.toml" in caught.value.hint or "translate.toml" in caught.value.hint
        )
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "recipes": "lockstep/recipes"
    }
