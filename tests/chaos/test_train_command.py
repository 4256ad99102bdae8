"""`lockstep train`: real processes, real signals, exit codes, and errors in three parts."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import (
    OWN_LOOP,
    ROOT,
    TORCHRUN,
    lockstep_command,
    one_thread,
    run_command,
    run_lockstep,
    start_lockstep,
)
from support.processes import children, is_alive
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line as digest
from lockstep.config.schema import config_fields
from lockstep.record import metrics
from lockstep.record.events import read_events

EXAMPLE = ROOT / "examples" / "own_loop.py"
DATA = "--data.pairs 1500 --data.held_out 40 --batch.tokens 128 --batch.buckets 3"
SMALL = (
    "--tokenizer.vocab_size 500 --model.dim 32 --model.ffn_dim 64 --model.encoder_layers 1"
    f" --model.decoder_layers 1 {DATA} --evaluate.at_end"
)
TINY = f"{SMALL} 0"


def run(words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run_lockstep(*words.split(), **options)


def start(words: str) -> subprocess.Popen[str]:
    return start_lockstep(*words.split())


def steps_in(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    return [
        pid
        for pid in children(process.pid)
        if Path(f"/proc/{pid}/comm").read_text() == "lockstep-worker\n"
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saves = "--steps 30 --checkpoint.every_steps 10 --track.every_s 0"
    result = run(f"train --out {folder} --workers 1 {saves} {TINY}")
    assert result.returncode == 0, result.stderr
    assert "step 30/30  loss" in result.stdout and "next: lockstep translate" in result.stdout
    assert steps_in(folder) == list(range(1, 31))
    assert run(f"checkpoint verify {folder}").returncode == 0
    assert run(f"checkpoint digest {folder}").stdout == f"{digest(folder)}\n"
    return folder


def test_each_signal_saves_and_the_same_command_resumes(undisturbed: Path, tmp_path: Path) -> None:
    command = f"train --out {tmp_path} --steps 30 --checkpoint.every_steps 100 {TINY}"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)):
        first = len(steps_in(tmp_path))
        process = start(command)
        wait_until(lambda first=first: len(steps_in(tmp_path)) >= first + 2, process=process)  # type: ignore[misc]
        pids = workers_of(process)
        assert len(pids) == 2
        process.send_signal(number)
        output = process.communicate(timeout=120)[0]
        assert process.returncode == code, output
        assert not any(map(is_alive, pids))
        assert digest(tmp_path).startswith(f"step {steps_in(tmp_path)[-1]} ")
        assert not list(Path("/tmp").glob(f"lockstep-*{process.pid}*"))
    again = run(command)
    assert again.returncode == 0, again.stderr
    assert steps_in(tmp_path) == list(range(1, 31)) and digest(tmp_path) == digest(undisturbed)


def test_a_killed_worker_is_replaced_and_the_bits_are_the_same(
    undisturbed: Path, tmp_path: Path
) -> None:
    saves = "--steps 30 --checkpoint.every_steps 10"
    process = start(f"train --out {tmp_path} --workers 3 {saves} {TINY}")
    wait_until(lambda: len(steps_in(tmp_path)) >= 3, process=process)
    pids = workers_of(process)
    os.kill(pids[1], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "killed by SIGKILL; restarting now" in output and not any(map(is_alive, pids))
    assert steps_in(tmp_path) == list(range(1, 31)) and digest(tmp_path) == digest(undisturbed)


def test_after_a_kill_of_rank_0_its_successor_prints_the_results(
    undisturbed: Path, tmp_path: Path
) -> None:
    words = f"--workers 2 --min 2 --steps 30 --checkpoint.every_steps 10 {SMALL} 20"
    process = start(f"launch --out {tmp_path} {words}")
    wait_until(lambda: len(steps_in(tmp_path)) >= 3, process=process)
    status = json.loads(run(f"status {tmp_path} --json").stdout)
    assert [member["slot"] for member in status["members"]] == [0, 1]
    os.kill(status["members"][0]["pid"], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert (
        "joined after step" in output and "\nstep 30/30  loss" in output
    )  # the other worker is rank 0 now
    assert "(test, 20 pairs, greedy)" in output and f"next: lockstep translate {tmp_path}" in output
    assert digest(tmp_path) == digest(undisturbed)


def test_workers_exit_within_two_seconds_of_their_agent(tmp_path: Path) -> None:
    process = start(f"train --out {tmp_path} --steps 1000 {TINY}")
    wait_until(lambda: len(steps_in(tmp_path)) >= 1, process=process)
    pids = workers_of(process)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=2)
    assert process.stdout is not None
    process.stdout.close()


def three_parts(text: str) -> bool:
    """Whether an error line is followed by two indented ones: where the values came from, what to try."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if "Error: " in line), None)
    return (
        first is not None
        and len(lines) > first + 2
        and all(line.startswith("  ") for line in lines[first + 1 : first + 3])
    )


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update_with_code_4(
    tmp_path: Path,
) -> None:
    rates = "--optim.learning_rate 1e9 --optim.clip_norm 0"
    words = f"--steps 9 --checkpoint.every_steps 1 {rates} {DATA} --evaluate.at_end 0"
    result = run(f"train --out {tmp_path} {words}")
    assert (
        result.returncode == 4 and "DivergedError" in result.stderr and three_parts(result.stderr)
    ), result.stderr
    assert 1 <= len(steps_in(tmp_path)) < 9 and run(f"checkpoint verify {tmp_path}").returncode == 0


def test_a_busy_port_is_refused(busy_port: int, tmp_path: Path) -> None:
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    environ = one_thread(**environ, MASTER_PORT=str(busy_port))
    result = run(f"train --out {tmp_path}/run {TINY}", env=environ)
    assert (
        result.returncode == 2 and str(busy_port) in result.stderr and three_parts(result.stderr)
    ), result.stderr


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("--optim.lr 1", "perhaps optim.learning_rate", 2),
        ("--bogus", "--bogus", 2),
        ("missing.toml", "there is no run file missing.toml", 2),
        ("torn.toml", "torn.toml is not TOML", 2),
        ("--workers 9", "9 workers for a step of 8 micro-batches", 2),
        ("--resume sometimes", "'sometimes' is neither a step nor", 2),
        ("--resume required", "there is no checkpoint to resume from", 3),
        ("--data.kind files --data.train no.en,no.it", "no.en", 3),
    ],
)
def test_invalid_words_and_values_are_refused_in_three_parts(
    words: str, message: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "torn.toml").write_text("[optim\n")
    more = "" if "files" in words else TINY
    result = run(f"train {words} --out {tmp_path}/run --steps 1 {more}", cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert message in result.stderr and three_parts(result.stderr), result.stderr


def test_the_folder_of_another_run_is_refused_and_unchanged(undisturbed: Path) -> None:
    before = digest(undisturbed)
    result = run(f"train --out {undisturbed} --seed 7")
    assert (
        result.returncode == 2
        and "holds another run: seed was 1, now 7" in result.stderr
        and three_parts(result.stderr)
    )
    assert digest(undisturbed) == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    process = start(f"train --out {tmp_path} --workers 1 --steps 1000 {TINY}")
    wait_until(lambda: len(steps_in(tmp_path)) >= 1, process=process)
    result = run(f"train --out {tmp_path} --workers 1")
    process.kill()
    process.communicate()
    assert (
        result.returncode == 2
        and "another training is already running" in result.stderr
        and three_parts(result.stderr)
    ), result.stderr


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a read-only tmpfs needs root")
    try:
        result = run(f"train --out {tmp_path}/run {TINY}")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert (
        result.returncode == 2
        and "Read-only file system" in result.stderr
        and three_parts(result.stderr)
    ), result.stderr


@pytest.mark.parametrize(("on_error", "last"), [("continue", 8), ("stop", 7)])
def test_a_full_disk_stops_training_or_not_and_keeps_the_older_checkpoint(
    on_error: str, last: int, tmp_path: Path
) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", tmp_path],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        saves = f"--checkpoint.every_steps 2 --checkpoint.on_error {on_error}"
        result = run(f"train --out {tmp_path}/run --steps 8 {saves} {DATA} --evaluate.at_end 0")
        assert result.returncode == 3, result.stderr  # the last checkpoint is missing in both cases
        assert "No space left on device" in result.stderr and three_parts(result.stderr), (
            result.stderr
        )
        steps = steps_in(tmp_path / "run")
        assert steps == list(range(1, len(steps) + 1)) and (
            len(steps) == 8 if on_error == "continue" else 4 <= len(steps) <= last
        )
        listed = run(f"checkpoint verify {tmp_path}/run")
        assert listed.returncode == 0 and listed.stdout.startswith("step 2 is whole"), listed.stdout
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_help_lists_every_value() -> None:
    result = run("train --help")
    assert result.returncode == 0 and all(f"--{key}" in result.stdout for key in config_fields())
    assert (
        run("--help").returncode == 0
        and run("train --show").stdout.count("default") >= len(config_fields()) - 1
    )


def test_a_resume_from_an_earlier_step_sets_later_checkpoints_aside_and_gives_the_same_bits(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    result = run(f"train --out {folder} --workers 2 --resume 20 --steps 30")
    assert result.returncode == 0 and "is set aside as step-00000030.abandoned" in result.stderr, (
        result.stderr
    )
    assert steps_in(folder) == list(range(1, 31)) and digest(folder) == digest(undisturbed)


def test_an_override_is_recorded_and_a_resume_before_it_gives_the_same_bits(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    refused = run(f"train --out {folder} --workers 1 --optim.learning_rate 8e-3")
    assert refused.returncode == 2 and "--override optim.learning_rate=0.008" in refused.stderr
    override = "--override optim.learning_rate=8e-3"
    result = run(f"train --out {folder} --workers 2 --resume 20 {override}")
    assert result.returncode == 0, result.stderr
    rates = {
        line["step"]: line["lr"]
        for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    }
    assert rates[20] == 4e-3 * 20 / 60 and rates[21] == 8e-3 * 21 / 60
    overrides = [
        event
        for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        if event["event"] == "override"
    ]
    assert [(event["step"], event["values"]) for event in overrides] == [
        (20, {"optim.learning_rate": 8e-3})
    ]
    changed = digest(folder)
    assert run(f"train --out {folder} --workers 1 --resume 10").returncode == 0
    assert digest(folder) == changed != digest(undisturbed)


def test_torchrun_starts_the_same_training(undisturbed: Path, tmp_path: Path) -> None:
    words = f"train --out {tmp_path} --steps 30 --checkpoint.every_steps 10 {TINY}"
    result = run_command([*TORCHRUN, "-m", "lockstep", *words.split()])
    assert result.returncode == 0, result.stderr
    assert digest(tmp_path) == digest(undisturbed)


# A user's loop.


def own_loop(folder: Path, workers: int) -> str:
    return f"train {OWN_LOOP} --out {folder} --workers {workers} --steps 120"


@pytest.mark.long  # test_drill.py runs the same loop through the same faults
def test_own_loop_has_the_same_bits_on_any_number_of_workers_and_through_a_kill_and_a_stop(
    tmp_path: Path,
) -> None:
    for workers in (1, 2, 3):
        assert run_loop(EXAMPLE, tmp_path / str(workers), workers, steps=120) == LoopResult(0, "")
    disturbed = tmp_path / "disturbed"
    process = start(own_loop(disturbed, 2))
    wait_until(lambda: len(steps_in(disturbed)) >= 20, process=process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    wait_until(
        lambda: any(event.get("joined") for event in read_events(disturbed)), process=process
    )
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and 20 <= steps_in(disturbed)[-1] < 120, output
    reasons = [
        json.loads(path.read_text())["reason"]
        for path in sorted((disturbed / "generations").glob("*.json"))
    ]
    assert len(reasons) > 2 and not any(
        "no member of generation" in reason for reason in reasons
    ), reasons  # healed in place
    assert digest(disturbed).startswith(f"step {steps_in(disturbed)[-1]} ")
    assert run(own_loop(disturbed, 3)).returncode == 0
    assert steps_in(disturbed) == list(range(1, 121))
    digests = {digest(tmp_path / name) for name in ("1", "2", "3", "disturbed")}
    assert len(digests) == 1 and digests.pop().startswith("step 120 sha256 ")


def test_a_scheduler_an_ema_and_two_optimizers_survive_a_kill_a_join_and_a_resume(
    tmp_path: Path,
) -> None:
    loop = ROOT / "tests" / "support" / "scheduled_loop.py"

    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    assert run_loop(loop, alone, 1) == LoopResult(0, "")
    disturbed.mkdir()
    (disturbed / "disturb").write_text(json.dumps({"kill": 25, "stop": 45}))
    stopped = run(f"train {loop}:train --out {disturbed} --workers 3")
    assert stopped.returncode == 75 and "flipped" not in stopped.stderr, stopped.stderr
    events = [json.loads(line) for line in (disturbed / "events.jsonl").read_text().splitlines()]
    assert any(event.get("joined") for event in events), events
    result = run(f"train {loop}:train --out {disturbed} --workers 2")
    assert result.returncode == 0 and "flipped" not in result.stderr, result.stderr
    rates = [
        [(line["step"], line["rate"]) for line in metrics.iter_steps(folder / "metrics.jsonl")]
        for folder in (alone, disturbed)
    ]
    assert rates[0] == rates[1] and rates[0][-1] == (60, pytest.approx(0.7**9))
    assert digest(alone, 60) == digest(disturbed, 60)


@pytest.mark.parametrize("starter", ["torchrun", "agent"])
def test_no_thread_of_the_process_group_is_left_after_the_loop(
    tmp_path: Path, starter: str
) -> None:
    loop = f"{ROOT}/tests/support/gloo_threads.py"
    agent = lockstep_command("train", f"{loop}:train", "--workers", "2", "--out", "run")
    words = [*TORCHRUN, loop] if starter == "torchrun" else agent
    result = run_command(words, cwd=tmp_path)
    assert result.returncode == 0 and "threads of gloo: 0" in result.stdout, (
        result.stdout + result.stderr
    )


def test_own_loop_differs_from_the_plain_loop_by_eight_lines() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import own_loop as example

    plain, ours = (inspect.getsource(f).splitlines()[1:] for f in (example.plain, example.train))
    stripped = [[line.strip() for line in lines] for lines in (plain, ours)]
    added = [line for line in difflib.ndiff(*stripped) if line.startswith("+ ")]
    assert len(added) == 8, "\n".join(added)


def test_workers_without_a_micro_batch_are_on_standby(tmp_path: Path) -> None:
    few = f"--workers 3 --batch.micro_batches 2 {TINY}"
    result = run(f"launch {few} --steps 4 --out {tmp_path}/run")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        len(json.loads((tmp_path / "run" / "generations" / "000001.json").read_text())["members"])
        == 2
    )
    refused = run(f"train {few} --out {tmp_path}/other")
    assert refused.returncode == 2 and "3 workers for a step of 2 micro-batches" in refused.stderr


@pytest.mark.parametrize("words", ["--resume never", "--show"])
def test_an_option_for_run_files_is_refused_with_a_user_script(tmp_path: Path, words: str) -> None:
    result = run(f"{own_loop(tmp_path / 'run', 1)} {words}")
    assert (
        result.returncode == 2
        and f"{words.split()[0]} is for a run file" in result.stderr
        and not (tmp_path / "run").exists()
    )


def test_a_user_loop_accepts_more_workers_than_it_started_with(tmp_path: Path) -> None:
    result = run(f"launch {OWN_LOOP} --workers 2 --max 4 --steps 5 --out {tmp_path}/run")
    assert result.returncode == 0, result.stdout + result.stderr
