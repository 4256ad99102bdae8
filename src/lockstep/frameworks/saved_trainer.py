"""The state of a Trainer in checkpoints, beside its model, its optimizer and its schedule."""

from __future__ import annotations

import json
import math
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from lockstep import EarlyStopping
from lockstep.frameworks.supported import module_of
from lockstep.log import log
from lockstep.units import join_names
from lockstep.unsaved.watch import has_state_dict


class SavedTrainer:
    """The state of a Trainer beside its model and optimizer, for session.state."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state = trainer.state
        self.callbacks = callbacks_by_name(trainer.callback_handler.callbacks)
        self.initial = self._exported()
        self.removed: dict[str, str] = {}  # callbacks that a checkpoint has and this run lacks
        self.logged: list[dict[str, Any]] = []  # equal on all workers
        self.early = [c for c in self.callbacks.values() if isinstance(c, EarlyStoppingCallback)]
        patience = min((c.early_stopping_patience for c in self.early), default=math.inf)
        self.stopping = EarlyStopping(patience)

    def update_stopping(self) -> None:
        """Let the Session end with this step, and not be resumed, when a callback stops early."""
        worse = 0
        if self.early and self.trainer.control.should_training_stop:
            worse = max(vars(c)["early_stopping_patience_counter"] for c in self.early)
        self.stopping.load_state_dict({"best": self.state.best_metric, "worse": worse})

    def stateful_parts(self) -> dict[str, Any]:
        """Return what callbacks hold that has a state_dict, such as an EMA, without what the
        Session holds."""
        trainer: Any = self.trainer
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
        state = self.state
        best = {"best_metric": state.best_metric, "best_global_step": state.best_global_step}
        exported = self._exported().items()
        changed = {name: text for name, text in exported if text != self.initial[name]}
        return {"state": json.dumps([best, self.removed | changed, self.logged])}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        best, exported, self.logged = json.loads(saved["state"])
        vars(self.state).update(best, log_history=[*self.logged])
        for name in exported.keys() & self.callbacks.keys():
            vars(self.callbacks[name]).update(json.loads(exported[name]))
        self.removed = {name: exported[name] for name in exported.keys() - self.callbacks.keys()}
        if self.removed:
            log.warning(
                "the checkpoint has the state of callbacks that this run lacks: %s",
                join_names(sorted(self.removed)),
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
