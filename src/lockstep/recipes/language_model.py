"""Train a language model on text or on chats, whole or by adapters: a script of `lockstep train`.

    lockstep train recipes/llama-pretrain.toml --workers 2       task = "pretrain"
    lockstep train recipes/llama-sft.toml --workers 2            task = "sft"
    lockstep recipes copy language_model my.py                   a copy of this file, to change

`run` has the values of the run file and of the flags: run.config.optim is its section [optim].
"""

from __future__ import annotations

import math

from lockstep import recipes


def main(run: recipes.RecipeRun) -> None:
    config = run.config
    # Rows of batch.seq_len tokens: documents one after the other, or whole chats, packed.
    rows = recipes.open_rows(run)
    validation = recipes.Validation(run, rows)

    # A model on the meta device, without memory. `prepare` gives it to each worker, whole or in
    # slices, with its initial weights or those of llama.init_from.
    model = rows.meta_model()
    optimizers = recipes.make_optimizers(run, model)

    with run.session() as session:
        model, *optimizers = run.prepare(session, model, *optimizers)
        loader = session.loader(rows.loader)
        session.state(best=validation.best, stopping=validation.stopping)

        for step in session.steps(config.steps):
            for batch in loader(step):
                loss = model(batch.tokens, batch.labels, batch.documents)
                # A sum over the predicted tokens; of chats those of answers.
                session.backward(loss, count=batch.count)

            norm = session.clip_grad_norm_(config.optim.clip_norm or math.inf)  # 0: never clipped
            rate = recipes.learning_rate(step + 1, run.optim_after(step))  # --override changes it
            for optimizer in optimizers:
                recipes.set_learning_rate(optimizer, rate)
                optimizer.step()
            if config.optim.ema_decay:  # beside the moments; validated and exported
                recipes.update_average(optimizers, config.optim.ema_decay, step + 1)
            epoch = rows.loader.order.epoch(step + 1)
            session.log(step, norm=norm, lr=rate, epoch=epoch)

            if validation.is_due(step + 1):
                with recipes.averaged_weights(optimizers):  # if there are averages
                    validation.score(session, model, step, step + 1)

    # The last checkpoint: scores and samples, and the command that uses it.
    recipes.evaluate_at_end(run)


if __name__ == "__main__":
    recipes.start(main, __file__)
