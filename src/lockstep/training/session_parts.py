"""What a Session is given: its arguments, and what the loop declares before its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from lockstep.checkpoint.stateful import Stateful, refuse_unsupported_state
from lockstep.data.order import splitmix64
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import REPLICA_AXES, Layout
from lockstep.parallel.parallelize import SplitOptions
from lockstep.parallel.plans import StagedModel
from lockstep.runtime.numerics import seed_generators
from lockstep.training.function_values import FunctionValues
from lockstep.training.leaves import Leaves
from lockstep.training.loader import Loader
from lockstep.training.model_options import PreparedModel
from lockstep.training.replica_group import ReplicaOptions
from lockstep.training.saved_state import PerMicroBatch, SavedState

if TYPE_CHECKING:
    from lockstep.training.initial_values import InitialValues
    from lockstep.training.profiler import ProfiledSteps
    from lockstep.training.rollback import Rollback
    from lockstep.unsaved.watch import UnsavedVariables


class RunValues(Protocol):
    """Values of a run beside the arguments of its Session: `lockstep train` gives those of its run
    file."""

    def shared(self) -> dict[str, str]:
        """Return the values that are equal on all workers, as text by name."""

    def saved(self) -> dict[str, Any]:
        """Return what checkpoints hold of them. A resume compares "fingerprints", the values with
        other bits."""

    def shown(self) -> dict[str, Any]:
        """Return what trackers show."""

    def check(self, facts: Mapping[str, Any], step: int) -> None:
        """Compare with the facts of the resumed checkpoint, of `step`. Error: another run."""


@dataclass
class Declared:
    """What a Session is given: its arguments, and what the loop declares before its first step.

    backends  of the Tracker
    rollback  None: a divergence ends the run
    function  the arguments of the user's function, or none
    splits    further arguments of `prepare`
    init      the initial values of a model on the meta device
    bits      values of `prepare` that decide bits, as text
    saved     what Session.state has returned
    loaders   and what a resumed run must have in common with each
    """

    out: Path
    micro_batches: int
    save_every: int
    keep: int
    seed: int
    resume: str
    backends: Sequence[str]
    progress_s: float
    on_save_error: Literal["continue", "stop"]
    rollback: Rollback | None
    mfu: float | bool
    profiled: ProfiledSteps | None
    options: ReplicaOptions
    run: RunValues | None
    function: FunctionValues
    leaves: Leaves
    model: PreparedModel | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    splits: SplitOptions = SplitOptions()
    init: InitialValues | None = None
    bits: dict[str, str] = field(default_factory=dict)
    state: dict[str, Stateful] = field(default_factory=dict)
    saved: SavedState = field(default_factory=SavedState)
    carried: list[PerMicroBatch] = field(default_factory=list)
    loaders: list[tuple[Loader, str]] = field(default_factory=list)

    def seed_generators(self, step: int, place: int, device: torch.device) -> None:
        """Seed the generators, equal on all workers, also on one that has resumed or joined."""
        seed_generators(splitmix64(self.seed, step, self.micro_batches, place) >> 1, device)

    @property
    def is_staged(self) -> bool:
        """Whether the model runs the stages of a pipeline itself, and returns its loss."""
        return self.model is not None and isinstance(self.model.module, StagedModel)

    def add_state(self, objects: Mapping[str, Any]) -> None:
        state = self.saved.add(objects)
        refuse_unsupported_state(state)
        self.state |= state

    def refuse_second_model(self) -> None:
        if self.model is not None:
            raise UsageError(
                "a second session.prepare",
                "one Session trains one model",
                "put all trained modules into one nn.ModuleDict",
            )

    def refuse_incomplete(self) -> PreparedModel:
        """Return the model. UsageError when the loop has declared too little for its first step."""
        if self.model is None:
            raise UsageError(
                "session.steps without a model",
                "session.steps(...)",
                "call session.prepare(model, optimizer) before",
            )
        states = self.state.values()
        if any(all(carried is not value for value in states) for carried in self.carried):
            raise UsageError(
                "session.state has not received a per_micro_batch",
                "session.steps(...)",
                "saved = session.state(hidden=session.per_micro_batch(...)), "
                "then saved.hidden.value",
            )
        return self.model

    def watch_unsaved(self, runtime: ElasticRuntime) -> UnsavedVariables | None:
        """Return what names, on rank 0, variables of the loop that no checkpoint holds."""
        if not runtime.is_leader():
            return None
        # Only one worker reads the loop's source.
        from lockstep.unsaved.watch import UnsavedVariables

        optimizers = [*self.optimizers, *self.leaves.optimizers]
        held = [self.model, *optimizers, *self.state.values()]
        batches = [loader.batches for loader, _ in self.loaders]
        sources = [part for keyed in batches for part in (keyed.dataset, keyed.collate_fn)]
        return UnsavedVariables(held, sources)

    def facts(self) -> dict[str, str]:
        """Return what a resumed run must have in common with the run, as text."""
        facts = {
            "micro_batches": str(self.micro_batches),
            "seed": str(self.seed),
            "wire": self.options.get("wire", "fp32"),
            "skip": self.rollback.skip_fact() if self.rollback else "none",
        }
        facts |= {**self.leaves.facts, **self.bits}
        return facts | {f"loader {i}": fact for i, (_, fact) in enumerate(self.loaders)}

    def shown_options(self, layout: Layout, total: int) -> dict[str, str]:
        """Return the other arguments, whose change at a resume is a warning, as text."""
        axes = {f"--layout.{axis}": getattr(layout, axis) for axis in REPLICA_AXES}
        shown = {"steps": total, "save_every": self.save_every, **axes}
        shown["on_divergence"] = self.rollback or "stop"
        shown |= self.function.shared() | vars(self.splits) | {**self.options}
        del shown["verify"]  # follows from the option `rehearse`
        return {name: str(value) for name, value in shown.items()}

    def shown(self, layout: Layout, total: int) -> dict[str, Any]:
        """Return the values of the run for trackers."""
        return self.run.shown() if self.run else self.facts() | self.shown_options(layout, total)

    def samples(self, step: int, k: int) -> list[int]:
        """Return the numbers of the samples that a loader has yielded as micro-batch `k` of the
        newest `step`; [] for data without a loader."""
        loader = next((loader for loader, _ in self.loaders if loader.newest_step == step), None)
        return loader.samples(step, k) if loader else []

    @property
    def sample_kind(self) -> str:
        """What the numbers of samples count, in the plural."""
        return next((loader.sample_kind for loader, _ in self.loaders), "samples")

    def samples_of_mean(self) -> int | None:
        """Return the number of samples of the micro-batch that the loop has now; None: unknown."""
        sources: Any = (*(loader for loader, _ in self.loaders), self.model)
        numbers = (source.samples_of_mean() for source in sources)
        return next((number for number in numbers if number is not None), None)
