"""Faults on order, for drills and tests: a worker kills itself, asks for a stop, stops, hangs or flips a bit of its weights.

Each strikes at an exact place of a step.

The order lies in the state folder (seat.py) as SLOT.fault, JSON, and is taken away before it is carried out:

    {"what": "kill", "at": "voting", "step": 7}
    {"what": "kill", "at": "collective", "after": 1}      between two buckets; "hand-over": while the state goes to a joiner

A worker looks for orders only when it was started with LOCKSTEP_DRILL=1, which `lockstep drill` and the tests set.
"""

from __future__ import annotations

import ctypes
import logging
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
from lockstep.log import let_out
from lockstep.runtime.status_board import Board, Phase

log = logging.getLogger("lockstep")
DRILL = "LOCKSTEP_DRILL"
What = Literal["kill", "term", "stop", "hang", "spin", "raise", "exit", "flip"]
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


class FaultyBoard(Board):
    """A board that obeys orders at each phase (and at each "collective") of its worker.

    flip  flips a bit of the weights; set by whoever has them
    """

    def __init__(self, path: Path, orders: Path) -> None:
        self.orders = orders
        self.flip: Callable[[], None] | None = None
        super().__init__(path)

    def enter(self, phase: Phase, step: int | None = None, *, generation: int | None = None) -> None:
        super().enter(phase, step, generation=generation)
        self._obey(phase)

    def collective(self, size_bytes: int = 0) -> None:
        super().collective(size_bytes)
        self._obey("hand-over" if self.phase == "joining" else "collective")

    def _obey(self, at: str) -> None:
        try:
            order = read_json(self.orders)
        except (OSError, ValueError):
            return
        if order.get("at") not in (None, at) or self.step < order.get("step", 0) or (order["what"] == "flip" and self.flip is None):
            return
        if order.get("after"):
            write_json(self.orders, order | {"after": order["after"] - 1})
            return
        with suppress(FileNotFoundError):
            self.orders.unlink()
            log.warning("obeying %s at %s of step %d", order["what"], at, self.step)
            let_out()
            self._do(order["what"])

    def _do(self, what: What) -> None:
        if what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif what == "hang":
            time.sleep(3600)
        elif what == "spin":
            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock
        elif what == "raise":
            raise ValueError("an error on order")
        elif what == "exit":
            sys.exit(0)
        elif self.flip:
            self.flip()


def order(state: Path, slot: int, what: What, **where: Any) -> None:
    """Leave an order for the worker in `slot`: at="forward", step=7."""
    write_json(state / f"{slot}.fault", {"what": what, **where})


def flip_bit(parameters: list[Any], seed: int = 0) -> None:
    """Flip one bit of one weight (a torch tensor), as a cosmic ray does."""
    import torch  # here, since the agent imports this module and does without torch

    chance = random.Random(seed)
    words = chance.choice(parameters).detach().view(-1).view(torch.uint8).numpy().view("uint32")
    words[chance.randrange(len(words))] ^= 1 << chance.randrange(20, 32)
