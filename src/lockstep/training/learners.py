"""DiLoCo (Douillard et al., 2023) in a user's own loop: its step is an outer step.

    for step in session.steps(total):              0, H, 2H, ...
        for inner_step in learners(step):          H steps of each learner that this worker has
            for x, y in loader(inner_step):
                session.backward(loss_fn(model(x), y))
            inner.step()
        outer.step()

The leaves of the ordered sum are the M learners. Learner m starts at the common weights and takes
H steps of the inner optimizers on its own micro-batches: m*K/M to (m+1)*K/M - 1 of each step. Its
leaf is the difference, start minus end. The sum over the leaves, divided by M, is the gradient of
the outer step.

A learner is a pure function of the common state, the step and m. Any worker can compute it, and a
lost one takes nothing with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.data.order import splitmix64
from lockstep.elastic.consensus import parse_count
from lockstep.errors import DivergedError, UsageError
from lockstep.parallel.digest import digest_of
from lockstep.parallel.grad_norm import StepGradient, commit_gradient, sum_of_squares
from lockstep.parallel.learner_replica import LearnerReplica, build_learner_replica
from lockstep.runtime.numerics import seed_generators
from lockstep.training.inner_optimizers import INNER_OPTIMIZERS, InnerOptimizers
from lockstep.training.learner_checks import refuse_incomplete
from lockstep.training.leaves import Leaves
from lockstep.training.loop_changes import LoopChanges
from lockstep.training.rewound_state import RewoundState, Taken
from lockstep.training.update_checks import updating_scaler
from lockstep.units import join_names

if TYPE_CHECKING:
    from lockstep.training.session_parts import Declared

BEFORE_PASSES, AFTER_PASSES = 1, 2  # separate the random numbers of these places


def copy_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in parameters]


def fill(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.detach().copy_(value)


class LearnerPlace(Enum):
    """Where the loop is in a learner's step."""

    BEFORE = auto()  # its micro-batches
    BETWEEN = auto()  # two of them
    MICRO_BATCH = auto()
    DONE = auto()  # all of them: the gradient is complete
    LOST = auto()  # as DONE, without a gradient: a peer was lost


@dataclass
class InnerStep:
    """The step of a learner that the loop is in."""

    learner: int
    step: int
    updates: list[Optimizer] = field(default_factory=list)
    place: LearnerPlace = LearnerPlace.BEFORE
    gradient: StepGradient | None = None
    loss: float = 0.0
    count: int | None = None
    samples: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"step {self.step + 1} of learner {self.learner}"

    def enter(self, place: LearnerPlace) -> None:
        self.place = place

    def note(self, numbers: Sequence[Sequence[float]]) -> None:
        """Take the rows of its micro-batches. UsageError where only some have a
        count."""
        losses, counts, samples = zip(*numbers, strict=True)
        self.loss = sum(losses)
        self.samples = {int(number) - 1 for number in samples if number}
        if not any(counts):
            return
        self.count = sum(int(count) - 1 for count in counts)
        if not all(counts) or not self.count:
            raise UsageError(
                f"the counts of {self} add up to 0"
                if all(counts)
                else f"some micro-batches of {self} have a count and others have none",
                "session.backward(loss, count=...)",
                "give the number of samples or tokens of every micro-batch, or none in all steps",
            )

    def finish(self, gradient: StepGradient) -> None:
        self.gradient = gradient
        self.place = LearnerPlace.DONE


@dataclass
class Learner:
    """A learner after `steps` steps.

    states   of its optimizers; () once it is complete
    loss     summed over its steps: of each the mean, or with counts the sum
    count    of all samples or tokens; None: the losses are means
    samples  numbers of samples that the losses are means over
    state    of the objects in session.state
    """

    weights: list[Tensor]
    states: Sequence[dict[Any, Any]] = ()
    steps: int = 0
    loss: float = 0.0
    count: int | None = None
    samples: set[int] = field(default_factory=set)
    state: dict[str, Taken] = field(default_factory=dict)

    def take(self, step: InnerStep) -> None:
        """Add a step. UsageError when only some steps have counts."""
        if self.steps and (step.count is None) != (self.count is None):
            raise UsageError(
                f"{step} has {'no ' * (step.count is None)}counts, unlike those before",
                "session.backward(loss, count=...)",
                "give a count in every step, or in none",
            )
        self.count = None if step.count is None else step.count + (self.count or 0)
        self.samples |= step.samples
        self.loss += step.loss
        self.steps += 1


class AttemptedLearners:
    """The learners that this worker has trained in an attempt at an outer step: what ReplicaGroup
    exchanges before its vote."""

    def __init__(self, count: int, steps: int, state: RewoundState) -> None:
        self.count = count
        self.steps = steps
        self.state = state
        self.learners: list[Learner] = []
        self.diverged: dict[int, int] = {}  # by learner, the step whose loss is not finite

    def start_attempt(self) -> None:
        self.learners = []
        self.diverged = {}

    def exchange(
        self, group: dist.ProcessGroup | None, wait: Callable[[list[dist.Work | None]], None]
    ) -> None:
        """Collective. Refuse, on all workers, losses that are not finite, and state that differs
        between learners."""
        names = list(self.state.state)
        numbers = [[learner.state[name].number() for name in names] for learner in self.learners]
        highest = [max(of_one) for of_one in zip(*numbers, strict=True)]
        not_lowest = [~min(of_one) for of_one in zip(*numbers, strict=True)]
        steps = [self.diverged.get(m, 0) for m in range(self.count)]
        device = self.learners[0].weights[0].device
        row = torch.tensor([*steps, *highest, *not_lowest], dtype=torch.int64, device=device)
        if group is not None and group.size() > 1:
            wait([dist.all_reduce(row, dist.ReduceOp.MAX, group=group, async_op=True)])
        found = row.tolist()
        if diverged := [(m, step) for m, step in enumerate(found[: self.count]) if step]:
            named = [f"learner {m} at step {step}" for m, step in diverged]
            raise DivergedError(
                f"loss not finite: {join_names(named)}",
                "agreed by all workers before the outer step, which was not made",
                "lower the learning rate of the inner optimizer, or clip the gradients; the "
                "checkpoints before are whole",
            )
        pairs = zip(names, found[self.count :], found[self.count + len(names) :], strict=False)
        if differing := [name for name, most, not_least in pairs if most != ~not_least]:
            raise UsageError(
                f"session state {join_names(differing)} differs between the learners",
                f"after the {self.steps} steps of each of {self.count} learners",
                "what the steps of a learner change must follow from the step alone, as a "
                "scheduler does; change the rest after outer.step()",
            )

    def commit(self) -> None:
        """Take the state after the learners' steps for the next outer step."""
        self.state.put(self.learners[0].state)


class LearnerChanges(LoopChanges):
    """Learners change weights and state, and put both back."""

    def _weights_and_state(self) -> dict[str, Any]:
        return {}


class Learners(Leaves):
    """What session.learners returns: `for inner_step in learners(step)`.

    Memory beside the model: the common weights, the inner optimizers' state and one gradient; and
    the weights of each learner that this worker has computed in the outer step.

    count          M: learners; they share the micro-batches of a step
    steps          H: of a learner in an outer step
    micro_batches  of a learner's step
    """

    loop = "learners", "for inner_step in learners(step)"
    build_replica = staticmethod(build_learner_replica)
    watch_changes = LearnerChanges
    refuse_incomplete = refuse_incomplete

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        declared: Declared,
        count: int,
        steps: int,
    ) -> None:
        super().__init__(declared.micro_batches // count)
        self.count = count
        self.divisor = count
        self.steps = steps
        self.optimizers = optimizers
        self.facts = {"learners": f"{count} of {steps} steps"}
        self.inner = InnerOptimizers(optimizers, steps, self)
        self.now: InnerStep | None = None
        self.attempt = AttemptedLearners(count, steps, RewoundState(declared.state))
        self.options = {"micro_batches": count, "carried": [self.attempt], "rehearse": False}
        # Of the newest outer step: its number, the digest of its weights, and the learner's number.
        self._learners: dict[tuple[int, int, int], Learner] = {}
        declared.state[INNER_OPTIMIZERS] = self.inner
        for optimizer in declared.optimizers:
            optimizer.register_step_pre_hook(self._before_outer_update)

    def __call__(self, step: int) -> Iterator[int]:
        """Collective. Yield the steps of this worker's learners, one learner after the other; the
        outer step is committed at the end. After a failure, its new share."""
        if step != self.step:
            raise UsageError(
                f"the learners of step={step}",
                "learners(step) outside of the body of that step",
                "for step in session.steps(...): for inner_step in learners(step)",
            )
        for m in super().micro_batches_of(step):
            yield from self._train(step, m)

    def refuse_total(self, total: int) -> None:
        if total % self.steps:
            near = max(1, round(total / self.steps)) * self.steps
            raise UsageError(
                f"{total} steps are not a multiple of the {self.steps} steps of a learner",
                "session.steps(...), session.learners(steps=...)",
                f"give {near}: a common state exists after outer steps only",
            )

    def refuse_inside(self, call: str) -> None:
        if self.now:
            raise UsageError(
                f"{call} in {self.now}",
                "workers have other learners, and after a failure they repeat them",
                "call it after the loop over learners(step), where the weights are common",
            )

    def _train(self, step: int, m: int) -> Iterator[int]:
        """Yield the steps that learner `m` lacks; then add its difference to the sum.

        Stop early when the generation is over or a loss is not finite: there is no commit then. The
        next generation repeats the outer step, and continues a learner where this worker left it if
        the common weights are the same.
        """
        parameters = self.replica.parameters
        start = copy_of(parameters)
        state = self.attempt.state
        common = state.take()
        key = (step, digest_of(start), m)
        learner = self._find(key, start)
        try:
            fill(parameters, learner.weights)
            self.inner.put_states(learner.states)
            state.put(learner.state)
            yield from self._steps_of(learner, step, m)
            taken = state.take()
            state.refuse_changed_tensors(common, taken, m)
            states = self.inner.take_states() if learner.steps < self.steps else ()
            learner = replace(learner, weights=copy_of(parameters), states=states, state=taken)
            self._learners[key] = learner
            if self.now:  # a shard was lost within it
                del self._learners[key]
        finally:
            self.now = None
            fill(parameters, start)
            self.inner.put_states(())
            state.put(common)
        if not math.isfinite(learner.loss):
            self.attempt.diverged[m] = step + learner.steps
        elif learner.steps < self.steps:
            return
        self.attempt.learners.append(learner)
        change = [before - after for before, after in zip(start, learner.weights, strict=True)]
        means = self.count * self.steps if learner.count is None else 1
        self.run.replicas.runner.ballot.add(learner.count, [*learner.samples])
        self.replica.add_learner(learner.loss / means, change)

    def _find(self, key: tuple[int, int, int], start: list[Tensor]) -> Learner:
        """Return the learner as this worker has left it, or at the start."""
        self._learners = {
            old: learner for old, learner in self._learners.items() if old[:2] == key[:2]
        }
        learner = self._learners.get(key, Learner(start))
        if not self.replica.is_equal(learner.steps):
            learner = Learner(start)
        self._learners[key] = learner
        return learner

    def _steps_of(self, learner: Learner, step: int, m: int) -> Iterator[int]:
        while (
            learner.steps < self.steps
            and math.isfinite(learner.loss)
            and not self.run.runtime.generation_error()
        ):
            self.now = now = InnerStep(m, step + learner.steps)
            for p in self.replica.parameters:
                p.grad = None
            self._seed(now, BEFORE_PASSES)
            yield now.step
            if now.place is LearnerPlace.LOST:
                return
            self._refuse_incomplete(now)
            learner.take(now)
            self.now = None

    @property
    def replica(self) -> LearnerReplica:
        replica = self.run.replicas.replica
        assert isinstance(replica, LearnerReplica)
        return replica

    def _seed(self, now: InnerStep, place: int) -> None:
        """Seed the generators around the micro-batches of a learner's step."""
        key = (now.step, self.count * self.micro_batches + 1 + now.learner, place)
        device = self.replica.parameters[0].device
        seed_generators(splitmix64(self.replica.seed, *key) >> 1, device)

    def _refuse_incomplete(self, now: InnerStep) -> None:
        if now.gradient is None:
            raise UsageError(
                f"the micro-batch loop of {now} ended early"
                if now.place is not LearnerPlace.BEFORE
                else f"the body of {now} ran no micro-batches",
                "for inner_step in learners(step)",
                "take all of them, `for batch in loader(inner_step)`, in every step",
            )
        if missing := [
            type(optimizer).__name__
            for optimizer in self.optimizers
            if optimizer not in now.updates
        ]:
            raise UsageError(
                f"{', '.join(missing)} made no update in {now}: its gradient is lost",
                "for inner_step in learners(step)",
                "call inner.step() once after the micro-batches of each step",
            )

    # In a step of a learner.

    def leaves(self) -> range:
        """Return the micro-batches of the learner that the loop is in."""
        first = self.now.learner * self.micro_batches if self.now else 0
        return range(first, first + self.micro_batches)

    @property
    def own_leaves(self) -> list[int]:
        return [self.leaves().start + leaf for leaf in self.replica.inner.own_leaves]

    def micro_batches_of(self, step: int) -> Iterator[int]:
        """Collective in the replica. Yield this worker's micro-batches of the learner's step."""
        now = self.now
        if now is None or step != now.step or now.place is not LearnerPlace.BEFORE:
            at = f"the loop is in {now}" if now else "the loop is in no step of a learner"
            raise UsageError(
                f"the micro-batches of step={step}"
                if now is None or step != now.step
                else f"a second micro-batch loop in {now}",
                at,
                "for inner_step in learners(step): one loop over loader(inner_step)",
            )
        now.enter(LearnerPlace.BETWEEN)
        board = self.run.runtime.board
        try:
            for k in self.replica.passes(step, self.leaves()):
                board.enter("forward", step + 1)
                now.enter(LearnerPlace.MICRO_BATCH)
                yield k
                now.enter(LearnerPlace.BETWEEN)
        except GeneratorExit:
            now.enter(LearnerPlace.BETWEEN)
            raise
        except Exception as error:
            self._lose(now, error)
            return
        now.note(self.replica.numbers.tolist())
        replica = self.replica
        now.finish(commit_gradient(replica.parameters, replica.squared, now.count or 1))
        self._seed(now, AFTER_PASSES)

    def _lose(self, now: InnerStep, error: Exception) -> None:
        """In shards, keep an error for the ReplicaGroup, which knows whether a peer was lost: the
        loop ends this step without an update."""
        if self.replica.workers_per_replica == 1:
            raise error
        self.replica.fail(error)
        now.enter(LearnerPlace.LOST)
        for p in self.replica.parameters:
            p.grad = None

    def backward(self, loss: Tensor, count: int | None, scaler: object = None) -> None:
        if scaler is not None:
            refuse_scaler("session.backward(loss, scaler=...)")
        now = self.now
        if now is None or now.place is not LearnerPlace.MICRO_BATCH:
            raise UsageError(
                "session.backward outside of the micro-batches of a learner",
                "session.backward(loss)",
                "call it in `for batch in loader(inner_step)`",
            )
        if count is not None:
            self.replica.add_pass(loss, parse_count(count) + 1, 0)
            return
        samples = self.run.declared.samples_of_mean()
        self.replica.add_pass(loss, 0, 0 if samples is None else samples + 1)

    def clip_(self, max_norm: float) -> Tensor:
        now = self.now
        if now is None:
            return super().clip_(max_norm)
        if now.place is LearnerPlace.LOST:
            return torch.zeros(())
        if now.gradient is None and now.place is not LearnerPlace.MICRO_BATCH:
            self._refuse_incomplete(now)
        return (now.gradient or StepGradient((), None, 1, in_slices=False)).clip_(max_norm)

    def begin_update(self, optimizer: Optimizer) -> int | None:
        """Return the step that an inner optimizer updates in; None: a peer was lost in it."""
        now = self.now
        if updating_scaler():
            refuse_scaler("scaler.step(optimizer)")
        if now and now.place is LearnerPlace.LOST:
            return None
        name = type(optimizer).__name__
        if now and now.gradient is None and now.place is not LearnerPlace.MICRO_BATCH:
            self._refuse_incomplete(now)
        if now is None or now.gradient is None:
            raise UsageError(
                f"an update of {name}, an inner optimizer, outside of a learner's step",
                f"{name}.step()",
                "call it after the micro-batches, in `for inner_step in learners(step)`",
            )
        if any(optimizer is updated for updated in now.updates):
            raise UsageError(
                f"a second update of {name} in {now}",
                f"{name}.step()",
                "call inner.step() once after the micro-batches of each step",
            )
        now.gradient.refuse_noise()
        now.updates.append(optimizer)
        return now.step

    def mean_square(self) -> Tensor | None:
        """Collective in the replica. Return that of the elements of the gradient."""
        replica = self.replica
        try:
            squared = replica.grad_norm_squared()
        except Exception as error:
            assert self.now is not None
            self._lose(self.now, error)
            return None
        if squared is None:
            gradients = [p.grad for p in replica.parameters]
            squared = sum_of_squares([gradient for gradient in gradients if gradient is not None])
        mean: Tensor = squared.sqrt().float().square() / self._elements()
        return mean

    def _elements(self) -> int:
        """Return the number of trained weights of the whole model."""
        local = self.run.replicas.local_model
        if local is None:
            return sum(p.numel() for p in self.replica.parameters)
        trained = [name for name, p in local.local_params.items() if p.requires_grad]
        return sum(math.prod(local.slices[name].shape) for name in trained)

    def _before_outer_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self.now:
            self.refuse_inside(f"{type(optimizer).__name__}.step(), the outer optimizer's,")


def refuse_scaler(where: str) -> None:
    """UsageError: a GradScaler has a state that follows the gradients of one learner."""
    raise UsageError(
        "a GradScaler is not supported with session.learners",
        where,
        'train in bf16: session.prepare(model, outer, precision="bf16")',
    )
