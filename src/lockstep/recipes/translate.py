"""Train a Transformer that translates sentences: the script of `lockstep train` for translation.

    lockstep train --workers 2 --steps 40         this script
    lockstep recipes copy translate my.py         a copy of it, to change
    lockstep run --workers 2 my.py --steps 40     the same run, by the copy

`run` has the values of the run file and of the flags: run.config.optim is its section [optim].
"""

from __future__ import annotations

import math

from lockstep import recipes


def main(run: recipes.RecipeRun) -> None:
    config = run.config
    # Sentence pairs: rank 0 prepares them once, with a tokenizer that it trains on them.
    pairs = recipes.open_pairs(run)

    # An encoder-decoder Transformer on the meta device, without memory. `prepare` gives it to each
    # worker, whole or in slices. Its initial weights follow from the seed and their names;
    # precision and the like from the sections [compute] and [memory].
    model = pairs.meta_model()
    optimizers = recipes.make_optimizers(run, model)

    with run.session() as session:
        model, *optimizers = run.prepare(session, model, *optimizers)

        # Micro-batches of pairs with similar lengths. All workers together train those of a step.
        loader = session.loader(pairs.loader)

        for step in session.steps(config.steps):
            for batch in loader(step):
                loss = model(  # the sum of the losses of all target tokens
                    batch.source,
                    batch.target,
                    batch.labels,
                    smoothing=config.optim.label_smoothing,
                )
                session.backward(loss, count=batch.count)  # count: of these tokens

            norm = session.clip_grad_norm_(config.optim.clip_norm or math.inf)  # 0: never clipped
            rate = recipes.learning_rate(step + 1, run.optim_after(step))  # --override changes it
            for optimizer in optimizers:
                recipes.set_learning_rate(optimizer, rate)
                optimizer.step()
            if config.optim.ema_decay:  # beside the moments; evaluated and exported
                recipes.update_average(optimizers, config.optim.ema_decay, step + 1)
            epoch = pairs.loader.order.epoch(step + 1)
            session.log(step, norm=norm, lr=rate, epoch=epoch)

    # The last checkpoint: BLEU, chrF and samples of held-out pairs, and how to translate with it.
    recipes.evaluate_at_end(run)


if __name__ == "__main__":
    recipes.start(main, __file__)
