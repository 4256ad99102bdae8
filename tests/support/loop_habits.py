"""A user's loop with one habit that differs between workers, for test_own_loop_habits.py."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def refuse_threads() -> None:
    """Limit this process to 4 MiB more than it uses; the stack of a thread takes 8."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**20,) * 2)
    with suppress(RuntimeError):
        while True:  # the stacks of finished threads are reused
            threading.Thread(target=threading.Event().wait, daemon=True).start()


def train(habit: str, steps: int = 6, out: Path = Path("run")) -> None:
    data = torch.rand(64, 3)  # unseeded
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        ElasticRuntime.join() as runtime,
        Checkpointer(out / "checkpoints", runtime, model, optimizer) as checkpointer,
    ):
        step = checkpointer.resume()
        own = torch.Generator().manual_seed(runtime.world.rank)
        with ReplicaGroup(runtime, model, checkpointer, micro_batches=4) as replicas:
            while step < steps:
                for k in replicas.micro_batches(step):
                    first = 16 * k + step % 10
                    loss = replicas(data[first : first + 4]).square().mean()
                    if (
                        habit == "rank 1 calls loss.backward"
                        and runtime.world.rank == 1
                        and step == 2
                    ):
                        loss.backward()
                    else:
                        replicas.backward(loss)
                if habit == "no memory is left for a thread" and step == 2:
                    if runtime.world.leader:
                        raise ValueError("an error of rank 0")
                    refuse_threads()
                    time.sleep(1.0)  # until this worker knows that rank 0 is gone
                alone = habit == "noise on the last rank" and runtime.world.rank == 3
                if habit == "noise from a generator of each rank" or alone:
                    with torch.no_grad():
                        model[1].weight += 0.01 * torch.randn(1, 4, generator=own)
                optimizer.step()
                step += 1
        checkpointer.save(step)
