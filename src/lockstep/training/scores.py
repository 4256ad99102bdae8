"""Objects for session.state that follow a score: the best step, and when to stop.

A score must be the same on all workers, as session.evaluate and session.gather give it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import UsageError
from lockstep.record.events import append_event

Mode = Literal["min", "max"]


class Best:
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
        self.mode = checked_mode(mode, "lockstep.Best(mode=...)")
        self.step: int | None = None
        self.score: float | None = None

    def update(self, step: int, score: float) -> bool:
        """Give the score of the weights after `step` of session.steps. Return whether it is the
        best."""
        is_best = is_better(score, self.score, self.mode)
        if is_best:
            self.step, self.score = step + 1, float(score)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "score": self.score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.score = state["step"], state["score"]


class EarlyStopping:
    """End session.steps, with a save, after `patience` scores in a row that are not better.

        stopping = lockstep.EarlyStopping(patience=3)
        session.state(stopping=stopping)
        ...
        stopping.update(loss)

    mode       "min": a lower score is better
    min_delta  by how much it must be better than the best one
    A run that has stopped trains no step when it is started again, unless `patience` is higher.
    """

    def __init__(self, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> None:
        where = "lockstep.EarlyStopping(...)"
        if patience < 1 or not min_delta >= 0:
            what = f"patience={patience}, min_delta={min_delta}"
            raise UsageError(what, where, "give a patience of at least 1, and a difference")
        self.patience = patience
        self.mode = checked_mode(mode, where)
        self.min_delta = min_delta
        self.best: float | None = None
        self.worse = 0  # scores since the best one

    @property
    def stops(self) -> bool:
        return self.worse >= self.patience

    def update(self, score: float) -> bool:
        """Give the next score. Return whether the loop ends after this step."""
        if is_better(score, self.best, self.mode, self.min_delta):
            self.best, self.worse = float(score), 0
        else:
            self.worse += 1
        return self.stops

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.worse = state["best"], state["worse"]


def checked_mode(mode: Mode, where: str) -> Mode:
    if mode not in ("min", "max"):
        raise UsageError(f"mode={mode!r}", where, 'give "min" or "max"')
    return mode


def is_better(score: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether a score is better than the best one; NaN is not."""
    if best is None or math.isnan(score):
        return not math.isnan(score)
    gain = best - score if mode == "min" else score - best
    return gain > min_delta


class ScoredRun:
    """What the scores in the state of a Session decide: the same on all workers.

    leader  whether this worker records that the run stops
    """

    def __init__(self, folder: Path, state: Iterable[object], leader: Callable[[], bool]) -> None:
        self.folder = folder
        self.leader = leader
        values = list(state)
        self.bests = [value for value in values if isinstance(value, Best)]
        self.stoppings = [value for value in values if isinstance(value, EarlyStopping)]

    def best_steps(self) -> list[int]:
        """Return the best steps so far, whose checkpoints retention keeps."""
        return [best.step for best in self.bests if best.step is not None]

    def why(self) -> str:
        """Return why the run has stopped; "" if it continues."""
        return "; ".join(
            f"no score better than {stopping.best} in {stopping.worse}"
            for stopping in self.stoppings
            if stopping.stops
        )

    def end(self, step: int) -> str:
        """Return why `step` is the last one, and record it; "" if it is not."""
        why = self.why()
        if why and self.leader():
            append_event(self.folder, "stopped early", step=step, why=why)
        return why
