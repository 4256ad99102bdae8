"""Run a user's loop without an agent, in processes forked from one that has imported torch.

A start then takes a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from support.loop_worker import run_worker
from support.ranks import PRELOAD


@dataclass(frozen=True)
class LoopResult:
    """Exit code and message of the worker that failed; 0 and "" if none did."""

    code: int
    text: str


def run_loop(
    script: Path,
    folder: Path,
    workers: int,
    *,
    shard: int = 1,
    kill_in: int = 0,
    timeout_s: float = 120.0,
    override: Sequence[str] = (),
    **flags: object,
) -> LoopResult:
    """Train SCRIPT:train(**flags) in `folder`. Return a failure other than the loss of a peer.

    override  NAME=VALUE words of --override
    shard    workers of a replica
    kill_in  number of the update in which every worker kills itself; 0: none
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    names = {
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    names |= {"LOCKSTEP_LAYOUT_SHARD": shard} if shard > 1 else {}
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(
            target=run_worker,
            args=(
                script,
                folder,
                flags,
                {**names, "RANK": rank, "LOCAL_RANK": rank},
                kill_in,
                pipes[rank][1],
                override,
            ),
            daemon=True,
        )
        for rank in range(workers)
    ]
    for process, (_, writer) in zip(processes, pipes, strict=True):
        process.start()
        writer.close()
    results = [receive(reader, timeout_s) for reader, _ in pipes]
    for process in processes:
        process.join(5)
        process.kill()
    failed = sorted(
        (result for result in results if result.code), key=lambda result: result.code == 76
    )
    return failed[0] if failed else LoopResult(0, "")


def receive(reader: Connection, timeout_s: float) -> LoopResult:
    """Return the result that a worker sends."""
    with contextlib.suppress(EOFError):
        if reader.poll(timeout_s):
            return LoopResult(*reader.recv())
    return LoopResult(1, f"a worker sent no result within {timeout_s:g} s")
