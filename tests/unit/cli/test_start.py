"""How many workers a run gets, and which layouts it can start with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli import start
from lockstep.cli.start import (
    RunRequest,
    choose_worker_count,
    max_workers,
    refuse_layout,
    refuse_other_worker_count,
    warn_if_not_profiled,
    workers_per_replica,
)
from lockstep.config.resolve import resolve
from lockstep.elastic.generation_log import Generation, GenerationLog, Member
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.environment import RankInfo, check_worker_count
from lockstep.runtime.variables import PROFILE
from lockstep.runtime.worker_env import WORKER_ENV, WorkerEnv


def test_the_default_number_of_workers_fills_whole_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start, "default_worker_count", lambda: (5, "5 GPUs"))
    sharded = resolve(None, {"layout.shard": "2"}).run
    assert choose_worker_count(None, None) == (5, "5 GPUs")
    assert choose_worker_count(None, sharded) == (4, "as many as the layout takes")
    assert (
        choose_worker_count(
            None, resolve(None, {"layout.shard": "2", "layout.replicate": "3"}).run
        )[0]
        == 6
    )
    assert choose_worker_count(7, sharded) == (7, "--workers")


def test_a_step_has_work_for_one_worker_per_micro_batch_of_each_replica() -> None:
    run = resolve(None, {"layout.shard": "2", "layout.tensor": "2", "batch.micro_batches": "8"}).run
    assert (workers_per_replica(run), max_workers(run, 3)) == (4, 16)
    assert (workers_per_replica(None), max_workers(None, 3)) == (1, 3)


def test_a_layout_that_does_not_suit_the_workers_is_refused() -> None:
    refuse_layout(None, 1000, "--workers")
    refuse_layout(resolve().run, 8, "--workers")
    with pytest.raises(UsageError, match="9 workers for a step of 8 micro-batches"):
        refuse_layout(resolve().run, 9, "--workers")
    with pytest.raises(UsageError, match="it needs 2 workers, 3 are running"):
        refuse_layout(resolve(None, {"layout.shard": "2"}).run, 3, "--workers")


def test_each_replica_of_learners_in_shards_needs_a_learner() -> None:
    run = resolve(
        None, {"layout.shard": "2", "diloco.learners": "2", "checkpoint.every_steps": "50"}
    ).run
    assert max_workers(run, 100) == 4
    for workers in (2, 4):
        refuse_layout(run, workers, "--workers")
    with pytest.raises(
        UsageError, match=r"6 workers for a step of 2 learners, each on layout\.shard=2 workers"
    ) as caught:
        refuse_layout(run, 6, "--workers")
    assert caught.value.hint == "give 2 to 4 workers, or more learners"
    with pytest.raises(UsageError, match="it needs 2 workers, 3 are running"):
        refuse_layout(run, 3, "--workers")


@pytest.mark.parametrize(
    ("words", "error"), [(["--lr"], "--lr has no value"), (["fast"], "'fast' is neither an option")]
)
def test_values_of_a_function_are_refused_before_workers_start(
    words: list[str], error: str
) -> None:
    request = RunRequest("loop.py:train", None, Path("run"), "auto", ["--seed", "1", *words])
    with pytest.raises(ConfigError, match=error):
        request.validate()
    assert replace(request, script="loop.py").validate() is None, "they are the script's own"


def test_only_the_agent_of_rank_0_warns_that_nothing_was_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generations").mkdir()
    warn_if_not_profiled(tmp_path, "here")
    assert not caplog.messages
    monkeypatch.setenv(PROFILE, "steps=2")
    warn_if_not_profiled(tmp_path, "here")  # of a script without a Session or a group
    members = tuple(Member(f"{host}/0/x", host, 0, 1, "127.0.0.1:1") for host in ("here", "there"))
    GenerationLog(tmp_path / "generations").propose(Generation(1, "token", members, "", 0, "start"))
    warn_if_not_profiled(tmp_path, "there")
    warn_if_not_profiled(tmp_path, "here")
    (tmp_path / "profile").mkdir()
    warn_if_not_profiled(tmp_path, "here")
    assert caplog.messages == ["--profile steps=2: no Session has trained these steps"] * 2


def test_workers_must_match_the_launch_environment() -> None:
    info = RankInfo(0, 2, 0, 2, "127.0.0.1", 29500, "torchrun")
    refuse_other_worker_count(None, info)
    refuse_other_worker_count(2, info)
    with pytest.raises(
        UsageError, match="--workers 3 does not match the launch environment: rank 0 of 2"
    ):
        refuse_other_worker_count(3, info)


def test_one_machine_has_a_maximum_number_of_workers() -> None:
    check_worker_count(64, "here", cores=2)
    check_worker_count(1024, "here", cores=64)
    for workers, cores in ((65, 2), (1025, 64)):
        with pytest.raises(UsageError, match="workers on one machine"):
            check_worker_count(workers, "here", cores=cores)


def test_a_command_that_a_worker_starts_is_no_worker_of_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = WorkerEnv("run", "state", "here", 0, 1, 1, 1, 1, "127.0.0.1", agent_pid=os.getppid())
    of_parent = replace(own, agent_pid=os.getpid())
    outlives_its_agent = replace(own, agent_pid=0)
    assert own.is_child and not of_parent.is_child and not outlives_its_agent.is_child
    monkeypatch.setattr(start, "run_fixed_group", lambda program, workers: workers)
    for env in (of_parent, outlives_its_agent):
        monkeypatch.setenv(WORKER_ENV, env.environ()[WORKER_ENV])
        assert start.run_in_group(["evaluate"], 3, lambda runtime: 0) == 3
