"""A loop with all parts of lockstep.Session: a scheduler, loader processes, random numbers in
samples and model, an evaluation.

RUN/disturb holds JSON: {"kill": STEP, "stop": STEP}. The worker in slot 1 kills itself in the first
step, slot 0 requests a stop in the second.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep


class Points(Dataset[tuple[Tensor, Tensor]]):
    """600 points with random noise."""

    def __init__(self) -> None:
        self.inputs = torch.rand(600, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i] + 0.01 * torch.randn(2), self.inputs[i].sum()


def train(out: str = "runs/session", steps: int = 40, num_workers: int = 0) -> None:
    model = nn.Sequential(
        nn.Linear(2, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1), nn.Flatten(0)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7)
    with lockstep.Session(out, micro_batches=6, save_every=10) as session:
        model, optimizer = session.prepare(model, optimizer)
        session.state(scheduler=scheduler)
        loader = session.loader(Points(), batch_size=24, num_workers=num_workers)
        for step in session.steps(steps):
            for inputs, targets in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                session.backward(nn.functional.mse_loss(model(inputs), targets))
            norm = session.clip_grad_norm_(0.5)
            optimizer.step()
            scheduler.step()
            session.log(step, norm=norm)
            if step % 10 == 9:
                error = session.evaluate(
                    lambda batch: (model(batch[0]) - batch[1]).abs().mean(),
                    Points(),
                    batch_size=100,
                )
                session.log(step, error=error)


SECONDS_PER_STEP = 5.0  # below the limit of a hang
sizes_seen: set[int] = set()  # numbers of workers of this process's generations
steps_held: set[int] = set()  # in which rank 0 waited for the replacement of a lost worker


def disturb(path: Path, runtime: lockstep.ElasticRuntime, step: int) -> None:
    """Carry out what the file requests for this step, once.

    After a kill, rank 0 holds each step until a replacement waits to join, so that it joins before
    the last step on a loaded machine, too.
    """
    orders = {}
    with suppress(FileNotFoundError):  # another worker removes it when it stops the run
        orders = json.loads(path.read_text())
    slot, done = runtime.membership.slot, path.with_name("killed")
    if step == orders.get("kill") and slot == 1 and not done.exists():
        done.touch()
        time.sleep(
            0.3
        )  # the others end the evaluation before the step: in shards, a loss in it ends the run
        os.kill(os.getpid(), signal.SIGKILL)
    if step == orders.get("stop") and slot == 0:
        path.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)
    sizes_seen.add(runtime.world.size)
    if orders and runtime.world.size < 3:
        time.sleep(0.1)
    if (
        "kill" in orders
        and runtime.world.rank == 0
        and runtime.world.size < max(sizes_seen)
        and step not in steps_held
    ):
        steps_held.add(step)
        until_s = time.monotonic() + SECONDS_PER_STEP
        while not runtime.membership.joiner_count and time.monotonic() < until_s:
            time.sleep(0.05)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
