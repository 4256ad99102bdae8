"""Functions for `lockstep train FILE.py:FUNCTION`."""

from __future__ import annotations

import torch


def fails() -> None:
    raise ValueError("an error of the user's loop")


CPU = torch.device("cpu")


def trains(out: str, device: torch.device = CPU, steps: int = 1) -> None:
    print("trained", type(out).__name__, steps)


def needs(steps: int) -> None: ...
