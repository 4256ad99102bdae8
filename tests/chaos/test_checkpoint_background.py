"""AsyncSaver and Checkpointer: saves during training, one at a time; every failure is reported."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import run_command
from support.waiting import wait_until
from torch import nn

from lockstep.checkpoint.async_save import NICE, AsyncSaver, IdleRun
from lockstep.checkpoint.commit import PIECE_BYTES, write_file
from lockstep.checkpoint.state_dict import digest, get_state_dict
from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


class Gate:
    """A fail point that holds the writer at its start until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, place: str) -> None:
        if place == "started":
            self.reached.set()
            assert self.open.wait(30)


def test_saves_the_state_at_the_call_while_training_continues(tmp_path: Path) -> None:
    gate = Gate()
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = digest(get_state_dict(model, optimizer))
    facts = {"list": [1]}
    with AsyncSaver(CheckpointStore(tmp_path, fail_point=gate)) as saver:
        saver.save(1, get_state_dict(model, optimizer), facts)
        assert gate.reached.wait(30)
        model(torch.ones(50)).sum().backward()
        optimizer.step()
        facts["list"].append(2)
        assert saver.writing and CheckpointStore(tmp_path).steps() == []
        gate.open.set()
        saver.wait()
        assert CheckpointStore(tmp_path).steps() == [1] and not saver.writing
        saver.save(2, get_state_dict(model, optimizer), facts)  # with optimizer state: more tensors
    store = CheckpointStore(tmp_path)
    assert digest(store.load(1).tensors) == before
    assert store.load(1).facts == {"list": [1]}
    assert digest(store.load(2).tensors) == digest(get_state_dict(model, optimizer)) != before


def test_second_save_waits_for_the_first_and_logs_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    caplog.set_level(logging.WARNING)
    saver = AsyncSaver(CheckpointStore(tmp_path, keep=0, fail_point=gate))
    for step in (1, 2, 3):
        gate.reached.clear()
        gate.open.clear()
        saver.save(step, {"model.x": torch.full((5,), float(step))}, {})
        assert gate.reached.wait(30)
        assert [t.name for t in threading.enumerate() if t.name.startswith("save")] == [
            f"save step {step}"
        ]
        threading.Timer(0.05, gate.open.set).start()  # while the next save waits
    saver.close()
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]
    assert [r.getMessage() for r in caplog.records if "waited" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "'save step 1' before step 2 is copied; save less often to avoid this" in caplog.text


def test_memory_of_a_copy_is_reused(tmp_path: Path) -> None:
    store = RecordingStore(tmp_path, keep=0)
    saver = AsyncSaver(store)
    state = {"model.x": torch.ones(1000), "model.y": torch.ones(3)}
    for step in (1, 2, 3):
        saver.save(step, state, {})
        state = {"model.x": state["model.x"] + 1, "model.y": torch.ones(2 + step)}
    saver.close()
    assert [store.load(step).tensors["model.x"][0].item() for step in (1, 2, 3)] == [1, 2, 3]
    assert [store.load(step).tensors["model.y"].numel() for step in (1, 2, 3)] == [3, 3, 4]
    assert len(set(store.addresses)) == 1


def policies_of_threads() -> set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def test_hashing_and_writing_have_idle_priority_and_no_other_thread_has(tmp_path: Path) -> None:
    place_of: dict[str, str] = {}
    saver = AsyncSaver(
        CheckpointStore(
            tmp_path, file_bytes=400, fail_point=lambda at: place_of.update({at: own_policy()})
        )
    )
    model = nn.Linear(100, 100)
    saver.save(1, {"model.x": torch.ones(100), "model.y": torch.ones(100)}, {})
    model(torch.ones(100)).sum().backward()  # the thread of autograd may start during a save
    saved = saver._done.wait(60)
    # A joined thread may be listed for a moment; autograd's thread, had it become idle, would be listed for good.
    wait_until(
        lambda: policies_of_threads() == {os.SCHED_OTHER}, "normal priority of all threads", 10
    )
    saver.close()
    assert (
        saved
        and place_of["in tensors-00000.safetensors"]
        == place_of["in tensors-00001.safetensors"]
        == "idle"
    )
    assert place_of["in facts.json"] == place_of["sealed"] == place_of["marked"] == "other"


@pytest.mark.parametrize("reason", ["waited for", "too late"])
def test_idle_priority_ends_when_the_save_is(
    tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may not raise its priority again: other threads write the rest of the file. Too
    late, they write at low priority."""
    places: list[str] = []
    nice: list[int] = []
    reached, proceed = threading.Event(), threading.Event()

    def chunks() -> Iterator[bytes]:
        for number in range(3):
            places.append(own_policy())
            nice.append(
                os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getpid())
            )
            if number == 0:
                reached.set()
                assert proceed.wait(30)
            yield bytes(PIECE_BYTES)

    if reason == "too late":
        monkeypatch.setattr("lockstep.checkpoint.async_save.IDLE_S", 0.2)
    run = IdleRun()
    thread = threading.Thread(target=lambda: write_file(tmp_path / "file", chunks(), run=run))
    thread.start()
    assert reached.wait(30)
    if reason == "waited for":
        run.hurry()
    else:
        time.sleep(0.2)
    proceed.set()
    thread.join()
    assert places == ["idle", "other", "other"]
    lower = min(NICE, 19 - os.getpriority(os.PRIO_PROCESS, os.getpid()))
    assert nice[1:] == ([lower] * 2 if reason == "too late" else [0, 0])
    assert (tmp_path / "file").stat().st_size == 3 * PIECE_BYTES


def own_policy() -> str:
    return {os.SCHED_OTHER: "other", os.SCHED_IDLE: "idle"}[os.sched_getscheduler(0)]


class RecordingStore(CheckpointStore):
    """Records in which memory the copies are."""

    addresses: tuple[int, ...] = ()
    pinned: tuple[bool, ...] = ()

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], *others: Any) -> Path:
        self.addresses = (*self.addresses, tensors["model.x"].data_ptr())
        self.pinned = (*self.pinned, tensors["model.x"].is_pinned())
        return super().save(step, tensors, *others)


def test_failures_are_reported_and_later_saves_succeed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saver = AsyncSaver(store)
    saver.save(1, {"model.x": torch.ones(3)}, {})
    saver.save(1, {"model.x": torch.zeros(3)}, {})
    saver.save(1, {"model.x": torch.ones(2)}, {})
    saver.save(2, {"model.x": torch.ones(3)}, {})
    saver.wait()
    for shape in ("(3,)", "(2,)"):
        error = saver.failure()
        assert isinstance(error, CheckpointError) and "other content" in str(error), shape
    assert saver.failure() is None
    saver.close()
    saver.save(2, {"model.x": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="step 2 has a checkpoint with other content"):
        saver.close()
    saver.close()


def test_failed_save_does_not_hide_an_error_in_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = threading.active_count()
    store = CheckpointStore(tmp_path)
    store.save(1, {"model.x": torch.ones(3)}, {})
    with pytest.raises(ZeroDivisionError), AsyncSaver(store) as saver:
        saver.save(1, {"model.x": torch.zeros(3)}, {})
        raise ZeroDivisionError
    assert "other content" in caplog.text
    assert threading.active_count() == threads


def test_facts_that_are_not_json_fail_at_the_call(tmp_path: Path) -> None:
    with (
        AsyncSaver(CheckpointStore(tmp_path)) as saver,
        pytest.raises(TypeError, match="not JSON serializable"),
    ):
        saver.save(1, {}, {"path": tmp_path})
    assert CheckpointStore(tmp_path).steps() == []


def test_exit_without_close_finishes_the_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from lockstep.checkpoint.store import CheckpointStore; from lockstep.checkpoint.async_save import AsyncSaver\n"
        "AsyncSaver(CheckpointStore(Path(sys.argv[1]))).save(5, {'model.x': torch.ones(10**6)}, {})\n"
        "raise RuntimeError('the loop broke')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = run_command([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=240)
    assert result.returncode == 1 and "the loop broke" in result.stderr
    assert CheckpointStore(tmp_path).load(5).tensors["model.x"].sum() == 10**6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, even in a background job of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signal_during_the_wait_loses_nothing(tmp_path: Path) -> None:
    gate = Gate()
    saver = AsyncSaver(CheckpointStore(tmp_path, fail_point=gate))
    saver.save(1, {"model.x": torch.ones(3)}, {})
    assert gate.reached.wait(30)
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    gate.open.set()
    saver.close()
    assert CheckpointStore(tmp_path).steps() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_gpu_copies_on_its_stream_into_pinned_memory(tmp_path: Path) -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    store = RecordingStore(tmp_path, keep=0)
    with AsyncSaver(store) as saver:
        for step in range(1, 4):
            weights.fill_(step)
            saver.save(step, {"model.x": weights, "optim.x.step": torch.tensor(float(step))}, {})
            weights.fill_(-1)  # queued behind the copy
    assert store.pinned == (True, True, True) and len(set(store.addresses)) == 1
    for step in range(1, 4):
        assert bool((CheckpointStore(tmp_path).load(step).tensors["model.x"] == step).all())


def test_due_save_is_skipped_while_the_previous_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate, model = Gate(), nn.Linear(3, 3)
    checkpointer = Checkpointer(
        tmp_path, alone(), model, torch.optim.SGD(model.parameters()), every_steps=1, keep=0
    )
    checkpointer.store = CheckpointStore(tmp_path, keep=0, fail_point=gate)
    with caplog.at_level(logging.WARNING, "lockstep"), checkpointer:
        checkpointer.save_if_due(1)
        assert gate.reached.wait(30)
        for step in (2, 3):
            checkpointer.save_if_due(step)
        gate.open.set()
        assert checkpointer.saver
        checkpointer.saver.wait()
        checkpointer.save_if_due(4)
        checkpointer.save(5)
    assert CheckpointStore(tmp_path).steps() == [1, 4, 5]
    assert [
        record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()
    ] == [
        "the save of step 2 is skipped: the previous one is still being written (logged once per delay)"
    ]


def test_first_and_protect_are_called_in_the_writing_thread(tmp_path: Path) -> None:
    model, calls = nn.Linear(3, 3), list[tuple[str, str]]()
    checkpointer = Checkpointer(
        tmp_path, alone(), model, torch.optim.SGD(model.parameters()), keep=1
    )
    checkpointer.add_to_saves(lambda step: {}, lambda: [1])
    with checkpointer:
        for step in (1, 2, 3):

            def first(step: int = step) -> None:
                calls.append((f"first {step}", threading.current_thread().name))
                assert step not in checkpointer.store.steps()

            checkpointer.save(step, first=first)
    assert checkpointer.store.steps() == [1, 3]
    assert calls == [(f"first {step}", f"save step {step}") for step in (1, 2, 3)]


@pytest.mark.parametrize("extra_steps", [0, 1], ids=["the state is unchanged", "one step later"])
def test_new_leader_repeats_the_save_of_a_lost_leader(tmp_path: Path, extra_steps: int) -> None:
    """Rank 0 is lost before its save of the last step is finished."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        ElasticRuntime.join() as runtime,
        Checkpointer(tmp_path, runtime, model, optimizer, every_steps=2) as checkpointer,
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1) as replicas,
    ):
        for step in range(2 + extra_steps):
            for _ in replicas.micro_batches(step):
                replicas.backward(replicas(torch.ones(1, 3)).sum())
            optimizer.step()
            runtime.world = replace(runtime.world, rank=1)  # another rank is leader
            checkpointer.save_if_due(step + 1)
            runtime.world = replace(runtime.world, rank=0)
        final_digest = digest(checkpointer.state_dict())
    assert checkpointer.store.steps() == ([] if extra_steps else [2])
    assert extra_steps or digest(checkpointer.store.load(2).tensors) == final_digest


def test_worker_that_was_not_compared_saves_nothing_in_that_generation(tmp_path: Path) -> None:
    """A bit has flipped in rank 0: the other ranks evict it before it has their digests."""
    model, runtime = nn.Linear(3, 3), alone()
    checkpointer = Checkpointer(tmp_path, runtime, model, torch.optim.SGD(model.parameters()))
    checkpointer.compare_before_saving(lambda step: False)
    checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.store.steps() == []
    runtime.world = replace(
        runtime.world, generation=1
    )  # a member of the next generation: the others saw no difference
    checkpointer.close()
    assert checkpointer.store.steps() == [1]


def alone() -> ElasticRuntime:
    return ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))


SAVE_WITHOUT_THREADS = Path(__file__).parents[1] / "support" / "save_without_threads.py"


def test_save_without_memory_is_an_error_and_does_not_hang(tmp_path: Path) -> None:
    command = [sys.executable, str(SAVE_WITHOUT_THREADS), str(tmp_path)]
    result = run_command(command)
    assert result.returncode == 1 and "can't start new thread" in result.stderr, result.stderr
    assert CheckpointStore(tmp_path).steps() == []
