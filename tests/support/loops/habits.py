"""Loops with the habits of PyTorch scripts, by name: `train --habit NAME`.

A model of 49 weights, 48 points, six micro-batches in a step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data.order import UniformOrder
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup

MICRO_BATCHES = 6
ORDER = UniformOrder(48, batch_size=12, micro_batches=MICRO_BATCHES)


def make_model(*more: nn.Module) -> nn.Sequential:
    """Return a model with `more` after its first layer, with the same weights on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *more, nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def make_points() -> tuple[Tensor, Tensor]:
    """Return (inputs (48, 4), targets (48,))."""
    inputs = torch.rand(48, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a micro-batch: its share of the mean over the step."""
    return nn.functional.mse_loss(outputs, targets) / MICRO_BATCHES


class Plain:
    """The parts of a loop. A habit replaces one of them."""

    def __init__(self) -> None:
        self.model = make_model()
        self.inputs, self.targets = make_points()
        self.optimizers: list[torch.optim.Optimizer] = [self.sgd(self.model, lr=0.1)]
        self.state: dict[str, Any] = {}

    @staticmethod
    def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def start(self, step: int) -> None:
        """Before step `step`."""

    def rows(self, step: int, k: int) -> tuple[Tensor, Tensor]:
        ids = ORDER.ids(step, k)
        return self.inputs[ids], self.targets[ids]

    def backward(self, replicas: ReplicaGroup, loss: Tensor) -> None:
        replicas.backward(loss)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Slow(Plain):
    """Steps of SECONDS, for the timeouts of a drill."""

    seconds = 1.0

    def rows(self, step: int, k: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds / MICRO_BATCHES)
        return super().rows(step, k)


class Diverges(Plain):
    """A learning rate at which the loss is NaN after a few steps."""

    @staticmethod
    def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e30)


class GradientNoise(Plain):
    """Noise on the summed gradient, drawn after the micro-batches."""

    def update(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn_like(parameter)
        super().update()


class Unseeded(Plain):
    """Data and noise from unseeded generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = torch.from_numpy(np.random.rand(48, 4)).float()
        self.targets = self.inputs.sum(1)

    def rows(self, step: int, k: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().rows(step, k)
        return inputs + 0.1 * random.random() + 0.1 * torch.randn(len(inputs), 4), targets


class BatchNorm(Plain):
    """Running statistics that follow the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model(nn.BatchNorm1d(8))
        self.optimizers = [self.sgd(self.model, lr=0.1)]


class PlainBackward(Plain):
    """loss.backward() instead of replicas.backward(loss)."""

    def backward(self, replicas: ReplicaGroup, loss: Tensor) -> None:
        loss.backward()


class ZeroGrad(Plain):
    """zero_grad before each micro-batch, as in loops with one micro-batch in a step."""

    def rows(self, step: int, k: int) -> tuple[Tensor, Tensor]:
        self.optimizers[0].zero_grad()
        return super().rows(step, k)


class Unfreeze(Plain):
    """A layer that is frozen until the fourth step."""

    def start(self, step: int) -> None:
        self.model[0].requires_grad_(step >= 3)


class Average(Plain):
    """An exponential moving average of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.state["ema"] = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(self) -> None:
        super().update()
        self.state["ema"].update_parameters(self.model)


class Scheduler(Plain):
    """A scheduler of torch that reduces the learning rate twice."""

    def __init__(self) -> None:
        super().__init__()
        self.state["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)

    def update(self) -> None:
        super().update()
        self.state["scheduler"].step()


class Scaler(Plain):
    """A loss scale that grows every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def backward(self, replicas: ReplicaGroup, loss: Tensor) -> None:
        replicas.backward(loss, scaler=self.state["scaler"])

    def update(self) -> None:
        self.state["scaler"].step(self.optimizers[0])
        self.state["scaler"].update()


class Optimizers(Plain):
    """Two optimizers, one for each layer."""

    def __init__(self) -> None:
        super().__init__()
        second = torch.optim.AdamW(self.model[2].parameters(), lr=0.01)
        self.optimizers = [self.sgd(self.model[0], lr=0.1), second]


class IteratedLoader(Plain):
    """A DataLoader that is iterated inside the loop: the next batch depends on those before."""

    def __init__(self) -> None:
        super().__init__()
        loader = DataLoader(TensorDataset(*make_points()), batch_size=2, shuffle=True)
        self.batches = endless(loader)

    def rows(self, step: int, k: int) -> tuple[Tensor, Tensor]:
        rows, wanted = next(self.batches)
        return rows, wanted


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of the loader, epoch after epoch."""
    while True:
        yield from loader


HABITS = {
    "slow": Slow,
    "diverges": Diverges,
    "gradient_noise": GradientNoise,
    "unseeded": Unseeded,
    "batchnorm": BatchNorm,
    "plain_backward": PlainBackward,
    "zero_grad": ZeroGrad,
    "unfreeze": Unfreeze,
    "ema": Average,
    "scheduler": Scheduler,
    "scaler": Scaler,
    "optimizers": Optimizers,
    "dataloader": IteratedLoader,
}


def train(habit: str, steps: int = 6, seconds: float = 1.0, out: Path = Path("run")) -> None:
    if habit in SESSIONS:
        return SESSIONS[habit](steps, out)
    with ElasticRuntime.join() as runtime:
        Slow.seconds = seconds
        loop = HABITS[habit]()
        with Checkpointer(
            out / "checkpoints",
            runtime,
            loop.model,
            loop.optimizers if len(loop.optimizers) > 1 else loop.optimizers[0],
            state=loop.state,
            every_steps=2,
        ) as checkpointer:
            step = checkpointer.resume()
            loop.start(step)
            with ReplicaGroup(
                runtime, loop.model, checkpointer, micro_batches=MICRO_BATCHES
            ) as replicas:
                while step < steps:
                    loop.start(step)
                    for k in replicas.micro_batches(step):
                        inputs, targets = loop.rows(step, k)
                        loop.backward(replicas, loss_of(replicas(inputs), targets))
                    loop.update()
                    step += 1
                    checkpointer.save_if_due(step)
                checkpointer.save(step)


# With a Session.


def counts(steps: int, out: Path) -> None:
    """Micro-batches of unequal size, each with its count."""
    model, (inputs, targets) = make_model(), make_points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lockstep.Session(out, micro_batches=MICRO_BATCHES, save_every=2) as session:
        model, optimizer = session.prepare(model, optimizer)
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                rows = slice(5 * k, 5 * k + 1 + (step + k) % 5)
                loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows], reduction="sum")
                session.backward(loss, count=len(inputs[rows]))
            optimizer.step()


def one_rank_stops(steps: int, out: Path) -> None:
    """Rank 0 alone asks for the end, after the micro-batches of step 2."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with lockstep.Session(out, micro_batches=2) as session:
        prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                session.backward(prepared(torch.full((3, 2), float(k))).square().mean())
            optimizer.step()
            if step == 2 and session.world.rank == 0:
                session.stop()


SESSIONS = {"counts": counts, "one_rank_stops": one_rank_stops}
