"""The promise made to a user's machine, kept on this one: a short drill, and the rules of the plan."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hosts import living

from lockstep.checkpoint.folder import committed_steps
from lockstep.cli.drill import FAULTS, Run, plan
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import LockstepError
from lockstep.record import events

LOOPS = Path(__file__).parents[1] / "support" / "loops"
OWN_LOOP = Path(__file__).parents[2] / "examples" / "own_loop.py"

TINY = ["--data.pairs", "3000", "--data.held_out", "50", "--tokenizer.vocab_size", "500", "--batch.tokens", "256", "--evaluate.at_end", "0"]
TINY += ["--model.dim", "32", "--model.encoder_layers", "1", "--model.decoder_layers", "1", "--model.ffn_dim", "64"]
TINY += ["--checkpoint.every_steps", "10"]


def test_a_drill_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = ["drill", "--workers", "3", "--faults", "5", "--seed", "4", "--steps", "60", "--out", str(tmp_path / "drill"), *TINY]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True, timeout=280, env=environ, check=False)
    log = tmp_path / "drill" / "disturbed" / "drill.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in FAULTS]
    assert sorted(rows) == sorted(fault for _, fault in plan(4, 5, 60, 3, 10)) and "the same bits" in done.stdout
    assert {"stop", "flip", "checkpoint"} < set(rows) and "is damaged" in log.read_text()
    newest = GenerationLog(tmp_path / "drill" / "disturbed" / "generations").newest()
    assert newest is not None and newest.end is not None and newest.end.code == 0 and newest.number > 2


def test_a_plan_is_a_function_of_its_seed_and_has_every_kind_before_any_twice() -> None:
    assert plan(7, 20, 300, 3, 100) == plan(7, 20, 300, 3, 100) != plan(8, 20, 300, 3, 100)
    assert {fault for _, fault in plan(1, len(FAULTS), 300, 3, 100)} == set(FAULTS)
    assert "flip" not in {fault for _, fault in plan(1, 12, 300, 2, 100)}  # two replicas cannot tell who is wrong without going back
    assert {"flip", "stop"}.isdisjoint(fault for _, fault in plan(1, 12, 300, 1, 100))  # of one worker nobody else is there to see it
    moments = [moment for moment, _ in plan(3, 9, 40, 3, 10)]
    assert moments == sorted(moments) and moments[0] >= 1 and moments[-1] < 37


def test_a_checkpoint_is_damaged_only_where_another_one_can_serve() -> None:
    for seed in range(100):
        assert all(200 < moment < 297 for moment, fault in plan(seed, 7, 300, 3, 100) if fault == "checkpoint")
        for every in (0, 20, 100):
            assert "checkpoint" not in {fault for _, fault in plan(seed, 7, 40, 3, every)}


def test_a_drill_that_is_ended_leaves_no_training(tmp_path: Path) -> None:
    words = ["drill", "--workers", "2", "--steps", "100000", "--out", str(tmp_path / "drill"), *TINY]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    metrics = tmp_path / "drill" / "undisturbed" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-m", "lockstep", *words], cwd=tmp_path, env=environ) as process:
        until_s = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_bytes()):
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    assert not living(tmp_path)


def test_a_drill_wants_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    words = ["drill", "--out", str(tmp_path), "--steps", "5", *TINY]
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "is not empty" in done.stderr


# A loop of one's own.


def drill(*words: str | Path, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep", "drill", *map(str, words)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ, check=False)


def test_a_self_check_of_an_own_loop_loses_a_worker_resumes_with_another_number_and_compares(tmp_path: Path) -> None:
    done = drill(f"{OWN_LOOP}:train", "--steps", "21", "--out", tmp_path / "drill")
    assert done.returncode == 0 and done.stdout.endswith("\nthe same bits\n"), done.stdout + done.stderr
    rows = [line.partition(" step ")[2] for line in done.stdout.splitlines() if "sha256" in line]
    assert len(rows) == 4 and len({row.rpartition("step ")[2] for row in rows}) == 1 and "21 sha256" in rows[0]
    killed, resumed = (events.read_events(tmp_path / "drill" / name) for name in ("killed", "resumed"))
    assert any(event["event"] == "regrouped" and event["joined"] for event in killed), "the replacement was given the state"
    began = [(event["step"], len(event["workers"])) for event in resumed if event["event"] == "began"]
    assert began == [(0, 2), (10, 1)]


def test_a_self_check_shows_the_refusal_of_a_run_and_has_its_exit_code(tmp_path: Path) -> None:
    done = drill(f"{OWN_LOOP}:train", "--stepz", "21", "--out", tmp_path / "drill")
    assert done.returncode == 2 and "1 worker ended with exit code 2" in done.stderr, done.stderr
    assert "UsageError: " in done.stderr and "takes no --stepz" in done.stderr and "it takes --out, --steps" in done.stderr


def test_faults_need_metrics_and_a_loop_without_them_is_told_so(tmp_path: Path) -> None:
    done = drill(f"{LOOPS / 'gradient_noise.py'}:train", "--faults", "1", "--workers", "1", "--out", tmp_path / "drill")
    assert done.returncode == 2 and "the loop has written no step to" in done.stderr and "tracker.step" in done.stderr, done.stderr


def test_patience_follows_the_progress_of_a_run_and_ends_where_it_makes_none(tmp_path: Path) -> None:
    words = [f"{LOOPS / 'slow.py'}:train", "--steps", "1000", "--seconds", "0.15"]
    with Run(words, tmp_path / "run", 1, socket.gethostname()) as run:
        run.wait_for(lambda: bool(committed_steps(tmp_path / "run" / "checkpoints")), "the first checkpoint")
        run.patience_s = 0.3
        began_s = time.monotonic()
        run.wait_for(lambda: committed_steps(tmp_path / "run" / "checkpoints")[-1] >= 8, "step 8")
        assert time.monotonic() - began_s > 2 * run.patience_s, "a fixed patience would have given up"
        run.kill(run.members(), signal.SIGSTOP)
        with pytest.raises(LockstepError, match=r"step 1000 did not come, and the run has made no progress for"):
            run.wait_for(lambda: False, "step 1000")


@pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part of the drills: LOCKSTEP_CHAOS=1")
def test_faults_strike_an_own_loop_that_writes_metrics(tmp_path: Path) -> None:
    done = drill(f"{OWN_LOOP}:train", "--faults", "4", "--seed", "2", "--steps", "2000", "--out", tmp_path / "drill")
    assert done.returncode == 0 and done.stdout.endswith("\nthe same bits\n"), done.stdout + done.stderr


def test_replicas_of_two_shards_heal_as_whole_ones(tmp_path: Path) -> None:
    words = ["drill", "--faults", "2", "--seed", "3", "--steps", "40", "--out", str(tmp_path / "drill"), *TINY]
    words += ["--layout.replicate", "2", "--layout.shard", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True, timeout=280, env=environ, check=False)
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stdout + done.stderr
    records = [GenerationLog(tmp_path / "drill" / "disturbed" / "generations").read(number) for number in range(1, 4)]
    assert all(len(record.members) % 2 == 0 for record in records)
