"""Wrong, unsupported and odd uses of a Session, one class each, for test_wrong_uses.py.

`Loop` is the right loop; each subclass changes one part of it.

    refused    text of the error, as a regular expression; "": the use is harmless, with the bits of
               one worker on any number of workers and through a resume
    warned     text of a warning, for a use whose bits depend on the number of workers
    committed  steps before the error
    workers    that the error needs; shard of them hold one copy of the model
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep

INPUTS = torch.rand(48, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1)
Batches = Iterator[tuple[Tensor, Tensor]]


class Loop:
    """A right loop: dropout, noise on the data, momentum, a schedule, an average of the weights."""

    refused: ClassVar[str] = ""
    warned: ClassVar[str] = ""
    committed: ClassVar[int] = 0
    workers: ClassVar[int] = 1
    shard: ClassVar[int] = 1

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.total, self.rank = out, steps, int(os.environ["RANK"])
        self.dataset: Any = TensorDataset(INPUTS, TARGETS)
        self.options: dict[str, Any] = {"micro_batches": 6, "save_every": 2}
        self.loader_options: dict[str, Any] = {"batch_size": 12}
        self.configure()

    def configure(self) -> None:
        """Change the options, the data set or the number of steps."""

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1), nn.Flatten(0)
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def make_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def train(self) -> None:
        with lockstep.Session(self.out, **self.options) as session:
            self.session, self.plain = session, self.make_model()
            self.model, self.optimizer = session.prepare(
                self.wrap(self.plain), self.make_optimizer(self.plain)
            )
            self.scheduler = self.make_scheduler()
            self.ema = AveragedModel(self.plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            session.state(scheduler=self.scheduler, ema=self.ema)
            self.loader = session.loader(self.dataset, **self.loader_options)
            for step in session.steps(self.total):
                self.step = step
                self.before()
                for x, y in self.batches():
                    self.before_micro_batch()
                    self.micro_batch(x, y)
                    self.after_micro_batch()
                self.update()

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def before(self) -> None:
        """Run before the micro-batches of a step."""

    def batches(self) -> Batches:
        return self.loader(self.step)

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y))

    def before_micro_batch(self) -> None:
        """Run before the forward pass."""

    def after_micro_batch(self) -> None:
        """Run after the backward pass."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.model(x + 0.01 * torch.randn_like(x)), y)

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.ema.update_parameters(self.plain)


USES: dict[str, type[Loop]] = {}


def use(name: str) -> Any:
    def register(kind: type[Loop]) -> type[Loop]:
        USES[name] = kind
        return kind

    return register


use("none")(Loop)
