"""Operations in progress when a connection is closed: gloo would wait for the group's whole timeout."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import os, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from lockstep.errors import PeersLostError
from lockstep.runtime.work import GRACE_S, WorkWaiter
from lockstep.runtime.sockets import shutdown_sockets, open_sockets

rank, ends, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
before = open_sockets()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
sockets = open_sockets() - before
reason = [""]
waiter = WorkWaiter(lambda: reason[0])
small = torch.full((1000,), float(rank))
waiter.wait([dist.isend(small, 1 - rank), None, dist.irecv(got := torch.empty(1000), 1 - rank)])
assert (got == 1 - rank).all()
del waiter
while any(thread.name == "lockstep-wait" for thread in threading.enumerate()):  # until the helper thread has exited
    time.sleep(0.01)
waiter = WorkWaiter(lambda: reason[0])
large = torch.zeros(500_000_000)  # 2e9 bytes: in flight for about a second
dist.barrier()

def end():
    time.sleep(0.1)
    if ends == "killed" and rank == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.3)
    reason[0] = "its peer has exited"
    shutdown_sockets(open_sockets() & sockets)

threading.Thread(target=end, daemon=True).start()
began_s = time.monotonic()
try:
    if ends == "not begun":
        waiter.wait([dist.irecv(large, 1 - rank)])
    else:
        waiter.wait([dist.isend(large, 1) if rank == 0 else dist.irecv(large, 0)])
except Exception as error:
    print(type(error).__name__, round(time.monotonic() - began_s, 2), str(error).splitlines()[0], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("ends", ["killed", "cut", "not begun"])
def test_wait_ends_with_the_generation(ends: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    commands = [[sys.executable, "-c", WORKER, str(rank), ends, port] for rank in (0, 1)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    for text in outputs[1:] if ends == "killed" else outputs:
        kind, seconds, _ = text.split(maxsplit=2)
        assert kind == ("RuntimeError" if ends == "not begun" else "PeersLostError")
        assert float(seconds) < 20, "the timeout of the group is 60 s"


def test_all_reduce_is_abandoned_when_its_peer_is_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = str(Path(__file__).parents[1] / "support" / "stopped_reduce.py")
    stopped, waiting = (subprocess.Popen([sys.executable, program, str(rank), port], stdout=subprocess.PIPE, text=True) for rank in (0, 1))
    try:
        kind, seconds = waiting.communicate(timeout=120)[0].split()
        assert kind == "PeersLostError" and float(seconds) < 20, f"{kind} after {seconds} s; the timeout of the group is 40 s"
    finally:
        stopped.kill()
        stopped.communicate()
