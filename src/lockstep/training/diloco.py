"""DiLoCo (Douillard et al., 2023) as a step of the ordered sum: its leaves are the learners.

Learner m starts at the common weights and takes H steps of the inner optimizer on its own
micro-batches: m*K/M to (m+1)*K/M - 1 of each step. Its leaf is the difference, start minus end. The
mean over the M leaves, added in the tree of the ordered sum, is the gradient of the outer step.

Between two outer steps all workers hold the same state: weights and outer momentum. The moments of
the inner AdamW start from the first gradient of each outer step (start_moments), so a learner is a
pure function of weights, step and m. Any worker can compute it, and a lost one takes nothing with
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.config.schema import DilocoOptions, ResolvedRun
from lockstep.data.order import splitmix64
from lockstep.data.pairs.loader import PairLoader
from lockstep.data.text.packing import RowLoader
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError
from lockstep.network.subtrees import Subtree
from lockstep.parallel.digest import digest_of
from lockstep.parallel.grad_norm import divide_and_clip
from lockstep.parallel.learner_shards import LearnerShards
from lockstep.parallel.ordered_sum import SumTree
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.replica import Gradients, Replica
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.record.step_timer import StepTimer
from lockstep.runtime.numerics import seed_generators
from lockstep.training.inner_optimizers import (
    has_adam_moments,
    mean_growth,
    start_moments,
)
from lockstep.training.learners import PseudoGradient, copy_of, fill
from lockstep.training.optim import (
    learning_rate,
    make_optimizers,
    set_learning_rate,
    trained_parameters,
)
from lockstep.units import join_names


def outer_optimizer(model: LocalModel, values: DilocoOptions) -> torch.optim.Optimizer:
    parameters, momentum = [p for _, p in trained_parameters(model)], values.outer_momentum
    return torch.optim.SGD(
        parameters,
        lr=values.outer_learning_rate,
        momentum=momentum,
        nesterov=momentum > 0,
        foreach=False,
    )


@dataclass
class Learner:
    """A learner after `steps` steps; `states`, of its optimizers, are empty once it is complete."""

    steps: int
    loss: Tensor  # summed over its steps
    weights: list[Tensor]
    states: list[dict[Any, Any]]

    def take(self, loss: Tensor) -> None:
        self.steps, self.loss = self.steps + 1, self.loss + loss

    def keep(self, weights: list[Tensor], states: list[dict[Any, Any]]) -> None:
        self.weights, self.states = weights, states


class Learners:
    """The learners of a run, computed one after the other in the memory of `model`.

    Memory beside the model: the common weights, the inner optimizer's state and one gradient; and
    the weights of each learner that this worker has computed in the outer step.
    loss     returns the sum of the losses of a micro-batch: loss(module, batch)
    replica  of the ReplicaGroup. LearnerShards: this worker trains its slices of each learner
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        model: LocalModel,
        runtime: ElasticRuntime,
        loader: PairLoader | RowLoader,
        loss: Callable[[Callable[..., Tensor], Any], Tensor],
        timer: StepTimer,
        replica: Replica | ShardedReplica | None = None,
    ) -> None:
        self.shards = replica if isinstance(replica, LearnerShards) else None
        self.resolved, self.module, self.runtime, self.loader, self.loss, self.timer = (
            resolved,
            model.module,
            runtime,
            loader,
            loss,
            timer,
        )
        named = trained_parameters(model)
        self.parameters = [p for _, p in named]
        self.elements = sum(
            math.prod(model.slices[name].shape) if model.slices else p.numel() for name, p in named
        )  # of the whole model
        self.optimizers = make_optimizers(model, resolved.run.optim, resolved.run.memory)
        self._learners: dict[
            tuple[int, int, int], Learner
        ] = {}  # of the newest outer step: its first step and digest, and m
        self.nonfinite: list[tuple[int, int]] = []  # (learner, step) of losses that are not finite
        self.micro_batches = (
            resolved.run.batch.micro_batches // resolved.run.diloco.learners
        )  # of a learner's step

    def train(self, step: int, m: int) -> Tensor:
        """Return the losses of learner `m` in the outer step that starts at `step`, summed; the
        gradients of this sum are the common weights minus the learner's.

        Stop early when the generation is over or a loss is not finite: there is no commit then. The
        next generation repeats the outer step, and continues a learner where this worker left it if
        the common weights are the same.
        """
        every, start, sums = (
            self.resolved.run.diloco.every,
            copy_of(self.parameters),
            [p.grad for p in self.parameters],
        )
        outer_step = (step, digest_of(start))
        self._learners = {
            key: learner for key, learner in self._learners.items() if key[:2] == outer_step
        }
        new = Learner(
            0, torch.zeros((), device=start[0].device), start, [{} for _ in self.optimizers]
        )
        learner = self._learners.setdefault((*outer_step, m), new)
        if self.shards and not self.shards.is_equal(learner.steps):
            learner = self._learners[*outer_step, m] = new
        try:
            fill(self.parameters, learner.weights)
            for optimizer, state in zip(self.optimizers, learner.states, strict=True):
                optimizer.state.update(state)
            self._advance(learner, step, m)
            if not math.isfinite(learner.loss):
                self.nonfinite.append((m, step + learner.steps))
            unfinished = learner.steps < every
            learner.keep(
                copy_of(self.parameters),
                [dict(optimizer.state) if unfinished else {} for optimizer in self.optimizers],
            )
        finally:
            fill(self.parameters, start)
            for p, gradient in zip(self.parameters, sums, strict=True):
                p.grad = gradient
            for optimizer in self.optimizers:
                optimizer.state.clear()
        change = [before - after for before, after in zip(start, learner.weights, strict=True)]
        return PseudoGradient.apply(learner.loss, change, *self.parameters)  # type: ignore[no-any-return, no-untyped-call]

    def _advance(self, learner: Learner, step: int, m: int) -> None:
        """Take the steps that the learner lacks. In shards an error is kept for the
        ReplicaGroup."""
        try:
            while (
                learner.steps < self.resolved.run.diloco.every
                and math.isfinite(learner.loss)
                and not self.runtime.generation_error()
            ):
                learner.take(self._step(step + learner.steps, m))
        except Exception as error:
            if not self.shards:
                raise
            self.shards.fail(error)

    def refuse_nonfinite(self, decision: StepDecision) -> None:
        """Collective if the loss is not finite. DivergedError, which names learner and step."""
        if not decision.finite:
            found = sorted(
                {
                    (m, step)
                    for rows in all_gather_json(self.runtime, self.nonfinite)
                    for m, step in rows
                }
            )
            raise DivergedError(
                f"loss not finite: {join_names([f'learner {m} at step {step}' for m, step in found])}",
                "agreed by all processes before the outer step, which was not made",
                "lower optim.learning_rate, lengthen optim.warmup_steps, or set optim.clip_norm; the checkpoints before are whole",
            )

    def _step(self, step: int, m: int) -> Tensor:
        """Take one step of learner `m`; return the sum of its losses."""
        run, leaves = self.resolved.run, range(m * self.micro_batches, (m + 1) * self.micro_batches)
        if self.shards:
            losses, squared = self.shards.sum_gradients(
                step, leaves, partial(self._loss, self.shards, step)
            )
        else:
            losses, squared = self._sum_gradients(step, leaves), None
        tokens = self.loader.tokens_in_step(step, leaves)
        norm = divide_and_clip(
            self.parameters,
            divisor=tokens,
            clip_norm=run.optim.clip_norm,
            grad_norm_squared=squared,
        )
        rate = learning_rate(step + 1, self.resolved.optim_after(step))
        for optimizer in self.optimizers:
            growth, every = 1.0, run.diloco.every
            # In the first outer step, AdamW starts as in a plain run.
            if step >= every and has_adam_moments(optimizer):
                growth = mean_growth(run.optim.beta1, every)
                if step % every == 0:
                    clipped = norm.clamp(max=run.optim.clip_norm or math.inf)
                    start_moments(optimizer, clipped.square() / self.elements)
            set_learning_rate(optimizer, rate / growth)
            optimizer.step()
        return sum(losses, torch.zeros((), device=self.runtime.world.device))

    def _sum_gradients(self, step: int, leaves: range) -> list[Tensor]:
        """Write the sum of the gradients of these micro-batches to .grad; return their losses."""
        tree, losses = SumTree[Gradients](), list[Tensor]()
        for i, k in enumerate(leaves):
            seed_generators(
                splitmix64(self.resolved.run.seed, step, k) >> 1, self.runtime.world.device
            )
            loss = self._loss(self.module, step, k)
            self.runtime.board.enter("backward")
            tree.add(Subtree(i, 1), Gradients(list(torch.autograd.grad(loss, self.parameters))))
            losses.append(loss.detach())
        for p, gradient in zip(self.parameters, tree.total().tensors, strict=True):
            p.grad = gradient
        return losses

    def _loss(self, model: Callable[..., Tensor], step: int, k: int) -> Tensor:
        self.runtime.board.enter("forward", step + 1)
        with self.timer.timing("data"):
            batch = self.loader.micro_batch(step, k)
        with torch.autocast(
            self.runtime.world.device.type,
            torch.bfloat16,
            enabled=self.resolved.run.compute.precision == "bf16",
        ):
            return self.loss(model, batch)
