"""A rank of test_work.py whose connection is closed during a send or receive: RANK HOW PORT."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.runtime.sockets import open_sockets, shutdown_sockets
from lockstep.runtime.work import WorkWaiter

rank, how, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
before = open_sockets()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
sockets = open_sockets() - before
reason = [""]
waiter = WorkWaiter(lambda: reason[0])
small, received = torch.full((1000,), float(rank)), torch.empty(1000)
waiter.wait([dist.isend(small, 1 - rank), None, dist.irecv(received, 1 - rank)])
assert (received == 1 - rank).all()
del waiter
while any(
    thread.name == "lockstep-wait" for thread in threading.enumerate()
):  # until the helper thread has exited
    time.sleep(0.01)
waiter = WorkWaiter(lambda: reason[0])
large = torch.zeros(500_000_000)  # 2e9 bytes: in flight for about a second
dist.barrier()


def close_connections() -> None:
    time.sleep(0.1)
    if how == "killed" and rank == 0:
        os.kill(os.getpid(), 9)
    time.sleep(0.3)
    reason[0] = "its peer has exited"
    shutdown_sockets(open_sockets() & sockets)


threading.Thread(target=close_connections, daemon=True).start()
start_s = time.monotonic()
try:
    if how == "not started":
        waiter.wait([dist.irecv(large, 1 - rank)])
    else:
        waiter.wait([dist.isend(large, 1) if rank == 0 else dist.irecv(large, 0)])
except Exception as error:
    print(
        type(error).__name__,
        round(time.monotonic() - start_s, 2),
        str(error).splitlines()[0],
        flush=True,
    )
os._exit(0)
