"""lockstep recipes and lockstep completion: outside the repository, and in real shells."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.options import RUN_COMMANDS, build_parser
from lockstep.config.resolve import recipes
from lockstep.config.schema import config_fields


def test_recipes_are_listed_and_printed_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert len(recipes()) >= 5
    for name, path in recipes().items():
        assert f"\n{name} " in f"\n{listed}"
        for given in (name, f"{name}.toml", f"recipes/{name}.toml"):
            assert main(["recipes", given]) == 0
            assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(path.read_text())
    assert main(["recipes", "absent"]) == 2
    assert "there is no recipe 'absent'" in capsys.readouterr().err


def test_a_recipe_in_place_of_a_missing_file_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recipes/llama-sft.toml", "--show"]) == 0
    shown = capsys.readouterr()
    assert (
        "recipes/llama-sft.toml: no such file here; using the recipe that comes with lockstep"
        in shown.err
    )
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "llama-sft.toml").write_text("seed = 5")
    assert main(["train", "recipes/llama-sft.toml", "--show"]) == 0
    shown = capsys.readouterr()
    assert "no such file" not in shown.err and re.search(r"^seed += 5 ", shown.out, re.M)


BASH = """source ./script
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _lockstep; echo "${COMPREPLY[*]}"; }
try lockstep tra
try lockstep train --layout.p
try lockstep launch --task ''
try lockstep run --restart ''
try lockstep checkpoint ver
try lockstep checkpoint verify ''
try lockstep checkpoint verify --o
"""
EXPECTED = [
    "train translate",
    "--layout.pipeline --layout.pipeline_chunks",
    "translate pretrain sft",
    "one all",
    "verify",
    "",
    "--out",
]


def script_for(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_keys_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script_for("bash", capsys))
    done = subprocess.run(
        ["bash", "-c", BASH], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == EXPECTED and not done.stderr


def test_zsh_completes_with_the_script_of_bash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not shutil.which("zsh"):
        pytest.skip("no zsh")
    (tmp_path / "script").write_text(script_for("zsh", capsys))
    code = "source ./script; whence -w _lockstep; print -r -- ${_comps[lockstep]}"
    done = subprocess.run(
        ["zsh", "-f", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "_lockstep: function" in done.stdout and "_lockstep" in done.stdout.splitlines()[-1], (
        done.stdout + done.stderr
    )


def test_fish_completes_commands_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not shutil.which("fish"):
        pytest.skip("no fish")
    (tmp_path / "script").write_text(script_for("fish", capsys))
    code = "source ./script; complete -C 'lockstep tra'; complete -C 'lockstep launch --task '; complete -C 'lockstep train --layout.pipe'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert {
        "train",
        "translate",
        "pretrain",
        "sft",
        "--layout.pipeline",
        "--layout.pipeline_chunks",
    } <= set(words), done.stdout + done.stderr


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_every_command_option_and_key_is_completed(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_for(shell, capsys)
    options = {
        option
        for parser in build_parser().commands.values()
        for option in parser._option_string_actions
        if option.startswith("--")
    }
    for word in [*options, *(f"--{key}" for key in config_fields())]:
        assert (word if shell == "bash" else f"-l {word[2:]} ") in script, word
    assert all(name in script for name in [*build_parser().commands, *RUN_COMMANDS])
