"""`lockstep drill`: a short one with faults, and self-checks of user loops."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support import state_places
from support.forking import ForkedPopen
from support.hosts import living
from support.launching import ROOT, lockstep_command, one_thread, run_lockstep
from support.object_store import environment, s3_server
from support.waiting import wait_until

from lockstep.checkpoint.folder import committed_steps
from lockstep.drill.run import FAULTS, DrillRun, plan_faults
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import LockstepError
from lockstep.record import events

HABITS = f"{ROOT / 'tests' / 'support' / 'loops' / 'habits.py'}:train"
OWN_LOOP = ROOT / "examples" / "own_loop.py"

TINY = (
    "--data.pairs 3000 --data.held_out 50 --tokenizer.vocab_size 500 --batch.tokens 256"
    " --evaluate.at_end 0 --model.dim 32 --model.encoder_layers 1 --model.decoder_layers 1"
    " --model.ffn_dim 64 --checkpoint.every_steps 10"
)


def drill(words: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_lockstep("drill", *words.split(), "--out", folder, **{"timeout": 280} | options)


def assert_same_bits(result: subprocess.CompletedProcess[str], log: Path | None = None) -> None:
    more = log.read_text()[-3000:] if log and log.exists() else ""
    assert result.returncode == 0 and "the same bits" in result.stdout, (
        result.stdout + result.stderr + more
    )


def faults_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    first_words = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
    return sorted(word for word in first_words if word in FAULTS)


def test_a_drill_reports_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "drill"
    # Both runs prepare their data.
    environ = one_thread(LOCKSTEP_CACHE="off")
    result = drill(f"--workers 3 --faults 4 --seed 49 --steps 40 {TINY}", folder, env=environ)
    log = folder / "disturbed" / "drill.log"
    assert_same_bits(result, log)
    rows = faults_of(result)
    assert rows == sorted(fault for _, fault in plan_faults(49, 4, 40, 3, 10))
    assert {"stop", "flip", "checkpoint"} < set(rows) and "is damaged" in log.read_text()
    newest = GenerationLog(folder / "disturbed" / "generations").newest()
    assert newest.end is not None and newest.end.code == 0 and newest.number > 2


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [("3", "bf16", "1"), ("3", "int8", "1"), ("4", "int8", "2")], ids=" ".join
)
def test_a_drill_reports_the_same_bits_with_each_wire_format(
    tmp_path: Path, words: tuple[str, str, str]
) -> None:
    workers, wire, shard = words
    layout = f"--workers {workers} --parallel.wire {wire} --layout.shard {shard}"
    assert_same_bits(drill(f"{layout} --faults 3 --steps 60 {TINY}", tmp_path / "drill"))


@pytest.mark.long
def test_a_drill_in_an_object_store_compares_what_the_store_holds(tmp_path: Path) -> None:
    words = f"drill --workers 3 --faults 7 --steps 150 --out s3://runs/team/drill {TINY}".split()
    with s3_server() as server:
        environ = {
            **os.environ,
            **environment(server, tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_TMP": str(tmp_path),
        }
        run = functools.partial(
            subprocess.run, capture_output=True, text=True, timeout=280, env=environ, check=False
        )
        result = run(lockstep_command(*words))
        assert_same_bits(result)
        assert faults_of(result) == sorted(FAULTS)
        again = run(lockstep_command(*words))
        assert again.returncode == 2 and "s3://runs/team/drill is not empty" in again.stderr
        listed = run(lockstep_command("checkpoint", "list", "s3://runs/team/drill/disturbed"))
        assert listed.stdout.splitlines()[-1].split()[0] == "150", listed.stderr
    assert not living(tmp_path)


def test_a_terminated_drill_leaves_no_worker(tmp_path: Path) -> None:
    words = f"drill --workers 2 --steps 100000 --out {tmp_path}/drill {TINY}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    metrics = tmp_path / "drill" / "undisturbed" / "metrics.jsonl"
    with ForkedPopen(lockstep_command(*words.split()), cwd=tmp_path, env=environ) as process:
        wait_until(lambda: metrics.exists() and metrics.read_bytes(), "step 1", process=process)
        process.terminate()
        assert process.wait(30) == 143
    assert not living(tmp_path)


def test_a_drill_needs_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    result = drill(f"--steps 5 {TINY}", tmp_path)
    assert result.returncode == 2 and "is not empty" in result.stderr


# A user's loop.


@pytest.mark.long
def test_a_self_check_kills_a_worker_resumes_with_another_number_and_compares(
    tmp_path: Path,
) -> None:
    result = drill(f"{OWN_LOOP}:train --steps 21", tmp_path / "drill")
    assert result.returncode == 0 and result.stdout.endswith("\nthe same bits\n"), (
        result.stdout + result.stderr
    )
    rows = [line.partition(" step ")[2] for line in result.stdout.splitlines() if "sha256" in line]
    assert (
        len(rows) == 4
        and len({row.rpartition("step ")[2] for row in rows}) == 1
        and "21 sha256" in rows[0]
    )
    killed, resumed = (
        events.read_events(tmp_path / "drill" / name) for name in ("killed", "resumed")
    )
    assert any(event["event"] == "regrouped" and event["joined"] for event in killed), (
        "the replacement received the state"
    )
    starts = [
        (event["step"], len(event["workers"])) for event in resumed if event["event"] == "began"
    ]
    assert starts == [(0, 2), (10, 1)]


@pytest.mark.long
def test_a_self_check_names_the_state_that_a_joiner_lacks(tmp_path: Path) -> None:
    script = state_places.write("a local number", tmp_path / "script")
    result = drill(f"{script}:train --steps 8", tmp_path / "drill")
    assert result.returncode == 2, result.stderr
    assert re.search(
        r"the loop changes what no checkpoint holds: \w+ \(line \d+\)\n", result.stdout
    )
    assert "is not the same on all workers" in result.stderr


def test_a_failed_self_check_prints_the_error_and_has_the_exit_code_of_its_run(
    tmp_path: Path,
) -> None:
    result = drill(f"{OWN_LOOP}:train --stepz 21", tmp_path / "drill")
    assert result.returncode == 2 and "1 worker exited with code 2" in result.stderr, result.stderr
    assert (
        "UsageError: " in result.stderr
        and "takes no --stepz" in result.stderr
        and "it takes --out, --steps" in result.stderr
    )


def test_faults_in_a_loop_without_metrics_are_refused(tmp_path: Path) -> None:
    words = "--habit gradient_noise --faults 1 --workers 1"
    result = drill(f"{HABITS} {words}", tmp_path / "drill")
    assert (
        result.returncode == 2
        and "the loop has written no step to" in result.stderr
        and "tracker.step" in result.stderr
    ), result.stderr


def test_a_drill_waits_while_the_run_makes_progress_and_times_out_without(tmp_path: Path) -> None:
    words = f"{HABITS} --habit slow --steps 1000 --seconds 0.15".split()
    with DrillRun(words, str(tmp_path / "run"), 1) as run:
        run.wait_for(
            lambda: bool(committed_steps(tmp_path / "run" / "checkpoints")), "the first checkpoint"
        )
        run.patience_s = 0.3
        start_s = time.monotonic()
        run.wait_for(lambda: committed_steps(tmp_path / "run" / "checkpoints")[-1] >= 8, "step 8")
        assert time.monotonic() - start_s > 2 * run.patience_s, (
            "a fixed patience would have given up"
        )
        run.kill(run.newest_generation().members, signal.SIGSTOP)
        with pytest.raises(
            LockstepError,
            match=r"timed out waiting for step 1000: the run has made no progress for",
        ):
            run.wait_for(lambda: False, "step 1000")


@pytest.mark.long
def test_faults_are_injected_into_a_user_loop_with_metrics(tmp_path: Path) -> None:
    words = f"{OWN_LOOP}:train --faults 4 --seed 2 --steps 2000"
    result = drill(words, tmp_path / "drill")
    assert result.returncode == 0 and result.stdout.endswith("\nthe same bits\n"), (
        result.stdout + result.stderr
    )


@pytest.mark.long  # test_layout_hosts.py has the same faults
def test_replicas_of_two_shards_recover_as_units(tmp_path: Path) -> None:
    layout = "--layout.replicate 2 --layout.shard 2"
    result = drill(f"--faults 2 --seed 3 --steps 40 {layout} {TINY}", tmp_path / "drill")
    assert_same_bits(result)
    generations = [
        GenerationLog(tmp_path / "drill" / "disturbed" / "generations").read(number)
        for number in range(1, 4)
    ]
    assert all(len(generation.members) % 2 == 0 for generation in generations)
