"""What checkpoints hold of a Trainer beside its model, its optimizer and its schedule."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from lockstep import EarlyStopping
from lockstep.frameworks.supported import module_of
from lockstep.log import log
from lockstep.training.attributes import mark_of
from lockstep.units import join_names
from lockstep.unsaved.values import Look, Unfinished
from lockstep.unsaved.watch import compared_values, has_state_dict, held_ids

SECONDS_OF_A_LOOK = 0.05


class SavedTrainer:
    """The state of a Trainer beside its model and optimizer, for session.state."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.callbacks = callbacks_by_name(trainer.callback_handler.callbacks)
        self.initial = self._exported()
        self.removed: dict[str, str] = {}  # callbacks that a checkpoint has and this run lacks
        self.marks: dict[str, int] = {}  # of what no checkpoint holds
        self.warned: set[str] = set()
        self.logged: list[dict[str, float | None]] = []  # equal on all workers
        self.early = [c for c in self.callbacks.values() if isinstance(c, EarlyStoppingCallback)]
        patience = min((c.early_stopping_patience for c in self.early), default=math.inf)
        self.stopping = EarlyStopping(patience)

    def update_stopping(self) -> None:
        """Let the Session end with this step, and not be resumed, when a callback stops early."""
        worse = 0
        if self.early and self.trainer.control.should_training_stop:
            worse = max(vars(c)["early_stopping_patience_counter"] for c in self.early)
        self.stopping.load_state_dict({"best": self.trainer.state.best_metric, "worse": worse})

    def stateful_parts(self) -> dict[str, Any]:
        """Return what callbacks hold that has a state_dict, such as an EMA, without what the
        Session holds."""
        trainer = self.trainer
        trained = {id(parameter) for parameter in trainer.model.parameters()}
        held = (trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)
        return {
            f"{name}_{key}": part
            for name, callback in self.attribute_holders().items()
            for key, part in vars(callback).items()
            if has_state_dict(part)
            and all(part is not other for other in held)
            and not (isinstance(part, nn.Module) and trained & {*map(id, part.parameters())})
        }

    def attribute_holders(self) -> dict[str, TrainerCallback]:
        """Return the callbacks whose attributes that change are part of the checkpoints."""
        return {
            name: callback
            for name, callback in self.callbacks.items()
            if not isinstance(callback, ExportableState)
            and not module_of(callback).startswith("transformers.")
        }

    def state_dict(self) -> dict[str, str]:
        state = self.trainer.state
        self._warn_of_unsaved()
        best = {"best_metric": state.best_metric, "best_global_step": state.best_global_step}
        exported = self._exported().items()
        changed = {name: text for name, text in exported if text != self.initial[name]}
        return {"state": json.dumps([best, self.removed | changed, self.logged])}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        best, exported, self.logged = json.loads(saved["state"])
        vars(self.trainer.state).update(best, log_history=[*self.logged])
        for name in exported.keys() & self.callbacks.keys():
            vars(self.callbacks[name]).update(json.loads(exported[name]))
        self.removed = {name: exported[name] for name in exported.keys() - self.callbacks.keys()}
        if self.removed:
            log.warning(
                "the checkpoint has the state of callbacks that this run lacks: %s",
                join_names(sorted(self.removed)),
            )

    def _warn_of_unsaved(self) -> None:
        """Warn of what changes in callbacks and is no plain value and no object with a state."""
        trainer, holders = self.trainer, self.attribute_holders()
        parts = self.stateful_parts().values()
        held = held_ids([trainer.model, trainer.optimizer, trainer.lr_scheduler, *parts])
        held |= {*map(id, (trainer, trainer.args, trainer.state, trainer.control))}
        look = Look(held, {module_of(callback) for callback in holders.values()}, SECONDS_OF_A_LOOK)
        marks: dict[str, int] = {}
        with suppress(Unfinished):
            for name, callback in holders.items():
                for key, part in vars(callback).items():
                    if id(part) not in held and mark_of(part, ()) is None:
                        values = compared_values(look, f"{name}.{key}", "", part)
                        marks |= {path: value.mark for path, value in values}
        changed = [path for path, mark in marks.items() if self.marks.get(path, mark) != mark]
        self.marks = marks
        if changed := [path for path in changed if path not in self.warned]:
            self.warned |= {*changed}
            log.warning(
                "callbacks change what no checkpoint holds: %s. After a resume, and in a worker "
                "that joins, each starts from its value before training. Keep plain values, or "
                "an object with state_dict and load_state_dict, in an attribute",
                join_names(changed),
            )

    def _exported(self) -> dict[str, str]:
        return {
            name: json.dumps(callback.state()["attributes"])
            for name, callback in self.callbacks.items()
            if isinstance(callback, ExportableState)
        }


def callbacks_by_name(callbacks: list[TrainerCallback]) -> dict[str, TrainerCallback]:
    """Return them by the names of their classes, numbered where a class occurs again."""
    named: dict[str, TrainerCallback] = {}
    for callback in callbacks:
        kind = type(callback)
        same = sum(type(other) is kind for other in named.values())
        named[f"{kind.__name__}_{same}" if same else kind.__name__] = callback
    return named
