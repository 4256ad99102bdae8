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

from lockstep.parallel.bucket_source import BucketSource
from lockstep.parallel.buckets import Bucket
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.groups import Connection
from lockstep.parallel.replica import Replica
from lockstep.runtime.torch_private import detach_groups
from lockstep.runtime.work import static_group


def take_step(replica: Replica, step: int) -> None:
    for _ in replica.micro_batches(step):
        replica.backward(replica(torch.ones(1, 4)).sum())


def reduce_with_a_stopped_peer(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    reasons: list[str] = []
    with build_replica(
        nn.Linear(4, 4),
        micro_batches=2,
        connection=Connection(generation_error=lambda: "".join(reasons)),
    ) as replica:
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
        print(
            "new memory"
            if uses_new_memory(replica)
            else "memory that the thread left behind may write to",
            flush=True,
        )
        os._exit(0)


def uses_new_memory(replica: Replica) -> bool:
    """Return whether the next step, in a group of this process alone, has other gradient buffers."""
    before = [bucket.buffer for bucket in buckets_of(replica)]
    detach_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    replica.groups.waits.generation_error = static_group
    replica.release_groups()
    take_step(replica, 1)
    return all(new.buffer is not old for new, old in zip(buckets_of(replica), before, strict=True))


def buckets_of(replica: Replica) -> list[Bucket]:
    assert isinstance(replica.source, BucketSource) and replica.source.buckets
    return replica.source.buckets.buckets


if __name__ == "__main__":
    reduce_with_a_stopped_peer(int(sys.argv[1]), int(sys.argv[2]))
