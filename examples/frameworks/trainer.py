"""transformers' Trainer with restarts. It does not import Lockstep.

    lockstep run examples/frameworks/trainer.py --workers 2

In place of your data set it has a short text, in place of from_pretrained a small Llama with random
weights.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from whole_checkpoints import WholeCheckpoints, newest

BATCH, ROWS = 16, 4  # samples of a step over all workers, and of one forward pass


def make_dataset() -> list[dict[str, torch.Tensor]]:
    """Return rows of 64 bytes of a text."""
    text = "".join(f"{n} and {n + 1} are {2 * n + 1}. " for n in range(1000)).encode()
    rows = [torch.tensor(list(text[start : start + 64])) for start in range(0, 16000, 64)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model(dropout: float = 0.1) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--dropout", type=float, default=0.1)
    options = parser.parse_args()
    # --8<-- [start:train]
    args = TrainingArguments(
        options.out,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=BATCH // ROWS // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        logging_steps=10,
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        make_model(options.dropout),
        args,
        train_dataset=make_dataset(),
        callbacks=[WholeCheckpoints()],
    )
    trainer.train(resume_from_checkpoint=newest(options.out))
    if trainer.state.global_step == options.steps:
        trainer.save_model()
    # --8<-- [end:train]


if __name__ == "__main__":
    main()
