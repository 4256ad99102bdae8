"""transformers' Trainer and TRL's SFTTrainer under `lockstep run`, as they are and on a Session:
examples/frameworks."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launching import ROOT, one_thread, run_lockstep, start_lockstep
from support.processes import children
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.record.events import read_events
from lockstep.runtime.worker_env import running_workers, state_folder

EXAMPLES = ROOT / "examples" / "frameworks"
RESULT = ("model.safetensors", "checkpoint-30/optimizer.pt")
SHORT = ("--steps", 30, "--save-steps", 10)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


@pytest.fixture(params=["trainer", "sft"])
def script(request: pytest.FixtureRequest) -> str:
    if request.param == "sft" and not find_spec("trl"):
        pytest.skip("trl is not installed")
    return str(request.param)


def words(script: str, out: Path, workers: int = 2) -> tuple[object, ...]:
    return ("run", EXAMPLES / f"{script}.py", "--workers", workers, "--out", out)


def train(script: str, out: Path, workers: int = 2, **options: object) -> list[str]:
    """Train undisturbed; return the hashes of the result."""
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    result = run_lockstep(*words(script, out, workers), *SHORT, *more, timeout=400.0)
    assert result.returncode == 0, result.stderr
    return hashes(out)


def hashes(out: Path) -> list[str]:
    return [hashlib.sha256((out / name).read_bytes()).hexdigest() for name in RESULT]


def wait_for_checkpoint(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    marker = out / f"checkpoint-{step}" / "COMPLETE"
    wait_until(marker.exists, f"checkpoint {step}", 400.0, process=process)


def script_process(out: Path, slot: int) -> int:
    """Return the pid of the script that the worker of a slot runs."""
    worker = running_workers(state_folder(out, socket.gethostname()))[slot]
    [pid] = children(worker.pid)
    return pid


@pytest.mark.long
def test_a_killed_run_has_the_bits_of_an_undisturbed_one(script: str, tmp_path: Path) -> None:
    undisturbed = train(script, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    process = start_lockstep(*words(script, out), *SHORT)
    wait_for_checkpoint(out, 10, process)
    os.kill(script_process(out, slot=1), signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "killed by SIGKILL; restarting now" in output
    assert hashes(out) == undisturbed


@pytest.mark.long
def test_one_worker_has_other_bits_than_two_also_without_random_numbers(tmp_path: Path) -> None:
    one = train("trainer", tmp_path / "1", workers=1, dropout=0.0)
    assert one != train("trainer", tmp_path / "2", workers=2, dropout=0.0)


@pytest.mark.long
def test_all_processes_save_the_same_step_after_sigterm(tmp_path: Path) -> None:
    process = start_lockstep(*words("trainer", tmp_path), "--steps", 1_000_000, "--save-steps", 10)
    wait_for_checkpoint(tmp_path, 10, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    names = {path.name for path in newest.iterdir()}
    assert {"COMPLETE", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= names
    step = int(newest.name.split("-")[1])
    result = run_lockstep(*words("trainer", tmp_path), "--steps", step + 1, timeout=400.0)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "model.safetensors").exists()


def test_a_checkpoint_without_the_marker_is_not_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    pytest.importorskip("transformers")
    from whole_checkpoints import newest

    assert newest(str(tmp_path)) is None
    for step in (9, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert newest(str(tmp_path)) is None
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / "COMPLETE").touch()
    assert newest(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    sys.modules.pop("whole_checkpoints")


COUNTS = """
import time

import lockstep
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments, Trainer
from trainer import make_dataset, make_model
from lockstep.frameworks.trainer import SessionLoop

class Counts(TrainerCallback):
    begun = steps = 0

    def on_epoch_begin(self, *_, **__):
        self.begun += 1

    def on_step_begin(self, args, state, control, optimizer, **_):
        self.start_s = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] *= 0.99

    def on_step_end(self, *_, **__):
        self.steps += time.monotonic() > self.start_s

    def on_train_end(self, args, state, control, **_):
        print(f"counted {self.begun} {self.steps} {args.should_save}")

class ExactTrainer(SessionLoop, Trainer):
    pass

def main(out: str, steps: int = 8, save_steps: int = 4) -> None:
    args = TrainingArguments(
        out, use_cpu=True, max_steps=steps, save_steps=save_steps, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, disable_tqdm=True, eval_strategy="epoch",
        metric_for_best_model="loss", lr_scheduler_type="constant",
    )
    rows = make_dataset()[:12]
    callbacks = [Counts(), EarlyStoppingCallback(9)]
    ExactTrainer(
        make_model(), args, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks
    ).train()

lockstep.launch(main)
"""


def test_callbacks_count_on_as_undisturbed_and_one_worker_writes(tmp_path: Path) -> None:
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    environment = {"PYTHONPATH": str(EXAMPLES), DRILL_VARIABLE: "1"}
    digests = []
    for name, steps in (("undisturbed", [8]), ("resumed", [5, 8]), ("joined", [8])):
        out = tmp_path / name
        if name == "joined":
            request_fault(state_folder(out, socket.gethostname()), 1, "kill", at="forward", step=4)
        for total in steps:
            words = ("launch", "--workers", 2, "--min", 2, "--out", out, script, "--steps", total)
            result = run_lockstep(*words, timeout=400.0, env=one_thread(**environment))
            assert result.returncode == 0, result.stderr
        logs = [result.stdout, *(path.read_text() for path in (out / "logs").glob("*.log"))]
        last = [log[log.rindex("counted") :].splitlines()[0] for log in logs]
        assert sorted(last) == ["counted 3 8 False", "counted 3 8 True"]
        digests.append(digest_line(out))
    assert len({*digests}) == 1


def test_a_trainer_on_a_session_has_the_bits_of_one_worker_when_another_is_killed(
    tmp_path: Path,
) -> None:
    script, short = EXAMPLES / "exact.py", ("--steps", 12, "--save_steps", 4)
    one, healed = tmp_path / "one", tmp_path / "healed"
    run_lockstep("run", script, "--workers", 1, "--out", one, *short, timeout=400.0, check=True)
    request_fault(state_folder(healed, socket.gethostname()), 1, "kill", at="forward", step=6)
    result = run_lockstep(
        *("launch", "--workers", 2, "--min", 2, "--out", healed, script, *short),
        timeout=400.0,
        env=one_thread(**{DRILL_VARIABLE: "1"}),
    )
    assert result.returncode == 0, result.stderr
    assert any(event["event"] == "regrouped" and event["joined"] for event in read_events(healed))
    assert digest_line(healed) == digest_line(one)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, healed)]
    assert weights[0] == weights[1]
    replayed = run_lockstep("replay", one, "--step", 12, timeout=400.0)  # which saves, too
    assert "equal the record" in replayed.stdout, replayed.stderr


@pytest.mark.long
@pytest.mark.parametrize("script", ["exact", "exact_accelerate", "exact_sft"])
def test_a_drill_of_a_framework_on_a_session(script: str, tmp_path: Path) -> None:
    if script == "exact_sft" and not find_spec("trl"):
        pytest.skip("trl is not installed")
    words = ("drill", f"{EXAMPLES / script}.py:main", "--steps", 30, "--out", tmp_path / "drill")
    result = run_lockstep(*words, timeout=800.0)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("the same bits\n")
