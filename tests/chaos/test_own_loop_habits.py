"""User loops under an agent: an error of one worker ends the run with that error, and unseeded
generators draw the same numbers on all workers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import lockstep_command, run_command

from lockstep.checkpoint.commands import digest_line

LOOP = Path(__file__).parents[1] / "support" / "loop_habits.py"


@pytest.fixture(autouse=True)
def separate_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def trained(
    folder: Path, habit: str, workers: int, steps: int = 6
) -> subprocess.CompletedProcess[str]:
    """Run `lockstep train`; return its output and exit code."""
    words = [
        "--workers",
        str(workers),
        "--out",
        str(folder),
        "--habit",
        habit,
        "--steps",
        str(steps),
    ]
    command = lockstep_command("train", f"{LOOP}:train", *words)
    return run_command(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300)


def test_error_of_one_worker_is_reported_and_gives_the_exit_code(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "rank 1 calls loss.backward", 2, steps=1_000_000)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr[ended.stderr.index("UsageError") :]
    assert last.startswith(
        "UsageError: no gradient arrived for the 4 parameters in micro-batch 2 of step 3: backward() was not called"
    )
    assert "lost" not in last and "Traceback" not in ended.stderr


def test_repeated_divergence_ends_the_run_and_names_the_tensors(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "noise from a generator of each rank", 2)
    assert ended.returncode == 2, ended.stderr
    assert (
        "UsageError: the replicas differ again before step 2" in ended.stderr
        and "model.1.weight" in ended.stderr
    )
    assert "model.0.weight" not in ended.stderr, (
        "with equal gradients the first layer has not changed differently yet"
    )
    assert not list((tmp_path / "run" / "generations").glob("*.suspects.json"))


def test_worker_without_memory_for_a_thread_exits_and_does_not_hang(tmp_path: Path) -> None:
    ended = trained(tmp_path / "run", "no memory is left for a thread", 2)
    assert ended.returncode == 1, ended.stderr
    assert "an error of rank 0" in ended.stderr
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "can't start new thread" in events, events


def test_unseeded_data_and_weights_are_equal_on_1_and_2_workers(tmp_path: Path) -> None:
    digests = []
    for workers in (1, 2):
        assert run_loop(LOOP, tmp_path / str(workers), workers, habit="none") == LoopResult(0, "")
        digests.append(digest_line(tmp_path / str(workers)))
    assert digests[0] == digests[1]
