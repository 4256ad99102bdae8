"""Test helpers: run a function on several ranks, and measure the memory of tensors.

The processes of `run_ranks` are forked from a server that has imported torch and owns no threads (multiprocessing's forkserver), so a
group of four starts in a tenth of a second instead of eight seconds. They rendezvous through a file in a temporary folder: there is no
port that another process could take.
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
    """Return function(world, *args) of each of `size` processes that share a gloo group, in rank order.

    kill  ranks that are expected to die by SIGKILL inside the function; their result is None
    Raises an AssertionError with the traceback of every rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=run_rank, args=(function, rank, size, folder, pipes[rank][1], args), daemon=True) for rank in range(size)
        ]
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        answers = collect_answers([reader for reader, _ in pipes], timeout_s)
        for process in processes:
            process.join(timeout=0.1 if None in answers else 5)
            if process.is_alive():
                process.kill()
                process.join()
    errors = enumerate(errors_by_rank(answers, kill))
    failed = [f"rank {rank} (exit code {processes[rank].exitcode}):\n{text}" for rank, text in errors if text]
    if failed:
        raise AssertionError("\n".join(failed))
    for rank in kill:
        assert processes[rank].exitcode == -signal.SIGKILL, f"rank {rank} was expected to be killed; exit code {processes[rank].exitcode}"
    return [answer[1] if answer else None for answer in answers]


def collect_answers(readers: list[Connection], timeout_s: float) -> list[tuple[bool, Any] | None]:
    """Return (succeeded, answer) of each reader; None for one that closed without an answer or sent none in time."""
    answers: list[tuple[bool, Any] | None] = [None] * len(readers)
    rank_of = {id(reader): rank for rank, reader in enumerate(readers)}
    remaining_s = timeout_s
    while rank_of and remaining_s > 0:
        ready = wait([reader for reader in readers if id(reader) in rank_of], timeout=0.5)
        remaining_s -= 0.0 if ready else 0.5
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = rank_of.pop(id(reader))
            try:
                answers[rank] = reader.recv()
            except EOFError:
                answers[rank] = None
    return answers


def errors_by_rank(answers: list[tuple[bool, Any] | None], kill: tuple[int, ...]) -> list[str]:
    """Return what went wrong on each rank; "" for a rank that succeeded or was expected to be killed."""
    errors = []
    for rank, answer in enumerate(answers):
        if answer is None:
            errors.append("" if rank in kill else "no answer")
        else:
            errors.append("" if answer[0] else str(answer[1]))
    return errors


def run_rank(function: Callable[..., Any], rank: int, size: int, folder: str, answer: Connection, args: tuple[Any, ...]) -> None:
    """Process main function: form the group, run the function, send (succeeded, result or traceback) through `answer`."""
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


class TensorMemory(TorchDispatchMode):
    """Count the bytes of live tensors created inside the context, and their peak. Temporary memory inside an operator is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not hasattr(storage := tensor.untyped_storage(), "counted"):
                storage.counted = True  # type: ignore[attr-defined]
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, size: int) -> None:
        self.bytes -= size
