"""The promise made to a user's machine, kept on this one: a short drill, and the rules of the plan."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hosts import living

from lockstep.drill import FAULTS, plan
from lockstep.membership.arbiter import Arbiter

TINY = ["--data.pairs", "3000", "--data.held_out", "50", "--tokens.vocabulary", "500", "--batch.tokens", "256", "--evaluate.at_end", "0"]
TINY += ["--model.width", "32", "--model.encoder_layers", "1", "--model.decoder_layers", "1", "--model.feed_forward", "64"]
TINY += ["--save.every_steps", "10"]


def test_a_drill_ends_with_the_same_bits(tmp_path: Path) -> None:
    words = ["drill", "--workers", "3", "--faults", "5", "--seed", "4", "--steps", "60", "--out", str(tmp_path / "drill"), *TINY]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True, timeout=280, env=environ, check=False)
    log = tmp_path / "drill" / "disturbed" / "drill.log"
    assert done.returncode == 0, done.stdout + done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in FAULTS]
    assert sorted(rows) == sorted(fault for _, fault in plan(4, 5, 60, 3, 10)) and "the same bits" in done.stdout
    assert {"stop", "flip", "checkpoint"} < set(rows) and "is damaged" in log.read_text()
    newest = Arbiter(tmp_path / "drill" / "disturbed" / "generations").newest()
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


def test_replicas_of_two_shards_heal_as_whole_ones(tmp_path: Path) -> None:
    words = ["drill", "--faults", "2", "--seed", "3", "--steps", "40", "--out", str(tmp_path / "drill"), *TINY]
    words += ["--layout.replicate", "2", "--layout.shard", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, text=True, timeout=280, env=environ, check=False)
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stdout + done.stderr
    records = [Arbiter(tmp_path / "drill" / "disturbed" / "generations").read(number) for number in range(1, 4)]
    assert all(len(record.members) % 2 == 0 for record in records)
