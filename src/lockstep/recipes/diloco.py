"""Train learners apart, with DiLoCo: the script of `lockstep train` when diloco.learners is set.

    lockstep train recipes/translate.toml --workers 2 --diloco.learners 4 --diloco.every 50
    lockstep recipes copy diloco my.py            a copy of this file, to change

Each learner starts at the common weights and takes diloco.every steps with its inner optimizers.
The mean change of all learners is the gradient of the outer optimizer (docs/slow-links.md).
"""

from __future__ import annotations

import math

import torch

from lockstep import recipes


def main(run: recipes.RecipeRun) -> None:
    config = run.config
    diloco = config.diloco
    # Sentence pairs, documents or chats, and their model without memory.
    data = recipes.open_learners_data(run)
    validation = recipes.Validation(run, data)
    model = data.meta_model()
    inner = recipes.make_optimizers(run, model)
    outer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=diloco.outer_learning_rate,
        momentum=diloco.outer_momentum,
        nesterov=diloco.outer_momentum > 0,
        foreach=False,
    )

    with run.session() as session:
        model, outer = run.prepare(session, model, outer)
        learners = session.learners(*inner, count=diloco.learners, steps=diloco.every)
        loader = session.loader(data.loader)
        session.state(best=validation.best, stopping=validation.stopping)

        for step in session.steps(config.steps):  # 0, 50, 100, ...
            for inner_step in learners(step):
                for batch in loader(inner_step):
                    session.backward(data.loss(model, batch), count=batch.count)
                session.clip_grad_norm_(config.optim.clip_norm or math.inf)
                rate = recipes.learning_rate(inner_step + 1, run.optim_after(inner_step))
                for optimizer in inner:
                    recipes.set_learning_rate(optimizer, rate)
                    optimizer.step()

            norm = session.clip_grad_norm_(math.inf)  # of the mean change, which is not clipped
            outer.step()
            steps = step + diloco.every  # of each learner, so far
            if config.optim.ema_decay:  # of `every` steps at once
                recipes.update_average([outer], config.optim.ema_decay**diloco.every, steps)
            epoch = data.loader.order.epoch(steps)
            session.log(step, norm=norm, lr=rate, epoch=epoch)

            if validation.is_due(steps):
                with recipes.averaged_weights([outer]):
                    validation.score(session, model, step, steps)

    recipes.evaluate_at_end(run)


if __name__ == "__main__":
    recipes.start(main, __file__)
