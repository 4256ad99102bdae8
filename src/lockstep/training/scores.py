"""Objects for session.state that follow a score: the best step, and when to stop.

A score must be the same on all workers, as session.evaluate and session.gather give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer

from lockstep.checkpoint.folder import committed_steps
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.record.events import append_event
from lockstep.training.replica_group import ReplicaGroup

Mode = Literal["min", "max"]


class Position(AbstractContextManager["Position"]):
    """The step that the loop is in, and the updates of the optimizers so far."""

    def __init__(self, replicas: ReplicaGroup, optimizers: Sequence[Optimizer]) -> None:
        self.replicas = replicas
        self.commit_steps = replicas.commit_steps
        self.step = -1
        self.updates = 0
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in optimizers]

    def begin(self, step: int) -> None:
        self.step = step

    def trained_step(self) -> int | None:
        """Return the step that the loop is in if its micro-batches are done."""
        return self.step if self.replicas.last_step == self.step else None

    def _count(self, *_: object) -> None:
        self.updates += 1

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class Score:
    """What Best and EarlyStopping have in common: a Session follows them."""

    def __init__(self, mode: Mode, where: str) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode={mode!r}", where, 'give "min" or "max"')
        self.mode = mode
        self.given_after: int | None = None  # updates, in this step; None: no score in it
        self._loop: Position | None = None

    def follow(self, loop: Position) -> None:
        """Let a Session follow the scores."""
        self._loop = loop

    def forget_update(self) -> None:
        self.given_after = None

    def _accept(self, step: int | None) -> int:
        """Return the number of committed steps. UsageError for a score that would have no effect,
        or another one after a failure."""
        name = type(self).__name__
        where = f"lockstep.{name}.update(...)"
        if self._loop is None:
            raise UsageError(
                f"this {name} is not in session.state",
                where,
                f"before the loop: session.state(name={name.lower()})",
            )
        trained = self._loop.trained_step()
        if trained is None:
            raise UsageError(
                f"a score for {name} before the micro-batches of the step",
                where,
                "give it after optimizer.step(): a worker that joins repeats what is before them",
            )
        if step not in (None, trained):
            raise UsageError(
                f"a score of step={step}, and the loop has step={trained}",
                where,
                f"{name.lower()}.update(step, score), after optimizer.step()",
            )
        self.given_after = self._loop.updates
        return trained + self._loop.commit_steps


class Best(Score):
    """The step with the best score. Its checkpoint is saved and kept, under the name "best":
    `lockstep checkpoint export RUN best`.

        best = lockstep.Best(mode="max")
        session.state(best=best)
        ...
        best.update(step, accuracy)     after optimizer.step()

    mode  "min": a lower score is better

    `step` is the number of committed steps then, and `score` the score; None before the first.
    """

    def __init__(self, mode: Mode = "min") -> None:
        super().__init__(mode, "lockstep.Best(mode=...)")
        self.step: int | None = None
        self.score: float | None = None

    def update(self, step: int, score: float) -> bool:
        """Give the score of the weights after `step` of session.steps. Return whether it is the
        best."""
        committed = self._accept(step)
        is_best = is_better(score, self.score, self.mode)
        if is_best:
            self.step, self.score = committed, float(score)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "score": self.score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.score = state["step"], state["score"]


class EarlyStopping(Score):
    """End session.steps, with a save, after `patience` scores in a row that are not better.

        stopping = lockstep.EarlyStopping(patience=3)
        session.state(stopping=stopping)
        ...
        stopping.update(loss)

    mode       "min": a lower score is better
    min_delta  by how much it must be better than the best one
    name       of the score, in the message that ends the loop: "validation accuracy"

    A run that has stopped trains no step when it is started again, unless `patience` is higher.
    """

    def __init__(
        self, patience: float, mode: Mode = "min", min_delta: float = 0.0, name: str = "score"
    ) -> None:
        where = "lockstep.EarlyStopping(...)"
        if patience < 1 or not min_delta >= 0:
            raise UsageError(
                f"patience={patience}, min_delta={min_delta}",
                where,
                "give a patience of at least 1, and a difference",
            )
        super().__init__(mode, where)
        self.patience = patience
        self.min_delta = min_delta
        self.name = name
        self.best: float | None = None
        self.worse = 0  # scores since the best one

    @property
    def stops(self) -> bool:
        return self.worse >= self.patience

    def why(self) -> str:
        """Return why the loop ends after this step; "" if it continues."""
        return f"no {self.name} better than {self.best} in {self.worse}" if self.stops else ""

    def update(self, score: float) -> bool:
        """Give the next score. Return whether the loop ends after this step."""
        self._accept(None)
        if is_better(score, self.best, self.mode, self.min_delta):
            self.best, self.worse = float(score), 0
        else:
            self.worse += 1
        return self.stops

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.worse = state["best"], state["worse"]


def is_better(score: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether a score is better than the best one; NaN is not."""
    if best is None or math.isnan(score):
        return not math.isnan(score)
    gain = best - score if mode == "min" else score - best
    return gain > min_delta


class ScoredRun:
    """What the scores in the state of a Session decide: the same on all workers."""

    def __init__(
        self,
        folder: Path,
        state: Iterable[object],
        runtime: ElasticRuntime,
        loop: Position,
    ) -> None:
        self.folder = folder
        self.loop = loop
        self.runtime = runtime
        self.scores = [value for value in state if isinstance(value, Best | EarlyStopping)]
        for score in self.scores:
            score.follow(loop)
        self.bests = [score for score in self.scores if isinstance(score, Best)]
        self.stoppings = [score for score in self.scores if isinstance(score, EarlyStopping)]
        self._chosen: list[list[int]] = [[] for _ in self.bests]  # each best step of this start

    def is_best(self, step: int) -> bool:
        return any(best.step == step for best in self.bests)

    def best_steps(self, saving: int = -1) -> list[int]:
        """Return the best steps that have a checkpoint, or get one with the save of `saving`."""
        committed = {saving, *committed_steps(self.folder / "checkpoints")}
        steps = [[step for step in chosen if step in committed] for chosen in self._chosen]
        return [chosen[-1] for chosen in steps if chosen]

    def kept_steps(self) -> list[int]:
        """Return the steps that retention keeps: the best ones here, and of `lockstep evaluate`."""
        from lockstep.checkpoint.evaluations import best_steps

        return [*self.best_steps(), *best_steps(self.folder)]

    def why(self) -> str:
        """Return why the run has stopped; "" if it continues."""
        return "; ".join(filter(None, (stopping.why() for stopping in self.stoppings)))

    def follow_state(self) -> None:
        """Note the best steps that a checkpoint or another worker has given."""
        for best, chosen in zip(self.bests, self._chosen, strict=True):
            if best.step is not None and best.step not in chosen:
                chosen.append(best.step)

    def end(self, step: int) -> str:
        """Collective, in a step with scores. Return why `step` is the last one, and record it; ""
        if it is not. UsageError, on all workers, when their scores differ."""
        if any(score.given_after is not None for score in self.scores):
            self._refuse_different()
        now = self.loop.updates
        if any(best.given_after not in (None, now) for best in self.bests):
            raise UsageError(
                f"the weights of step {step} were scored before they were updated",
                "lockstep.Best.update(step, score): the checkpoint of the step has others",
                "score them after optimizer.step()",
            )
        for score in self.scores:
            score.forget_update()
        self.follow_state()
        if self.bests and self.bests[0].step == step and self.runtime.is_leader():
            append_event(self.folder, "best score", step=step, score=self.bests[0].score)
        why = self.why()
        if why and self.runtime.is_leader():
            append_event(self.folder, "stopped early", step=step, why=why)
        return why

    def _refuse_different(self) -> None:
        if self.runtime.is_late:  # the others have ended this step
            return
        own = [score.state_dict() for score in self.scores]
        with self.runtime.catch_peer_loss():
            states = all_gather_json(self.runtime, own)
            if any(state != states[0] for state in states):
                listed = "; ".join(f"rank {rank}: {state}" for rank, state in enumerate(states))
                raise UsageError(
                    f"the scores differ between the workers: {listed}",
                    "lockstep.Best, lockstep.EarlyStopping",
                    "give them what session.evaluate or session.gather returns",
                )
