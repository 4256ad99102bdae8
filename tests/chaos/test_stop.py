"""Stop a run that is not training: too few workers, a waiting worker, a worker that starts, an
evaluator.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from support.hosts import Host, Training, living
from support.launching import run_lockstep

from lockstep.checkpoint.folder import committed_steps

long = pytest.mark.long
A, B, C = (Host(name) for name in "abc")  # all on this machine


class Start(Protocol):
    def __call__(self, *hosts: Host, **values: Any) -> Training: ...


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start runs that are longer than their test, with one worker on each host, and end them."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    started: list[Training] = []

    def start_training(*hosts: Host, **values: Any) -> Training:
        started.append(Training(tmp_path, hosts, **{"workers": 1, "steps": 100_000} | values))
        return started[-1]

    yield start_training
    for training in started:
        training.close()


def lockstep(training: Training, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a user's command in the run's parent folder."""
    return run_lockstep(*words, cwd=training.folder)


def assert_saved_and_stopped(training: Training, *hosts: Host) -> None:
    """Assert that the agents exited with 75, the newest checkpoint has all steps, and nothing is left."""
    for host in hosts:
        assert training.agents[host.name].wait(60) == 75, training.report()
    assert training.newest.end and training.newest.end.code == 75, training.report()
    assert committed_steps(training.run / "checkpoints")[-1] == training.step > 0
    assert not list((training.run / "waiting").glob("*")) and not living(training.folder)


# Below --min.


@pytest.mark.parametrize(
    "how",
    [
        "SIGTERM",
        pytest.param("--stop", marks=long),
        pytest.param("SIGUSR1, then SIGTERM", marks=long),
    ],
)
def test_a_run_that_waits_for_workers_saves_and_stops(start: Start, how: str) -> None:
    training = start(A, B, words=("--min", "2"))
    training.wait_for_step(3)
    training.kill_host(B)
    training.wait(
        lambda: training.wrote("too few workers: 1 available, at least 2 required"),
        what="the wait for workers",
    )
    start_s, step = time.monotonic(), training.step
    if how == "--stop":
        training.stop()
    else:
        for name in how.split(", then "):
            training.kill_agent(A, signal.Signals[name])
    assert_saved_and_stopped(training, A)
    assert training.step == step + 1, "the interrupted step is completed, and no other one"
    assert time.monotonic() - start_s < 30


@long
def test_a_signal_to_a_host_that_does_not_lead_stops_a_run_that_waits_for_workers(
    start: Start,
) -> None:
    training = start(A, B, C, words=("--min", "3"))
    training.wait_for_step(3)
    training.kill_host(C)
    training.wait(
        lambda: training.wrote("too few workers: 2 available, at least 3 required"),
        what="the wait for workers",
    )
    training.kill_agent(B, signal.SIGTERM)
    assert_saved_and_stopped(training, A, B)


@long
def test_hosts_that_are_drained_one_after_the_other_below_the_minimum_save(start: Start) -> None:
    training = start(A, B, words=("--min", "2"))
    training.wait_for_step(3)
    training.kill_agent(B, signal.SIGUSR1)
    assert training.agents[B.name].wait(30) == 0, training.report()
    training.wait(
        lambda: training.wrote("too few workers: 1 available, at least 2 required"),
        what="the wait for workers",
    )
    training.kill_agent(A, signal.SIGUSR1)
    assert_saved_and_stopped(training, A)


# Workers that wait or start.


@pytest.mark.parametrize("state", ["waiting to join", pytest.param("starting", marks=long)])
def test_a_signal_to_a_host_that_has_no_vote_stops_the_run(start: Start, state: str) -> None:
    training = start(
        A, B, words=("--max", "1"), start=(A,), values={"elastic__rendezvous_timeout_s": 0.1}
    )
    training.wait_for_step(3)
    training.start_agent(B)
    waits = state == "waiting to join"
    training.wait(
        lambda: (
            any((training.run / "waiting").glob("b-0-*.json"))
            if waits
            else bool(training.processes(B))
        ),
        what="host b",
    )
    training.kill_agent(B, signal.SIGTERM)
    assert_saved_and_stopped(training, A, B)


def test_a_waiting_host_leaves_when_it_is_drained(start: Start) -> None:
    training = start(A, B, words=("--max", "1"))
    training.wait_for_step(3)
    waits, trains = (B, A) if training.leader.host == "a" else (A, B)
    training.wait(
        lambda: any((training.run / "waiting").glob(f"{waits.name}-0-*.json")),
        what="a worker that waits to join",
    )
    training.kill_agent(waits, signal.SIGUSR1)
    assert training.agents[waits.name].wait(30) == 0, training.report()
    assert not list((training.run / "waiting").glob(f"{waits.name}-*"))
    training.wait_for_step(training.step + 5)
    training.kill_agent(trains, signal.SIGTERM)
    assert_saved_and_stopped(training, trains)


# A run that waits for its first workers.


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=long), "--stop"])
def test_a_run_that_waits_for_workers_to_start_is_listed_and_can_be_stopped(
    start: Start, how: str
) -> None:
    training = start(A, B, words=("--min", "2"), start=(A,))
    training.wait(
        lambda: training.wrote(r"1 available \(a/0\), at least 2 required"),
        what="the reason for the wait",
    )
    status = lockstep(training, "status", "run")
    assert status.returncode == 0 and status.stdout.startswith("run: its workers wait to start\n")
    assert "waiting" in status.stdout.splitlines()[-1]
    (worker,) = json.loads(lockstep(training, "status", "run", "--json").stdout)["waiting"]
    assert (worker["host"], worker["pid"]) == ("a", training.processes(A)[0].pid)
    if how == "SIGTERM":
        training.kill_agent(A, signal.SIGTERM)
    else:
        stop = lockstep(training, "launch", "--stop", "run")
        assert (stop.returncode, stop.stdout) == (
            0,
            "a/0 accepted the stop request: no worker is training, all waiting workers exit\n",
        )
    assert training.agents["a"].wait(30) == 75, training.report()
    assert training.newest.number == 1 and training.newest.end and not living(training.folder)


# An evaluator.


def evaluator(training: Training, host: Host) -> psutil.Process:
    """Wait until the evaluator of a host runs; return its process."""
    training.wait(
        lambda: any(event["host"] == host.name for event in training.events("evaluator started")),
        what="the evaluator",
    )
    return psutil.Process(training.events("evaluator started")[-1]["pid"])


@pytest.mark.long
def test_draining_a_host_ends_its_evaluator_at_once(start: Start) -> None:
    training = start(A, B)
    training.words = ("--with-evaluator",)
    training.wait_for_step(3)
    training.kill_agent(B)
    training.start_agent(B)  # adopts the worker
    process = evaluator(training, B)
    (listed,) = json.loads(lockstep(training, "status", "run", "--json").stdout)["evaluators"]
    assert listed["pid"] == process.pid
    training.kill_agent(B)
    training.wait(
        lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE,
        what="the end of the evaluator",
    )
    assert (training.run / "evaluators" / "b.json").exists(), "no agent was left to remove it"
    assert json.loads(lockstep(training, "status", "run", "--json").stdout)["evaluators"] == []
    training.start_agent(B)
    training.wait(lambda: len(training.events("evaluator started")) == 2, what="another evaluator")
    training.kill_agent(B, signal.SIGUSR1)
    assert training.agents["b"].wait(30) == 0, training.report()
    assert not psutil.pid_exists(training.events("evaluator started")[-1]["pid"])
    training.kill_agent(A, signal.SIGTERM)
    assert_saved_and_stopped(training, A)


@long
def test_the_agent_waits_for_the_last_score_until_a_signal(start: Start) -> None:
    training = start(A, steps=60, words=("--with-evaluator",))
    process = evaluator(training, A)
    os.kill(process.pid, signal.SIGSTOP)
    training.wait(
        lambda: training.newest.end is not None and not training.processes(A),
        what="the end of the run",
    )
    time.sleep(1.0)
    assert training.agents["a"].poll() is None, "the agent waits for the last score"
    start_s = time.monotonic()
    training.kill_agent(A, signal.SIGTERM)
    assert training.agents["a"].wait(30) == 0, training.report()
    assert time.monotonic() - start_s < 10 and not living(training.folder)
