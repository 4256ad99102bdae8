"""The process of `fork_loop.run_loop`.

This file imports no other file of the tests: a Session analyzes the files of its callers and the
files that these import.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def run_worker(
    script: Path,
    folder: Path,
    flags: dict[str, object],
    environ: dict[str, object],
    kill_in: int,
    writer: Connection,
    override: Sequence[str],
) -> None:
    """Run a worker as torchrun would start it."""
    gc.freeze()  # a collection would copy the memory of all imported modules
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from lockstep.cli.worker import run_function
    from lockstep.runtime.exit_report import run_and_report

    os.environ |= {name: str(value) for name, value in environ.items()}
    if kill_in:
        register_optimizer_step_pre_hook(kill_in_update(kill_in))
    report = run_and_report(
        lambda: run_function(
            f"{script}:train",
            folder,
            {name: str(value) for name, value in flags.items()},
            override,
        )
    )
    writer.send((report.code, report.text))


def kill_in_update(number: int) -> Callable[..., None]:
    """Return a hook that kills this process in the update `number` of the first optimizer."""
    optimizers: list[int] = []

    def hook(optimizer: Any, *_: Any) -> None:
        optimizers.append(id(optimizer))
        if optimizers.count(optimizers[0]) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
