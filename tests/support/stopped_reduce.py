"""A worker of an all-reduce in which rank 0 is stopped: `stopped_reduce.py RANK PORT`.

Rank 1 prints its error and after how many seconds it came. The connections stay open, so only the
wait itself can give up before the timeout of the group.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lockstep.parallel.replica import Replica


def take_step(replica: Replica, step: int) -> None:
    for _ in replica.micro_batches(step):
        replica.backward(replica(torch.ones(1, 4)).sum())


def reduce_with_a_stopped_peer(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40))
    reasons: list[str] = []
    with Replica(nn.Linear(4, 4), micro_batches=2, reduce="fast") as replica:
        replica.waits.generation_error = lambda: "".join(reasons)
        take_step(replica, 0)  # the first step also compares the trained parameters
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(0.3, lambda: reasons.append("the peer does not answer")).start()
        start_s = time.monotonic()
        try:
            take_step(replica, 1)
            print("done", 0.0, flush=True)
        except Exception as error:
            print(type(error).__name__, round(time.monotonic() - start_s, 2), flush=True)
        os._exit(0)


if __name__ == "__main__":
    reduce_with_a_stopped_peer(int(sys.argv[1]), int(sys.argv[2]))
