"""State transfer to joiners: several of a host, or from sources that differ. Real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import Progress
from lockstep.errors import PeersLostError
from lockstep.parallel.digest import digest_of
from lockstep.training import state_transfer
from lockstep.training.state_transfer import StateMismatchError, transfer_state

STEPS = [7, 7, 6, 7, -1]  # rank 2 missed the vote on step 6; rank 4 joins


def state(rank: int, other: str) -> dict[str, torch.Tensor]:
    """Return the state of a rank.

    other  what differs on rank 1: "weight", "buffer", "length", or "nothing"
    """
    tensors = {
        f"model.{name}": torch.full((3,), float(STEPS[rank]))
        for name in ("a", "seen", "b", "c", "d", "e")
    }
    for name, tensor in tensors.items():
        if rank == 1 and (name == "model.seen" if other == "buffer" else other == "weight"):
            tensor += 1
    if rank == 1 and other == "length":  # a text, such as a scheduler's state
        tensors["model.a"] = torch.full((4,), float(STEPS[rank]))
    return tensors


def transfer_outcomes(runtime: ElasticRuntime, other: str) -> list[Any]:
    """Return the outcome of each transfer attempt until one succeeds, three at most."""
    rank, size = runtime.world.rank, runtime.world.size
    runtime.set_progress(Progress("step", STEPS[rank]))
    outcomes: list[Any] = []
    own_state = state(rank, other)
    weights = [tensor for name, tensor in own_state.items() if name != "model.seen"]
    while len(outcomes) < 3:
        gathered = runtime.group.gather_json(size, asdict(runtime.progress))
        runtime.member_progress = [Progress.from_json(values) for values in gathered]
        try:
            if rank == 4:
                received = transfer_state(runtime)
                assert received is not None
                outcomes.append(digest(received))
            else:
                assert (
                    transfer_state(runtime, lambda: own_state, 1, lambda: digest_of(weights))
                    is None
                )
                outcomes.append(digest(own_state))
            break
        except StateMismatchError as error:
            outcomes.append(
                (
                    "differ",
                    find_divergent_ranks(error.digests, 1),
                    [digest is None for digest in error.digests],
                )
            )
        except PeersLostError as error:
            outcomes.append(error.what)
    return outcomes


@pytest.mark.parametrize("other", ["nothing", "weight", "buffer", "length"])
def test_joiner_receives_the_state_of_one_worker_or_divergent_ranks_are_named(other: str) -> None:
    outcomes = run_ranks(transfer_outcomes, 5, other)
    expected = digest(state(0, "nothing"))
    if other == "nothing":
        assert outcomes[4] == [expected]
    elif other in ("weight", "length"):
        assert outcomes == [[("differ", (1,), [False, False, True, False, True])] * 3] * 5
    else:  # then the next attempt has one source
        assert (
            outcomes[4]
            == outcomes[0]
            == ["rank 4 received something other than the state of one worker", expected]
        )


BIG = 4_000_000  # bytes of each of the six tensors


def memory_left() -> list[str]:
    """Return the shared memory of state transfers that this process maps or has open."""
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [
        name
        for name in [*files, *Path("/proc/self/maps").read_text().splitlines()]
        if "lockstep-state" in name
    ]


def join_hosts(runtime: ElasticRuntime, hosts: str, sources: int, dies: int = -1) -> dict[str, Any]:
    """Transfer the state of the first ranks to the others; rank r is on the host hosts[r].

    dies  rank that is killed after the first of its tensors; a second joiner of a host: when it
          opens the memory of the first
    """
    rank, size = runtime.world.rank, runtime.world.size
    runtime.world = replace(runtime.world, host=hosts[rank])
    tensors = {
        f"model.{name}": torch.arange(BIG // 4, dtype=torch.float32) + i
        for i, name in enumerate("abcdef")
    }
    own = (
        {**tensors, "model.none": torch.empty(0, 3), "model.one": torch.tensor(7)}
        if rank < sources
        else {}
    )
    runtime.member_progress = [
        Progress("step", 7 if other < sources else -1) for other in range(size)
    ]
    send, receive, sent = runtime.group.isend, runtime.group.irecv, list[int]()

    def isend(tensor: torch.Tensor, to: int) -> Any:
        if hosts[to] != hosts[rank]:
            sent.append(tensor.nbytes)
        return send(tensor, to)

    def irecv(tensor: torch.Tensor, source: int) -> Any:
        if rank == dies and tensor.nbytes == BIG:
            os.kill(os.getpid(), signal.SIGKILL)
        return receive(tensor, source)

    runtime.group.isend, runtime.group.irecv = isend, irecv  # type: ignore[method-assign]
    if rank == dies:
        state_transfer.map_received = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    received, error, shared = None, "", 0
    try:
        received = transfer_state(runtime, lambda: own)
        shared = len(memory_left())
    except RuntimeError as problem:
        error = str(problem)
    answer = {
        "sent": sum(sent),
        "digest": digest(received or own) if received or own else "",
        "error": error,
        "shared": shared,
    }
    del received
    return {**answer, "left": memory_left()}


@pytest.mark.parametrize(
    ("hosts", "joiners"), [("abcc", 2), ("abccc", 3), ("abccdd", 4), ("aab", 1), ("aaa", 1)]
)
def test_each_host_receives_the_state_once_however_many_join_on_it(
    hosts: str, joiners: int
) -> None:
    """Each joiner received it: two on a host twice, three on a host three times the bytes."""
    sources = len(hosts) - joiners
    before = sorted(os.listdir("/dev/shm"))
    outcomes = run_ranks(join_hosts, len(hosts), hosts, sources)
    assert len({outcome["digest"] for outcome in outcomes}) == 1 and outcomes[0]["digest"]
    new_hosts = set(hosts[sources:]) - set(hosts[:sources])
    sent = sum(outcome["sent"] for outcome in outcomes)
    print(
        f"{joiners} joiners on {len(new_hosts)} other hosts: {sent / (6 * BIG):.2f} states sent between hosts"
    )
    assert sent == len(new_hosts) * (6 * BIG + 8)
    assert all(outcome["shared"] for outcome in outcomes[sources:]) and not any(
        outcome["left"] for outcome in outcomes
    )
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("dies", [2, 3])
def test_death_of_a_joiner_or_of_the_one_that_receives_for_it_leaves_no_memory(dies: int) -> None:
    before = sorted(os.listdir("/dev/shm"))
    outcomes = run_ranks(join_hosts, 5, "abccc", 2, dies, kill=(dies,), timeout_s=40)
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != dies]
    assert all(outcome["error"] and not outcome["left"] for outcome in survivors), survivors
    assert sorted(os.listdir("/dev/shm")) == before


def join_without_access(runtime: ElasticRuntime) -> list[str]:
    """Join until it succeeds; no process can open the memory of another. Return the outcomes."""
    rank, outcomes = runtime.world.rank, list[str]()
    runtime.set_progress(Progress("step", 7 if rank == 0 else -1))
    opened = state_transfer.open_regular
    state_transfer.open_regular = lambda path, flags: opened("/proc/self/missing", flags)
    try:
        for _ in range(2):
            gathered = runtime.group.gather_json(3, asdict(runtime.progress))
            runtime.member_progress = [Progress.from_json(values) for values in gathered]
            try:
                received = transfer_state(runtime, lambda: {"model.a": torch.ones(3)})
                outcomes.append(digest(received) if received else "sent")
            except PeersLostError as error:
                outcomes.append(error.what)
    finally:
        state_transfer.open_regular = opened
    return outcomes


def test_joiner_that_cannot_open_the_memory_of_another_receives_the_state_itself() -> None:
    refused = "rank 2 received something other than the state of one worker"
    expected = digest({"model.a": torch.ones(3)})
    assert run_ranks(join_without_access, 3) == [
        [refused, "sent"],
        [refused, expected],
        [refused, expected],
    ]
