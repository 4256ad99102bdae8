"""Wrong, unsupported and odd uses of a Session, one class each, for test_wrong_uses.py.

`Loop` is the right loop; each subclass changes one part of it.

    refused    text of the error, as a regular expression; "": the use is harmless, with the bits of
               one worker on any number of workers and through a resume
    warned     text of a warning, for a use whose bits depend on the number of workers
    committed  steps before the error
    workers    that the error needs; shard of them hold one copy of the model
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

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


# The model.


@use("a buffer that counts forward passes")
class ChangingBuffer(Loop):
    refused = r"buffers changed in the forward passes of step 1: calls"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
        return model


@use("a number in a module that counts forward passes")
class CountingAttribute(Loop):
    warned = r"calls changed in the micro-batch loop of step 0: if forward passes depend on it"

    def make_model(self) -> nn.Module:
        class Counting(nn.Sequential):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * (1.0 if self.calls < 9 else 0.5)

        return Counting(*super().make_model())


@use("an unused parameter")
class UnusedParameter(Loop):
    refused = r"(?s)no gradient arrived for 1 of 5 parameters in micro-batch 0 of step 0: unused\n.*Session\(\.\.\., unused=\"zero\"\)"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model


@use("a parameter used in odd steps only")
class SometimesUnused(UnusedParameter):
    refused = r"no gradient arrived for 1 of 5 parameters in micro-batch \d of step 2: unused"
    committed = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + (self.plain.unused.square().sum() if self.step < 2 else 0.0)


@use("new values through .data after the micro-batch loop")
class NewMemory(Loop):
    def update(self) -> None:
        super().update()
        for p in self.plain.parameters():
            p.data = 0.99 * p.data


@use("new values through .data after the micro-batch loop, in shards")
class NewMemoryInShards(NewMemory):
    refused = (
        r"(?s)have left the memory that the shards gather: 0\.weight.*in place: p\.data\.copy_"
    )
    committed = 1
    workers = shard = 2


@use("a parameter replaced between two steps, in shards")
class ReplacedInShards(NewMemoryInShards):
    def update(self) -> None:
        Loop.update(self)
        self.plain[0].weight = nn.Parameter(self.plain[0].weight.detach().clone())


@use("functional_call with other weights, in shards")
class FunctionalInShards(Loop):
    refused = r"(?s)called with other parameters, in shards: 0\.weight.*move it into forward"
    workers = shard = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: 0.9 * p for name, p in self.plain.named_parameters()}
        return mse_loss(torch.func.functional_call(self.plain, weights, (x,)), y)


@use("an unused parameter in shards")
class UnusedInShards(UnusedParameter):
    workers = shard = 2


class Skipping(nn.Module):
    """Blocks, the second of which some forward passes leave out."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if not (self.skips and i == 1 and float(torch.rand(())) < 0.5):
                x = block(x)
        return self.last(x).flatten(0)


@use("a block in shards that some micro-batches leave out")
class SkippedBlock(Loop):
    refused = (
        r"(?s)blocks\.1 did not run before blocks\.2 in micro-batch \d of step 2.*unused=\"zero\""
    )
    committed = 2
    workers = shard = 2

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return Skipping()

    def before(self) -> None:
        self.plain.skips = self.step >= 2


@use("a block that some micro-batches leave out, with gradients of zero")
class SkippedBlockWithZeros(SkippedBlock):
    refused = ""

    def configure(self) -> None:
        self.options["unused"] = "zero"


@use("a model in DistributedDataParallel")
class WrappedInDdp(Loop):
    refused = r"DistributedDataParallel"

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


@use("a module that is not on the device")
class OffDevice(Loop):
    refused = r"(?i)meta"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[3] = nn.Linear(8, 1, device="meta")
        return model


@use("a model in eval mode")
class EvalMode(Loop):
    def make_model(self) -> nn.Module:
        return super().make_model().eval()


@use("eval mode left on by rank 0")
class EvalOnRankZero(Loop):
    refused = r"the weights of rank 0.* differ before step 3"
    workers = 2
    committed = 2

    def before(self) -> None:
        if self.step == 2 and self.rank == 0:
            self.plain.eval()


@use("eval mode left on by all ranks")
class EvalLeftOn(Loop):
    warned = r"other modules in eval mode: the model then, none now"

    def before(self) -> None:
        if self.step == 2:
            self.plain.eval()


@use("an evaluation by rank 0 between two steps")
class EvaluationByRankZero(Loop):
    def before(self) -> None:
        self.plain.train()

    def update(self) -> None:
        super().update()
        if self.rank == 0:
            self.plain.eval()


@use("other weights on each rank at the start")
class OtherWeights(Loop):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        with torch.no_grad():
            model[0].weight += self.rank
        return model


@use("another architecture on each rank")
class OtherArchitecture(Loop):
    refused = r"not all workers train the same parameters: 5\.bias, 5\.weight"
    workers = 2

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            *super().make_model(), nn.Linear(12, 12) if self.rank else nn.Identity()
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(p.sum() for p in self.plain.parameters())


@use("other frozen layers on each rank")
class OtherFrozen(Loop):
    refused = r"not all workers train the same parameters: 0\.bias"
    workers = 2

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[0].bias.requires_grad_(self.rank != 1)
        return model


# Gradients.


@use("two backward calls in a micro-batch")
class TwoBackwards(Loop):
    refused = r"backward\(\) was called twice in micro-batch 0 of step 0"

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        super().micro_batch(x, y)
        super().micro_batch(x, y)


@use("no backward call")
class NoBackward(Loop):
    refused = r"backward\(\) was not called"

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.loss(x, y)


@use("loss.backward beside session.backward, with retain_graph")
class RetainGraph(Loop):
    refused = r"gradients of 4 of 4 parameters were changed in micro-batch 0 of step 0"

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        loss = self.loss(x, y)
        loss.backward(retain_graph=True)
        self.session.backward(loss)


@use("a detached loss")
class DetachedLoss(Loop):
    refused = r"does not require grad"

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y).detach())


@use("a forward pass under no_grad")
class NoGrad(DetachedLoss):
    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            loss = self.loss(x, y)
        self.session.backward(loss)


@use("a loss with several elements")
class VectorLoss(Loop):
    refused = r"scalar"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x) - y


@use("a loss that is not finite")
class NotFinite(Loop):
    refused = r"DivergedError: loss nan in step 3"
    committed = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * (float("nan") if self.step == 2 else 1.0)


@use("zero_grad in the micro-batch loop")
class ZeroGrad(Loop):
    refused = r"by optimizer\.zero_grad\(\)"

    def before_micro_batch(self) -> None:
        self.optimizer.zero_grad()


@use("zero_grad through .data before the forward pass")
class ZeroGradByData(Loop):
    refused = r"gradients of 4 of 4 parameters were changed in micro-batch 0"

    def before_micro_batch(self) -> None:
        for p in self.plain.parameters():
            if p.grad is not None:
                p.grad.data.zero_()


@use("clipping in the micro-batch loop")
class ClipInside(Loop):
    refused = r"gradients of 4 of 4 parameters were changed"

    def after_micro_batch(self) -> None:
        nn.utils.clip_grad_norm_(self.plain.parameters(), 0.1)


@use("all_reduce of the gradients in the micro-batch loop")
class ReduceInside(Loop):
    refused = r"a collective of torch\.distributed ran in the micro-batch loop of step 0"

    def after_micro_batch(self) -> None:
        for p in self.plain.parameters():
            dist.all_reduce(p.grad)


@use("all_reduce of the gradients after the loop")
class ReduceAfter(Loop):
    warned = r"a collective of torch\.distributed ran after the micro-batch loop of step 0"

    def update(self) -> None:
        for p in self.plain.parameters():
            dist.all_reduce(p.grad)
        super().update()


@use("all_reduce of the loss in the micro-batch loop")
class ReduceLoss(ReduceInside):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        dist.all_reduce(loss.detach().clone())
        return loss

    after_micro_batch = Loop.after_micro_batch


@use("a gradient hook")
class GradientHook(Loop):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[0].weight.register_hook(
            lambda gradient: gradient.clamp(-0.1, 0.1) + 0.01 * torch.randn_like(gradient)
        )
        return model


@use("an update in a gradient hook")
class UpdateInHook(Loop):
    refused = "a hook has removed gradients in micro-batch 0 of step 0: 0.weight, 0.bias"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(model)

        def update(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return optimizer


@use("a gradient penalty by autograd.grad")
class GradientPenalty(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        outputs = self.model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return mse_loss(outputs, y) + 0.1 * slope.square().mean()


# Changes in the micro-batch loop that belong after it.


@use("optimizer.step in the micro-batch loop")
class StepInside(Loop):
    refused = r"0\.weight, 3\.bias, 3\.weight changed in the micro-batch loop of step 0"

    def after_micro_batch(self) -> None:
        self.optimizer.step()


@use("a change of a parameter in the micro-batch loop")
class DecayInside(Loop):
    refused = r"0\.weight changed in the micro-batch loop of step 2; no update was made"
    committed = 2

    def after_micro_batch(self) -> None:
        if self.step == 2:
            with torch.no_grad():
                self.plain[0].weight.mul_(0.99)


@use("a change of a parameter through .data in the micro-batch loop")
class DecayByData(Loop):
    refused = r"0\.weight changed in the micro-batch loop of step 0; no update was made"

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
    refused = r"scheduler.* changed in the micro-batch loop of step 0|lr.* changed in the micro-batch loop of step 0"

    def after_micro_batch(self) -> None:
        self.scheduler.step()


@use("an update of the average in the micro-batch loop")
class AverageInside(Loop):
    refused = r"ema.* changed in the micro-batch loop of step 0"

    def after_micro_batch(self) -> None:
        self.ema.update_parameters(self.plain)


@use("a learning rate set by the micro-batch")
class RateInside(Loop):
    refused = r"lr of parameter group 0 of SGD changed in the micro-batch loop of step 2"
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


# State beside parameters, buffers, optimizer.state and param_groups.


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
    refused = r"the parameter groups changed during the run, before step 2: 3\.weight, 3\.bias"
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
    warned = r"the learning rate of all parameter groups is 0 in steps 3 and 4, which train nothing"

    def make_scheduler(self) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: float(0 < step < 3))


# Uses on some ranks only.


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
    warned = r"step 3 changed no trained weight, and its gradient is lost"

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
    refused = r"the (loss|gradient) of micro-batch 0 of step 0 is not the same on all workers"
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
    refused = r"session state 'seen' changed in the micro-batch loop of step 2; no update was made"
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


# Data.


@use("a data set of another length on each rank")
class OtherLength(Loop):
    refused = r"is not the same on all workers|samples"
    workers = 2

    def configure(self) -> None:
        self.dataset = TensorDataset(INPUTS[: 48 - 8 * self.rank], TARGETS[: 48 - 8 * self.rank])


@use("another batch size on each rank")
class OtherBatch(Loop):
    refused = r"is not the same on all workers|batch_size"
    workers = 2

    def configure(self) -> None:
        self.loader_options["batch_size"] = 24 if self.rank == 1 else 12


@use("the share of the rank as the data set")
class ShareOfRank(Loop):
    refused = r"is not the same on all workers"
    workers = 2

    def configure(self) -> None:
        rows = slice(self.rank, None, int(os.environ["WORLD_SIZE"]))
        self.dataset = TensorDataset(INPUTS[rows].repeat(6, 1)[:48], TARGETS[rows].repeat(6)[:48])


@use("a DataLoader that the loop consumes")
class ConsumedLoader(Loop):
    refused = r"the loss of micro-batch 0 of step 0 is .* the first time and"

    def batches(self) -> Batches:
        if not hasattr(self, "stream"):
            self.stream = iter(
                DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2, shuffle=True)
            )
        for _ in self.session.micro_batches(self.step):
            yield tuple(next(self.stream))


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator of the data set."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return INPUTS[i] + torch.rand(4, generator=self.generator), TARGETS[i]


@use("a generator of the data set")
class OwnGenerator(Loop):
    refused = r"the loss of micro-batch 0 of step 0 is .* the first time and"

    def configure(self) -> None:
        self.dataset = Drawing()


@use("a manual seed in the micro-batch loop")
class ManualSeed(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(5)
        return super().loss(x, y)


@use("a manual seed by rank in the micro-batch loop")
class SeedByRank(Loop):
    refused = r"is not the same on all workers"
    workers = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(self.rank)
        return super().loss(x, y)


@use("data that depend on the time")
class ByTime(Loop):
    refused = r"the loss of micro-batch 0 of step 0 is .* the first time and|is not the same on all workers"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + time.monotonic() % 1, y)


@use("a batch changed in place")
class BatchInPlace(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.mul_(2.0), y)


@use("rows of the data set changed in place")
class DataInPlace(Loop):
    refused = r"the loss of micro-batch 0 of step 0 is .* the first time and"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[2 * k : 2 * k + 2].mul_(1.1), TARGETS[2 * k : 2 * k + 2]


@use("an iterable data set")
class Iterable(Loop):
    refused = r"has no length or no index"

    def configure(self) -> None:
        class Stream(IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return iter(INPUTS)

        self.dataset = Stream()


@use("a mean over ragged micro-batches")
class RaggedMean(Loop):
    refused = r"the micro-batches of a step have 1 to 6 samples, and their losses are means"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: k + 1], TARGETS[: k + 1]


@use("a mean over one micro-batch of another size on each rank")
class RaggedRanks(Loop):
    refused = r"the micro-batches of a step have 3 to 4 samples, and their losses are means"
    workers = 2

    def configure(self) -> None:
        self.options["micro_batches"] = 2

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: 3 + k], TARGETS[: 3 + k]


@use("a mean over rows of different lengths")
class RaggedRows(Loop):
    warned = r"micro-batches differ: 2 x 1 x 4, then 2 x 2 x 4\. session\.backward\(loss\) gives each the same weight"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: 2 * (k + 1)].view(2, k + 1, 4), TARGETS[: 2 * (k + 1)]


@use("ragged micro-batches whose losses weigh the same")
class RaggedCountOfOne(RaggedMean):
    refused = ""

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y), count=1)


@use("some micro-batches with a count")
class SomeCounts(Loop):
    refused = r"some micro-batches of a step have a count and others have none"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            self.k = k
            yield INPUTS[:2], TARGETS[:2]

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y), count=2 if self.k % 2 else None)


@use("break in the micro-batch loop")
class Break(Loop):
    refused = r"the body of step 0 ran no micro-batches"

    def batches(self) -> Batches:
        for batch in self.loader(self.step):
            yield batch
            break


@use("a second micro-batch loop in a step")
class SecondLoop(Loop):
    refused = r"a second micro-batch loop in step 0"

    def update(self) -> None:
        for x, y in self.batches():
            self.micro_batch(x, y)
        super().update()


def train(out: Path, steps: int = 6, use: str = "none") -> None:
    out.mkdir(exist_ok=True)
    logging.getLogger("lockstep").addHandler(logging.FileHandler(out / "warnings.log"))
    USES[use](out, steps).train()
