"""Retry a step that diverges, without the micro-batches that make it diverge.

The vote on a step comes before its update, so weights and optimizer state are those before the
step: finite, and compared between the replicas in the same vote. They are the newest verified
state. A checkpoint has the same bits or older ones, and training from it leads to the same step
again.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import Any, Literal, NoReturn, Protocol

from torch.amp import GradScaler

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import StepDecision
from lockstep.errors import DivergedError, UsageError
from lockstep.parallel.replica import Replica
from lockstep.record.events import append_event
from lockstep.record.metrics import to_json_value
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.skip import parse_skip, skip_conflicts, skip_texts
from lockstep.units import join_names

log = logging.getLogger("lockstep")

WINDOW_STEPS = 64  # the newest committed losses, to which a loss is compared
MIN_STEPS = 16  # fewer losses show no spike
LEAST_DEVIATION = 0.02  # of the median: a loss that hardly changes has a small deviation


@dataclass(frozen=True)
class Rollback:
    """Retry a step that diverges without the micro-batches that make it diverge:
    Session(on_divergence=lockstep.Rollback(...)); "rollback" is Rollback().

    max_skipped  micro-batches that a run may skip; one more ends it
    spike        robust standard deviations above the newest losses that make a loss a spike;
                 0: only what is not finite
    skip         micro-batches to skip from the start: "STEP:K", with the step of metrics.jsonl and
                 K from 0. A resumed run must have the same ones
    """

    max_skipped: int = 100
    spike: float = 10.0
    skip: Sequence[str] = ()

    def __post_init__(self) -> None:
        where = f"Rollback(max_skipped={self.max_skipped!r}, spike={self.spike!r})"
        try:
            is_right = operator.index(self.max_skipped) >= 0 and self.spike >= 0
        except TypeError:
            is_right = False
        if not is_right:
            raise UsageError("a value is not a number of at least 0", where, "give one")
        if isinstance(self.skip, str):
            raise UsageError(
                "skip is a text", f"Rollback(skip={self.skip!r})", f"write skip=[{self.skip!r}]"
            )
        try:
            parse_skip(self.skip)
        except (ValueError, AttributeError, TypeError):
            raise UsageError(
                "skip has another form than STEP:K",
                f"Rollback(skip={self.skip!r})",
                'write skip=["120:3"], with the step of metrics.jsonl and K from 0',
            ) from None

    def skip_fact(self) -> str:
        """Return the micro-batches that a resumed run must skip from the start, too."""
        return ", ".join(skip_texts(parse_skip(self.skip))) or "none"

    def __str__(self) -> str:
        return f"rollback, max_skipped={self.max_skipped}, spike={self.spike}"


def choose_rollback(
    on_divergence: Literal["rollback"] | Rollback, micro_batches: int, on_nonfinite: str
) -> Rollback:
    """Return the options of Session(on_divergence=...)."""
    where = f"Session(on_divergence={on_divergence!r})"
    options = Rollback() if on_divergence == "rollback" else on_divergence
    if not isinstance(options, Rollback):
        raise UsageError(
            f"on_divergence={on_divergence!r}",
            where,
            'give "stop", "rollback" or lockstep.Rollback(max_skipped=100, spike=10.0, skip=[])',
        )
    if on_nonfinite == "ignore":
        raise UsageError(
            "on_divergence is not supported with on_nonfinite='ignore'",
            where,
            "a GradScaler skips a whole step instead: remove one of them; bf16 needs no GradScaler",
        )
    for what, hint in skip_conflicts("skip", options.skip, micro_batches):
        raise UsageError(what, where, hint)
    return options


class SampleNames(Protocol):
    """Names of the samples of a micro-batch, as a loader gives them."""

    @property
    def sample_kind(self) -> str:
        """Their kind, in the plural."""

    def samples(self, step: int, k: int) -> list[int]:
        """Return their numbers; [] if they are unknown."""


@dataclass(frozen=True)
class MicroBatchResult:
    """A micro-batch that was computed alone. loss: mean over its tokens."""

    loss: float
    gradient_finite: bool


def loss_limit(losses: Sequence[float], deviations: float, parts: int = 1) -> float:
    """Return the loss above which a step is a spike; with `parts`, the limit for one of its equal
    parts, whose mean varies more. Infinity without enough losses.

    median + deviations * s * sqrt(parts), where s is 1.4826 times the median distance to the
    median.
    """
    if not deviations or len(losses) < MIN_STEPS:
        return math.inf
    middle = median(losses)
    deviation = max(
        1.4826 * median(abs(loss - middle) for loss in losses), LEAST_DEVIATION * abs(middle)
    )
    return middle + deviations * deviation * math.sqrt(parts)


def find_guilty(measured: Mapping[int, MicroBatchResult], limit: float) -> list[int]:
    """Return the micro-batches that are not finite; if all are finite, those with a loss above
    `limit`, unless that is all of them: then the weights are the cause."""
    if not_finite := sorted(
        k
        for k, result in measured.items()
        if not (math.isfinite(result.loss) and result.gradient_finite)
    ):
        return not_finite
    high = sorted(k for k, result in measured.items() if result.loss > limit)
    return high if len(high) < len(measured) else []


class SkippedMicroBatches:
    """The micro-batches of a run that contribute neither loss nor gradient nor tokens: those of
    `options.skip`, and the causes of diverging steps.

    micro_batches  K of a step
    names          of the samples, for messages and events

    Everything is decided from values that all ranks share. Checkpoints and joiners have `to_json`.
    A guilty micro-batch is forgotten when the generation ends before the commit: all ranks find it
    again.
    """

    def __init__(
        self,
        options: Rollback,
        micro_batches: int,
        checkpointer: Checkpointer,
        names: SampleNames,
    ) -> None:
        self.options = options
        self.micro_batches = micro_batches
        self.names = names
        self.checkpointer = checkpointer
        self.runtime = checkpointer.runtime
        saved: Mapping[str, Any] = (
            self.runtime.loop_state or checkpointer.facts.get("rollback") or {}
        )
        self._given = parse_skip(options.skip)
        skipped = saved.get("skipped", {})
        self._found: dict[int, list[int]] = {int(step) - 1: ks for step, ks in skipped.items()}
        self._losses: list[tuple[int, float]] = [
            (step, loss) for step, loss in saved.get("losses", [])
        ]
        # The generation and the step that `_guilty` and `_measured` belong to.
        self._attempt = (-1, -1)
        self._guilty: list[int] = []
        self._measured: dict[int, MicroBatchResult] = {}
        self._record()

    def to_json(self) -> dict[str, Any]:
        return {
            "skipped": {str(step + 1): ks for step, ks in self._found.items()},
            "losses": self._losses,
        }

    def _record(self) -> None:
        if self._found or self._losses:
            self.checkpointer.run_facts["rollback"] = self.to_json()
            self.runtime.set_loop_state(self.to_json())

    def refuse_unsupported(self, parts: Mapping[str, bool]) -> None:
        """UsageError if one of these `parts` of the run is used: no micro-batch is computed alone
        there."""
        used = [name for name, is_used in parts.items() if is_used]
        if used:
            raise UsageError(
                f"on_divergence='rollback' is not supported with {join_names(used)}",
                "no micro-batch is computed alone there",
                "remove on_divergence, or train without it",
            )

    def refuse_scaler(self, scaler: GradScaler | None) -> None:
        """UsageError for a GradScaler that is enabled: a scale that is too high would make every
        micro-batch guilty."""
        if scaler and scaler.is_enabled():
            raise UsageError(
                "on_divergence='rollback' is not supported with a GradScaler",
                "session.backward(loss, scaler=scaler)",
                "remove one of them; bf16 needs no GradScaler",
            )

    def start(self, step: int) -> list[int]:
        """Start an attempt at `step`; return the micro-batches that it skips."""
        attempt = (self.runtime.world.generation, step)
        if self._attempt != attempt:
            self._attempt = attempt
            self._guilty = []
            self._measured = {}
        return sorted({*self.skipped(step), *self._guilty})

    def skipped(self, step: int) -> list[int]:
        """Return the micro-batches that a committed step has skipped, or that the first attempt at
        a later one skips."""
        return sorted({*self._given.get(step, []), *self._found.get(step, [])})

    def trained(self, step: int) -> list[int] | None:
        """Return the micro-batches of a committed step that were not skipped; None: all of them."""
        skipped = self.skipped(step)
        return [k for k in range(self.micro_batches) if k not in skipped] if skipped else None

    def with_share(self, decision: StepDecision, skipped: Sequence[int]) -> StepDecision:
        """Return the decision on a step without these micro-batches. If its losses are shares of
        a mean over all micro-batches, it becomes the mean over the others."""
        if decision.count or not skipped:
            return decision
        trained = self.micro_batches - len(skipped)
        return replace(decision, trained_share=trained / self.micro_batches)

    def _mean(self, loss: float, micro_batches: Sequence[int] | None, count: int | None) -> float:
        """Return the mean loss of these micro-batches, or of all: None."""
        if count is not None:
            return loss / max(1, count)
        return loss * self.micro_batches / len(micro_batches or range(self.micro_batches))

    def _mean_of_step(self, step: int, decision: StepDecision) -> float:
        return self._mean(decision.loss, self.trained(step), decision.count or None)

    def suspects(self, step: int, decision: StepDecision) -> bool:
        """Return whether to measure the micro-batches of `step`: at most once in a generation."""
        if self._measured:
            return False
        if not (decision.finite and decision.gradient_finite):
            return True
        limit = loss_limit([loss for _, loss in self._losses], self.options.spike)
        return limit < math.inf and self._mean_of_step(step, decision) > limit

    def measure(self, step: int, replica: Replica, counts: list[int | None]) -> Iterator[int]:
        """Collective. Yield each micro-batch of this replica that is not skipped, computed alone
        and dropped; decide which ones the next attempt skips. DivergedError when that is not
        possible.

        counts  backward passes append theirs
        """
        rows: list[tuple[int, str, bool, int | None]] = []
        skipped = self.start(step)
        trained_s = self.runtime.ledger.spent("training", time.monotonic())
        for own in (k for k in replica.source.plan.leaves if k not in skipped):
            counts.clear()
            for k in replica.rehearsal(step, own):
                self.runtime.board.enter("forward", step + 1)
                yield k
            count = counts[-1] if counts else None
            result = replica.hashed
            rows.append((own, str(result.loss), result.is_finite, count))
        self.runtime.board.enter("voting")
        self.runtime.board.enter_collective()
        for k, loss, finite, count in chain.from_iterable(all_gather_json(self.runtime, rows)):
            # From another worker of the replica, with other parts of the gradient.
            before = self._measured.get(k)
            self._measured[k] = MicroBatchResult(
                self._mean(float(loss), [k], count),
                finite and (before is None or before.gradient_finite),
            )
        losses = [loss for _, loss in self._losses]
        limit = loss_limit(losses, self.options.spike, self.micro_batches)
        self._guilty = find_guilty(self._measured, limit)
        self._refuse(step)
        self.runtime.count_as_lost(trained_s)

    def _refuse(self, step: int) -> None:
        """DivergedError when no micro-batch would be left, or more are skipped than allowed."""

        def fail(what: str, hint: str) -> NoReturn:
            self._append_event("diverged", step)
            raise DivergedError(
                what,
                "measured one by one, agreed by all processes before the update, "
                "which was not made",
                hint,
            )

        if len(self._guilty) == len(self._measured):
            fail(
                f"none of the {len(self._measured)} micro-batches of step {step + 1} is finite: "
                "the cause is the weights, not the data",
                "lower the learning rate, lengthen its warm-up, or clip the gradients; "
                "the checkpoints before are whole",
            )
        before = sum(map(len, self._found.values()))
        allowed = self.options.max_skipped
        if before + len(self._guilty) > allowed:
            fail(
                f"step {step + 1} diverges: {self._describe(step)}; "
                f"with {before} skipped before, that is more than {allowed}",
                "remove these samples from the data, or raise max_skipped",
            )

    def _describe(self, step: int) -> str:
        texts = []
        for k in self._guilty:
            result = self._measured[k]
            reason = f"loss {result.loss:.4g}"
            if not result.gradient_finite:
                reason += ", gradient not finite"
            if samples := self.names.samples(step, k):
                reason += f"; {self.names.sample_kind} {join_names([*map(str, samples)])}"
            texts.append(f"micro-batch {k} ({reason})")
        return ", ".join(texts)

    def commit(self, step: int, decision: StepDecision) -> None:
        """Record `step`, which all ranks have agreed on."""
        leads = self.runtime.world.leader
        if self._guilty:
            self._found[step] = self._guilty
            if leads:
                log.warning("step %d was retried without %s", step + 1, self._describe(step))
            self._append_event("rolled back", step)
        elif self._measured and decision.finite and decision.gradient_finite and leads:
            log.warning(
                "step %d: the loss is a spike, but no micro-batch is: the step is trained as it is",
                step + 1,
            )
            self._append_event("spike", step)
        mean = self._mean_of_step(step, decision)
        self._losses = [*self._losses, (step, mean)][-WINDOW_STEPS:]
        self._record()

    def _append_event(self, event: str, step: int) -> None:
        if not self.runtime.world.leader:
            return
        rows: list[dict[str, Any]] = []
        for k in self._guilty:
            row: dict[str, Any] = {"k": k, **vars(self._measured[k])}
            if samples := self.names.samples(step, k):
                row[self.names.sample_kind] = samples
            rows.append(row)
        folder = self.checkpointer.store.folder.parent
        append_event(folder, event, step=step + 1, micro_batches=to_json_value(rows))
