"""Run the scripts of a folder one after another in one process, as `train` of each.

This file imports no other file of the tests: a Session analyzes the files of its callers.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from pathlib import Path
from typing import Any

STEPS = 8


class Interrupted(Exception):
    """Instead of a kill, which would end the other scripts too."""


def train(out: str, scripts: str, interrupt_in: int = 0) -> None:
    """Train in out/NAME, with NAME.RANK for what it prints and for its error.

    interrupt_in  number of the update that ends each script; 0: none
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from lockstep.cli.worker import run_function

    updates: list[Any] = []

    def interrupt(optimizer: Any, *_: Any) -> None:
        updates.append(optimizer)
        if len(updates) == interrupt_in:
            raise Interrupted

    register_optimizer_step_pre_hook(interrupt)
    os.chdir(Path(scripts).parent)
    for script in sorted(Path(scripts).glob("*.py")):
        updates.clear()
        folder = Path(out) / script.stem
        report = folder.with_suffix(f".{os.environ['RANK']}")
        with open(report, "w") as file, contextlib.redirect_stdout(file):
            try:
                run_function(f"{script}:train", folder, {"steps": str(STEPS)})
            except Interrupted:
                pass
            except BaseException:  # of one script; also a SystemExit
                print(traceback.format_exc())
