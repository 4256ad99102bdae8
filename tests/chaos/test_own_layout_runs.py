"""A Session in shards with real workers: one sha256 through a kill, a stop and other layouts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.hosts import Host, Training
from support.launching import TORCHRUN, one_thread, run_command, run_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record import events, metrics

SCRIPT = Path(__file__).parents[1] / "support" / "loops" / "own_layout.py"
SPLIT = SCRIPT.with_name("tensor_plan.py")
STEPS = 30


@pytest.fixture(autouse=True)
def own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def lines_of(folder: Path) -> list[tuple[float | None, ...]]:
    names = ("step", "loss", "norm", "error")
    return [
        tuple(line.get(name) for name in names)
        for line in metrics.iter_steps(folder / "metrics.jsonl")
    ]


def test_shards_heal_and_resume_with_the_digest_of_one_worker(tmp_path: Path) -> None:
    alone, healed, resumed = (tmp_path / name for name in ("alone", "healed", "resumed"))
    assert run_loop(SCRIPT, alone, 1) == LoopResult(0, "")
    for folder, workers, orders in (
        (healed, 4, {"kill": 12}),
        (resumed, 2, {"kill": 13, "stop": 22}),
    ):
        folder.mkdir()
        (folder / "disturb").write_text(json.dumps(orders))
        result = run_lockstep(
            "run", "--out", folder, "--workers", workers, "--layout.shard", 2, SCRIPT
        )
        assert result.returncode == (75 if "stop" in orders else 0), result.stderr
    regrouped = [event for event in events.read_events(healed) if event["event"] == "regrouped"]
    assert any(event.get("joined") for event in regrouped), "the lost replica was replaced in place"
    assert run_loop(SCRIPT, resumed, 1) == LoopResult(0, "")
    digests = {digest_line(folder) for folder in (alone, healed, resumed)}
    assert len(digests) == 1 and digests.pop().startswith(f"step {STEPS} sha256 ")
    assert (
        lines_of(alone) == lines_of(healed) == lines_of(resumed) and len(lines_of(alone)) == STEPS
    )


EVALUATE_FIRST = {"habit": "evaluate first"}
ENDS = re.compile(
    "exited with code 0|killed by SIGKILL|its replica is incomplete"
)  # of workers that did not fail


@pytest.mark.parametrize(
    ("flags", "workers", "shards", "orders"),
    [
        (EVALUATE_FIRST, 4, 2, {"disturb": {"kill": 12}}),
        pytest.param(EVALUATE_FIRST, 2, 1, {"disturb": {"kill": 12}}, marks=pytest.mark.long),
        ({}, 4, 2, {"disturb_evaluation": {"kill": 19}}),
    ],
    ids=[
        "a shard joins before an evaluation",
        "a replica joins before an evaluation",
        "a shard is lost in an evaluation",
    ],
)
def test_evaluations_of_joiners_and_around_a_loss_keep_the_digest(
    flags: dict[str, str], workers: int, shards: int, orders: dict[str, Any], tmp_path: Path
) -> None:
    alone, healed = tmp_path / "alone", tmp_path / "healed"
    healed.mkdir()
    for name, order in orders.items():
        (healed / name).write_text(json.dumps(order))
    assert run_loop(SCRIPT, alone, 1, **flags) == LoopResult(0, "")
    layout = ("--workers", workers, "--layout.shard", shards)
    words = [f"--{name}={value}" for name, value in flags.items()]
    result = run_lockstep("run", "--out", healed, *layout, SCRIPT, *words)
    assert result.returncode == 0, result.stderr
    recorded = events.read_events(healed)
    joined = any(event.get("joined") for event in recorded if event["event"] == "regrouped")
    assert (healed / "killed").exists() and (joined or "disturb" not in orders)
    failed = [
        event["why"]
        for event in recorded
        if event["event"] == "worker ended" and not ENDS.search(event["why"])
    ]
    assert not failed or "disturb" not in orders, (
        "no other worker failed, and the run did not start again"
    )
    assert digest_line(healed) == digest_line(alone) and lines_of(healed) == lines_of(alone)


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        ("in the loop: backward", "backward() was called twice in micro-batch"),
        ("in the loop: clip", "there is no gradient to clip"),
        ("after it: plain clip", "an operation needs whole weights or gradients"),
        ("after it: deep copy", "an operation needs whole weights or gradients"),
        ("after it: state_dict", "state_dict() of a sharded model"),
        ("after it: forward", "a forward pass with gradients outside of the micro-batches"),
        ("after it: a change", "the gradient has changed since the micro-batches"),
        ("after the clip: noise", "the gradient was changed and random numbers were drawn"),
        ("hidden state", "the first time"),
    ],
)
def test_wrong_use_in_shards_is_refused(habit: str, message: str, tmp_path: Path) -> None:
    result = run_loop(SCRIPT, tmp_path / "run", 2, shard=2, habit=habit)
    assert result.code == 2 and message in result.text, result


def run_split(
    folder: Path, workers: int, tensor: int, shards: int = 1, script: Path = SPLIT
) -> subprocess.CompletedProcess[str]:
    layout = ("--layout.tensor", tensor, "--layout.shard", shards)
    return run_lockstep("run", "--out", folder, "--workers", workers, *layout, script)


@pytest.mark.long
def test_split_layers_heal_and_resume_with_one_digest(tmp_path: Path) -> None:
    """And a resume without the tensor axis, with a warning."""
    undisturbed, healed, resumed, other = (
        tmp_path / name for name in ("undisturbed", "healed", "resumed", "other")
    )
    layouts = [
        (undisturbed, 2, 1, {}),
        (healed, 4, 1, {"kill": 9}),
        (resumed, 4, 2, {"kill": 10, "stop": 18}),
    ]
    for folder, workers, shards, orders in layouts:
        folder.mkdir()
        if orders:
            (folder / "disturb").write_text(json.dumps(orders))
        result = run_split(folder, workers, 2, shards)
        assert result.returncode == (75 if "stop" in orders else 0), result.stderr
    assert any(
        event.get("joined") for event in events.read_events(healed) if event["event"] == "regrouped"
    )
    shutil.copytree(resumed, other)
    assert run_split(resumed, 2, 2).returncode == 0
    assert len({digest_line(folder) for folder in (undisturbed, healed, resumed)}) == 1
    assert lines_of(undisturbed) == lines_of(healed) == lines_of(resumed)
    result = run_split(other, 1, 1)
    assert (
        result.returncode == 0 and "tensor is 1, it was 2: from here on other bits" in result.stderr
    ), result.stderr
    losses = [[line[1] for line in lines_of(folder)] for folder in (resumed, other)]
    assert losses[0][:18] == losses[1][:18] and losses[0] != losses[1], "dropout has other masks"


def test_wrong_splits_are_refused(tmp_path: Path) -> None:
    result = run_split(tmp_path / "none", 2, 2, script=SCRIPT)
    assert (
        result.returncode == 2 and "there is no plan of the layers of Sequential" in result.stderr
    ), result.stderr
    result = run_split(tmp_path / "uneven", 4, 4)
    assert (
        result.returncode == 2
        and "tensor 4 does not divide the 14 output features of 0.inner" in result.stderr
    ), result.stderr
    result = run_lockstep(
        "run",
        SPLIT,
        "--layout.pipeline",
        "2",
        "--layout.tensor",
        "2",
        "--workers",
        "4",
        cwd=tmp_path,
    )
    assert (
        result.returncode == 2
        and "tensor 2 with pipeline 2 is not supported for own models" in result.stderr
    ), result.stderr


def test_incomplete_replicas_are_refused(tmp_path: Path) -> None:
    result = run_loop(SCRIPT, tmp_path / "run", 3, shard=2)
    assert (
        result.code == 2 and "3 workers cannot form replicas of 2 workers (shard 2)" in result.text
    ), result


@pytest.mark.long
def test_worker_with_another_layout_cannot_join(tmp_path: Path) -> None:
    hosts = [
        Host("a", enter=("env", "LOCKSTEP_LAYOUT_SHARD=2")),
        Host("b", enter=("env", "LOCKSTEP_LAYOUT_SHARD=1")),
    ]
    training = Training(
        tmp_path, hosts, workers=2, script=f"{SCRIPT}:train", steps=5000, start=hosts[:1]
    )
    try:
        training.wait_for_step(5)
        training.start_agent(hosts[1])
        agent = training.agents.pop("b")
        training.wait(lambda: agent.poll() is not None, what="the refusal")
        message = r"it was started for a different run: --layout\.shard is '1' there and '2' here"
        assert agent.returncode == 2 and training.wrote(message), training.report()
        training.stop()
        assert training.end() == {"a": 75}
    finally:
        training.close()


def test_torchrun_trains_in_shards(tmp_path: Path) -> None:
    environ = one_thread(LOCKSTEP_LAYOUT_SHARD="2")
    command = [
        *TORCHRUN,
        str(SCRIPT),
        "--steps=3",
    ]
    result = run_command(command, env=environ, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert run_loop(SCRIPT, tmp_path / "alone", 1, steps=3) == LoopResult(0, "")
    assert digest_line(tmp_path / "runs" / "own_layout") == digest_line(tmp_path / "alone")
