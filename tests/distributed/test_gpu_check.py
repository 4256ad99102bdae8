"""`make gpu-check` without a GPU: the same commands at a tiny size, and how their answers are judged."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.launching import run_command

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.check import Part, differences, parts
from bench.results import TOP


@pytest.mark.long
def test_each_part_succeeds_on_a_cpu(tmp_path: Path) -> None:
    """All but the drill: test_drill.py runs it."""
    command = [
        sys.executable,
        "-m",
        "bench.gpu.check",
        "--device",
        "cpu",
        "--only",
        "chats,throughput",
    ]
    environ = {**os.environ, "LOCKSTEP_TMP": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_command(command, cwd=TOP, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Different bits: none" in done.stdout and "tokens/s" in done.stdout


def test_other_digests_and_missing_ones_are_reported() -> None:
    done = [
        Part("a", [], group="chats", answer="step 5 sha256 1f00\n"),
        Part("b", [], group="chats", answer="step 5 sha256 1f00\n"),
    ]
    assert differences(done) == []
    for answer in ("step 5 sha256 2e00", ""):
        assert differences([*done, Part("c", [], group="chats", answer=answer)]) == [
            "chats: 2 digests"
        ]


def test_a_gpu_is_checked_with_all_that_a_cpu_is_and_the_gpu_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("bench.gpu.check.nccl_version", lambda: 23001)
    on_gpu = {part.name for part in parts("cuda", tmp_path)}
    ways = {"4 workers, nccl", "2 workers, gloo on one GPU", "2 workers, nccl on one GPU"}
    assert {f"{task}, {way}" for task in ("chats", "translator") for way in ways} <= on_gpu
    assert {part.name.partition(",")[0] for part in parts("cpu", tmp_path)} | {"tests"} <= {
        name.partition(",")[0] for name in on_gpu
    }
