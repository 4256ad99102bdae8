"""A regression on data with bad samples: inputs that are NaN, and targets that are far too high."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

import lockstep

MICRO_BATCHES = 6
BATCH_SIZE = 24
STEPS = 24


class Points(Dataset[tuple[Tensor, Tensor]]):
    """As many points as one epoch of STEPS steps has. nan, high: numbers of bad samples."""

    def __init__(self, nan: set[int], high: set[int]) -> None:
        self.nan = nan
        self.high = high

    def __len__(self) -> int:
        return STEPS * BATCH_SIZE

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(i))
        target = point.sum(0, keepdim=True) + 1e4 * (i in self.high)
        return point * (torch.nan if i in self.nan else 1), target


class Average(nn.Module):
    """Keeps a moving average of its inputs, and the newest mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("newest", torch.zeros(4))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            mean = points.detach().mean(0)
            self.average.mul_(0.8).add_(0.2 * mean)
            self.newest.copy_(mean)
        return points


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)]
    model = nn.Sequential(Average(), *layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)


def numbers(text: str) -> set[int]:
    return {int(word) for word in text.split(",") if word}


visits: Counter[tuple[int, bytes]] = Counter()  # of this process, by step and points


def kill_self(
    orders: str, out: str, runtime: lockstep.ElasticRuntime, step: int, x: Tensor
) -> None:
    """Carry out "SLOT:STEP:VISIT,..." once: the worker in the slot kills itself when it computes a
    micro-batch of the step for the third time (VISIT 3), which is the retry."""
    if not orders:
        return
    key = step, x.numpy().tobytes()
    visits[key] += 1
    order = f"{runtime.membership.slot}:{step}:{visits[key]}"
    done = Path(out) / f"killed {order}"
    if order in orders.split(",") and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)  # a replacement joins before the next kill


def train(
    out: str = "runs/rollback",
    steps: int = STEPS,
    form: str = "mean",
    nan: str = "",
    high: str = "",
    skip: str = "",
    max_skipped: int = 100,
    rollback: bool = True,
    rehearse: bool = True,
    scaler: bool = False,
    num_workers: int = 0,
    stop_in: int = -1,
    kill: str = "",
) -> None:
    """form: losses are a "mean", a sum with a "count", or a mean "without loader"."""
    model, optimizer = make_model()
    options = lockstep.Rollback(max_skipped=max_skipped, skip=skip.split(",") if skip else ())
    with lockstep.Session(
        out,
        micro_batches=MICRO_BATCHES,
        save_every=4,
        progress=False,
        on_divergence=options if rollback else "stop",
        rehearse=rehearse,
        buffers={"*.average": 0.8, "*.newest": "per_micro_batch"},
    ) as session:
        model, optimizer = session.prepare(model, optimizer)
        more: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu")} if scaler else {}
        session.state(**more)
        data = Points(numbers(nan), numbers(high))
        loader = session.loader(data, batch_size=BATCH_SIZE, num_workers=num_workers)
        for step in session.steps(steps):
            batches = loader(step)
            if form == "without loader":
                batches = (loader.batch(step, k) for k in session.micro_batches(step))
            for x, y in batches:
                kill_self(kill, out, session.runtime, step, x)
                if step == stop_in and session.world.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                if form == "count":
                    session.backward(mse_loss(model(x), y, reduction="sum"), count=len(x))
                else:
                    session.backward(mse_loss(model(x), y), **more)
            norm = session.clip_grad_norm_(3.0)
            optimizer.step()
            session.log(step, norm=norm, mean=session.loss)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
