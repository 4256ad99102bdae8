"""TRL's SFTTrainer with restarts, on chats. It does not import Lockstep.

    lockstep run examples/frameworks/sft.py --workers 2 --data chats.jsonl

Without --data it makes chats. In place of from_pretrained it has a small Llama with random weights.
"""

from __future__ import annotations

import argparse
import os

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined, import-not-found, unused-ignore]
from whole_checkpoints import WholeCheckpoints, newest

BATCH, ROWS = 16, 4  # chats of a step over all workers, and of one forward pass
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    ids = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def make_chats(count: int = 256) -> Dataset:
    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    chats = [
        [say("user", f"{n} and 1?"), say("assistant", f"{n + 1}, of course")] for n in range(count)
    ]
    return Dataset.from_list([{"messages": chat} for chat in chats])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/sft")
    parser.add_argument("--data", default="", help="lines of {messages: [{role, content}, ...]}")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    options = parser.parse_args()
    args = SFTConfig(
        options.out,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=BATCH // ROWS // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        learning_rate=1e-3,
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = make_tokenizer()
    chats = load_dataset("json", data_files=options.data, split="train") if options.data else None
    trainer = SFTTrainer(
        make_model(tokenizer),
        args,
        train_dataset=chats or make_chats(),
        processing_class=tokenizer,
        callbacks=[WholeCheckpoints()],
    )
    trainer.train(resume_from_checkpoint=newest(options.out))
    if trainer.state.global_step == options.steps:
        trainer.save_model()


if __name__ == "__main__":
    main()
