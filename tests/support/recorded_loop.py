"""examples/own_loop.py, whose workers record their collectives, and meet faults at votes on request.

Files in the working directory:

    HOST-SLOT-PID.collectives   a line for each collective that the worker completed: [generation, name]
    HOST-SLOT.knows-joiner      a joiner has asked the worker of this slot
    votes.json                  {"HOST/SLOT": [step, [action, ...]]}, read at each vote, taken once

    stop   vote for the end of the run, as on SIGTERM
    end    vote for the end of the loop, as session.stop()
    miss   lose the decision, and fail when another worker has left the generation
    die    exit by SIGKILL with the decision
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.elastic.consensus import STOP_REQUEST
from lockstep.elastic.generation_group import GenerationGroup
from lockstep.errors import PeersLostError
from lockstep.runtime import process_group
from lockstep.training import step_runner

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from own_loop import Houses, make_model, train  # noqa: F401

vote_on_step, form, refuse_other_collectives = (
    step_runner.vote_on_step,
    GenerationGroup.form,
    process_group.refuse_other_collectives,
)
generation = [0]  # of this worker


def train_with_state(out: str, steps: int) -> None:
    """As `train`, with a loss that depends on the steps of this worker, which no checkpoint holds."""
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own_steps = 0
    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for sizes, prices in loader(step):
                loss = torch.nn.functional.mse_loss(model(sizes), prices)
                session.backward(loss / (1 + own_steps))
            optimizer.step()
            own_steps += 1


def worker_name() -> str:
    """Return "HOST/SLOT"; unknown in the forkserver, which imports this module."""
    env = json.loads(os.environ["LOCKSTEP_WORKER_ENV"])
    return f"{env['host']}/{env['slot']}"


def record(collective: str) -> None:
    with open(f"{worker_name().replace('/', '-')}-{os.getpid()}.collectives", "a") as file:
        print(json.dumps([generation[0], collective]), file=file)


def is_first_time() -> bool:
    """Return whether no worker of this slot has met its faults, as it has not when the step is retried."""
    marker = Path(f"{worker_name().replace('/', '-')}.met-faults")
    is_first = not marker.exists()
    marker.touch()
    return is_first


def form_and_record(group: GenerationGroup, record_of_generation: Any, *rest: Any) -> None:
    form(group, record_of_generation, *rest)
    generation[0] = record_of_generation.number
    record("form")


def refuse_and_record(names: Sequence[str]) -> None:
    refuse_other_collectives(names)
    record(names[0])


def vote_and_record(runtime: Any, vote: Any, **named: Any) -> Any:
    if not runtime.is_static and runtime.membership.protocol.joiners:
        Path(f"{worker_name().replace('/', '-')}.knows-joiner").touch()
    votes = json.loads(Path("votes.json").read_text()) if Path("votes.json").exists() else {}
    step, actions = votes.get(worker_name(), [-1, []])
    actions = actions if vote.step == step and is_first_time() else []
    signals = {"stop": "SIGTERM", "end": STOP_REQUEST}
    for action in signals.keys() & actions:
        vote = replace(vote, stop_signal=signals[action])
    time.sleep(0.01)  # so that joiners do not miss hundreds of steps
    decision = vote_on_step(runtime, vote, **named)
    if "die" in actions:
        os.kill(os.getpid(), signal.SIGKILL)
    while "miss" in actions:
        if runtime.generation_error():
            raise PeersLostError("this worker missed the decision", "", "")
        time.sleep(0.01)
    record(f"vote on step {vote.step}")
    return decision


step_runner.vote_on_step = vote_and_record
process_group.refuse_other_collectives = refuse_and_record
GenerationGroup.form = form_and_record  # type: ignore[method-assign]
