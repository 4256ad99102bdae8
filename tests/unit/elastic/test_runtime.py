"""ElasticRuntime with a fake membership and process group: generations, retries, the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cluster import FakeCluster, run_workers

from lockstep.elastic import runtime as runtime_module
from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import Progress, World, transfer_roles
from lockstep.errors import FencedError, LockstepError, PeersLostError, UsageError
from lockstep.record.goodput import Ledger
from lockstep.runtime.signals import Stopped
from lockstep.runtime.worker_env import SHARED_TERMINAL

LOST = RuntimeError("Connection closed by peer")


@pytest.fixture
def cluster(tmp_path: Path) -> FakeCluster:
    return FakeCluster(tmp_path, 1)


@pytest.fixture
def runtime(cluster: FakeCluster) -> ElasticRuntime:
    runtime = cluster.runtime(0)
    runtime.join_first_generation()
    return runtime


def failing(*errors: Exception) -> Callable[[], str]:
    """Return a function that raises each of `errors` once, and then returns "done"."""
    remaining = list(errors)

    def function() -> str:
        if remaining:
            raise remaining.pop(0)
        return "done"

    return function


def test_world_is_a_value_that_each_generation_replaces(runtime: ElasticRuntime) -> None:
    before = runtime.world
    assert (before.rank, before.size, before.generation, before.members, before.leader) == (
        0,
        1,
        1,
        ("h/0/x",),
        True,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.rank = 1  # type: ignore[misc]
    runtime.leave_group("members change")
    runtime.form_next()
    assert runtime.world == dataclasses.replace(before, generation=2, reason="members change")
    assert before.generation == 1


def test_local_rank_counts_the_workers_of_one_host(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, 3)
    runtimes = [cluster.runtime(slot) for slot in range(3)]
    run_workers(cluster, lambda slot: runtimes[slot].join_first_generation(), [0, 1, 2])
    assert [(r.world.rank, r.world.local_rank, r.world.local_size) for r in runtimes] == [
        (n, n, 3) for n in range(3)
    ]
    assert (
        [r.world.leader for r in runtimes]
        == [r.shows_progress() for r in runtimes]
        == [True, False, False]
    )


@pytest.mark.parametrize(
    ("members", "shared", "shows"),
    [
        (("h/0/x", "h/1/y", "g/0/z"), "", (True, False, True)),
        (("h/2/x", "h/0/y", "g/0/z"), "", (False, True, True)),  # slot 0 has the terminal
        (("h/2/x", "h/1/y", "g/1/z"), "", (True, False, True)),  # the agent copies from rank 0
        (("h/1/x", "h/2/y", "g/0/z"), "1", (False, False, True)),
        (("h/0/x", "h/1/y", "g/0/z"), "1", (True, False, False)),
    ],
)
def test_one_worker_of_a_terminal_shows_the_progress(
    monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...], shared: str, shows: tuple[bool, ...]
) -> None:
    monkeypatch.setenv(SHARED_TERMINAL, shared)
    device = torch.device("cpu")
    worlds = [
        World(rank, 3, 0, 1, id.split("/")[0], device, 1, members)
        for rank, id in enumerate(members)
    ]
    assert tuple(ElasticRuntime(world).shows_progress() for world in worlds) == shows


# Retries.


def test_lost_peer_leads_to_the_next_generation_until_the_function_returns(
    runtime: ElasticRuntime,
) -> None:
    function = failing(
        LOST, PeersLostError("a worker is gone"), RuntimeError("wait timeout after 10ms")
    )
    assert runtime.retry_across_generations(function) == "done"
    assert runtime.world.generation == 4 and runtime.world.reason == "wait timeout after 10ms"


def test_retry_first_leaves_a_generation_that_is_over(runtime: ElasticRuntime) -> None:
    assert runtime.retry_across_generations(failing(), "members change") == "done"
    assert runtime.world.generation == 2 and runtime.world.reason == "members change"


@pytest.mark.parametrize(
    "error",
    [
        UsageError("wrong"),
        ValueError("a bug"),
        RuntimeError("a bug"),
        FencedError("evicted"),
        RuntimeError("out of memory"),
        MemoryError(),
    ],
)
def test_other_errors_are_raised(runtime: ElasticRuntime, error: Exception) -> None:
    with pytest.raises(type(error)):
        runtime.retry_across_generations(failing(error))
    assert runtime.world.generation == 1


def test_any_torch_error_is_a_lost_peer_once_the_generation_is_over(
    cluster: FakeCluster, runtime: ElasticRuntime
) -> None:
    assert not runtime.is_peer_loss(RuntimeError("a bug"))
    cluster.gone["h/0/x"] = "killed"
    assert runtime.is_peer_loss(RuntimeError("a bug")) and not runtime.is_peer_loss(
        RuntimeError("out of memory")
    )


def test_static_group_has_no_next_generation() -> None:
    runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
    with pytest.raises(RuntimeError, match="Connection closed"):
        runtime.retry_across_generations(failing(LOST))
    assert runtime.generation_error() == ""


def test_caught_peer_loss_keeps_no_traceback(runtime: ElasticRuntime) -> None:
    with runtime.catch_peer_loss() as loss:
        raise (error := RuntimeError("Connection closed by peer"))
    assert loss.why == "Connection closed by peer" and error.__traceback__ is None
    with runtime.catch_peer_loss() as loss:
        pass
    assert loss.why == ""


# Forming a generation.


def fail_to_form(
    monkeypatch: pytest.MonkeyPatch, runtime: ElasticRuntime, times: int, error: Exception
) -> None:
    form, remaining = runtime.group.form, [error] * times

    def fail(*arguments: Any) -> None:
        if remaining:
            raise remaining.pop()
        form(*arguments)

    monkeypatch.setattr(runtime.group, "form", fail)


def test_generation_that_breaks_while_it_forms_is_abandoned(
    runtime: ElasticRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_form(monkeypatch, runtime, 3, RuntimeError("timed out connecting"))
    runtime.leave_group("members change")
    runtime.form_next()
    assert runtime.world.generation == 5


def test_too_many_broken_generations_in_a_row_end_the_worker(
    runtime: ElasticRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "MAX_FAILED_GENERATIONS", 3)
    fail_to_form(monkeypatch, runtime, 9, RuntimeError("timed out connecting"))
    with pytest.raises(
        PeersLostError, match="3 generations in a row failed to form: timed out connecting"
    ):
        runtime.retry_across_generations(failing(), "members change")


def test_out_of_memory_while_forming_is_not_retried(
    runtime: ElasticRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_form(monkeypatch, runtime, 1, RuntimeError("can't start new thread"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        runtime.retry_across_generations(failing(), "members change")
    assert runtime.world.generation == 2


def test_untrusted_state_restarts_the_worker(cluster: FakeCluster, runtime: ElasticRuntime) -> None:
    facts = {"step": 3, "what": "weights", "digests": {}}
    runtime.membership.mark_untrusted(runtime.world.generation, "replicas differ", facts)
    runtime.leave_group("replicas differ")
    with pytest.raises(FencedError, match="replicas differ"):
        runtime.form_next()


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (
            (Progress("join", -1), Progress("resume", -1)),
            "workers are at different stages of the start: join, resume",
        ),
        ((Progress("join", -1), Progress("join", -1)), ""),
        ((Progress("step", 7), Progress("resume", -1)), ""),
    ],
)
def test_new_workers_start_at_the_same_stage(
    tmp_path: Path, progress: tuple[Progress, Progress], message: str
) -> None:
    cluster = FakeCluster(tmp_path, 2)
    runtimes = [cluster.runtime(slot) for slot in range(2)]
    for runtime, own in zip(runtimes, progress, strict=True):
        runtime.set_progress(own)
    results = run_workers(cluster, lambda slot: runtimes[slot].join_first_generation(), [0, 1])
    if message:
        assert all(
            isinstance(error, FencedError) and message in str(error) for error in results.values()
        )
    else:
        assert results == {0: None, 1: None}


def test_joiner_continues_the_ledger_of_the_run(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, 2)
    trained, joiner = (cluster.runtime(slot) for slot in range(2))
    trained.set_progress(Progress("step", 7))
    trained.set_ledger(Ledger(-1000.0, "training"))
    joiner.set_progress(Progress("resume", -1))
    run_workers(cluster, lambda slot: (trained, joiner)[slot].join_first_generation(), [0, 1])
    assert (trained.is_joining, joiner.is_joining) == (False, True)
    assert not trained.first_generation and not joiner.first_generation
    assert joiner.ledger.summary(1.0)["training_s"] > 900
    assert transfer_roles(joiner.member_progress) == (7, [0], [1])


def test_compiling_counts_as_compiling_and_not_as_training(runtime: ElasticRuntime) -> None:
    phases = []

    def slow_backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        phases.append((runtime.board.phase, runtime.ledger.category))
        time.sleep(0.3)
        return graph.forward

    runtime.track_compilation()
    runtime.board.enter("forward", 1)
    runtime.set_ledger(Ledger(time.monotonic(), "training"))
    doubled = torch.compile(lambda tensor: tensor + tensor, backend=slow_backend, dynamic=False)
    for rows in (2, 2, 3):
        assert doubled(torch.ones(rows)).sum() == 2 * rows
    assert phases == [("compiling", "compiling")] * 2, "once for each shape"
    assert (runtime.board.phase, runtime.ledger.category) == ("forward", "training")
    assert runtime.ledger.summary(time.monotonic())["compiling_s"] > 0.6


def test_only_training_counts_as_lost_when_a_step_is_retried(runtime: ElasticRuntime) -> None:
    now_s = time.monotonic()
    runtime.set_ledger(Ledger(now_s - 100.0, "training"))
    trained_s = runtime.ledger.spent("training", now_s - 30.0)
    runtime.ledger.switch("compiling", now_s - 20.0)
    runtime.ledger.switch("training", now_s - 5.0)
    runtime.count_as_lost(trained_s)
    values = runtime.ledger.summary(time.monotonic())
    assert values["compiling_s"] == pytest.approx(15.0)
    assert values["lost_s"] == pytest.approx(15.0, abs=1.0)
    assert values["training_s"] == pytest.approx(70.0, abs=1.0)


# The end of a run.


def test_all_ranks_leave_together_with_the_exit_code_of_the_run(tmp_path: Path) -> None:
    cluster = FakeCluster(tmp_path, 2)

    def work(slot: int) -> None:
        runtime = cluster.runtime(slot)
        runtime.join_first_generation()
        with runtime:
            runtime.set_exit_code(75)

    assert run_workers(cluster, work, [0, 1]) == {0: None, 1: None}
    assert cluster.ended is not None and cluster.ended.code == 75


def test_stop_records_its_own_exit_code(cluster: FakeCluster, runtime: ElasticRuntime) -> None:
    with pytest.raises(Stopped), runtime:
        raise Stopped("SIGTERM")
    assert cluster.ended is not None and cluster.ended.code == 75


def test_torch_error_of_a_lost_peer_becomes_a_peers_lost_error(
    cluster: FakeCluster, runtime: ElasticRuntime
) -> None:
    with (
        pytest.raises(PeersLostError, match="rank 0 lost its peers: Connection closed by peer"),
        runtime,
    ):
        raise LOST
    assert cluster.ended is None


def test_second_owner_of_one_kind_is_refused_while_the_first_is_open(
    runtime: ElasticRuntime,
) -> None:
    class Owner: ...

    first, second = Owner(), Owner()
    runtime.register(first)
    with pytest.raises(UsageError, match="a second Owner on one ElasticRuntime"):
        runtime.register(second)
    runtime.unregister(first)
    runtime.register(second)


# Progress.


def test_progress_survives_json() -> None:
    for progress in (
        Progress("join", -1),
        Progress(
            "step",
            7,
            StepDecision(1.5, (1.5, None), count=4, divergent_ranks=(1,), digests=(2, 3)),
            2,
            True,
            True,
            False,
            {"seconds": {}},
        ),
    ):
        assert Progress.from_json(dataclasses.asdict(progress)) == progress


@pytest.mark.parametrize(
    "change",
    [{"extra": 1}, {"step": None}, {"decision": {"loss": 1.0}}],
    ids=["unknown", "missing", "decision"],
)
def test_progress_of_another_version_is_refused(change: dict[str, Any]) -> None:
    values = dataclasses.asdict(Progress("step", 7)) | change
    if change == {"step": None}:
        del values["step"]
    with pytest.raises(LockstepError, match="of another version: missing"):
        Progress.from_json(values)
