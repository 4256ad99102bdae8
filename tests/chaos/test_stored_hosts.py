"""Hosts without a shared disk train one run, lose hosts and gain others, with the same bits."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import SWITCH, Network, Truth, enter, flags, ip
from support.launching import run_lockstep
from support.object_store import s3_server
from support.processes import children
from support.stored_hosts import RUN, StoredTraining

from lockstep.checkpoint.commands import digest_line

STEPS = 160


@pytest.fixture
def training(network: Network, tmp_path: Path) -> Iterator[StoredTraining]:
    """Three hosts, and a store that all of them reach."""
    with s3_server(SWITCH, enter(network.switch)) as server:
        training = StoredTraining(tmp_path, network.hosts, server, STEPS)
        yield training
        training.close()


@pytest.mark.long  # test_store_accidents.py resumes on another host
def test_the_host_of_rank_0_is_lost_and_replaced(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    for host in training.hosts:
        training.start(host)
    training.wait(lambda: training.step(a) >= 15, "step 15")
    first = training.newest(a)
    assert [member.host for member in first.members] == ["a", "b", "c"]
    training.lose(a)
    training.wait(
        lambda: training.newest(b).number > first.number and training.step(b) > 16,
        "a step without the first host",
    )
    training.start(a)  # a new host, with an empty disk
    training.wait(
        lambda: {member.host for member in training.newest(b).members} == {"a", "b", "c"},
        "the join of a new host",
    )
    joined = training.newest(b)
    training.lose(c)
    assert joined.members[0].host == "b"
    assert set(training.end().values()) == {0}, training.report()
    truth = reference(STEPS)
    assert training.steps_of(b) == truth.steps, training.report()
    assert training.run(b, "checkpoint", "digest", RUN).strip() == truth.digest


@pytest.mark.long
def test_hosts_that_a_scheduler_starts_need_no_list(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    training.nodes = "2:3"
    training.start(a)
    time.sleep(2)
    assert training.newest(a).number == 0, "one host is fewer than the minimum"
    training.start(b)
    training.wait(lambda: training.step(b) >= 15, "step 15")
    training.start(c)
    training.wait(lambda: len(training.newest(b).members) == 3, "the join of a third host")
    training.lose(a)
    assert set(training.end().values()) == {0}, training.report()
    truth = reference(STEPS)
    assert training.steps_of(b) == truth.steps
    assert training.run(b, "checkpoint", "digest", RUN).strip() == truth.digest


@pytest.mark.long
def test_a_stopped_run_resumes_on_other_hosts(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    training.values |= {
        "evaluate.at_end": 5,
        "elastic.rendezvous_timeout_s": 5.0,
    }  # no start is complete
    training.start(a)
    training.start(b)
    training.wait(lambda: training.step(a) >= 25, "step 25")
    assert "leader" in training.run(b, "status", RUN)
    training.run(b, "launch", "--stop", RUN)
    assert training.end() == {"a": 75, "b": 75}, training.report()
    stopped = int(training.run(c, "checkpoint", "list", RUN).splitlines()[-1].split()[0])
    assert stopped >= 25
    training.lose(a)
    training.lose(b)
    training.start(c)
    training.start(b)  # a new host, with an empty disk
    assert training.end() == {"c": 0, "b": 0}, training.report()
    assert all("BLEU" in (training.folder / f"{name}.out").read_text() for name in "bc")
    truth = reference(STEPS)
    leader = next(host for host in training.hosts if host.name == training.leader_of(c))
    assert training.steps_of(leader) == truth.steps
    assert training.run(c, "checkpoint", "digest", RUN).strip() == truth.digest


@pytest.mark.long
def test_an_outage_of_the_store_delays_only_a_regrouping(
    training: StoredTraining, network: Network, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    for host in training.hosts:
        training.start(host)
    training.wait(lambda: training.step(a) >= 15, "step 15")
    first, address = training.newest(a), f"{SWITCH}/24 dev hub"
    ip(network.switch, f"addr del {address}")
    training.wait(lambda: training.step(a) >= 40, "a step without the store")
    training.lose(a)
    time.sleep(4.0)
    assert training.newest(b) == first
    ip(network.switch, f"addr add {address}")
    assert set(training.end().values()) == {0}, training.report()
    truth = reference(STEPS)
    assert training.steps_of(b) == truth.steps, training.report()
    assert training.run(c, "checkpoint", "digest", RUN).strip() == truth.digest


@pytest.mark.long
def test_killed_agents_and_mirrors_stop_no_other_host(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, _ = training.hosts
    training.values["elastic.rendezvous_timeout_s"] = 5.0
    training.start(a)
    training.start(b)
    training.wait(lambda: training.step(a) >= 12, "step 12")
    first = training.newest(b)
    (agent,) = children(training.agents["a"].pid)
    os.kill(agent, signal.SIGKILL)
    assert training.agents["a"].wait(60.0) == 137
    step = training.step(a)
    training.wait(lambda: training.step(a) >= step + 5, "a step without an agent")
    training.start(a)  # it adopts the worker
    training.wait(
        lambda: "adopted slot 0" in (training.folder / "a.out").read_text(), "the adoption"
    )
    assert training.newest(b) == first
    training.agents["a"].kill()  # the process that mirrors: the agent and the worker leave
    training.wait(lambda: training.newest(b).number > first.number, "a generation without a")
    assert training.end() == {"a": -signal.SIGKILL, "b": 0}, training.report()
    assert training.run(b, "checkpoint", "digest", RUN).strip() == reference(STEPS).digest


@pytest.mark.long
def test_the_last_checkpoint_of_a_lost_host_is_saved_by_another(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, _ = training.hosts
    training.values["elastic.rendezvous_timeout_s"] = 5.0
    training.start(a)
    training.start(b)
    training.wait(lambda: training.step(a) >= STEPS - 8, "almost the last step")
    first = training.newest(b)
    training.agents["a"].send_signal(
        signal.SIGSTOP
    )  # the process that mirrors: nothing is uploaded
    training.wait(lambda: training.step(a) == STEPS, "the last step")
    time.sleep(14.0)  # more than counts as a hang outside of a save
    assert training.agents["b"].poll() is None and training.newest(b) == first
    training.lose(a)
    assert training.end() == {"b": 0}, training.report()
    assert training.run(b, "checkpoint", "digest", RUN).strip() == reference(STEPS).digest


@pytest.mark.long
def test_an_ended_run_is_scored_by_any_host(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    training.values["elastic.rendezvous_timeout_s"] = 5.0
    training.start(a)
    training.start(b)
    training.wait(lambda: training.step(a) >= 25, "step 25")
    refused = training.messages(c, "evaluate", RUN, code=2)[1]
    assert "has not ended" in refused and "--with-evaluator" in refused, refused
    assert set(training.end().values()) == {0}, training.report()
    assert f"step {STEPS}" in training.messages(c, "evaluate", RUN, code=0)[1]
    assert "(scored before)" in training.messages(a, "evaluate", RUN, code=0)[1], (
        "the score is in the store"
    )
    assert training.run(b, "checkpoint", "digest", RUN).strip() == reference(STEPS).digest
    training.steps = STEPS + 40
    for host in (a, b):
        training.start(host, "--override", f"optim.decay_steps={training.steps}")
    assert set(training.end().values()) == {0}, training.report()
    assert training.step(a) == STEPS + 40
    training.run(c, "evaluate", RUN)
    scores = [
        json.loads(line)["step"]
        for line in (training.copy(c) / "evaluations.jsonl").read_text().splitlines()
    ]
    assert scores == [STEPS, STEPS + 40], "the training has kept the earlier score"


@pytest.mark.long
def test_evaluators_score_on_the_host_of_rank_0(training: StoredTraining) -> None:
    a, b, c = training.hosts
    training.values |= {"elastic.rendezvous_timeout_s": 5.0, "checkpoint.every_steps": 40}
    training.start(a, "--with-evaluator")
    training.start(b, "--with-evaluator")
    training.wait(lambda: training.step(a) >= 45, "step 45")
    training.lose(a)
    assert training.end() == {"b": 0}, training.report()
    (training.folder / c.name).mkdir(exist_ok=True)
    for step in (80, 120, STEPS):
        assert (
            "(scored before)"
            in training.messages(c, "evaluate", RUN, "--step", str(step), code=0)[1]
        )


@pytest.mark.long
def test_hosts_return_to_an_earlier_step_with_another_learning_rate(
    training: StoredTraining, tmp_path: Path
) -> None:
    a, b, c = training.hosts
    training.steps = 500
    training.values |= {
        "elastic.rendezvous_timeout_s": 5.0,
        "checkpoint.every_steps": 50,
        "checkpoint.keep": 0,
    }
    for host in training.hosts:
        training.start(host)
    assert set(training.end().values()) == {0}, training.report()
    words = ["--resume", "100", "--override", "optim.learning_rate=0.01"]
    run = str(tmp_path / "truth")
    tiny = flags(training.steps, **training.values)
    for more in ([], words):
        done = run_lockstep("train", "--workers", 1, "--out", run, *more, *tiny)
        assert done.returncode == 0, done.stderr
    training.start(b, *words)
    training.start(c, *words)
    training.wait(lambda: 100 < training.step(b) < 300, "a step after the return")
    training.start(a)  # its copy has the later steps
    training.wait(lambda: len(training.newest(b).members) == 3, "the join")
    leader = training.leader_of(b)
    training.lose(next(host for host in training.hosts if host.name == leader))
    assert set(training.end().values()) == {0}, training.report()
    assert training.run(a, "checkpoint", "digest", RUN).strip() == digest_line(Path(run))
    steps = [
        int(line.split()[0]) for line in training.run(a, "checkpoint", "list", RUN).splitlines()[1:]
    ]
    for step in steps:
        assert training.run(a, "checkpoint", "digest", RUN, str(step)).strip() == digest_line(
            Path(run), step
        )


@pytest.mark.long
def test_a_host_without_the_run_watches_and_reports_it(training: StoredTraining) -> None:
    a, b, c = training.hosts
    training.values["elastic.rendezvous_timeout_s"] = 5.0
    training.start(a)
    training.start(b)
    training.wait(lambda: training.step(a) >= 25, "step 25")
    text = training.run(c, "watch", RUN)
    assert RUN in text and ", put by " in text and f" of {STEPS}" in text and "loss" in text, text
    assert "rank" in training.run(b, "watch", RUN), "beside the training the workers are asked"
    training.run(c, "report", RUN, "--out", "r.html")
    assert "hosts: Lockstep report" in (training.folder / c.name / "r.html").read_text()
    assert " ago" in text and "silent" not in text, text
    training.lose(a)
    assert training.end() == {"b": 0}, training.report()
    text = training.run(c, "watch", RUN)
    assert "ended with exit code 0" in text and f"step {STEPS} of {STEPS}" in text, text


@pytest.mark.long
def test_replicas_of_two_shards_live_on_one_host_each(
    training: StoredTraining, reference: Callable[[int], Truth]
) -> None:
    a, b, c = training.hosts
    training.workers, training.values = 2, {"elastic.rendezvous_timeout_s": 5.0, "layout.shard": 2}
    for host in (a, b):
        training.start(host)
    training.wait(lambda: training.step(a) >= 15, "step 15")
    first = training.newest(a)
    assert [member.host for member in first.members] == ["a", "a", "b", "b"]
    os.kill(
        first.members[3].pid, signal.SIGKILL
    )  # one shard of b: the other one leaves, and both join again
    training.wait(lambda: len(training.newest(a).members) == 2, "a generation without b")
    training.wait(lambda: len(training.newest(a).members) == 4, "the return of b")
    training.start(c)
    training.wait(lambda: len(training.newest(a).members) == 6, "the join of c")
    hosts = [member.host for member in training.newest(a).members]
    assert hosts[::2] == hosts[1::2], "no replica spans two hosts"
    training.lose(a)
    assert set(training.end().values()) == {0}, training.report()
    truth = reference(STEPS)
    leader = next(host for host in training.hosts if host.name == training.leader_of(b))
    assert training.steps_of(leader) == truth.steps, training.report()
    assert training.run(b, "checkpoint", "digest", RUN).strip() == truth.digest
    assert training.run(c, "checkpoint", "verify", RUN)
