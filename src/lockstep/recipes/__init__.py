"""The scripts of `lockstep train`, each a training loop on a Session, and what they are made of.

lockstep.recipes.translate, language_model, diloco   the scripts: main(run)

RecipeRun            values, folder and workers of a run; opens its Session
start                run a script by itself, with the values of the command line
open_pairs, open_rows, open_learners_data        data and model of a run: tasks/
make_optimizers      of the section [optim]; with set_learning_rate and learning_rate
update_average, averaged_weights                 a moving average of the weights
Validation           the validation loss in the loop, its best step, early stopping
evaluate_at_end      scores on held-out data, and samples
"""

from lockstep.recipes.parts import (
    Validation,
    evaluate_at_end,
    make_optimizers,
    open_learners_data,
    open_pairs,
    open_rows,
)
from lockstep.recipes.run import RecipeRun
from lockstep.recipes.script import start
from lockstep.tasks.optim import (
    averaged_weights,
    learning_rate,
    set_learning_rate,
    update_average,
)

__all__ = [
    "RecipeRun",
    "Validation",
    "averaged_weights",
    "evaluate_at_end",
    "learning_rate",
    "make_optimizers",
    "open_learners_data",
    "open_pairs",
    "open_rows",
    "set_learning_rate",
    "start",
    "update_average",
]
