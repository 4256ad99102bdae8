"""Train a Transformer that translates sentences: the script of `lockstep train` for translation.

    lockstep train recipes/translate.toml --workers 2
    lockstep recipes copy translate my.py         a copy of this file, to change
    lockstep run my.py --workers 2 --steps 40     the same run, by the copy

`run` has the values of the run file and of the flags: run.config.optim is its section [optim].
"""

from __future__ import annotations

import math

from lockstep import recipes


def main(run: recipes.RecipeRun) -> None:
    config = run.config
    # Sentence pairs: rank 0 prepares them once, with a tokenizer that it trains on them.
    pairs = recipes.open_pairs(run)

    # An encoder-decoder Transformer without memory: `prepare` gives it to each worker, whole or in
    # slices. Its initial weights follow from the seed and their names.
    model = pairs.meta_model()
    optimizers = recipes.make_optimizers(run, model)

    with run.session() as session:
        model, *optimizers = run.prepare(session, model, *optimizers)

        # Micro-batches of pairs with similar lengths. All workers together train all of a step.
        loader = session.loader(pairs.loader)

        for step in session.steps(config.steps):
            for batch in loader(step):
                loss = model(
                    batch.source,
                    batch.target,
                    batch.labels,
                    smoothing=config.optim.label_smoothing,
                )
                session.backward(loss, count=batch.count)  # a sum over the target tokens

            norm = session.clip_grad_norm_(config.optim.clip_norm or math.inf)
            rate = recipes.learning_rate(step + 1, run.optim_after(step))
            for optimizer in optimizers:
                recipes.set_learning_rate(optimizer, rate)
                optimizer.step()
            if config.optim.ema_decay:
                recipes.update_average(optimizers, config.optim.ema_decay, step + 1)
            epoch = pairs.loader.order.epoch(step + 1)
            session.log(step, norm=norm, learning_rate=rate, epoch=epoch)

    # BLEU, chrF and samples of held-out pairs, and the command that translates.
    recipes.evaluate_at_end(run)


if __name__ == "__main__":
    recipes.start(main, __file__)
