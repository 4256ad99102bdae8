"""ReplicaGroup and Checkpointer with several ranks in one process: votes, lost peers, saves.

Network, membership and replica are fakes (support/fake_cluster.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_cluster import FakeCluster, FakeReplica, WorkerKilled, run_workers
from torch import nn

from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic import membership
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, FencedError, SaveFailedError, UsageError
from lockstep.record.events import read_events
from lockstep.runtime.signals import HostDrained
from lockstep.training import state_transfer
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import compute_in_shares
from lockstep.training.leaves import Leaves
from lockstep.training.replica_group import ReplicaGroup

MICRO_BATCHES, STEPS = 6, 5
INPUTS = torch.rand(STEPS + 5, MICRO_BATCHES, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def fake_replica() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leaves, "build_replica", FakeReplica)
        patch.setattr(membership, "folder_error", lambda env: "")
        yield


@dataclass
class Run:
    """A training of a small model by workers of a FakeCluster.

    on_micro_batch  called as on_micro_batch(worker, step, k): where a test disturbs the run
    after_update    called as after_update(worker, step)
    """

    cluster: FakeCluster
    on_micro_batch: Callable[[Worker, int, int], None] = lambda worker, step, k: None
    after_update: Callable[[Worker, int], None] = lambda worker, step: None
    counts: bool = False
    steps: int = STEPS
    workers: dict[int, Worker] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    joiners: tuple[int, ...] = ()

    def __call__(self, slot: int) -> list[float]:
        """Train as the worker in `slot`; return the weights."""
        worker = self.workers[slot] = Worker(self.cluster.runtime(slot))
        runtime, model = worker.runtime, worker.model
        FakeReplica.current.runtime = runtime
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        runtime.is_joining = slot in self.joiners
        if not runtime.is_joining:
            runtime.join_first_generation()
        checkpointer = worker.checkpointer = Checkpointer(
            self.cluster.folder / "checkpoints", runtime, model, optimizer, **self.options
        )
        step = checkpointer.resume()
        group = ReplicaGroup(
            runtime,
            model,
            checkpointer,
            micro_batches=MICRO_BATCHES,
            rehearse=False,
            signals=worker.signals,
        )
        with runtime, checkpointer, group as replicas:
            worker.replicas = replicas
            while (
                step < self.steps
                and not replicas.decision.stop
                and not replicas.decision.save_failed
            ):
                for k in replicas.micro_batches(step):
                    self.on_micro_batch(worker, step, k)
                    loss = replicas(INPUTS[step, k]).square().sum()
                    replicas.backward(loss, k + 1 if self.counts else None)
                optimizer.step()
                self.after_update(worker, step)
                step += 1
                worker.losses[step] = replicas.loss
                checkpointer.save_if_due(step)
        return model.weight.flatten().tolist()


class Worker:
    def __init__(self, runtime: ElasticRuntime) -> None:
        self.runtime, self.slot = runtime, runtime.world.local_rank
        self.model = nn.Linear(3, 1)
        nn.init.constant_(self.model.weight, 0.5)
        nn.init.zeros_(self.model.bias)
        self.signals = SimpleNamespace(received="")
        self.losses: dict[int, float] = {}
        self.replicas: Any = None
        self.checkpointer: Any = None


def train(folder: Path, slots: int, **options: Any) -> tuple[Run, dict[int, Any]]:
    """Train with workers 0 to `slots` - 1; return the run and the weights or errors by slot."""
    joiners = options.get("joiners", ())
    run = Run(FakeCluster(folder, slots - len(joiners)), **options)
    return run, run_workers(run.cluster, run, list(range(slots)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, fake_replica: None) -> list[float]:
    """Return the weights of an undisturbed run on one worker."""
    _, weights = train(tmp_path_factory.mktemp("alone"), 1)
    assert isinstance(weights[0], list), weights
    return weights[0]


def test_nobody_votes_for_works_that_an_abort_has_ended(
    tmp_path: Path, expected: list[float]
) -> None:
    def lose(worker: Worker, step: int, k: int) -> None:
        if step == 2 and worker.slot == 2 and k == MICRO_BATCHES - 1:  # of a worker that is alive
            group = worker.runtime.group
            sent = [(group.number, group.count + 1, rank) for rank in (0, 1)]
            with cluster.turn:
                cluster.wait(lambda: all(slot in cluster.messages for slot in sent))
            cluster.remove("h/2/x", "no heartbeat")

    cluster = FakeCluster(tmp_path, 3, garbage=True)
    run = Run(cluster, on_micro_batch=lose)
    weights = run_workers(run.cluster, run, [0, 1, 2])
    assert weights[0] == weights[1] == pytest.approx(expected)
    assert isinstance(weights[2], FencedError), weights[2]


def wait_for_joiner(worker: Worker, step: int, k: int) -> None:
    """Hold worker 0 in step 1 until a joiner waits."""
    if step == 1 and worker.slot == 0 and worker.runtime.world.generation == 1:
        cluster = worker.runtime.membership.cluster
        with cluster.turn:
            cluster.wait(lambda: cluster.joiners)


def kill(worker: Worker) -> None:
    raise WorkerKilled


def test_every_number_of_workers_commits_the_same_steps(
    tmp_path: Path, expected: list[float]
) -> None:
    run, weights = train(tmp_path, 3)
    assert weights == dict.fromkeys(range(3), expected)
    assert run.workers[0].losses == run.workers[1].losses == run.workers[2].losses
    assert all(worker.runtime.world.generation == 1 for worker in run.workers.values())
    assert run.cluster.ended is not None and run.cluster.ended.code == 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_counts_divide_the_gradient_by_their_total_on_every_number_of_workers(
    tmp_path: Path, workers: int
) -> None:
    _, weights = train(tmp_path / "counts", workers, counts=True)
    _, alone = train(tmp_path / "alone", 1, counts=True)
    assert weights == dict.fromkeys(range(workers), alone[0])


def test_counts_on_some_workers_only_are_refused_by_all(tmp_path: Path) -> None:

    def mixed(slot: int) -> Any:
        run = Run(cluster, counts=slot == 0)
        return run(slot)

    cluster = FakeCluster(tmp_path, 2)
    errors = run_workers(cluster, mixed, [0, 1])
    assert all(
        isinstance(error, UsageError) and "some workers gave counts and others none" in error.what
        for error in errors.values()
    )


@pytest.mark.parametrize("k", [0, 5], ids=["first micro-batch", "last micro-batch"])
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_retry_the_step_of_a_lost_worker(
    tmp_path: Path, expected: list[float], victim: int, k: int
) -> None:
    def disturb(worker: Worker, step: int, micro_batch: int) -> None:
        if (
            step == 2
            and worker.slot == victim
            and micro_batch == worker.replicas.replica.own_leaves[0 if k == 0 else -1]
        ):
            kill(worker)

    run, weights = train(tmp_path, 3, on_micro_batch=disturb)
    assert isinstance(weights.pop(victim), WorkerKilled)
    assert list(weights.values()) == [expected, expected]
    survivor = run.workers[2].runtime
    assert survivor.world.generation == 2 and survivor.world.size == 2
    regrouped = [event for event in read_events(tmp_path) if event["event"] == "regrouped"]
    assert [(event["step"], event["attempt"], event["workers"]) for event in regrouped] == [
        (2, 2, list(survivor.world.members))
    ]


def test_last_survivor_finishes_alone(tmp_path: Path, expected: list[float]) -> None:
    _, weights = train(
        tmp_path,
        2,
        on_micro_batch=lambda worker, step, k: kill(worker) if worker.slot == 1 == step else None,
    )
    assert weights[0] == expected


def test_rank_that_missed_the_result_of_a_vote_commits_in_the_next_generation(
    tmp_path: Path, expected: list[float]
) -> None:
    def disturb(worker: Worker, step: int, k: int) -> None:
        if step == 2 and worker.slot == 1 and worker.runtime.world.generation == 1:
            worker.runtime.group.lose_results = 1

    run, weights = train(tmp_path, 3, on_micro_batch=disturb)
    assert weights == dict.fromkeys(range(3), expected)
    assert run.workers[0].losses == run.workers[1].losses
    assert run.workers[0].runtime.world.generation == 2


def test_rank_that_missed_a_vote_starts_no_collective_before_the_next_step(
    tmp_path: Path, expected: list[float]
) -> None:
    """The others are in the next step, whose collectives would meet those of a save or an evaluation."""
    sums: dict[int, list[float]] = {}

    def disturb(worker: Worker, step: int, k: int) -> None:
        if step == 2 and worker.slot == 1 and worker.runtime.world.generation == 1:
            worker.runtime.group.lose_results = 1

    def evaluate(worker: Worker, step: int) -> None:
        scores = compute_in_shares(
            worker.runtime, lambda numbers: {n: {"": float(n)} for n in numbers}, 7, 1
        )
        sums.setdefault(worker.slot, []).append(sum(score[""] for score in scores.values()))

    run, weights = train(
        tmp_path, 3, on_micro_batch=disturb, after_update=evaluate, options={"every_steps": 1}
    )
    assert weights == dict.fromkeys(range(3), expected)
    assert (
        sums == dict.fromkeys(range(3), [21.0] * STEPS)
        and run.workers[0].runtime.world.generation == 2
    )


def test_divergent_rank_is_evicted_and_the_others_continue(
    tmp_path: Path, expected: list[float]
) -> None:
    def flip(worker: Worker, step: int) -> None:
        if step == 1 and worker.slot == 2:
            worker.model.weight.data[0, 0] += 1.0

    run, weights = train(tmp_path, 3, after_update=flip)
    assert (
        isinstance(weights[2], FencedError)
        and "the weights and buffers of rank 2" not in weights[2].what
    )
    assert weights[0] == weights[1] == expected
    assert run.cluster.log.divergence_records() == [] and run.workers[0].runtime.world.size == 2


def test_without_a_majority_all_ranks_restart_from_a_checkpoint(tmp_path: Path) -> None:
    def flip(worker: Worker, step: int) -> None:
        if step == 1 and worker.slot == 1:
            worker.model.weight.data[0, 0] += 1.0

    run, errors = train(tmp_path, 2, after_update=flip)
    assert all(isinstance(error, FencedError) for error in errors.values()), errors
    assert run.cluster.log.untrusted_reason(1)
    ((_, record),) = run.cluster.log.divergence_records()
    assert record["step"] == 2 and len(record["digests"]) == 2


def test_joiner_receives_the_state_and_trains_with_the_others(
    tmp_path: Path, expected: list[float]
) -> None:
    run, weights = train(tmp_path, 3, on_micro_batch=wait_for_joiner, joiners=(2,), steps=STEPS + 2)
    _, alone = train(tmp_path / "alone", 1, steps=STEPS + 2)
    assert weights == dict.fromkeys(range(3), alone[0])
    joiner = run.workers[2]
    assert (
        not joiner.runtime.is_joining and joiner.runtime.world.size == 3 and min(joiner.losses) > 1
    )
    assert len(joiner.losses) < STEPS + 2
    (regrouped,) = [event for event in read_events(tmp_path) if event["event"] == "regrouped"]
    assert regrouped["joined"] == [2] and regrouped["attempt"] == 1


def test_joiner_receives_attributes_that_the_loop_changes(tmp_path: Path) -> None:
    def forward(worker: Worker, step: int, k: int) -> None:
        wait_for_joiner(worker, step, k)
        worker.model.last = (worker.slot, k)

    def halve(worker: Worker, step: int) -> None:
        worker.model.tau = 0.5 * getattr(worker.model, "tau", 1.0)

    run, _ = train(
        tmp_path, 3, on_micro_batch=forward, after_update=halve, joiners=(2,), steps=STEPS + 2
    )
    assert [worker.model.tau for worker in run.workers.values()] == [0.5 ** (STEPS + 2)] * 3
    assert all(
        list(worker.checkpointer.attributes.changed()) == ["tau"] for worker in run.workers.values()
    )


def test_joiner_is_lost_during_the_transfer_and_the_others_continue(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(state: dict[str, Any]) -> str:
        if threading.current_thread() is threads[2]:
            raise WorkerKilled
        return digest(state)

    digest = state_transfer.digest
    threads: dict[int, threading.Thread] = {}
    monkeypatch.setattr(state_transfer, "digest", die)

    run = Run(FakeCluster(tmp_path, 2), on_micro_batch=wait_for_joiner, joiners=(2,))

    def work(slot: int) -> Any:
        threads[slot] = threading.current_thread()
        return run(slot)

    weights = run_workers(run.cluster, work, [0, 1, 2])
    assert isinstance(weights[2], WorkerKilled) and weights[0] == weights[1] == expected
    assert run.workers[0].runtime.world.generation == 3


def test_stop_signal_of_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def disturb(worker: Worker, step: int, k: int) -> None:
        if step == 2 and worker.slot == 1:
            worker.signals.received = "SIGTERM"

    with caplog.at_level("DEBUG", "lockstep"):
        run, _ = train(tmp_path, 3, on_micro_batch=disturb)
    assert [max(worker.losses) for worker in run.workers.values()] == [3, 3, 3]
    assert {worker.replicas.decision.stop for worker in run.workers.values()} == {"SIGTERM"}
    votes = [text for text in caplog.messages if text.startswith("the vote on step")]
    assert len(votes) == 3 and all("step 3: " in text and "'SIGTERM'" in text for text in votes)


def test_drained_host_leaves_and_the_others_continue(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.training.replica_group.LINGER_S", 0.0)

    def disturb(worker: Worker, step: int, k: int) -> None:
        if step == 1 and worker.slot == 1:
            worker.runtime.membership.drains = True
            worker.signals.received = "SIGUSR1"

    _, weights = train(tmp_path, 3, on_micro_batch=disturb)
    assert isinstance(weights[1], HostDrained) and weights[1].code == 0
    assert weights[0] == weights[2] == expected


# Checkpoints.


def fail_saves(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    save = CheckpointStore.save

    def fail(store: CheckpointStore, step: int, *rest: Any) -> Path:
        if step in steps:
            raise CheckpointError(f"the checkpoint of step {step} was not saved", "a full disk", "")
        return save(store, step, *rest)

    monkeypatch.setattr(CheckpointStore, "save", fail)


def test_failed_save_is_a_warning_and_the_next_one_succeeds(
    tmp_path: Path,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_saves(monkeypatch, 2)
    run, weights = train(tmp_path, 2, options={"every_steps": 2})
    assert weights == dict.fromkeys(range(2), expected)
    assert run.workers[0].checkpointer.store.steps() == [4]
    assert (
        "the checkpoint of step 2 was not saved" in caplog.text
        and "training continues" in caplog.text
    )


def test_failed_save_stops_all_ranks_when_the_user_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_saves(monkeypatch, 2)

    def wait_for_save(worker: Worker, step: int, k: int) -> None:
        if step == 2 and worker.slot == 0:
            worker.checkpointer.saver.wait()

    run, errors = train(
        tmp_path, 2, options={"every_steps": 2, "on_error": "stop"}, on_micro_batch=wait_for_save
    )
    assert all(isinstance(error, SaveFailedError) for error in errors.values()), errors
    assert [max(worker.losses) for worker in run.workers.values()] == [3, 3]


def test_run_resumes_on_another_number_of_workers(tmp_path: Path, expected: list[float]) -> None:
    train(tmp_path, 2, options={"every_steps": 2}, steps=2)
    run, weights = train(tmp_path, 3, options={"every_steps": 2})
    assert weights == dict.fromkeys(range(3), expected) and min(run.workers[2].losses) == 3


RESUMES: dict[str, tuple[list[int], Any]] = {
    "auto": ([2, 4], 4),
    "never": ([2, 4], 0),
    "2": ([2, 4], 2),
    "required": ([], CheckpointError),
    "3": ([2, 4], CheckpointError),
}


@pytest.mark.parametrize("how", RESUMES)
def test_all_ranks_resume_from_the_step_that_rank_0_selects(how: str, tmp_path: Path) -> None:
    saved, outcome = RESUMES[how]
    if saved:
        train(tmp_path, 1, options={"every_steps": 2}, steps=max(saved))
    cluster = FakeCluster(tmp_path, 2)

    def resume(slot: int) -> int:
        runtime, model = cluster.runtime(slot), nn.Linear(3, 1)
        runtime.join_first_generation()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Checkpointer(tmp_path / "checkpoints", runtime, model, optimizer).resume(how)

    results = run_workers(cluster, resume, [0, 1])
    if isinstance(outcome, int):
        assert results == {0: outcome, 1: outcome}
    else:
        assert all(isinstance(error, outcome) for error in results.values()), results


def test_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, expected: list[float]
) -> None:
    train(tmp_path, 1, options={"every_steps": 2}, steps=4)
    (tensors,) = (tmp_path / "checkpoints").glob("*4/*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    run, weights = train(tmp_path, 2, options={"every_steps": 2})
    assert weights == dict.fromkeys(range(2), expected)
    assert [min(worker.losses) for worker in run.workers.values()] == [3, 3]


def test_new_leader_saves_what_a_lost_leader_did_not_finish(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def save_on_worker_1_only(store: CheckpointStore, step: int, *rest: Any) -> Path:
        return (
            save(store, step, *rest) if store is run.workers[1].checkpointer.store else store.folder
        )

    monkeypatch.setattr(CheckpointStore, "save", save_on_worker_1_only)
    run = Run(FakeCluster(tmp_path, 2), options={"every_steps": 2})
    run.on_micro_batch = lambda worker, step, k: (
        kill(worker) if step == 2 and worker.slot == 0 else None
    )
    weights = run_workers(run.cluster, run, [0, 1])
    assert weights[1] == expected and run.workers[1].checkpointer.store.steps() == [2, 4]
