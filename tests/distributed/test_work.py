"""Operations in progress when a connection is closed: gloo would wait for the group's whole timeout."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.runtime import work

PROGRAM = Path(__file__).parents[1] / "support" / "interrupted_send.py"


@pytest.mark.parametrize("how", ["killed", "cut", "not started"])
def test_wait_ends_with_the_generation(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    commands = [[sys.executable, str(PROGRAM), str(rank), how, port] for rank in (0, 1)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    for text in outputs[1:] if how == "killed" else outputs:
        kind, seconds, _ = text.split(maxsplit=2)
        assert kind == ("RuntimeError" if how == "not started" else "PeersLostError")
        assert float(seconds) < 20, "the timeout of the group is 60 s"


def test_all_reduce_is_abandoned_when_its_peer_is_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = str(Path(__file__).parents[1] / "support" / "stopped_reduce.py")
    stopped, waiting = (
        subprocess.Popen(
            [sys.executable, program, str(rank), port], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    )
    try:
        result, memory = waiting.communicate(timeout=120)[0].splitlines()
        kind, seconds = result.split()
        assert memory == "new memory"
        assert kind == "PeersLostError" and float(seconds) < 20, (
            f"{kind} after {seconds} s; the timeout of the group is 40 s"
        )
    finally:
        stopped.kill()
        stopped.communicate()


def exchange_in_both_directions(runtime: ElasticRuntime, staged: bool) -> float:
    """8 MB each way, more than NCCL buffers; staged: through the CPU, as gloo needs it on a GPU."""
    if staged:
        work.is_staged = lambda tensor, group: True
    rank, peer = runtime.world.rank, 1 - runtime.world.rank
    sent, received = torch.full((2_000_000,), float(rank)), torch.full((2_000_000,), -1.0)
    group = dist.group.WORLD
    assert group is not None
    works = work.start_p2p([(peer, sent)], [(peer, received)], group)
    assert staged == any(isinstance(started, work.StagedReceive) for started in works)
    work.WorkWaiter(in_thread=not staged).wait(works)
    assert work.start_p2p([], [], group) == []
    return float(received.unique().item())


@pytest.mark.parametrize("staged", [False, True])
def test_two_ranks_send_and_receive_at_once(staged: bool) -> None:
    assert run_ranks(exchange_in_both_directions, 2, staged) == [1.0, 0.0]
