"""transformers' Trainer on a Session: the same bits on any number of workers, through failures.

    lockstep run examples/frameworks/exact.py --workers 2

The model and the text are those of trainer.py.
"""

from __future__ import annotations

import torch
from trainer import make_dataset, make_model
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

# --8<-- [start:train]
import lockstep
from lockstep.frameworks.trainer import SessionLoop


class ExactTrainer(SessionLoop, Trainer):
    pass


def main(out: str = "runs/exact", steps: int = 60, save_steps: int = 20) -> None:
    args = TrainingArguments(
        out,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_steps=steps,
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=10,
        metric_for_best_model="loss",
        logging_steps=10,
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    rows = make_dataset()
    trainer = ExactTrainer(
        make_model(),
        args,
        train_dataset=rows[:-32],
        eval_dataset=rows[-32:],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
# --8<-- [end:train]
