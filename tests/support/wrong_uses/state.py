"""State beside parameters, buffers, optimizer.state and param_groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.wrong_uses.loop import Loop, use
from torch import Tensor, nn


class Scaled(nn.Sequential):
    """A model whose output depends on a tensor, a number and a list that its loop changes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.tau, self.gain, self.history = torch.ones(2), 1.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.last_output = super().forward(x)  # a cache, as models keep it
        return self.last_output * self.tau[0] * self.gain + self.history[-1]


@use("attributes of the model that the loop changes")
class ChangingAttributes(Loop):
    def make_model(self) -> nn.Module:
        return Scaled(*super().make_model())

    def update(self) -> None:
        super().update()
        self.plain.tau.mul_(0.9)
        self.plain.gain *= 1.01
        self.plain.history.append(0.1 * self.step)


@use("a buffer with persistent=False that the loop changes")
class ChangingNonPersistentBuffer(ChangingAttributes):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        del model.tau
        model.register_buffer("tau", torch.ones(2), persistent=False)
        return model


@use("an attribute of the model that differs between the workers")
class RankAttribute(ChangingAttributes):
    warned = r"attributes differ between the workers, and no checkpoint holds them: gain"

    def update(self) -> None:
        super().update()
        self.plain.gain = 1.0 + self.rank


class Counting(torch.optim.SGD):
    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        for group in self.param_groups:
            group["momentum"] = np.float32(0.9) * (1 - 0.5**self.k)
        return super().step(closure)


class CountingStateDict(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.k = state_dict.pop("k")
        super().load_state_dict(state_dict)


@use("an optimizer with a counter among its attributes, and numbers of NumPy")
class CountingOptimizer(Loop):
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Counting(model.parameters(), lr=0.05, momentum=0.9)


@use("an optimizer with a counter in its state_dict")
class CountingStateDictOptimizer(Loop):
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return CountingStateDict(model.parameters(), lr=0.05, momentum=0.9)


@use("an object in the state of the optimizer")
class ObjectInState(Loop):
    refused = r"ObjectKeeper keeps 'projector' as a object, which a checkpoint cannot hold"
    committed = 1

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        class ObjectKeeper(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                self.state[self.param_groups[0]["params"][0]]["projector"] = object()
                return super().step(closure)

        return ObjectKeeper(model.parameters(), lr=0.05)


@use("a parameter group added in step 2")
class LateGroup(Loop):
    refused = r"the parameter groups changed during the run, before step 3: 3\.weight, 3\.bias"
    committed = 2

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[3].requires_grad_(False)  # type: ignore[index]
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)  # type: ignore[index]

    def before(self) -> None:
        if self.step == 2:
            self.plain[3].requires_grad_(True)  # type: ignore[index]
            self.optimizer.add_param_group({"params": list(self.plain[3].parameters())})  # type: ignore[index]


@use("a schedule as long as the run, in a run that is extended")
class ExtendedSchedule(Loop):
    warned = r"scheduler: T_max is 3 from the checkpoint, 6 as constructed; the checkpoint's values hold; for another schedule"

    def make_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, self.total)


@use("a schedule that ends before the run")
class EndedSchedule(Loop):
    warned = r"the learning rate of all parameter groups is 0 in steps 4 and 5, which train nothing"

    def make_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: float(0 < step < 3))
