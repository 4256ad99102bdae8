"""The state of a Trainer in checkpoints, beside its model, its optimizer and its schedule."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from lockstep import EarlyStopping
from lockstep.frameworks.supported import module_of
from lockstep.unsaved.watch import has_state_dict

KEPT = ("best_metric", "best_global_step", "begun")  # of TrainerState


class SavedTrainer(EarlyStopping):
    """The state of a Trainer beside its model and optimizer, for session.state. The Session ends
    with the step in which an EarlyStoppingCallback has lost its patience, also when resumed."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(patience=1)
        self.trainer = trainer
        self.attribute_holders = callbacks_by_name(trainer.callback_handler.callbacks)
        self.logged: list[dict[str, Any]] = []  # equal on all workers

    def why(self) -> str:
        best = self.trainer.state.best_metric
        for callback in self.attribute_holders.values():
            if best is not None and isinstance(callback, EarlyStoppingCallback):
                worse = callback.early_stopping_patience_counter
                if worse >= callback.early_stopping_patience:
                    return f"no score better than {best} in {worse}"
        return ""

    def stateful_parts(self) -> dict[str, Any]:
        """Return what callbacks hold that has a state_dict, such as an EMA, without what the
        Session holds."""
        trainer: Any = self.trainer
        held = {*map(id, (trainer.optimizer, trainer.lr_scheduler, *trainer.model.parameters()))}
        return {
            f"{name}_{key}": part
            for name, callback in self.attribute_holders.items()
            for key, part in vars(callback).items()
            if has_state_dict(part)
            and id(part) not in held
            and not (isinstance(part, nn.Module) and held & {*map(id, part.parameters())})
        }

    def state_dict(self) -> dict[str, Any]:
        kept = {name: vars(self.trainer.state).get(name) for name in KEPT}
        return kept | {"log_history": self.logged}

    def load_state_dict(self, saved: Any) -> None:
        vars(self.trainer.state).update(saved)
        self.logged = [*saved["log_history"]]


def callbacks_by_name(callbacks: list[TrainerCallback]) -> dict[str, TrainerCallback]:
    """Return the callbacks that have a state by the names of their classes."""
    named: dict[str, TrainerCallback] = {}
    for callback in callbacks:
        kind = type(callback)
        if isinstance(callback, ExportableState) or not module_of(kind).startswith("transformers."):
            name = kind.__name__
            while name in named:
                name += "_2"
            named[name] = callback
    return named
