"""Uses on some ranks only."""

from __future__ import annotations

import random

import numpy as np
import torch
from support.wrong_uses.loop import Loop, use
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import prune


@use("optimizer.step on rank 0 only")
class StepOnRankZero(Loop):
    refused = r"differ before step"
    workers = 2
    committed = 1

    def update(self) -> None:
        if self.rank == 0:
            super().update()


@use("another learning rate on each rank")
class OtherRate(Loop):
    refused = r"differ before step"
    workers = 2
    committed = 1

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05 + self.rank)


@use("scheduler.step on rank 0 only")
class ScheduleOnRankZero(Loop):
    refused = r"differ before step"
    workers = 2
    committed = 2

    def update(self) -> None:
        self.optimizer.step()
        if self.rank == 0:
            self.scheduler.step()


@use("an average updated on rank 0 only")
class AverageOnRankZero(Loop):
    refused = r"differ before step"
    workers = 2
    committed = 2

    def update(self) -> None:
        self.optimizer.step()
        if self.rank == 0:
            self.ema.update_parameters(self.plain)


@use("an update in every second step")
class UpdateEverySecondStep(Loop):
    warned = r"step 4 changed no trained weight, and its gradient is lost"

    def update(self) -> None:
        if self.step % 2 == 0:
            super().update()


@use("an optimizer that changes .data")
class UpdateByData(Loop):
    def update(self) -> None:
        for p in self.plain.parameters():
            p.data.sub_(0.01 * p.grad)


class DrawnFactor(Loop):
    """Draws a number at the top of a step."""

    def draw(self) -> float:
        raise NotImplementedError

    def before(self) -> None:
        self.factor = self.draw()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * (0.5 + self.factor)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            self.plain[0].weight.mul_(1 - 0.01 * self.draw())


@use("draws of torch before the micro-batches and after the update")
class DrawnByTorch(DrawnFactor):
    def draw(self) -> float:
        return float(torch.rand(()))


@use("draws of NumPy before the micro-batches and after the update")
class DrawnByNumPy(DrawnFactor):
    def draw(self) -> float:
        return float(np.random.rand())


@use("draws of Python before the micro-batches and after the update")
class DrawnByPython(DrawnFactor):
    def draw(self) -> float:
        return random.random()


@use("inputs that differ between ranks by a millionth")
class SlightlyOtherInputs(Loop):
    refused = r"the (loss|gradient) of micro-batch 0 of step 1 is not the same on all workers"
    workers = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + 1e-6 * self.rank, y)


@use("a value of each micro-batch that the next step uses")
class CarriedValue(Loop):
    def wrap(self, model: nn.Module) -> nn.Module:
        initial = self.session.per_micro_batch(torch.zeros(2))
        self.saved = self.session.state(offset=initial)
        return model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.model(x)
        loss = mse_loss(outputs + 0.1 * self.saved.offset.value, y)
        self.saved.offset.value = outputs
        return loss


@use("a count in session.state that micro-batches of later steps change")
class CountInside(Loop):
    refused = r"session state 'seen' changed in the micro-batch loop of step 3; no update was made"
    committed = 2

    def wrap(self, model: nn.Module) -> nn.Module:
        self.saved = self.session.state(seen=[])
        return model

    def after_micro_batch(self) -> None:
        if self.step == 2:
            self.saved.seen.append(self.step)


@use("a layer that is exchanged during the run")
class ExchangedLayer(Loop):
    warned = r"modules, hooks or functions of the model changed during the run: 1"

    def before(self) -> None:
        if self.step == 4:
            self.plain[1] = nn.Sigmoid()


@use("a hook that is added during the run")
class AddedHook(Loop):
    warned = r"modules, hooks or functions of the model changed during the run: 1"

    def before(self) -> None:
        if self.step == 4:
            self.plain[1].register_forward_hook(lambda module, inputs, output: 0.5 * output)


@use("a function of a module that is exchanged during the run")
class ExchangedFunction(Loop):
    warned = r"modules, hooks or functions of the model changed during the run: 1"

    def before(self) -> None:
        if self.step == 4:
            self.plain[1].forward = torch.sigmoid


@use("parameters that get other names during the run")
class OtherNames(Loop):
    refused = r"parameters and buffers changed during the run: new: 0\.weight_mask, 0\.weight_orig; gone: 0\.weight"
    committed = 4

    def before(self) -> None:
        if self.step == 3:
            prune.l1_unstructured(self.plain[0], "weight", 0.5)

    def update(self) -> None:
        self.optimizer.step()


@use("a best loss and an early stop in session.state")
class BestLoss(Loop):
    def wrap(self, model: nn.Module) -> nn.Module:
        self.saved = self.session.state(best=1e9, bad=0)
        return model

    def update(self) -> None:
        super().update()
        self.saved.bad = 0 if self.session.loss < self.saved.best else self.saved.bad + 1
        self.saved.best = min(self.saved.best, self.session.loss)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * 0.5**self.saved.bad


@use("another number of micro-batches on each rank")
class OtherCount(Loop):
    refused = r"micro_batches"
    workers = 2

    def configure(self) -> None:
        self.options["micro_batches"] = 4 if self.rank == 1 else 6


@use("another seed on each rank")
class OtherSeed(Loop):
    refused = r"seed|is not the same on all workers"
    workers = 2

    def configure(self) -> None:
        self.options["seed"] = self.rank


@use("another interval of checkpoints on each rank")
class OtherInterval(Loop):
    refused = r"save_every"
    workers = 2

    def configure(self) -> None:
        self.options["save_every"] = 2 + self.rank


@use("no rehearsal on rank 1")
class OtherRehearsal(Loop):
    refused = r"rehearse"
    workers = 2

    def configure(self) -> None:
        self.options["rehearse"] = self.rank != 1


@use("another comparison interval on each rank")
class OtherVerify(Loop):
    refused = r"verify_every"
    workers = 2

    def configure(self) -> None:
        self.options["verify_every"] = 1 + self.rank


@use("another number of steps on each rank")
class OtherTotal(Loop):
    refused = r"steps is '6' on rank 0 .* and '7' on rank 1"
    workers = 2

    def configure(self) -> None:
        self.total += self.rank


@use("a number of the last micro-batch that is logged")
class LogOfOneMicroBatch(Loop):
    warned = r"session\.log recorded last .* for step \d, and other workers have "

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.last = super().loss(x, y)
        return self.last

    def update(self) -> None:
        super().update()
        self.session.log(self.step, last=self.last.item(), mean=self.session.loss)
