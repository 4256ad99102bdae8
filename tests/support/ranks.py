"""Run a function on several ranks.

The processes of `run_ranks` are forked from a server that has imported torch (multiprocessing's
forkserver): four start in a tenth of a second instead of eight seconds. They rendezvous through a
file in a temporary folder, so no other process can take their port.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import forking
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public at run time

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World

PRELOAD = ["pytest", "hypothesis", *forking.PRELOAD]


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 200.0,
    kill: tuple[int, ...] = (),
) -> list[Any]:
    """Return function(runtime, *args) of `size` processes with a common gloo group, in rank order.

    kill  ranks that are expected to die by SIGKILL inside the function; their result is None
    Raises an AssertionError with the traceback of every rank that failed.
    """
    context: Any = multiprocessing.get_context("forkserver" if forking.forks else "spawn")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="lockstep-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(
                target=run_rank,
                args=(function, rank, size, folder, pipes[rank][1], args),
                daemon=True,
            )
            for rank in range(size)
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
    failed = [
        f"rank {rank} (exit code {processes[rank].exitcode}):\n{text}"
        for rank, text in errors
        if text
    ]
    if failed:
        raise AssertionError("\n".join(failed))
    for rank in kill:
        assert processes[rank].exitcode == -signal.SIGKILL, (
            f"rank {rank} was expected to be killed; exit code {processes[rank].exitcode}"
        )
    return [answer[1] if answer else None for answer in answers]


def collect_answers(readers: list[Connection], timeout_s: float) -> list[tuple[bool, Any] | None]:
    """Return (succeeded, answer) of each reader; None: it was closed, or sent none in time."""
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
    """Return the error of each rank; "" for a rank that succeeded or was expected to be killed."""
    return [
        ("" if answer[0] else str(answer[1])) if answer else ("" if rank in kill else "no answer")
        for rank, answer in enumerate(answers)
    ]


def run_rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    answer: Connection,
    args: tuple[Any, ...],
) -> None:
    """Form the group, run the function, send (succeeded, result or traceback) through `answer`."""
    gc.freeze()  # a collection would copy the memory of all imported modules
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        wait_until_all_formed(store, size)
        runtime = ElasticRuntime(
            World(rank, size, rank, size, socket.gethostname(), torch.device("cpu"))
        )
        answer.send((True, function(runtime, *args)))
        dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
        sys.exit(1)


def wait_until_all_formed(store: FileStore, size: int) -> None:
    """Wait until every rank has formed the group: a rank that exits earlier breaks it for others."""
    store.add("formed", 1)
    while store.add("formed", 0) < size:
        time.sleep(0.005)
