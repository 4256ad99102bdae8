"""The run's account of time (record/goodput.py) across steps and starts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.record import events
from lockstep.record.goodput import Ledger
from lockstep.record.metrics import iter_steps

FACT = "time"  # of the checkpoints, which hold the account


def account_step(ledger: Ledger, values: Mapping[str, Any]) -> None:
    """Move the step's waiting for communication and data from training to their own accounts."""
    now_s = time.monotonic()
    ledger.move("training", "communication", values.get("communication_seconds", 0.0), now_s)
    ledger.move("training", "data", values.get("data_seconds", 0.0), now_s)


def account_facts(ledger: Ledger) -> dict[str, Any]:
    """Return what a checkpoint holds of the account."""
    return {FACT: ledger.to_json(time.monotonic(), time.time())}


def resume_account(
    runtime: ElasticRuntime, facts: Mapping[str, Any], first_step: int, folder: Path
) -> None:
    """Collective, except for a joiner, which received an account. Continue that of the run.

    It continues from the checkpoint, or from the run's first start. Training after `first_step`
    counts as lost, and the time without workers as down.
    """
    if not runtime.first_generation:
        return

    def read_files() -> tuple[dict[str, Any] | None, float]:
        seconds_after = (
            line.get("seconds", 0.0)
            for line in iter_steps(folder / "metrics.jsonl", after=first_step)
        )
        return facts.get(FACT) or _empty_account(folder), math.fsum(seconds_after)

    saved_ledger, lost_s = run_on_rank0(runtime, read_files)
    if saved_ledger is None:
        return
    now_s = time.monotonic()
    starting_s = runtime.ledger.summary(now_s)["wall_s"]
    runtime.set_ledger(Ledger.from_json(saved_ledger, now_s, wall_clock_s=time.time()))
    is_first = runtime.world.generation == 1
    runtime.ledger.move("down", "starting", math.inf if is_first else starting_s, now_s)
    runtime.ledger.move("down", "lost", lost_s, now_s)


def _empty_account(folder: Path) -> dict[str, Any] | None:
    """Return an empty account that starts with the run's first event; None without events."""
    first = next(events.iter_events(folder), None)
    if first is None:
        return None
    return {"wall_clock_s": datetime.fromisoformat(first["time"]).timestamp(), "seconds": {}}
