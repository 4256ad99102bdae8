"""Stopping a run that is not at work as it should be: below `--min`, standing by, starting, waiting to begin, or with an evaluator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from support.hosts import Host, Training, living

from lockstep.checkpoint.folder import committed_steps

long = pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part of stopping: LOCKSTEP_CHAOS=1")
A, B, C = (Host(name) for name in "abc")  # all on this machine


class Start(Protocol):
    def __call__(self, *hosts: Host, **values: Any) -> Training: ...


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a run that is longer than its test, with one worker on each host, and ends what is left of it."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    started: list[Training] = []

    def start_one(*hosts: Host, **values: Any) -> Training:
        started.append(Training(tmp_path, hosts, **{"workers": 1, "steps": 100_000} | values))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def lockstep(one: Training, *words: str) -> subprocess.CompletedProcess[str]:
    """What a command of a person comes to."""
    return subprocess.run([sys.executable, "-m", "lockstep", *words], cwd=one.folder, capture_output=True, text=True, check=False)


def saved_and_stopped(one: Training, *hosts: Host) -> None:
    """The agents of these hosts end with 75, the newest checkpoint has all steps, and nothing is left."""
    for host in hosts:
        assert one.agents[host.name].wait(60) == 75, one.report()
    assert one.newest.end and one.newest.end.code == 75, one.report()
    assert committed_steps(one.run / "checkpoints")[-1] == one.step > 0
    assert not list((one.run / "waiting").glob("*")) and not living(one.folder)


# Below --min.


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("--stop", marks=long), pytest.param("SIGUSR1, then SIGTERM", marks=long)])
def test_a_run_that_waits_for_workers_saves_and_stops(start: Start, how: str) -> None:
    one = start(A, B, words=("--min", "2"))
    one.wait_for_step(3)
    one.kill_host(B)
    one.wait(lambda: one.says("too few workers: 1 available, at least 2 required"), what="the wait for workers")
    began_s, stood = time.monotonic(), one.step
    if how == "--stop":
        one.stop()
    else:
        for name in how.split(", then "):
            one.kill_agent(A, signal.Signals[name])
    saved_and_stopped(one, A)
    assert one.step == stood + 1, "the step that was broken off is done, and no more"
    assert time.monotonic() - began_s < 30


@long
def test_a_signal_to_a_host_that_does_not_lead_stops_a_run_that_waits_for_workers(start: Start) -> None:
    one = start(A, B, C, words=("--min", "3"))
    one.wait_for_step(3)
    one.kill_host(C)
    one.wait(lambda: one.says("too few workers: 2 available, at least 3 required"), what="the wait for workers")
    one.kill_agent(B, signal.SIGTERM)
    saved_and_stopped(one, A, B)


# Standing by, and starting.


@pytest.mark.parametrize("place", ["standing by", pytest.param("starting", marks=long)])
def test_a_signal_to_a_host_that_has_no_vote_stops_the_run(start: Start, place: str) -> None:
    one = start(A, B, words=("--max", "1"), start=(A,), values={"elastic__rendezvous_timeout_s": 0.1})
    one.wait_for_step(3)
    one.start_agent(B)
    there = (lambda: any((one.run / "waiting").glob("b-0-*.json"))) if place == "standing by" else (lambda: bool(one.processes(B)))
    one.wait(there, what="host b")
    one.kill_agent(B, signal.SIGTERM)
    saved_and_stopped(one, A, B)


def test_a_host_that_only_stands_by_leaves_when_it_is_taken_away(start: Start) -> None:
    one = start(A, B, words=("--max", "1"))
    one.wait_for_step(3)
    waits, trains = (B, A) if one.leader.host == "a" else (A, B)
    one.wait(lambda: any((one.run / "waiting").glob(f"{waits.name}-0-*.json")), what="a worker that stands by")
    one.kill_agent(waits, signal.SIGUSR1)
    assert one.agents[waits.name].wait(30) == 0, one.report()
    assert not list((one.run / "waiting").glob(f"{waits.name}-*"))
    one.wait_for_step(one.step + 5)
    one.kill_agent(trains, signal.SIGTERM)
    saved_and_stopped(one, trains)


# Waiting to begin.


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=long), "--stop"])
def test_a_run_that_waits_to_begin_says_so_and_can_be_stopped(start: Start, how: str) -> None:
    one = start(A, B, words=("--min", "2"), start=(A,))
    one.wait(lambda: one.says(r"1 available \(a/0\), at least 2 required"), what="what it waits for")
    shown = lockstep(one, "status", "run")
    assert (
        shown.returncode == 0 and shown.stdout.startswith("run: its workers wait to start\n") and "waiting" in shown.stdout.splitlines()[-1]
    )
    (worker,) = json.loads(lockstep(one, "status", "run", "--json").stdout)["waiting"]
    assert (worker["host"], worker["pid"]) == ("a", one.processes(A)[0].pid)
    if how == "SIGTERM":
        one.kill_agent(A, signal.SIGTERM)
    else:
        asked = lockstep(one, "launch", "--stop", "run")
        assert (asked.returncode, asked.stdout) == (0, "a/0 accepted the stop request: no worker is training, all waiting workers exit\n")
    assert one.agents["a"].wait(30) == 75, one.report()
    assert one.newest.number == 1 and one.newest.end and not living(one.folder)


# An evaluator.


def evaluator(one: Training, host: Host) -> psutil.Process:
    """The one of a host, once it runs."""
    one.wait(lambda: any(event["host"] == host.name for event in one.events("evaluator started")), what="the evaluator")
    return psutil.Process(one.events("evaluator started")[-1]["pid"])


def test_a_host_that_is_taken_away_ends_its_evaluator_at_once(start: Start) -> None:
    one = start(A, B)
    one.words = ("--with-evaluator",)
    one.wait_for_step(3)
    one.kill_agent(B)
    one.start_agent(B)  # which takes the worker over
    process = evaluator(one, B)
    (shown,) = json.loads(lockstep(one, "status", "run", "--json").stdout)["evaluators"]
    assert shown["pid"] == process.pid
    one.kill_agent(B)
    one.wait(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, what="the end of the evaluator")
    assert (one.run / "evaluators" / "b.json").exists(), "nobody was left to take it away"
    assert json.loads(lockstep(one, "status", "run", "--json").stdout)["evaluators"] == []
    one.start_agent(B)
    one.wait(lambda: len(one.events("evaluator started")) == 2, what="another evaluator")
    one.kill_agent(B, signal.SIGUSR1)
    assert one.agents["b"].wait(30) == 0, one.report()
    assert not psutil.pid_exists(one.events("evaluator started")[-1]["pid"])
    one.kill_agent(A, signal.SIGTERM)
    saved_and_stopped(one, A)


@long
def test_the_last_scoring_of_a_run_is_waited_for_until_a_signal_comes(start: Start) -> None:
    one = start(A, steps=60, words=("--with-evaluator",))
    process = evaluator(one, A)
    os.kill(process.pid, signal.SIGSTOP)
    one.wait(lambda: one.newest.end is not None and not one.processes(A), what="the end of the run")
    time.sleep(1.0)
    assert one.agents["a"].poll() is None, "the agent waits for the last score"
    began_s = time.monotonic()
    one.kill_agent(A, signal.SIGTERM)
    assert one.agents["a"].wait(30) == 0, one.report()
    assert time.monotonic() - began_s < 10 and not living(one.folder)
