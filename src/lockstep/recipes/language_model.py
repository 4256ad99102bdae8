"""Train a language model on text or on chats, whole or by adapters: a script of `lockstep train`.

    lockstep train recipes/llama-pretrain.toml --workers 2       task = "pretrain"
    lockstep train recipes/llama-sft.toml --workers 2            task = "sft"
    lockstep recipes copy language_model my.py                   a copy of this file, to change

`run` has the values of the run file and of the flags: run.config.optim is its section [optim].
"""

from __future__ import annotations

import math

import lockstep
from lockstep import recipes


def main(run: recipes.RecipeRun) -> None:
    config = run.config
    # Rows of batch.seq_len tokens: documents one after the other, or whole chats, packed.
    rows = recipes.open_rows(run)
    held_out = recipes.held_out_batches(run, rows)

    # A model on the meta device, without memory. `prepare` gives it to each worker, whole or in
    # slices, with its initial weights or those of llama.init_from.
    model = rows.meta_model()
    optimizers = recipes.make_optimizers(run, model)

    with run.session() as session:
        model, *optimizers = run.prepare(session, model, *optimizers)
        loader = session.loader(rows.loader)
        best = lockstep.Best()
        stopping = lockstep.EarlyStopping(config.evaluate.patience or math.inf)
        session.state(best=best, stopping=stopping)

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
            session.log(step, norm=norm, learning_rate=rate, epoch=epoch)

            if held_out and (step + 1) % config.evaluate.every_steps == 0:
                with recipes.averaged_weights(optimizers):  # if there are averages
                    loss = recipes.mean_loss(session, model, held_out)
                best.update(step, loss)
                stopping.update(loss)
                session.log(step, **recipes.loss_and_perplexity(loss))
                session.print(recipes.validation_line(step + 1, loss, best, stopping))

    # The last checkpoint: scores and samples, and the command that uses it.
    recipes.evaluate_at_end(run)


if __name__ == "__main__":
    recipes.start(main, __file__)
