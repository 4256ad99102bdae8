"""For tests: real processes, and how much memory tensors take.

`run_ranks(function, size)` runs function(world, *args) in `size` processes that share a gloo group.

The processes are forked from a server that has imported torch and owns no threads (multiprocessing's forkserver), so that a group of
four starts in a tenth of a second instead of eight. Rendezvous is a file in a temporary folder: no port, no race for one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # torch.distributed has it too, untyped
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.elastic.world import World

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "lockstep.train", "lockstep.testing.ranks"]


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 60.0, kill: tuple[int, ...] = ()) -> list[Any]:
    """What function(world, *args) gives on each rank, in the order of the ranks. AssertionError with every rank's traceback when one fails.

    kill  ranks that are expected to be ended by SIGKILL within; their answer is None
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=be_rank, args=(function, rank, size, folder, pipes[rank][1], args), daemon=True) for rank in range(size)
        ]
        for process, (_, ours) in zip(processes, pipes, strict=True):
            process.start()
            ours.close()
        answers = collect([reader for reader, _ in pipes], timeout_s)
        for process in processes:
            process.join(timeout=0.1 if None in answers else 5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"rank {rank} (exit code {processes[rank].exitcode}):\n{text}" for rank, text in enumerate(texts(answers, kill)) if text]
    if failed:
        raise AssertionError("\n".join(failed))
    for rank in kill:
        assert processes[rank].exitcode == -signal.SIGKILL, f"rank {rank} was to be killed, and ended with {processes[rank].exitcode}"
    return [answer[1] if answer else None for answer in answers]


def collect(readers: list[Connection], timeout_s: float) -> list[tuple[bool, Any] | None]:
    """(succeeded, answer) of each reader; None for one that closed without an answer or gave none in time."""
    answers: list[tuple[bool, Any] | None] = [None] * len(readers)
    waiting = dict(zip(map(id, readers), range(len(readers)), strict=True))
    deadline = timeout_s
    while waiting and deadline > 0:
        ready = wait([reader for reader in readers if id(reader) in waiting], timeout=0.5)
        deadline -= 0.0 if ready else 0.5
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(id(reader))
            try:
                answers[rank] = reader.recv()
            except EOFError:
                answers[rank] = None
    return answers


def texts(answers: list[tuple[bool, Any] | None], kill: tuple[int, ...]) -> list[str]:
    """What went wrong on each rank, "" where nothing did."""
    found = []
    for rank, answer in enumerate(answers):
        if answer is None:
            found.append("" if rank in kill else "no answer")
        else:
            found.append("" if answer[0] else str(answer[1]))
    return found


def be_rank(function: Callable[..., Any], rank: int, size: int, folder: str, answer: Connection, args: tuple[Any, ...]) -> None:
    """The life of one rank."""
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        world = World(rank, size, rank, size, socket.gethostname(), torch.device("cpu"))
        answer.send((True, function(world, *args)))
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
        sys.exit(1)


class Living(TorchDispatchMode):
    """Bytes of the tensors made within that live, and the most that lived at once. What an operator makes for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not hasattr(storage := tensor.untyped_storage(), "counted"):
                storage.counted = True  # type: ignore[attr-defined]
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.gone, storage.nbytes())
        return made

    def gone(self, size: int) -> None:
        self.bytes -= size
