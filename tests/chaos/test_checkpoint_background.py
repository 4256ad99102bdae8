"""Saving beside training: what is saved is the state of that moment; one at a time; no failure lost, no thread left."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint.async_save import BackgroundSaver
from lockstep.checkpoint.state_dict import capture, digest
from lockstep.checkpoint.store import Store
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError
from lockstep.training.checkpointer import Keeper
from lockstep.training.replica_group import Team


class Gate:
    """A seam that holds the writer at its beginning until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, place: str) -> None:
        if place == "begun":
            self.reached.set()
            assert self.open.wait(30)


def test_the_state_of_the_call_is_saved_though_training_goes_on(tmp_path: Path) -> None:
    gate = Gate()
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = digest(capture(model, optimizer))
    facts = {"list": [1]}
    with BackgroundSaver(Store(tmp_path, at=gate)) as saver:
        saver.save(1, capture(model, optimizer), facts)
        assert gate.reached.wait(30)
        model(torch.ones(50)).sum().backward()
        optimizer.step()
        facts["list"].append(2)
        assert saver.writing and saver.committed is None and Store(tmp_path).steps() == []
        gate.open.set()
        saver.wait()
        assert saver.committed == 1 and not saver.writing
        saver.save(2, capture(model, optimizer), facts)  # now with optimizer state: more tensors than before
    store = Store(tmp_path)
    assert digest(store.load(1).tensors) == before
    assert store.load(1).facts == {"list": [1]}
    assert digest(store.load(2).tensors) == digest(capture(model, optimizer)) != before


def test_a_second_save_waits_for_the_first_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    caplog.set_level(logging.WARNING)
    saver = BackgroundSaver(Store(tmp_path, keep=0, at=gate))
    for step in (1, 2, 3):
        gate.reached.clear()
        gate.open.clear()
        saver.save(step, {"model.x": torch.full((5,), float(step))}, {})
        assert gate.reached.wait(30)
        assert [t.name for t in threading.enumerate() if t.name.startswith("save")] == [f"save step {step}"]
        threading.Timer(0.05, gate.open.set).start()  # while the next save waits
    saver.close()
    assert Store(tmp_path).steps() == [1, 2, 3]
    assert [r.getMessage() for r in caplog.records if "waited" in r.getMessage()] == [caplog.records[0].getMessage()]
    assert "'save step 1' before step 2 is copied; to avoid it save less often" in caplog.text


def test_host_buffers_are_used_again(tmp_path: Path) -> None:
    saver = BackgroundSaver(Store(tmp_path, keep=0))
    state = {"model.x": torch.ones(1000), "model.y": torch.ones(3)}
    addresses = []
    for step in (1, 2, 3):
        saver.save(step, state, {})
        addresses.append({name: buffer.data_ptr() for name, buffer in saver._buffers.items()})
        state = {"model.x": state["model.x"] + 1, "model.y": torch.ones(2 + step)}
    saver.close()
    assert len({a["model.x"] for a in addresses}) == 1
    store = Store(tmp_path)
    assert [store.load(step).tensors["model.x"][0].item() for step in (1, 2, 3)] == [1, 2, 3]
    assert [store.load(step).tensors["model.y"].numel() for step in (1, 2, 3)] == [3, 3, 4]


def test_no_failure_is_lost_and_saving_goes_on_after_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saver = BackgroundSaver(store)
    saver.save(1, {"model.x": torch.ones(3)}, {})
    saver.save(1, {"model.x": torch.zeros(3)}, {})
    saver.save(1, {"model.x": torch.ones(2)}, {})
    saver.save(2, {"model.x": torch.ones(3)}, {})
    saver.wait()
    assert saver.committed == 2
    for shape in ("(3,)", "(2,)"):
        error = saver.failure()
        assert isinstance(error, CheckpointError) and "other content" in str(error), shape
    assert saver.failure() is None
    saver.close()
    saver.save(2, {"model.x": torch.zeros(3)}, {})
    with pytest.raises(CheckpointError, match="step 2 has a checkpoint with other content"):
        saver.close()
    saver.close()


def test_an_error_in_the_block_is_not_hidden_by_a_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    store = Store(tmp_path)
    store.save(1, {"model.x": torch.ones(3)}, {})
    with pytest.raises(ZeroDivisionError), BackgroundSaver(store) as saver:
        saver.save(1, {"model.x": torch.zeros(3)}, {})
        raise ZeroDivisionError
    assert "other content" in caplog.text
    assert threading.active_count() == threads


def test_facts_that_json_cannot_hold_are_an_error_at_the_call(tmp_path: Path) -> None:
    with BackgroundSaver(Store(tmp_path)) as saver, pytest.raises(TypeError, match="not JSON serializable"):
        saver.save(1, {}, {"path": tmp_path})
    assert Store(tmp_path).steps() == []


def test_a_program_that_ends_without_closing_still_finishes_its_save(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from lockstep.checkpoint.store import Store; from lockstep.checkpoint.async_save import BackgroundSaver\n"
        "BackgroundSaver(Store(Path(sys.argv[1]))).save(5, {'model.x': torch.ones(10**6)}, {})\n"
        "raise RuntimeError('the loop broke')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and "the loop broke" in done.stderr
    assert Store(tmp_path).load(5).tensors["model.x"].sum() == 10**6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background and so without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_that_interrupts_the_wait_loses_nothing(tmp_path: Path) -> None:
    gate = Gate()
    saver = BackgroundSaver(Store(tmp_path, at=gate))
    saver.save(1, {"model.x": torch.ones(3)}, {})
    assert gate.reached.wait(30)
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        saver.wait()
    gate.open.set()
    saver.close()
    assert Store(tmp_path).steps() == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_device_copies_in_the_order_of_its_stream_into_pinned_memory(tmp_path: Path) -> None:
    weights = torch.zeros(50_000_000, device="cuda")
    with BackgroundSaver(Store(tmp_path, keep=0)) as saver:
        for step in range(1, 4):
            weights.fill_(step)
            saver.save(step, {"model.x": weights, "optim.x.step": torch.tensor(float(step))}, {})
            weights.fill_(-1)  # queued behind the copy
            assert saver._buffers["model.x"].is_pinned()
    for step in range(1, 4):
        assert bool((Store(tmp_path).load(step).tensors["model.x"] == step).all())


# The keeper.


def test_a_save_that_is_due_is_left_out_while_the_one_before_is_being_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate, model = Gate(), nn.Linear(3, 3)
    keeper = Keeper(tmp_path, alone(), model, torch.optim.SGD(model.parameters()), every_steps=1, keep=0)
    keeper.store = Store(tmp_path, keep=0, at=gate)
    with caplog.at_level(logging.WARNING, "lockstep"), keeper:
        keeper.save_if_due(1)
        assert gate.reached.wait(30)
        for step in (2, 3):
            keeper.save_if_due(step)
        gate.open.set()
        assert keeper.saver
        keeper.saver.wait()
        keeper.save_if_due(4)
        keeper.save(5)
    assert Store(tmp_path).steps() == [1, 4, 5]
    assert [one.getMessage() for one in caplog.records if "left out" in one.getMessage()] == [
        "the save of step 2 is left out: the one before is still being written (said once for as long as it is)"
    ]


def test_what_comes_first_and_the_best_are_asked_for_where_it_is_written(tmp_path: Path) -> None:
    model, asked = nn.Linear(3, 3), list[tuple[str, str]]()
    keeper = Keeper(tmp_path, alone(), model, torch.optim.SGD(model.parameters()), keep=1)
    with keeper:
        for step in (1, 2, 3):

            def first(step: int = step) -> None:
                asked.append((f"first {step}", threading.current_thread().name))
                assert step not in keeper.store.steps()

            keeper.save(step, first=first, protect=lambda: [1])
    assert keeper.store.steps() == [1, 3]
    assert asked == [(f"first {step}", f"save step {step}") for step in (1, 2, 3)]


@pytest.mark.parametrize("more", [0, 1], ids=["the state is still that one", "one step later"])
def test_who_leads_next_saves_what_the_leader_before_was_to_save_while_the_state_is_that_one(tmp_path: Path, more: int) -> None:
    """A loop of its own whose last step is not one of those that are saved: the leader is lost before its save is done."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        World.join() as world,
        Keeper(tmp_path, world, model, optimizer, every_steps=2) as keeper,
        Team(world, model, keeper, micro_batches=1) as team,
    ):
        for step in range(2 + more):
            for _ in team.micro_batches(step):
                team.backward(team(torch.ones(1, 3)).sum())
            optimizer.step()
            world.rank = 1  # the leader is another
            keeper.save_if_due(step + 1)
            world.rank = 0
        now = digest(keeper.capture())
    assert keeper.store.steps() == ([] if more else [2])
    assert more or digest(keeper.store.load(2).tensors) == now


def test_who_could_not_compare_itself_with_the_others_saves_nothing_in_that_generation(tmp_path: Path) -> None:
    """A bit has flipped in the leader, the others go on without it, and it hears of that before it has their digests."""
    model, world = nn.Linear(3, 3), alone()
    keeper = Keeper(tmp_path, world, model, torch.optim.SGD(model.parameters()))
    keeper.alike = lambda step: False
    keeper.save(1)
    keeper.close()
    assert keeper.store.steps() == []
    world.generation += 1  # it belongs to the next one: the others know of nothing
    keeper.close()
    assert keeper.store.steps() == [1]


def alone() -> World:
    return World(0, 1, 0, 1, "here", torch.device("cpu"))


WITHOUT_THREADS = """
import sys
from pathlib import Path
import torch
from lockstep.checkpoint.async_save import BackgroundSaver
from lockstep.checkpoint.store import Store
from tests.support.loop_habits import refuse_threads

with BackgroundSaver(Store(Path(sys.argv[1]))) as saver:
    refuse_threads()
    saver.save(1, {"weight": torch.ones(3)}, {})
"""


def test_a_save_for_which_there_is_no_memory_is_an_error_and_no_endless_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THREADS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[2])
    assert ended.returncode == 1 and "can't start new thread" in ended.stderr, ended.stderr
    assert Store(tmp_path).steps() == []
