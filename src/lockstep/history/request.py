"""The request to a process of a replay, in its environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from lockstep.runtime.variables import REPLAY

OBSERVED = "observed.jsonl"  # in the copy of the run folder


@dataclass(frozen=True)
class Replay:
    """Train in a copy of a run folder up to a step, and look at that step.

    folder    the copy
    step      the last step, by its number in metrics.jsonl
    observes  record each micro-batch of this step in observed.jsonl
    dumped    micro-batch of this step whose tensors are written to the folder `dump`
    stops_at  micro-batch of this step in whose body pdb starts
    """

    folder: str
    step: int
    observes: bool = False
    dumped: int | None = None
    dump: str = ""
    stops_at: int | None = None

    def environ(self) -> dict[str, str]:
        return {REPLAY: json.dumps(asdict(self))}
