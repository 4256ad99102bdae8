"""What a Session measures of its steps, and tells: metrics.jsonl, the screen, the account of
time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import c_float
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.record import events
from lockstep.record.goodput import Ledger
from lockstep.record.metrics import iter_steps
from lockstep.record.progress import PrintedLines, ProgressDisplay
from lockstep.record.step_timer import StepTimer
from lockstep.record.tracker import BackgroundTracker
from lockstep.runtime.device import measure_memory
from lockstep.training.loader import Loader
from lockstep.training.replica_group import ReplicaGroup

RECORDED = (
    "step",
    "seconds",
    "workers",
    "losses",
    "digest",
)  # names in metrics.jsonl that session.log cannot set

if TYPE_CHECKING:
    from lockstep.training.model_flops import ModelFlops
    from lockstep.training.profiler import Profiler


FACT = "time"  # of the checkpoints, which hold the account of time


class StepRecord:
    """The steps of one start, from its creation on.

    loaders  whose samples are counted, where the loop gives no count
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        loaders: Sequence[Loader],
        tracker: BackgroundTracker,
        display: ProgressDisplay,
        flops: ModelFlops | None,
        profiler: Profiler | None,
    ) -> None:
        self.replicas = replicas
        self.runtime = replicas.runtime
        self.loaders = loaders
        self.tracker = tracker
        self.display = display
        self.flops = flops
        self.profiler = profiler
        self.timer = StepTimer(memory=partial(measure_memory, self.runtime.world.device))
        self.logged: dict[str, float] = {}
        self.printed = PrintedLines()

    def log(self, values: Mapping[str, Any], get_loss: Callable[[], float]) -> None:
        """Add numbers to the line of this step."""
        self.logged |= numbers_to_log(values, get_loss)

    def counting_forward(self) -> AbstractContextManager[object]:
        """Context manager around a forward pass in the micro-batch loop."""
        return self.flops.forward() if self.flops else nullcontext()

    def counting_backward(self, count: int | None) -> AbstractContextManager[object]:
        """Context manager around a backward pass. count: of the micro-batch."""
        return self.flops.backward(count) if self.flops else nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager around an evaluation, whose waits are no communication of the step."""
        with self.timer.timing("overhead"), self.replicas.replica.groups.not_counting():
            yield

    def end(self, step: int, *, is_last: bool) -> None:
        """Record the steps that were committed together, up to `step`, with equal shares of time
        and samples. is_last: of this start."""
        loss, world = self.replicas.loss, self.runtime.world
        steps = self.replicas.commit_steps
        if world.size > 1:  # else the sum waits for no other worker
            self.timer.add("communication", self.replicas.replica.exposed_s())
        self.timer.add("data", sum(loader.take_waited_s() for loader in self.loaders))
        count, unit = self._count(step - 1)
        if self.flops:
            with self.timer.timing("overhead"):
                self.flops.measure_peak()
        measured = self.timer.step(count, world.size, unit)
        account_step(self.runtime.ledger, measured)
        if self.flops:
            measured |= self.flops.mfu(measured, unit, world.size)
        measured |= {"workers": world.size, "generation": world.generation}
        account = self.runtime.ledger.metrics(time.monotonic())
        line = {"loss": loss, **share_of(measured, steps), **account}
        for number in range(step - steps + 1, step):
            self.tracker.step(number, line)
        bits = record_of(self.replicas.decision, self.replicas.replica.workers_per_replica)
        self.tracker.step(step, line | bits | self.logged)
        shown = {"loss": loss, **measured}
        if self.timer.warm:
            shown["eta_s"] = (self.display.total - step) * self.timer.mean_step_s / steps
        further = {name: value for name, value in self.logged.items() if name != "loss"}
        self.display.step(step, shown, steps=steps, logged=further, is_last=is_last)
        compared = self.replicas.runner.comparison.logged
        compared.update({name: [step, number] for name, number in self.logged.items()})
        self.logged = {}
        if self.profiler:
            self.profiler.step(step)

    def _count(self, step: int) -> tuple[int, str]:
        """Return how many tokens or samples all workers have trained in the steps that were
        committed with `step`, and which it is."""
        if self.replicas.decision.count:
            return self.replicas.decision.count, "tokens"
        steps = self.replicas.commit_steps
        trained = self.replicas.runner.trained(step)
        samples = (loader.samples_in_step(step, trained) for loader in self.loaders)
        return next(((number * steps, "samples") for number in samples if number), (steps, "steps"))


def record_of(decision: StepDecision, slices: int) -> dict[str, Any]:
    """Return what `lockstep replay` compares of a step.

    losses  of each micro-batch, as the loop gave it: the loss of the step is their sum, divided by
            the count if there is one. None: skipped
    digest  of the trained weights that the step was computed with; of a replica in slices their
            sum, and the number of slices
    """
    record: dict[str, Any] = {"losses": list(map(shorten, decision.losses))}
    if decision.trained:
        record["digest"] = f"{decision.trained:016x}" + f"/{slices}" * (slices > 1)
    return record


def shorten(loss: float | None) -> float | None:
    """Return a loss with nine digits if they restore its bits as a float32."""
    is_single = loss is not None and c_float(loss).value == loss
    return float(f"{loss:.9g}") if is_single else loss


def share_of(values: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the metrics of one of `steps` steps that were committed together."""
    return {
        name: value / steps
        if steps > 1 and name.endswith(("tokens", "samples", "steps", "seconds"))
        else value
        for name, value in values.items()
    }


# The run's account of time (record/goodput.py) across steps and starts.


def account_step(ledger: Ledger, values: Mapping[str, Any]) -> None:
    """Move the step's waiting for communication and data from training to their own accounts."""
    now_s = time.monotonic()
    ledger.move("training", "communication", values.get("communication_seconds", 0.0), now_s)
    ledger.move("training", "data", values.get("data_seconds", 0.0), now_s)


def account_facts(ledger: Ledger) -> dict[str, Any]:
    """Return what a checkpoint holds of the account."""
    return {FACT: ledger.to_json(time.monotonic(), time.time())}


def resume_account(
    runtime: ElasticRuntime, facts: Mapping[str, Any], first_step: int, folder: Path
) -> None:
    """Collective, except for a joiner, which received an account. Continue that of the run.

    It continues from the checkpoint, or from the run's first start. Training after `first_step`
    counts as lost, and the time without workers as down.
    """
    if not runtime.first_generation:
        return

    def read_files() -> tuple[dict[str, Any] | None, float]:
        seconds_after = (
            line.get("seconds", 0.0)
            for line in iter_steps(folder / "metrics.jsonl", after=first_step)
        )
        return facts.get(FACT) or _empty_account(folder), math.fsum(seconds_after)

    saved_ledger, lost_s = run_on_rank0(runtime, read_files)
    if saved_ledger is None:
        return
    now_s = time.monotonic()
    starting_s = runtime.ledger.summary(now_s)["wall_s"]
    runtime.set_ledger(Ledger.from_json(saved_ledger, now_s, wall_clock_s=time.time()))
    is_first = runtime.world.generation == 1
    runtime.ledger.move("down", "starting", math.inf if is_first else starting_s, now_s)
    runtime.ledger.move("down", "lost", lost_s, now_s)


def _empty_account(folder: Path) -> dict[str, Any] | None:
    """Return an empty account that starts with the run's first event; None without events."""
    first = next(events.iter_events(folder), None)
    if first is None:
        return None
    return {"wall_clock_s": datetime.fromisoformat(first["time"]).timestamp(), "seconds": {}}


def numbers_to_log(values: Mapping[str, Any], get_loss: Callable[[], float]) -> dict[str, float]:
    """Return the values of session.log. UsageError for names that the line has anyway."""
    numbers = {name: number_of(name, value) for name, value in values.items()}
    for name, number in numbers.items():
        is_other_loss = name == "loss" and str(number) != str(get_loss())
        if name in RECORDED or is_other_loss:
            raise UsageError(
                f"{name} is recorded already, with another value",
                f"session.log({name}={values[name]!r})",
                "give it another name",
            )
    return numbers


def number_of(name: str, value: Any) -> float:
    """Return a number, or that of a tensor or array with one element. UsageError otherwise."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # several elements
        number = None
    if not isinstance(number, int | float):
        raise UsageError(
            f"{name} is a {type(value).__name__}, not a number",
            f"session.log({name}=...)",
            "give a number or one element",
        )
    return number
