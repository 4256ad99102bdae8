"""Session: a PyTorch training loop on any number of workers, with the same bits, through failures.

    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(200):
            for x, y in loader(step):
                session.backward(loss_fn(model(x), y))
            optimizer.step()

A Session composes ElasticRuntime, ReplicaGroup, Checkpointer and Tracker, which can also be used
without it (docs/loop.md).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.checkpoint.stateful import Stateful, refuse_unsupported_state
from lockstep.data.order import UniformOrder, splitmix64
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.numerics import make_deterministic, seed_generators
from lockstep.runtime.signals import Stopped, StopSignals
from lockstep.runtime.worker_env import read_worker_env
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.loader import Collate, Loader, get_samples, number_of_samples, to_device
from lockstep.training.replica_group import ReplicaGroup

log = logging.getLogger("lockstep")


class Session:
    """One training run of this process, together with all other workers. A context manager.

    out            folder of the run: checkpoints/, metrics.jsonl, events.jsonl
    micro_batches  micro-batches of a step, over all workers; at least the number of workers
    save_every     steps between two checkpoints; 0: only after the last step and when the run is
                   stopped
    keep           number of newest checkpoints to keep; 0: all
    seed           of the order of the samples, and of the random numbers of samples and model
    resume         "auto" (the newest valid checkpoint, if there is one), "never", "required", or a
                   step as text
    threads        of torch in this process; their number changes bits
    options        keyword arguments for ReplicaGroup: reduce, verify_every, rehearse, on_nonfinite,
                   local_buffers

    Attributes: `runtime` and `world` exist inside the `with` block; `replicas`, `checkpointer` and
    `tracker` exist once `steps` has yielded. `step` is the number of committed steps.
    """

    runtime: ElasticRuntime
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
        self._committed = -1  # the newest step whose gradient is complete
        self._total = 0
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        refuse_another_folder(self.out)
        self.runtime = self._exit.enter_context(ElasticRuntime.join(threads=self.threads))
        log.debug(make_deterministic(self.world.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Collective, without an error: wait for the last checkpoint, then leave the run."""
        if kind is None and self.step < self._total:
            log.warning("the loop was left in step %d of %d: the steps since the newest checkpoint are not saved", self.step, self._total)
        self._exit.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        if name in ("runtime", "replicas", "checkpointer", "tracker"):
            names, when = f"session.{name} does", "after session.steps(...) has started"
            if name == "runtime":
                names, when = "session.world and session.runtime do", "inside `with Session(...) as session`"
            raise UsageError(f"{names} not exist yet", f"set {when}", "move the line there")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def world(self) -> World:
        """Rank, size and device of this worker; a new value after a failure."""
        return self.runtime.world

    # Before the loop.

    def prepare(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[Any, ...]:
        """Return (the model to call in the loop, *optimizers).

        Moves the model to world.device. Checkpoints hold the model and the optimizers. The returned
        model behaves like DistributedDataParallel: `model.module` is the model that was passed.
        """
        self._refuse_after_start("prepare")
        if self.model is not None:
            raise UsageError("a second session.prepare", "one Session trains one model", "put all trained modules into one nn.ModuleDict")
        self.model, self.optimizers = PreparedModel(model.to(self.world.device), self), optimizers
        return self.model, *optimizers

    def state(self, **objects: Stateful) -> None:
        """Add objects with state_dict and load_state_dict to the checkpoints, by name:
        `session.state(scheduler=scheduler, ema=ema)`."""
        self._refuse_after_start("state")
        refuse_unsupported_state(objects)
        self._state |= objects

    def loader(self, dataset: Any, *, batch_size: int, collate_fn: Collate | None = None, num_workers: int = 0) -> Loader:
        """Return a loader: `for batch in loader(step)` yields this worker's micro-batches, on its
        device. See training/loader.py.

        batch_size   samples of a step, over all workers; a multiple of micro_batches
        num_workers  processes of each training worker that prefetch
        A resumed run is refused when the number of samples or batch_size differs. Other content of
        the same length is not detected.
        """
        samples, count = number_of_samples(dataset, "session.loader(dataset, ...)"), self.micro_batches_per_step
        if samples < 1 or batch_size < 1 or batch_size % count:
            raise UsageError(
                f"batch_size={batch_size} with micro_batches={count} and {samples} samples",
                "session.loader(...), Session(micro_batches=...)",
                f"give at least one sample and a batch_size that is a multiple of {count}: it counts the samples of a whole step",
            )
        order = UniformOrder(samples, batch_size, count, self.seed)
        loader = Loader(dataset, order, self.runtime, self.micro_batches, collate_fn, num_workers)
        self._exit.callback(loader.close)
        self._loaders.append(loader)
        return loader

    # The loop.

    def steps(self, total: int) -> Iterator[int]:
        """Collective. Yield the step numbers from the resumed one to `total` - 1.

        Saves when a checkpoint is due and after the last step. After SIGTERM, SIGINT or SIGUSR1 the
        workers agree to stop, save, and raise Stopped: a SystemExit with code 75 or 130.
        """
        if "replicas" not in self.__dict__:
            self._start()
        self._total = total
        while self.step < total:
            self._logged, start_s = {}, time.monotonic()
            yield self.step
            if self._committed != self.step:
                raise UsageError(
                    f"the body of step {self.step} ran no micro-batches",
                    "for step in session.steps(...)",
                    "take all of them, `for batch in loader(step)`, in every step",
                )
            self.step += 1
            values = {"loss": self.loss, **self._logged, "seconds": time.monotonic() - start_s, "workers": self.world.size}
            self._record.step(self.step, values)
            self._save_if_due(stop := self.replicas.decision.stop, last=bool(stop) or self.step >= total)

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield the numbers of this worker's micro-batches: for data without a loader."""
        if "replicas" not in self.__dict__ or step != self.step:
            raise UsageError(f"the micro-batches of step {step}", f"the loop is at step {self.step}", "for step in session.steps(...)")
        if self._committed == step:
            where, hint = "loader(step) or session.micro_batches(step), called twice", "compute all losses in one loop"
            raise UsageError(f"a second micro-batch loop in step {step}: it would drop the gradient of the first", where, hint)
        self.in_micro_batches = True
        try:
            yield from self.replicas.micro_batches(step)
        finally:
            self.in_micro_batches = False
        self._committed = step

    def backward(self, loss: torch.Tensor, *, count: int | None = None) -> None:
        """Run the backward pass of a micro-batch.

        loss   mean over the micro-batch; the step's gradient is the mean over its micro-batches
        count  number of samples or tokens of the micro-batch, an integer. `loss` is then their sum,
               and the step's gradient is the sum of all losses divided by the sum of all counts.
               Give it for every micro-batch of a step, or for none
        """
        if "replicas" not in self.__dict__:
            raise UsageError("session.backward outside of the loop", "session.backward(loss)", "call it in `for batch in loader(step)`")
        if count is None:
            self.replicas.backward(loss / self.micro_batches_per_step)
        else:
            self.replicas.backward(loss, count)

    @property
    def loss(self) -> float:
        """The mean loss of the newest step; the same bits for any number of workers."""
        return self.replicas.loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradient to a norm of at most `max_norm`; return the norm before.

        Call it between the micro-batches and optimizer.step().
        """
        assert self.model is not None
        return nn.utils.clip_grad_norm_(self.model.module.parameters(), max_norm)

    def log(self, step: int, **values: Any) -> None:
        """Add values to this step's line in metrics.jsonl, which rank 0 writes.

        The line is numbered by committed steps: step + 1.
        """
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
        """Collective. Return the mean over `dataset` of function(batch): a number or a dict of
        numbers, each the mean over the batch's samples.

        Each worker computes its share, in eval mode and without gradients. The result has the same
        bits on any number of workers.
        """
        count = number_of_samples(dataset, "session.evaluate(function, dataset)")
        batches = [range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]

        def compute_scores(numbers: Iterable[int]) -> dict[int, dict[str, float]]:
            scores = {}
            for number in numbers:
                seed_generators(splitmix64(self.seed, number) >> 1, self.world.device)
                samples = get_samples(dataset, batches[number])
                scores[number] = to_numbers(function(to_device((collate_fn or default_collate)(samples), self.world.device)))
            return scores

        with torch.no_grad(), in_eval_mode(self.model), self.runtime.during("evaluating"):
            scores = self._compute_in_shares(compute_scores, len(batches))
        # Equal on all workers again.
        seed_generators(splitmix64(self.seed, self.step, self.micro_batches_per_step, 1) >> 1, self.world.device)
        means = {name: weighted_mean([(len(batches[n]), scores[n][name]) for n in range(len(batches))]) for name in scores[0]}
        return means[""] if [*means] == [""] else means

    # Private.

    def _start(self) -> None:
        """Collective. Resume, and open what the loop needs."""
        if self.model is None:
            raise UsageError("session.steps without a model", "session.steps(...)", "call session.prepare(model, optimizer) before")
        module, runtime, enter = self.model.module, self.runtime, self._exit.enter_context
        facts = {"micro_batches": str(self.micro_batches_per_step), "seed": str(self.seed)}
        for i, loader in enumerate(self._loaders):
            facts[f"loader {i}"] = f"{loader.order.samples} samples, batch_size {loader.order.batch_size}"
        checkpointer = Checkpointer(
            self.out / "checkpoints", runtime, module, self.optimizers, state=self._state, every_steps=self.save_every, keep=self.keep
        )
        self.step = checkpointer.resume(self.resume, facts)
        signals = enter(StopSignals())
        tracker = enter(Tracker(self.out, leader=runtime.is_leader, from_step=self.step))
        self._record = enter(BackgroundTracker(tracker))
        enter(checkpointer)
        self.replicas = enter(
            ReplicaGroup(
                runtime,
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
            with self.runtime.during("saving"):  # the metrics are on disk first, so that no checkpoint is ahead of them
                self.checkpointer.save(self.step, first=self._record.sync, waits=last)
        if stop:
            self.checkpointer.close()
            raise Stopped(stop)

    def _compute_in_shares(
        self, compute: Callable[[Iterable[int]], dict[int, dict[str, float]]], count: int
    ) -> dict[int, dict[str, float]]:
        """Collective. Return compute(range(count)), of which each worker computes a share.

        If a worker is lost, this worker computes everything, and the next step regroups.
        """
        rank, size = (0, 1) if self.runtime.is_joining else (self.world.rank, self.world.size)
        own = compute(range(rank, count, size))
        with self.runtime.catch_peer_loss() as loss:
            return {number: scores for rows in all_gather_json(self.runtime, [*own.items()]) for number, scores in rows}
        log.info("a worker was lost during an evaluation (%s); this worker evaluates everything", loss.why)
        return own | compute(number for number in range(count) if number not in own)

    def _refuse_after_start(self, what: str) -> None:
        if "replicas" in self.__dict__:
            raise UsageError(f"session.{what} after session.steps", "the run has resumed already", f"call session.{what} before the loop")


class PreparedModel(nn.Module):
    """A model whose forward pass runs through the ReplicaGroup inside micro-batches. Elsewhere
    (evaluation, no_grad) it is the plain model.

    module  the model that was passed to Session.prepare; its attributes are available here, too
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
        """Copy the plain model, for an EMA."""
        return deepcopy(self.module, memo)


def refuse_another_folder(out: Path) -> None:
    """UsageError when the agent of this worker uses another run folder than the Session."""
    worker_env = read_worker_env(os.environ)
    if worker_env and Path(worker_env.folder) != out.resolve():
        raise UsageError(
            f"this Session's folder is {out}, the run's is {worker_env.folder}",
            "Session(out, ...), and the folder that lockstep was started with",
            f"start it with --out {out}: lockstep run --out {out} FILE.py, or let the script take --out",
        )


@contextmanager
def in_eval_mode(model: nn.Module | None) -> Iterator[None]:
    """Put the modules of a model into eval mode; restore the mode of each afterwards."""
    training = [module for module in model.modules() if module.training] if model else []
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def to_numbers(value: Any) -> dict[str, float]:
    """Return the numbers of a batch by name; a single number has the name ""."""
    return {str(name): float(number) for name, number in (value.items() if isinstance(value, Mapping) else [("", value)])}


def weighted_mean(rows: list[tuple[int, float]]) -> float:
    """Return the mean of (weight, value) rows. Sums are exactly rounded, so the order of computing
    the rows does not change bits."""
    values = [weight * value for weight, value in rows]
    return math.fsum(values) / sum(weight for weight, _ in rows) if all(map(math.isfinite, values)) else math.nan
