"""Retry a step that diverges, without the micro-batches that make it diverge.

The vote on a step comes before its update, so weights and optimizer state are those before the
step: finite, and compared between the replicas in the same vote. They are the newest verified
state. A checkpoint has the same bits or older ones, and training from it leads to the same step
again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, NoReturn

from lockstep.config.rules import parse_skip
from lockstep.config.schema import RunConfig
from lockstep.data.pairs.loader import PairLoader
from lockstep.data.text.packing import RowLoader
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import StepDecision
from lockstep.errors import DivergedError
from lockstep.parallel.replica import Replica
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.record.events import append_event
from lockstep.record.metrics import to_json_value
from lockstep.training.checkpointer import Checkpointer
from lockstep.units import join_names

log = logging.getLogger("lockstep")

WINDOW_STEPS = 64  # the newest committed losses, to which a loss is compared
MIN_STEPS = 16  # fewer losses show no spike
LEAST_DEVIATION = 0.02  # of the median: a loss that hardly changes has a small deviation


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


class Rollback:
    """The micro-batches of a run that contribute neither loss nor gradient nor tokens: the entries
    of `divergence.skip`, and with `on_divergence = "rollback"` the causes of diverging steps.

    Everything is decided from values that all ranks share. Checkpoints and joiners have `to_json`.
    A guilty micro-batch is forgotten when the generation ends before the commit: all ranks find it
    again.
    """

    def __init__(
        self, run: RunConfig, loader: PairLoader | RowLoader, checkpointer: Checkpointer
    ) -> None:
        self.options, self.enabled, self.micro_batches = (
            run.divergence,
            run.on_divergence == "rollback",
            run.batch.micro_batches,
        )
        self.loader, self.checkpointer, self.runtime = loader, checkpointer, checkpointer.runtime
        saved: Mapping[str, Any] = (
            self.runtime.loop_state.get("rollback") or checkpointer.facts.get("rollback") or {}
        )
        self._given = parse_skip(run.divergence.skip)
        self._found: dict[int, list[int]] = {
            int(number) - 1: ks for number, ks in saved.get("skipped", {}).items()
        }
        self._losses: list[tuple[int, float]] = [
            (step, loss) for step, loss in saved.get("losses", [])
        ]
        self._attempt = (
            -1,
            -1,
        )  # the generation and the step that `_guilty` and `_measured` belong to
        self._guilty, self._measured = list[int](), dict[int, MicroBatchResult]()
        self._record()

    def to_json(self) -> dict[str, Any]:
        return {
            "skipped": {str(step + 1): ks for step, ks in self._found.items()},
            "losses": self._losses,
        }

    def _record(self) -> None:
        if self._found or self._losses:
            self.checkpointer.run_facts["rollback"] = self.to_json()
            self.runtime.set_loop_state("rollback", self.to_json())

    def start(self, step: int) -> list[int]:
        """Start an attempt at `step`; return the micro-batches that it skips."""
        if self._attempt != (attempt := (self.runtime.world.generation, step)):
            self._attempt, self._guilty, self._measured = attempt, [], {}
        return sorted({*self._given.get(step, []), *self._found.get(step, []), *self._guilty})

    def trained(self, step: int) -> list[int] | None:
        """Return the micro-batches of a committed step that were not skipped; None: all of them."""
        skipped = {*self._given.get(step, []), *self._found.get(step, [])}
        return [k for k in range(self.micro_batches) if k not in skipped] if skipped else None

    def suspects(self, step: int, decision: StepDecision) -> bool:
        """Return whether to measure the micro-batches of `step`: at most once in a generation."""
        if not self.enabled or self._measured:
            return False
        if not (decision.finite and decision.gradient_finite):
            return True
        limit = loss_limit([loss for _, loss in self._losses], self.options.spike)
        return (
            limit < math.inf
            and decision.loss / self.loader.tokens_in_step(step, self.trained(step)) > limit
        )

    def measure(self, step: int, replica: Replica | ShardedReplica) -> Iterator[int]:
        """Collective. Yield each micro-batch of this replica that is not skipped, computed alone
        and dropped; decide which ones the next attempt skips. DivergedError when that is not
        possible."""
        rows, skipped, start_s = list[tuple[int, str, bool]](), self.start(step), time.monotonic()
        for own in (k for k in replica.replica_leaves if k not in skipped):
            for k in replica.rehearsal(step, own):
                self.runtime.board.enter("forward", step + 1)
                yield k
            rows.append((own, str(replica.rehearsed), replica.rehearsed_finite))
        self.runtime.board.enter("voting")
        self.runtime.board.enter_collective()
        for k, loss, finite in chain.from_iterable(all_gather_json(self.runtime, rows)):
            before = self._measured.get(
                k
            )  # from another worker of the replica, with other parts of the gradient
            mean = float(loss) / max(1, self.loader.tokens_in_step(step, [k]))
            self._measured[k] = MicroBatchResult(
                mean, finite and (before is None or before.gradient_finite)
            )
        limit = loss_limit(
            [loss for _, loss in self._losses], self.options.spike, self.micro_batches
        )
        self._guilty = find_guilty(self._measured, limit)
        self._refuse(step)
        self.runtime.ledger.move("training", "lost", time.monotonic() - start_s, time.monotonic())

    def _refuse(self, step: int) -> None:
        """DivergedError when no micro-batch would be left, or more are skipped than allowed."""

        def fail(what: str, hint: str) -> NoReturn:
            self._append_event("diverged", step)
            raise DivergedError(
                what,
                "measured one by one, agreed by all processes before the update, which was not made",
                hint,
            )

        if len(self._guilty) == len(self._measured):
            what = f"none of the {len(self._measured)} micro-batches of step {step + 1} is finite: the cause is the weights, not the data"
            fail(
                what,
                "lower optim.learning_rate, lengthen optim.warmup_steps, or set optim.clip_norm; the checkpoints before are whole",
            )
        before, allowed = sum(map(len, self._found.values())), self.options.max_skipped
        if before + len(self._guilty) > allowed:
            what = f"step {step + 1} diverges: {self._describe(step)}; with {before} skipped before, that is more than {allowed}"
            fail(what, "remove these samples from the data, or raise divergence.max_skipped")

    def _describe(self, step: int) -> str:
        kind, texts = self.loader.sample_kind, list[str]()
        for k in self._guilty:
            loss, samples = self._measured[k].loss, self.loader.samples(step, k)
            reason = (
                f"loss {loss:.4g}"
                if self._measured[k].gradient_finite
                else f"loss {loss:.4g}, gradient not finite"
            )
            texts.append(
                f"micro-batch {k} ({reason}; {kind} {join_names([str(sample) for sample in samples])})"
            )
        return ", ".join(texts)

    def commit(self, step: int, decision: StepDecision) -> None:
        """Record `step`, which all ranks have agreed on."""
        if self._guilty:
            self._found[step] = self._guilty
            if self.runtime.world.leader:
                log.warning("step %d was retried without %s", step + 1, self._describe(step))
            self._append_event("rolled back", step)
        elif (
            self._measured
            and decision.finite
            and decision.gradient_finite
            and self.runtime.world.leader
        ):
            log.warning(
                "step %d: the loss is a spike, but no micro-batch is: the step is trained as it is",
                step + 1,
            )
            self._append_event("spike", step)
        if self.enabled:
            tokens = self.loader.tokens_in_step(step, self.trained(step))
            self._losses = [*self._losses, (step, decision.loss / tokens)][-WINDOW_STEPS:]
        self._record()

    def _append_event(self, event: str, step: int) -> None:
        if self.runtime.world.leader:
            rows = [
                {
                    "k": k,
                    **vars(self._measured[k]),
                    self.loader.sample_kind: self.loader.samples(step, k),
                }
                for k in self._guilty
            ]
            append_event(
                self.checkpointer.store.folder.parent,
                event,
                step=step + 1,
                micro_batches=to_json_value(rows),
            )
