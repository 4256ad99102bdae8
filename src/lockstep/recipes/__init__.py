"""The scripts of `lockstep train`, each a training loop on a Session, and what they are made of.

    lockstep.recipes.translate, pretrain, finetune, diloco   the scripts: main(run)

    RecipeRun            values, folder and workers of a run; opens its Session
    start                run a script by itself, with the values of the command line
    open_pairs, open_documents, open_chats, open_learners_data   data and model of a run: tasks/
    make_optimizers      of the section [optim]; with set_learning_rate and learning_rate
    update_average, averaged_weights                 a moving average of the weights
    held_out_batches, mean_loss, loss_and_perplexity, validation_line   validation in the loop
    evaluate_at_end      scores on held-out data, and samples

Names are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.recipes.parts import evaluate_at_end as evaluate_at_end
    from lockstep.recipes.parts import make_optimizers as make_optimizers
    from lockstep.recipes.parts import open_chats as open_chats
    from lockstep.recipes.parts import open_documents as open_documents
    from lockstep.recipes.parts import open_learners_data as open_learners_data
    from lockstep.recipes.parts import open_pairs as open_pairs
    from lockstep.recipes.run import RecipeRun as RecipeRun
    from lockstep.recipes.script import start as start
    from lockstep.recipes.validation import held_out_batches as held_out_batches
    from lockstep.recipes.validation import loss_and_perplexity as loss_and_perplexity
    from lockstep.recipes.validation import mean_loss as mean_loss
    from lockstep.recipes.validation import validation_line as validation_line
    from lockstep.tasks.optim import averaged_weights as averaged_weights
    from lockstep.tasks.optim import learning_rate as learning_rate
    from lockstep.tasks.optim import set_learning_rate as set_learning_rate
    from lockstep.tasks.optim import update_average as update_average

_MODULES = {
    "RecipeRun": "lockstep.recipes.run",
    "averaged_weights": "lockstep.tasks.optim",
    "evaluate_at_end": "lockstep.recipes.parts",
    "held_out_batches": "lockstep.recipes.validation",
    "learning_rate": "lockstep.tasks.optim",
    "loss_and_perplexity": "lockstep.recipes.validation",
    "make_optimizers": "lockstep.recipes.parts",
    "mean_loss": "lockstep.recipes.validation",
    "open_chats": "lockstep.recipes.parts",
    "open_documents": "lockstep.recipes.parts",
    "open_learners_data": "lockstep.recipes.parts",
    "open_pairs": "lockstep.recipes.parts",
    "set_learning_rate": "lockstep.tasks.optim",
    "start": "lockstep.recipes.script",
    "update_average": "lockstep.tasks.optim",
    "validation_line": "lockstep.recipes.validation",
}
__all__ = [name for name in _MODULES]  # a comprehension: linters refuse a call here


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
