"""Uses that concern gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.wrong_uses.loop import Loop, use
from torch import Tensor, nn
from torch.nn.functional import mse_loss


@use("two backward calls in a micro-batch")
class TwoBackwards(Loop):
    refused = r"backward\(\) was called twice in micro-batch 0 of step 1"

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
    refused = r"gradients of 4 of 4 parameters were changed in micro-batch 0 of step 1"

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
    refused = r"a collective of torch\.distributed ran in the micro-batch loop of step 1"

    def after_micro_batch(self) -> None:
        for p in self.plain.parameters():
            dist.all_reduce(p.grad)


@use("all_reduce of the gradients after the loop")
class ReduceAfter(Loop):
    warned = r"a collective of torch\.distributed ran after the micro-batch loop of step 1"

    def update(self) -> None:
        for p in self.plain.parameters():
            dist.all_reduce(p.grad)
        super().update()


@use("all_reduce of the gradients after session.gather")
class ReduceAfterGather(ReduceAfter):
    def update(self) -> None:
        self.session.gather(lambda batch: batch[0], self.dataset, batch_size=12)
        super().update()


@use("all_reduce of the gradients before session.gather")
class ReduceBeforeGather(ReduceAfter):
    def update(self) -> None:
        super().update()
        self.session.gather(lambda batch: batch[0], self.dataset, batch_size=12)


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
    refused = "a hook has removed gradients in micro-batch 0 of step 1: 0.weight, 0.bias"

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
