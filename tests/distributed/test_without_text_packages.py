"""A Session and its commands need none of the packages of the extra [text]; recipes name them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.launching import ROOT, one_thread

from lockstep.cli.options import COMMANDS
from lockstep.errors import TEXT_PACKAGES

HIDING = ROOT / "tests/support/without_text_packages"
LOOP = """
import torch
from torch.utils.data import TensorDataset
import lockstep


def main(out: str = "runs/own", steps: int = 8) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    dataset, model = TensorDataset(inputs, inputs.sin()), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=2, save_every=5) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=8)
        for step in session.steps(steps):
            for x, y in loader(step):
                session.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
"""
RECIPE = "import lockstep.recipes\n\nlockstep.recipes.start(lambda run: None, __file__)\n"


def run_without(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python in an interpreter that lacks the packages."""
    path = os.pathsep.join([str(HIDING), os.environ.get("PYTHONPATH", "")])
    environ = one_thread(PYTHONPATH=path, LOCKSTEP_TMP=str(folder))
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same loop: started by itself, and by `lockstep run`."""
    folder = tmp_path_factory.mktemp("trained")
    loop = folder / "loop.py"
    loop.write_text(LOOP)
    alone = run_without(folder, loop, "--out", "runs/a")
    assert alone.returncode == 0, alone.stderr
    words = ["run", "--workers", "2", loop, "--out", "runs/b"]
    started = run_without(folder, "-m", "lockstep", *words)
    assert started.returncode == 0, started.stderr
    return folder


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("checkpoint digest runs/a", "step 8 sha256"),
        ("checkpoint export runs/a", "written to runs/a/model.safetensors"),
        ("replay runs/a --step 7", "digests equal the record"),
        ("why runs/a --step 7", "in micro-batch"),
        ("diff runs/a runs/b", "equal up to step 8"),
        ("report runs/a", "8 steps"),
        ("status runs/a", "ended with exit code 0"),
        ("watch runs/a", "checkpoint: step 8"),
    ],
)
def test_a_command_about_a_run_works(trained: Path, command: str, shown: str) -> None:
    done = run_without(trained, "-m", "lockstep", *command.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        "train --workers 2",
        "train recipes/llama-pretrain.toml",
        "launch recipes/translate.toml",
        "drill",
        "plan --devices 1x2:cpu-4GiB --link 1Gbit/s",
        "evaluate runs/a",
        "translate runs/a hello",
        "generate runs/a hello",
        "checkpoint import runs/a --out runs/c",
        "run recipe.py",
    ],
)
def test_a_missing_package_is_named_before_a_worker_starts(command: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    done = run_without(tmp_path, "-m", "lockstep", *command.split())
    assert done.returncode == 2
    what, where, hint = done.stderr.splitlines()
    assert re.fullmatch(
        f"ConfigError: the package ({'|'.join(TEXT_PACKAGES)}) is not installed", what
    )
    assert command.split()[0] in where or "lockstep." in where
    assert "pip install 'lockstep-train[text]'" in hint and "pip install '.[text]'" in hint
    assert not (tmp_path / "runs").exists()


def test_values_and_files_of_a_recipe_are_shown_without_the_packages(tmp_path: Path) -> None:
    for words in ("train --show", "recipes", "render slurm recipes/translate.toml --nodes 1:2"):
        done = run_without(tmp_path, "-m", "lockstep", *words.split())
        assert done.returncode == 0, done.stderr


def test_the_extra_has_these_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.partition(">")[0] for line in project["optional-dependencies"]["text"]]
    assert sorted(names) == list(TEXT_PACKAGES)
    assert not [line for line in project["dependencies"] if line.startswith(TEXT_PACKAGES)]
    assert {name for name, command in COMMANDS.items() if command.needs_text} == {
        "train", "plan", "launch", "drill", "evaluate", "translate", "generate",
    }  # fmt: skip
