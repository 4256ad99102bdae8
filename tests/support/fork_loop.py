"""Run a user's own loop without an agent, in processes forked from one that has imported torch: a start takes a tenth of a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.testing.ranks import PRELOAD


@dataclass(frozen=True)
class Ended:
    """How a run ended: the exit code and the words of the worker that failed, 0 and "" when none did."""

    code: int
    text: str


def run_loop(script: Path, folder: Path, workers: int, *, steps: int, timeout_s: float = 120.0) -> Ended:
    """Train SCRIPT:train in `folder` to `steps` on so many workers. The failure that is told is one that is not the loss of a peer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "lockstep.cli.main"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(target=be_worker, args=(script, folder, steps, rank, workers, port, pipes[rank][1]), daemon=True)
        for rank in range(workers)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    ends = [receive(reader, timeout_s) for reader, _ in pipes]
    for process in processes:
        process.join(5)
        process.kill()
    failed = sorted((end for end in ends if end.code), key=lambda end: end.code == 76)
    return failed[0] if failed else Ended(0, "")


def receive(reader: Connection, timeout_s: float) -> Ended:
    """What a worker says of its end."""
    with contextlib.suppress(EOFError):
        if reader.poll(timeout_s):
            return Ended(*reader.recv())
    return Ended(1, f"a worker has said nothing within {timeout_s:g} s")


def be_worker(script: Path, folder: Path, steps: int, rank: int, size: int, port: int, end: Connection) -> None:
    """A worker as torchrun would start it."""
    from lockstep.cli.main import own_function
    from lockstep.runtime.subprocesses import run_and_report

    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    report, text = run_and_report(lambda: own_function(f"{script}:train", folder, {"steps": str(steps)}))
    end.send((report.code, text))
