"""Session: a PyTorch training loop on any number of workers, with the same bits, through failures.

    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(200):
            for x, y in loader(step):
                session.backward(loss_fn(model(x), y))
            optimizer.step()

A Session composes World, ReplicaGroup, Checkpointer and Tracker, which stay public and can be used without it (docs/loop.md).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.checkpoint.stateful import Stateful, refuse_unsupported_state
from lockstep.data.order import UniformOrder, splitmix64
from lockstep.elastic.consensus import all_gather_json
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.numerics import make_deterministic, seed_generators
from lockstep.runtime.signals import Stopped, StopSignals
from lockstep.runtime.worker_env import read_worker_env
from lockstep.training.checkpointer import Checkpointer as Checkpointer
from lockstep.training.loader import Collate, Loader, samples_of, size_of, to_device
from lockstep.training.replica_group import ReplicaGroup as ReplicaGroup

log = logging.getLogger("lockstep")


class Session:
    """One training run of this process, together with all other workers. A context manager.

    out            folder of the run: checkpoints/, metrics.jsonl, events.jsonl
    micro_batches  gradients that a step sums, over all workers together; at least as many as workers
    save_every     steps from one checkpoint to the next; 0: only after the last step and when the run is stopped
    keep           newest checkpoints kept; 0: all
    seed           of the order of the samples and of the random numbers of samples and model
    resume         "auto" (the newest whole checkpoint, if there is one), "never", "required", or a step as text
    threads        of torch in this process; their number changes bits
    options        further keyword arguments for ReplicaGroup: reduce, verify_every, rehearse, on_nonfinite, local_buffers

    world is set on entry; replicas, checkpointer and tracker once `steps` has begun. `step` counts the committed steps.
    """

    world: World
    replicas: ReplicaGroup
    checkpointer: Checkpointer
    tracker: Tracker

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        micro_batches: int,
        save_every: int = 0,
        keep: int = 3,
        seed: int = 0,
        resume: str = "auto",
        threads: int = 1,
        **options: Any,
    ) -> None:
        self.out, self.micro_batches_per_step, self.save_every, self.keep = Path(out), micro_batches, save_every, keep
        self.seed, self.resume, self.threads, self.options = seed, resume, threads, options
        self.step = 0
        self.in_micro_batches = False
        self.model: PreparedModel | None = None
        self._state: dict[str, Stateful] = {}
        self._loaders: list[Loader] = []
        self._logged: dict[str, Any] = {}
        self._committed = -1  # the newest step of which the gradient was whole
        self._total = 0
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        refuse_another_folder(self.out)
        self.world = self._exit.enter_context(World.join(threads=self.threads))
        log.debug(make_deterministic(self.world.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Collective, without an error: wait for the last checkpoint, and leave the run together."""
        if kind is None and self.step < self._total:
            log.warning("the loop was left in step %d of %d: the steps since the newest checkpoint are not saved", self.step, self._total)
        self._exit.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        if name in ("world", "replicas", "checkpointer", "tracker"):
            when = "inside of `with Session(...) as session`" if name == "world" else "from session.steps(...) on"
            raise UsageError(f"session.{name} is not there yet", f"it exists {when}", "move the line behind that")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Before the loop.

    def prepare(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        """(the model to call in the loop, *optimizers). Moves the model to world.device; a checkpoint holds it and the optimizers.

        The returned model behaves like DistributedDataParallel: `model.module` is the one that was passed.
        """
        self._refuse_if_begun("prepare")
        if self.model is not None:
            raise UsageError("a second session.prepare", "one Session trains one model", "put all trained modules into one nn.ModuleDict")
        self.model, self.optimizers = PreparedModel(model.to(self.world.device), self), optimizers
        return self.model, *optimizers

    def state(self, **objects: Stateful) -> None:
        """Add objects with state_dict and load_state_dict to the checkpoints: `session.state(scheduler=scheduler, ema=ema)`."""
        self._refuse_if_begun("state")
        refuse_unsupported_state(objects)
        self._state |= objects

    def loader(self, dataset: Any, *, batch_size: int, collate_fn: Collate | None = None, num_workers: int = 0) -> Loader:
        """A function of the step: `for batch in loader(step)` gives this worker's micro-batches on its device. See training/loader.py.

        batch_size   samples of a step, over all workers; a multiple of micro_batches
        num_workers  processes of each training worker that fetch ahead
        """
        samples, count = size_of(dataset, "session.loader(dataset, ...)"), self.micro_batches_per_step
        if samples < 1 or batch_size < 1 or batch_size % count:
            raise UsageError(
                f"batch_size={batch_size} with micro_batches={count} and {samples} samples",
                "session.loader(...), Session(micro_batches=...)",
                f"give at least one sample and a batch_size that is a multiple of {count}: it counts the samples of a whole step",
            )
        order = UniformOrder(samples, batch_size, count, self.seed)
        loader = Loader(dataset, order, self.world, self.micro_batches, collate_fn, num_workers)
        self._exit.callback(loader.close)
        self._loaders.append(loader)
        return loader

    # The loop.

    def steps(self, total: int) -> Iterator[int]:
        """Collective. The numbers of the steps from the resumed one to `total` - 1. What the body does happens once for each step.

        Saves when it is due and after the last step. After SIGTERM, SIGINT or SIGUSR1 the workers agree to stop, save, and raise Stopped, a
        SystemExit with code 75 or 130.
        """
        if "replicas" not in self.__dict__:
            self._start()
        self._total = total
        while self.step < total:
            self._logged, began_s = {}, time.monotonic()
            yield self.step
            if self._committed != self.step:
                raise UsageError(
                    f"the body of step {self.step} did no micro-batches",
                    "for step in session.steps(...)",
                    "take all of them, `for batch in loader(step)`, in every step",
                )
            self.step += 1
            values = {"loss": self.loss, **self._logged, "seconds": time.monotonic() - began_s, "workers": self.world.size}
            self._record.step(self.step, values)
            self._save_if_due(stop := self.replicas.decision.stop, last=bool(stop) or self.step >= total)

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. The numbers of this worker's micro-batches of `step`; for data that no loader has. See ReplicaGroup.micro_batches."""
        if "replicas" not in self.__dict__ or step != self.step:
            raise UsageError(f"the micro-batches of step {step}", f"the loop is at step {self.step}", "for step in session.steps(...)")
        self.in_micro_batches = True
        try:
            yield from self.replicas.micro_batches(step)
        finally:
            self.in_micro_batches = False
        self._committed = step

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch, of which `loss` is the mean. The step's gradient is the mean over its micro-batches."""
        if "replicas" not in self.__dict__:
            raise UsageError("session.backward outside of the loop", "session.backward(loss)", "call it in `for batch in loader(step)`")
        self.replicas.backward(loss / self.micro_batches_per_step)

    @property
    def loss(self) -> float:
        """The mean of the losses of the newest step's micro-batches, over all workers; the same bits on any number of them."""
        return self.replicas.loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradient to a norm of at most `max_norm`; its norm before. Between the micro-batches and optimizer.step()."""
        assert self.model is not None
        return nn.utils.clip_grad_norm_(self.model.module.parameters(), max_norm)

    def log(self, step: int, **values: Any) -> None:
        """Add values to this step's line in metrics.jsonl, which rank 0 writes. The line has the number of committed steps, step + 1."""
        if step != self.step:
            raise UsageError(f"session.log of step {step}", f"the loop is at step {self.step}", "call it in the body of that step")
        self._logged |= {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}

    def evaluate(
        self,
        function: Callable[[Any], float | torch.Tensor | Mapping[str, Any]],
        dataset: Any,
        *,
        batch_size: int = 64,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Collective. The mean over `dataset` of function(batch), a number or a dict of numbers, each the mean over the batch's samples.

        Each worker computes its share, in eval mode and without gradients; the result has the same bits on any number of workers.
        """
        count = size_of(dataset, "session.evaluate(function, dataset)")
        batches = [range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]

        def scores(numbers: Iterable[int]) -> dict[int, dict[str, float]]:
            found = {}
            for number in numbers:
                seed_generators(splitmix64(self.seed, number) >> 1, self.world.device)
                samples = samples_of(dataset, batches[number])
                found[number] = as_numbers(function(to_device((collate_fn or default_collate)(samples), self.world.device)))
            return found

        with torch.no_grad(), in_eval_mode(self.model), self.world.during("evaluating"):
            found = self._shared(scores, len(batches))
        seed_generators(
            splitmix64(self.seed, self.step, self.micro_batches_per_step, 1) >> 1, self.world.device
        )  # equal on all workers again
        means = {name: weighted_mean([(len(batches[n]), found[n][name]) for n in range(len(batches))]) for name in found[0]}
        return means[""] if [*means] == [""] else means

    # Inside.

    def _start(self) -> None:
        """Collective. Resume, and open what the loop needs."""
        if self.model is None:
            raise UsageError("session.steps without a model", "session.steps(...)", "call session.prepare(model, optimizer) before")
        module, world, enter = self.model.module, self.world, self._exit.enter_context
        facts = {"micro_batches": str(self.micro_batches_per_step), "seed": str(self.seed)}
        facts |= {f"loader {i}": f"{one.order.samples} samples, batch_size {one.order.batch_size}" for i, one in enumerate(self._loaders)}
        checkpointer = Checkpointer(
            self.out / "checkpoints", world, module, self.optimizers, state=self._state, every_steps=self.save_every, keep=self.keep
        )
        self.step = checkpointer.resume(self.resume, facts)
        signals = enter(StopSignals())
        tracker = enter(Tracker(self.out, leader=world.is_leader_now, from_step=self.step))
        self._record = enter(BackgroundTracker(tracker))
        enter(checkpointer)
        self.replicas = enter(
            ReplicaGroup(
                world,
                module,
                checkpointer,
                micro_batches=self.micro_batches_per_step,
                seed=self.seed,
                signals=signals,
                tracker=self._record,
                **self.options,
            )
        )
        self.checkpointer, self.tracker = checkpointer, tracker

    def _save_if_due(self, stop: str, *, last: bool) -> None:
        """Collective. Save; Stopped when the workers have agreed to."""
        if last or self.checkpointer.due(self.step):
            with self.world.during("saving"):  # the metrics are on disk first, so that no checkpoint is ahead of them
                self.checkpointer.save(self.step, first=self._record.sync, waits=last)
        if stop:
            self.checkpointer.close()
            raise Stopped(stop)

    def _shared(self, scores: Callable[[Iterable[int]], dict[int, dict[str, float]]], count: int) -> dict[int, dict[str, float]]:
        """Collective. scores(range(count)), computed in shares. Where a worker is lost, this one computes all; the next step regroups."""
        rank, size = (0, 1) if self.world.is_joining else (self.world.rank, self.world.size)
        mine = scores(range(rank, count, size))
        try:
            return {number: one for rows in all_gather_json(self.world, [*mine.items()]) for number, one in rows}
        except Exception as error:
            if not self.world.is_peer_loss(error):
                raise
            log.info("a worker was lost during an evaluation (%s); this one evaluates everything", error_summary(error))
            error.__traceback__ = None  # it holds the group
        return mine | scores(number for number in range(count) if number not in mine)

    def _refuse_if_begun(self, what: str) -> None:
        if "replicas" in self.__dict__:
            raise UsageError(f"session.{what} after session.steps", "the run has resumed already", f"call session.{what} before the loop")


class PreparedModel(nn.Module):
    """A model whose forward pass goes through the replica group within micro-batches, and is its own elsewhere (evaluation, no_grad).

    module  the model that was passed to Session.prepare; its attributes and methods are this one's
    """

    module: nn.Module

    def __init__(self, module: nn.Module, session: Session) -> None:
        super().__init__()
        self.module, self._session = module, session

    def forward(self, *inputs: Any, **named: Any) -> Any:
        through_replicas = self._session.in_micro_batches and torch.is_grad_enabled()
        return (self._session.replicas if through_replicas else self.module)(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model alone, as an EMA makes one."""
        return deepcopy(self.module, memo)


def refuse_another_folder(out: Path) -> None:
    """UsageError when the agent that started this worker keeps the run in another folder than the Session."""
    seat = read_worker_env(os.environ)
    if seat and Path(seat.folder) != out.resolve():
        raise UsageError(
            f"this Session's folder is {out}, the run's is {seat.folder}",
            "Session(out, ...), and the folder that lockstep was started with",
            f"start it with --out {out}: lockstep run --out {out} FILE.py, or let the script take --out",
        )


class in_eval_mode:
    """Put the modules of a model into eval mode for the block, and each back into its own mode after it."""

    def __init__(self, model: nn.Module | None) -> None:
        self.training = [module for module in model.modules() if module.training] if model else []

    def __enter__(self) -> None:
        for module in self.training:
            module.training = False

    def __exit__(self, *_: object) -> None:
        for module in self.training:
            module.training = True


def as_numbers(value: Any) -> dict[str, float]:
    """The numbers of a batch by name; a single number has the name ""."""
    return {str(name): float(number) for name, number in (value.items() if isinstance(value, Mapping) else [("", value)])}


def weighted_mean(rows: list[tuple[int, float]]) -> float:
    """The mean of (weight, value) rows; exactly rounded sums, so that it has the same bits for any order of computing them."""
    values = [weight * value for weight, value in rows]
    return math.fsum(values) / sum(weight for weight, _ in rows) if all(map(math.isfinite, values)) else math.nan
