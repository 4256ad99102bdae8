"""NCCL in the communication hook, the reducer's stream, equal bits of two runs. Needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.runtime import numerics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SMALL = [
    "--steps",
    "6",
    "--data.pairs",
    "1500",
    "--data.held_out",
    "40",
    "--batch.tokens",
    "128",
    "--batch.buckets",
    "3",
    "--evaluate.at_end",
    "0",
]


def trained(folder: Path, workers: int) -> str:
    command = [sys.executable, "-m", "lockstep"]
    words = [
        "train",
        "--out",
        str(folder),
        "--workers",
        str(workers),
        "--checkpoint.every_steps",
        "3",
        *SMALL,
    ]
    result = subprocess.run(
        [*command, *words], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert result.returncode == 0, result.stderr
    return subprocess.run(
        [*command, "checkpoint", "digest", str(folder)], capture_output=True, text=True, check=True
    ).stdout


def test_two_trainings_on_one_gpu_have_one_sha256(tmp_path: Path) -> None:
    assert trained(tmp_path / "a", 1) == trained(tmp_path / "b", 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none here")
def test_one_and_two_gpus_have_one_sha256(tmp_path: Path) -> None:
    assert trained(tmp_path / "a", 1) == trained(tmp_path / "b", 2)


def test_example_own_loop_trains_on_the_gpu(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_loop.py"
    program = (
        "import torch, own_loop; own_loop.train(steps=3); print(torch.cuda.max_memory_allocated())"
    )
    paths = [str(example.parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ,
        check=False,
    )
    assert result.returncode == 0 and int(result.stdout.split()[-1]) > 0, (
        result.stdout + result.stderr
    )


def test_numerics_fingerprint_names_the_gpu_and_repeats() -> None:
    device = torch.device("cuda", 0)
    first = numerics.fingerprint(device)
    numerics.probe_results.cache_clear()
    assert numerics.fingerprint(device) == first != numerics.fingerprint(torch.device("cpu"))
