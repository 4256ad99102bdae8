"""`lockstep train` as its user meets it: real processes, real signals, exit codes, and errors in three parts."""

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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint.commands import digest_line
from lockstep.config.schema import config_fields
from lockstep.record import metrics

ROOT = Path(__file__).parents[2]
SMALL = ["--data.pairs", "1500", "--data.held_out", "40", "--batch.tokens", "128", "--batch.buckets", "3", "--evaluate.at_end", "0"]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def lockstep(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "lockstep", *map(str, words)]


def run(*words: str | Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(lockstep(*words), capture_output=True, text=True, timeout=200, env=environ or ENVIRON, check=False)


def start(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(lockstep(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRON)


def steps_in(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited 120 s in vain"
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "lockstep-worker"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def digest(folder: Path) -> str:
    return run("checkpoint", "digest", folder).stdout.strip()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    done = run(
        "train", "--out", folder, "--workers", "1", "--steps", "8", "--checkpoint.every_steps", "2", "--track.log_every", "4", *SMALL
    )
    assert done.returncode == 0, done.stderr
    assert "step 8  loss" in done.stdout and "next: lockstep translate" in done.stdout
    assert steps_in(folder) == list(range(1, 9))
    assert run("checkpoint", "verify", folder).returncode == 0
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_saves_and_the_same_command_goes_on(undisturbed: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = ("train", "--out", tmp_path, "--steps", "8", "--checkpoint.every_steps", "100", *SMALL)
    process = start(*command)
    wait_for(lambda: len(steps_in(tmp_path)) >= 2, process)
    pids = workers_of(process)
    assert len(pids) == 2
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, output
    assert not any(map(alive, pids))
    stopped_at = steps_in(tmp_path)[-1]
    assert digest(tmp_path).startswith(f"step {stopped_at} ")
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert steps_in(tmp_path) == list(range(1, 9)) and digest(tmp_path) == digest(undisturbed)
    assert not list(Path("/tmp").glob(f"lockstep-*{process.pid}*"))


def test_a_killed_worker_is_replaced_and_the_run_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    process = start("train", "--out", tmp_path, "--workers", "3", "--steps", "8", "--checkpoint.every_steps", "2", *SMALL)
    wait_for(lambda: len(steps_in(tmp_path)) >= 3, process)
    pids = workers_of(process)
    os.kill(pids[1], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "killed by SIGKILL; restarting now" in output and not any(map(alive, pids))
    assert steps_in(tmp_path) == list(range(1, 9)) and digest(tmp_path) == digest(undisturbed)


def test_when_the_worker_with_the_screen_was_killed_its_successor_shows_how_it_ends(undisturbed: Path, tmp_path: Path) -> None:
    words = ["--workers", "2", "--min", "2", "--steps", "8", "--checkpoint.every_steps", "2", *SMALL[:-1], "20"]
    process = start("launch", "--out", tmp_path, *words)
    wait_for(lambda: len(steps_in(tmp_path)) >= 3, process)
    found = json.loads(run("status", tmp_path, "--json").stdout)
    assert [one["slot"] for one in found["members"]] == [0, 1]
    os.kill(found["members"][0]["pid"], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "joined at step" in output and "\nstep 8  loss" in output  # the other one leads now, without a screen
    assert "(test, 20 pairs, greedy)" in output and f"next: lockstep translate {tmp_path}" in output
    assert digest(tmp_path) == digest(undisturbed)


def test_when_the_starter_is_killed_its_workers_end_within_two_seconds(tmp_path: Path) -> None:
    process = start("train", "--out", tmp_path, "--steps", "1000", *SMALL)
    wait_for(lambda: len(steps_in(tmp_path)) >= 1, process)
    pids = workers_of(process)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
    assert process.stdout is not None
    process.stdout.close()


def three_parts(text: str) -> bool:
    """An error line, and what follows it indented: where the values came from, what to try."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if "Error: " in line), None)
    return first is not None and len(lines) > first + 2 and all(line.startswith("  ") for line in lines[first + 1 : first + 3])


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update_with_code_4(tmp_path: Path) -> None:
    words = ("--steps", "9", "--checkpoint.every_steps", "1", "--optim.learning_rate", "1e9", "--optim.clip_norm", "0", *SMALL)
    done = run("train", "--out", tmp_path, *words)
    assert done.returncode == 4 and "DivergedError" in done.stderr and three_parts(done.stderr), done.stderr
    assert 1 <= len(steps_in(tmp_path)) < 9 and run("checkpoint", "verify", tmp_path).returncode == 0


def test_a_busy_port_is_refused(busy_port: int, tmp_path: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run("train", "--out", tmp_path / "run", *SMALL, environ={**ENVIRON, **place, "MASTER_PORT": str(busy_port)})
    assert done.returncode == 2 and str(busy_port) in done.stderr and three_parts(done.stderr), done.stderr


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--optim.lr", "1"], "perhaps optim.learning_rate", 2),
        (["--bogus"], "--bogus", 2),
        (["missing.toml"], "there is no run file missing.toml", 2),
        (["torn.toml"], "torn.toml is not TOML", 2),
        (["--workers", "9"], "9 workers for a step of 8 micro-batches", 2),
        (["--resume", "sometimes"], "'sometimes' is neither a step nor", 2),
        (["--resume", "required"], "there is no checkpoint to resume from", 3),
        (["--data.kind", "files", "--data.train", "no.en,no.it"], "no.en", 3),
    ],
)
def test_what_does_not_fit_is_refused_in_three_parts(words: list[str], says: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "torn.toml").write_text("[optim\n")
    words = [str(tmp_path / word) if word == "torn.toml" else word for word in words]
    done = run("train", *words, "--out", tmp_path / "run", "--steps", "1", *([] if "files" in words else SMALL))
    assert done.returncode == code, done.stderr
    assert says in done.stderr and three_parts(done.stderr), done.stderr


def test_the_folder_of_another_run_is_refused_and_left_whole(undisturbed: Path) -> None:
    before = digest(undisturbed)
    done = run("train", "--out", undisturbed, "--seed", "7")
    assert done.returncode == 2 and "holds another run: seed was 1, now 7" in done.stderr and three_parts(done.stderr)
    assert digest(undisturbed) == before


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    process = start("train", "--out", tmp_path, "--workers", "1", "--steps", "1000", *SMALL)
    wait_for(lambda: len(steps_in(tmp_path)) >= 1, process)
    done = run("train", "--out", tmp_path, "--workers", "1")
    process.kill()
    process.communicate()
    assert done.returncode == 2 and "another training is already running" in done.stderr and three_parts(done.stderr), done.stderr


def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a read-only tmpfs needs root")
    try:
        done = run("train", "--out", tmp_path / "run", *SMALL)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert done.returncode == 2 and "Read-only file system" in done.stderr and three_parts(done.stderr), done.stderr


@pytest.mark.parametrize(("on_error", "last"), [("continue", 8), ("stop", 7)])
def test_when_the_disk_is_full_training_goes_on_or_stops_and_the_older_checkpoint_is_whole(
    on_error: str, last: int, tmp_path: Path
) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        words = (
            "train",
            "--out",
            tmp_path / "run",
            "--steps",
            "8",
            "--checkpoint.every_steps",
            "2",
            "--checkpoint.on_error",
            on_error,
            *SMALL,
        )
        done = run(*words)
        assert done.returncode == 3, done.stderr  # the last checkpoint could not be had, either way
        assert "No space left on device" in done.stderr and three_parts(done.stderr), done.stderr
        steps = steps_in(tmp_path / "run")
        assert steps == list(range(1, len(steps) + 1)) and (len(steps) == 8 if on_error == "continue" else 4 <= len(steps) <= last)
        listed = run("checkpoint", "verify", tmp_path / "run")
        assert listed.returncode == 0 and listed.stdout.startswith("step 2 is whole"), listed.stdout
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_help_answers_with_every_value_and_without_torch() -> None:
    code = "import sys, lockstep.cli.main as c; sys.argv = ['lockstep', 'train', '--help']; c.main(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and all(f"--{key}" in done.stdout for key in config_fields())
    assert run("--help").returncode == 0 and run("train", "--show").stdout.count("default") >= len(config_fields()) - 1


def test_going_back_to_a_step_sets_later_checkpoints_aside_and_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    done = run("train", "--out", folder, "--workers", "2", "--resume", "6", "--steps", "8")
    assert done.returncode == 0 and "is set aside as step-00000008.abandoned" in done.stderr, done.stderr
    assert steps_in(folder) == list(range(1, 9)) and digest(folder) == digest(undisturbed)


def test_an_override_is_in_the_history_and_an_earlier_checkpoint_ends_with_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    refused = run("train", "--out", folder, "--workers", "1", "--optim.learning_rate", "8e-3")
    assert refused.returncode == 2 and "--override optim.learning_rate=0.008" in refused.stderr
    done = run("train", "--out", folder, "--workers", "2", "--resume", "6", "--override", "optim.learning_rate=8e-3")
    assert done.returncode == 0, done.stderr
    rates = {line["step"]: line["learning_rate"] for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert rates[6] == 4e-3 * 6 / 60 and rates[7] == 8e-3 * 7 / 60
    told = [event for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if event["event"] == "override"]
    assert [(event["step"], event["values"]) for event in told] == [(6, {"optim.learning_rate": 8e-3})]
    changed = digest_line(folder)
    assert run("train", "--out", folder, "--workers", "1", "--resume", "4").returncode == 0
    assert digest_line(folder) == changed != digest_line(undisturbed)


def test_torchrun_starts_the_same_training(undisturbed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lockstep", "train"]
    words = ["--out", str(tmp_path), "--steps", "8", "--checkpoint.every_steps", "4", *SMALL]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=200, env=ENVIRON, check=False)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path) == digest(undisturbed)


# Your own loop.


def own_loop(folder: Path, workers: int, steps: int = 120) -> list[str]:
    return ["train", f"{ROOT}/examples/own_loop.py:train", "--out", str(folder), "--workers", str(workers), "--steps", str(steps)]


def test_own_loop_has_one_sha256_on_1_2_and_3_processes_under_torchrun_and_through_a_kill_and_a_stop(tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        done = run(*own_loop(tmp_path / str(workers), workers))
        assert done.returncode == 0, done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"{ROOT}/examples/own_loop.py"]
    (tmp_path / "torchrun").mkdir()
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=200, env=ENVIRON, cwd=tmp_path / "torchrun", check=False)
    assert done.returncode == 0, done.stderr

    killed = tmp_path / "killed"
    process = start(*own_loop(killed, 2))
    wait_for(lambda: len(steps_in(killed)) >= 60, process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert steps_in(killed) == list(range(1, 121))
    reasons = [json.loads(path.read_text())["reason"] for path in sorted((killed / "generations").glob("*.json"))]
    assert len(reasons) > 2 and not any("no member of generation" in reason for reason in reasons), reasons  # healed in place

    stopped = tmp_path / "stopped"
    process = start(*own_loop(stopped, 2))
    wait_for(lambda: len(steps_in(stopped)) >= 20, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and 20 <= steps_in(stopped)[-1] < 120, output
    assert digest(stopped).startswith(f"step {steps_in(stopped)[-1]} ")
    assert run(*own_loop(stopped, 3)).returncode == 0
    assert steps_in(stopped) == list(range(1, 121))

    names = ("1", "2", "3", "killed", "stopped", "torchrun/runs/own")
    digests = {run("checkpoint", "digest", tmp_path / name, "100").stdout for name in names}
    assert len(digests) == 1 and digests.pop().startswith("step 100 sha256 ")
    last = {digest_line(tmp_path / name) for name in names if name != "torchrun/runs/own"}
    assert len(last) == 1 and last.pop().startswith("step 120 sha256 "), "the last state is saved, whatever every_steps says"


def test_a_scheduler_an_ema_and_two_optimizers_survive_a_kill_a_join_and_a_resume(tmp_path: Path) -> None:
    def command(folder: Path, workers: int) -> list[str]:
        return ["train", f"{ROOT}/tests/support/scheduled_loop.py:train", "--out", str(folder), "--workers", str(workers)]

    alone, disturbed = tmp_path / "alone", tmp_path / "disturbed"
    done = run(*command(alone, 1))
    assert done.returncode == 0, done.stderr
    disturbed.mkdir()
    (disturbed / "disturb").write_text(json.dumps({"kill": 25, "stop": 45}))
    stopped = run(*command(disturbed, 3))
    assert stopped.returncode == 75 and "flipped" not in stopped.stderr, stopped.stderr
    events = [json.loads(line) for line in (disturbed / "events.jsonl").read_text().splitlines()]
    assert any(event.get("joined") for event in events), events
    done = run(*command(disturbed, 2))
    assert done.returncode == 0 and "flipped" not in done.stderr, done.stderr
    rates = [[(line["step"], line["rate"]) for line in metrics.iter_steps(folder / "metrics.jsonl")] for folder in (alone, disturbed)]
    assert rates[0] == rates[1] and rates[0][-1] == (60, pytest.approx(0.7**9))
    assert run("checkpoint", "digest", alone, "60").stdout == run("checkpoint", "digest", disturbed, "60").stdout != ""


@pytest.mark.parametrize("starter", ["torchrun", "agent"])
def test_no_thread_of_the_group_is_left_when_the_loop_is_done(tmp_path: Path, starter: str) -> None:
    program = (
        f"import os, sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import own_loop\n"
        "def train(out: str = 'run', steps: int = 3):\n"
        "    own_loop.train(out, steps)\n"
        "    names = [open(f'/proc/self/task/{one}/comm').read() for one in os.listdir('/proc/self/task')]\n"
        "    print('threads of gloo:', sum('gloo' in name for name in names))\n"  # one that lives while Python ends may end it with SIGABRT
        "if __name__ == '__main__': train()\n"
    )
    (tmp_path / "loop.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    agent = [sys.executable, "-m", "lockstep", "train", "loop.py:train", "--workers", "2", "--out", "run"]
    words = torchrun if starter == "torchrun" else agent
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=ENVIRON, cwd=tmp_path, check=False)
    assert done.returncode == 0 and "threads of gloo: 0" in done.stdout, done.stdout + done.stderr


def test_own_loop_differs_from_the_plain_loop_by_eight_lines() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import own_loop as example

    plain, ours = (inspect.getsource(f).splitlines()[1:] for f in (example.plain, example.train))
    stripped = [[line.strip() for line in lines] for lines in (plain, ours)]
    added = [line for line in difflib.ndiff(*stripped) if line.startswith("+ ")]
    assert len(added) == 8, "\n".join(added)


def test_more_workers_than_a_step_has_work_for_stand_by(tmp_path: Path) -> None:
    done = run("launch", "--workers", "3", "--batch.micro_batches", "2", "--steps", "4", "--out", tmp_path / "run", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "run" / "generations" / "000001.json").read_text())["members"]) == 2
    refused = run("train", "--workers", "3", "--batch.micro_batches", "2", "--out", tmp_path / "other", *SMALL)
    assert refused.returncode == 2 and "3 workers for a step of 2 micro-batches" in refused.stderr


@pytest.mark.parametrize("words", [["--resume", "never"], ["--profile", "steps=1..2"], ["--show"]])
def test_an_option_that_an_own_loop_would_never_hear_of_is_refused(tmp_path: Path, words: list[str]) -> None:
    done = run(*own_loop(tmp_path / "run", 1), *words)
    assert done.returncode == 2 and f"{words[0]} is for a run file" in done.stderr and not (tmp_path / "run").exists()


def test_an_own_loop_may_let_in_more_workers_than_it_began_with(tmp_path: Path) -> None:
    own = f"{ROOT / 'examples' / 'own_loop.py'}:train"
    done = run("launch", own, "--workers", "2", "--max", "4", "--steps", "5", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
