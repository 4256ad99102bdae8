"""Fault injection for drills and tests: a worker dies, stops, hangs, raises or flips a bit.

Each fault happens at an exact point of a step. A request is the JSON file SLOT.fault in the state
folder (runtime/worker_env.py); the worker deletes it before it carries it out:

    {"what": "kill", "at": "voting", "step": 7}
    {"what": "kill", "at": "collective", "after": 1}      after one more bucket
    {"what": "kill", "at": "hand-over"}                   during the state transfer to a joiner

A worker looks for requests only if it was started with LOCKSTEP_DRILL=1, as `lockstep drill` and
the tests do.
"""

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from lockstep.files import read_json, write_json
from lockstep.log import flush_log, log
from lockstep.runtime.status_board import Phase, StatusBoard

DRILL_VARIABLE = "LOCKSTEP_DRILL"
FaultKind = Literal["kill", "term", "stop", "hang", "spin", "raise", "exit", "flip"]
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


class FaultInjectingBoard(StatusBoard):
    """A status board that carries out requested faults at each phase and collective."""

    def __init__(self, path: Path, request_path: Path) -> None:
        self.request_path = request_path
        self._flip: Callable[[], None] | None = None
        super().__init__(path)

    def set_flip(self, flip: Callable[[], None]) -> None:
        self._flip = flip

    def enter(
        self, phase: Phase, step: int | None = None, *, generation: int | None = None
    ) -> None:
        super().enter(phase, step, generation=generation)
        self._inject(phase)

    def enter_collective(self, size_bytes: int = 0) -> None:
        super().enter_collective(size_bytes)
        self._inject("hand-over" if self.phase == "joining" else "collective")

    def _inject(self, at: str) -> None:
        try:
            fault = read_json(self.request_path)
        except (OSError, ValueError):
            return
        if (
            fault.get("at") not in (None, at)
            or self.step < fault.get("step", 0)
            or (fault["what"] == "flip" and self._flip is None)
        ):
            return
        if fault.get("after"):
            write_json(self.request_path, fault | {"after": fault["after"] - 1})
            return
        with suppress(FileNotFoundError):
            self.request_path.unlink()
            log.warning("injecting %s at %s of step %d", fault["what"], at, self.step)
            flush_log()
            self._do(fault["what"])

    def _do(self, what: FaultKind) -> None:
        if what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif what == "hang":
            time.sleep(3600)
        elif what == "spin":
            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the GIL
        elif what == "raise":
            raise ValueError("injected error")
        elif what == "exit":
            sys.exit(0)
        elif self._flip:
            self._flip()


def request_fault(state: Path, slot: int, what: FaultKind, **where: Any) -> None:
    """Request a fault of the worker in `slot`, such as at="forward", step=7."""
    write_json(state / f"{slot}.fault", {"what": what, **where})


def flip_bit(parameters: list[Any], seed: int = 0) -> None:
    """Flip one bit of one weight (a torch tensor), as cosmic rays do."""
    import torch  # here, because the agent imports this module but not torch

    chance = random.Random(seed)
    words = chance.choice(parameters).detach().view(-1).view(torch.uint8).numpy().view("uint32")
    words[chance.randrange(len(words))] ^= 1 << chance.randrange(20, 32)
