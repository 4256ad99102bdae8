"""examples/own_loop.py with a frozen layer, in which an injected fault flips a bit."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from lockstep.elastic.fault_injection import flip_bit
from lockstep.training import replica_group

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import own_loop
from own_loop import train  # noqa: F401

make_model = own_loop.make_model


def make_frozen() -> nn.Module:
    model = make_model()
    frozen = next(model.parameters()).requires_grad_(False)
    replica_group.flip_bit = lambda _: flip_bit([frozen])
    return model


own_loop.make_model = make_frozen
