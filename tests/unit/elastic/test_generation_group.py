"""Closing and aborting the process groups of a generation: the rules that NCCL needs, with gloo.

NCCL itself runs in tests/gpu. Here fakes that block replace its closing and its abort.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.waiting import wait_until
from torch.distributed import TCPStore

from lockstep.elastic import generation_group
from lockstep.elastic.generation_group import GenerationGroup, GroupAborter, UpdateExchanges
from lockstep.elastic.generation_log import Generation, Member

MEMBER = Member("here/0/a", "here", 0, os.getpid(), "127.0.0.1:9")


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore(
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def form(group: GenerationGroup, store: TCPStore, number: int) -> None:
    generation = Generation(
        number, f"token {number}", (MEMBER,), f"127.0.0.1:{store.port}", 0, "test"
    )
    group.form(generation, 0, str)


def test_a_store_whose_process_exited_is_not_waited_for() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        generation = Generation(
            1, "token 1", (MEMBER,), f"127.0.0.1:{closed.getsockname()[1]}", 0, "test"
        )
        start_s = time.monotonic()
        with pytest.raises(RuntimeError, match="nothing listens at 127"):
            GenerationGroup(torch.device("cpu")).form(generation, 0, str)
        assert time.monotonic() - start_s < 10  # torch's client tries for much longer


class Closing:
    """A `ProcessGroup.shutdown` that blocks, as NCCL's may, until `finish` is set."""

    def __init__(self) -> None:
        self.finish, self.finished = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.finish.wait()
        self.finished.set()


def test_the_next_generation_forms_while_the_closing_of_the_last_one_blocks(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, closing = GenerationGroup(torch.device("cpu")), Closing()
    form(group, store, 1)
    monkeypatch.setattr(generation_group, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", closing.shutdown)
    group.abort()
    form(group, store, 2)
    subgroup = dist.new_group([0])
    closing.finish.set()
    assert closing.finished.wait(5)
    monkeypatch.undo()
    wait_until(lambda: not any(thread.name == "lockstep-close" for thread in threading.enumerate()))
    for formed in (
        None,
        subgroup,
    ):  # the late closing must not have unregistered the groups of generation 2
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=formed)
        assert tensor.item() == 1
    group.abort()


class Communicator:
    """A backend whose `abort` blocks, as NCCL's may, until `finish` is set."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.finish = threading.Event()

    def abort(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.finish.wait()


def test_each_communicator_is_aborted_once_and_none_blocks_the_membership_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicators = [Communicator(), Communicator()]
    monkeypatch.setattr(generation_group, "device_backends", lambda device: communicators)
    group = GenerationGroup(torch.device("cuda"))
    assert group.shutdown(set()) and group.shutdown(set())
    wait_until(lambda: all(communicator.threads for communicator in communicators))
    communicators[0].finish.set()
    assert group.shutdown(set()), "the second one still aborts"
    communicators[1].finish.set()
    wait_until(lambda: not group.shutdown(set()))
    assert [communicator.threads for communicator in communicators] == [["lockstep-abort"]] * 2


def test_an_abort_waits_for_an_exchange_but_not_for_long(store: TCPStore) -> None:
    group = GenerationGroup(torch.device("cpu"))
    form(group, store, 1)
    with group.track_subgroups():
        near, far = socket.socketpair()
    with near, far:
        near.settimeout(5)
        assert group.hold_abort(0.3)
        group.shutdown(set())
        far.send(b"the rest of an update")
        assert group.is_abort_held() and near.recv(100) == b"the rest of an update"
        wait_until(lambda: not group.is_abort_held())
        group.shutdown(set())
        assert near.recv(100) == b"" and not group.hold_abort(0.3), "it is aborted"
    group.abort()
    form(group, store, 2)
    assert group.hold_abort(60)
    group.shutdown(set())
    assert group.is_abort_held()
    assert group.hold_abort(0) and not group.is_abort_held(), "the exchange is finished"
    group.abort()


def test_an_abort_waits_until_all_optimizers_have_exchanged_their_updates() -> None:
    group = GenerationGroup(torch.device("cpu"))
    updates = UpdateExchanges(group)
    assert updates.hold(60) and not group.is_abort_held(), "none exchanges its update"
    updates.add()
    updates.add()
    assert updates.hold(60) and group.is_abort_held()
    updates.end()
    assert group.is_abort_held(), "the second one is not finished"
    updates.end()
    assert not group.is_abort_held()
    group.shutdown(set())
    assert not updates.hold(60), "it is aborted"


def test_works_that_end_by_an_abort_are_known_before_they_look_done(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted kernel of NCCL ends like one that has succeeded."""
    group = GenerationGroup(torch.device("cuda"))
    seen: list[tuple[bool, bytes]] = []

    class AbortedKernel:
        def abort(self) -> None:
            seen.append((group.is_aborted, near.recv(100)))

    kernel = AbortedKernel()
    monkeypatch.setattr(generation_group, "device_backends", lambda device: [kernel])
    with group.track_subgroups():
        near, far = socket.socketpair()
    with near, far:
        near.settimeout(5)
        assert not group.is_aborted
        group.shutdown(set())
        wait_until(lambda: bool(seen))
    assert seen == [(True, b"")], "and its sockets were shut down: no vote can succeed"


@pytest.mark.parametrize("intact", [True, False])
def test_the_communicators_of_an_intact_group_live_until_all_members_have_left(
    intact: bool, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slower member may still receive. What all members of the next generation have left is idle."""
    calls: list[str] = []
    communicator = Communicator()
    communicator.finish.set()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(generation_group, "device_backends", lambda device: [communicator])
    monkeypatch.setattr(
        generation_group, "init_default_group", lambda store, rank, size, device, timeout_s: None
    )
    monkeypatch.setattr(generation_group, "set_group_timeout", lambda timeout, group: None)
    group = GenerationGroup(torch.device("cuda"))
    form(group, store, 1)
    group.abort(intact=intact)
    if not intact:
        wait_until(lambda: communicator.threads)
        assert not calls, "the device may wait for a dead peer"
    else:
        assert calls == ["synchronize"] and not communicator.threads
        form(group, store, 2)
        wait_until(lambda: communicator.threads)


def test_nothing_is_aborted_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_group, "device_backends", lambda device: 1 / 0)
    assert not GenerationGroup(torch.device("cpu")).shutdown(set())


@pytest.mark.parametrize("is_aborting", [True, False])
def test_a_worker_whose_gpu_cannot_be_aborted_restarts(
    is_aborting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its main thread is blocked in CUDA, where no stack shows it. The limit counts from the break."""
    exits: list[str] = []
    monkeypatch.setattr(generation_group, "exit_for_restart", lambda why, stack: exits.append(why))
    aborter = GroupAborter(lambda: is_aborting, threading.get_ident())
    aborter.check(is_over=False, now_s=0.0)
    for now_s in (1000.0, 1000.0 + generation_group.STUCK_ABORT_S):
        aborter.check(is_over=True, now_s=now_s)
        assert not exits
    aborter.check(is_over=True, now_s=1000.1 + generation_group.STUCK_ABORT_S)
    assert exits == ["stuck while aborting the communicators of its GPU"] * is_aborting


def test_torch_neither_ends_the_process_nor_waits_after_an_error_of_nccl(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[float] = []
    monkeypatch.setattr(
        generation_group,
        "init_default_group",
        lambda store, rank, size, device, timeout_s: formed.append(timeout_s),
    )
    monkeypatch.setattr(generation_group, "set_group_timeout", lambda timeout, group: None)
    names = (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    )
    for name in names:
        monkeypatch.setenv(name, "3")
    form(GenerationGroup(torch.device("cpu")), store, 1)
    assert [os.environ[name] for name in names] == ["3"] * 3 and formed == [10.0]
    form(GenerationGroup(torch.device("cuda")), store, 1)
    assert [os.environ[name] for name in names] == ["0"] * 3 and formed == [10.0, 60.0]
