"""The progress of a worker, exchanged by all members when a generation forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lockstep.elastic.consensus import StepDecision
from lockstep.errors import LockstepError


@dataclass(frozen=True)
class Progress:
    stage: Literal[
        "join", "resume", "step"
    ]  # "join" and "resume" before the first step, then "step"
    step: int  # committed steps; -1: this worker has no training state yet
    decision: StepDecision | None = (
        None  # the vote on the last committed step, for members that missed it
    )
    divergences: int = 0  # see Divergence
    compare_all: bool = False  # compare all weights at the next vote: a member is new
    rehearse: bool = True  # compute micro-batch 0 of the next step on all ranks: a member is new
    one_source: bool = False  # a joiner receives its state from one worker only
    first_generation: bool = True  # the worker was in no generation that trained
    ledger: Mapping[str, Any] | None = None  # how the time of the run was spent
    loop_state: Mapping[str, Any] = field(default_factory=dict)  # see ElasticRuntime.loop_state

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress that `asdict` described. LockstepError for other fields."""
        _refuse_other_fields(cls, values)
        if (decision := values["decision"]) is None:
            return cls(**values)
        _refuse_other_fields(StepDecision, decision)
        tuples = {
            name: tuple(decision[name]) for name in ("divergent_ranks", "digests", "micro_batch_us")
        }
        return cls(**{**values, "decision": StepDecision(**{**decision, **tuples})})


def _refuse_other_fields(kind: type, values: Mapping[str, Any]) -> None:
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        missing, unknown = sorted(expected - values.keys()), sorted(values.keys() - expected)
        raise LockstepError(
            f"a member sent a {kind.__name__} of another version: missing {missing}, unknown {unknown}",
            "exchanged when a generation forms",
            "start all workers with the same version of Lockstep",
        )


def decision_before(members: Sequence[Progress], facts: Mapping[str, Any]) -> StepDecision:
    """Return the loss of the last step before this start: from other workers, or of a
    checkpoint."""
    if decisions := [member.decision for member in members if member.decision and member.step >= 0]:
        newest = decisions[0]
        return StepDecision(newest.loss, newest.count, newest.trained_share)
    return StepDecision(float(facts.get("loss", 0.0)))


def transfer_roles(progress: Sequence[Progress]) -> tuple[int, list[int], list[int]]:
    """Return (the step of the run, the ranks that have its state, the ranks that need it)."""
    newest = max(member.step for member in progress)
    sources = [rank for rank, member in enumerate(progress) if member.step == newest >= 0]
    return newest, sources, [rank for rank, member in enumerate(progress) if member.step < 0]
