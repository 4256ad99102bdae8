"""Changes in the micro-batch loop that belong after it."""

from __future__ import annotations

import torch
from support.wrong_uses.loop import INPUTS, TARGETS, Loop, use
from torch import Tensor, nn


@use("optimizer.step in the micro-batch loop")
class StepInside(Loop):
    refused = r"0\.weight, 3\.bias, 3\.weight changed in the micro-batch loop of step 1"

    def after_micro_batch(self) -> None:
        self.optimizer.step()


@use("a change of a parameter in the micro-batch loop")
class DecayInside(Loop):
    refused = r"0\.weight changed in the micro-batch loop of step 3; no update was made"
    committed = 2

    def after_micro_batch(self) -> None:
        if self.step == 2:
            with torch.no_grad():
                self.plain[0].weight.mul_(0.99)


@use("a change of a parameter through .data in the micro-batch loop")
class DecayByData(Loop):
    refused = r"0\.weight changed in the micro-batch loop of step 1; no update was made"

    def configure(self) -> None:
        self.options["rehearse"] = False

    def after_micro_batch(self) -> None:
        self.plain[0].weight.data.mul_(0.99)


@use("a parameter replaced in the micro-batch loop")
class ReplaceInside(Loop):
    refused = r"no gradient arrived for 1 of 4 parameters|0\.weight"

    def before_micro_batch(self) -> None:
        self.plain[0].weight = nn.Parameter(self.plain[0].weight.detach().clone())


@use("a parameter replaced between two steps")
class ReplaceBetween(Loop):
    refused = r"1 of the optimizer's parameters are not in the model: shape \(8, 4\)"
    committed = 2

    def before(self) -> None:
        if self.step == 2:
            self.plain[0].weight = nn.Parameter(self.plain[0].weight.detach().clone())


@use("scheduler.step in the micro-batch loop")
class ScheduleInside(Loop):
    refused = r"scheduler.* changed in the micro-batch loop of step 1|lr.* changed in the micro-batch loop of step 1"

    def after_micro_batch(self) -> None:
        self.scheduler.step()


@use("an update of the average in the micro-batch loop")
class AverageInside(Loop):
    refused = r"ema.* changed in the micro-batch loop of step 1"

    def after_micro_batch(self) -> None:
        self.ema.update_parameters(self.plain)


@use("a learning rate set by the micro-batch")
class RateInside(Loop):
    refused = r"lr of parameter group 0 of SGD changed in the micro-batch loop of step 3"
    committed = 2

    def after_micro_batch(self) -> None:
        if self.step == 2:
            self.optimizer.param_groups[0]["lr"] *= 0.9


@use("a param_group added in the loop")
class AddedGroup(Loop):
    refused = r"1 of the optimizer's parameters are not in the model: shape \(1,\)"
    committed = 4

    def before(self) -> None:
        if self.step == 4:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@use("an optimizer that needs a closure")
class NeedsClosure(Loop):
    refused = r"LBFGS\.step needs a closure"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


@use("an update with a closure")
class Closure(Loop):
    refused = r"SGD\.step was called with a closure"

    def update(self) -> None:
        def closure() -> Tensor:
            loss = self.loss(INPUTS, TARGETS)
            self.session.backward(loss)
            return loss

        self.optimizer.step(closure)


@use("an optimizer that couples tensors")
class Coupling(Loop):
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.01)
