"""examples/own_loop.py, whose leader reads a divergence only after its peer has left."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from lockstep.errors import PeersLostError
from lockstep.training import step_runner

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_loop import train  # noqa: F401

vote_on_step = step_runner.vote_on_step


def vote_late(runtime: Any, vote: Any, **named: Any) -> Any:
    decision = vote_on_step(runtime, vote, **named)
    while decision.divergent_ranks and runtime.world.leader:
        if runtime.generation_error():
            raise PeersLostError("the leader read no answers", "", "")
        time.sleep(0.01)
    return decision


step_runner.vote_on_step = vote_late
