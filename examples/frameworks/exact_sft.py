"""TRL's SFTTrainer on a Session: the same bits on any number of workers, through failures.

    lockstep run examples/frameworks/exact_sft.py --workers 2

The model and the chats are those of sft.py.
"""

from __future__ import annotations

import torch
from sft import make_chats, make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined, import-not-found, unused-ignore]

import lockstep
from lockstep.frameworks.trainer import SessionLoop


class ExactSFTTrainer(SessionLoop, SFTTrainer):  # type: ignore[misc, unused-ignore]
    pass


def main(out: str = "runs/exact_sft", steps: int = 60) -> None:
    args = SFTConfig(
        out,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_steps=steps,
        save_steps=20,
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    tokenizer = make_tokenizer()
    trainer = ExactSFTTrainer(
        make_model(tokenizer),
        args,
        train_dataset=make_chats(),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
