"""A model of transformers with adapters of peft and a Session, for any layout of replicas and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from session import disturb

import lockstep


def make_model() -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    return get_peft_model(
        base,
        LoraConfig(
            r=3, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
        ),
    )


def train(out: str = "runs/peft_model", steps: int = 12) -> None:
    rows = (torch.arange(12) + torch.arange(48)[:, None]) % 64
    model = make_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with lockstep.Session(out, micro_batches=4, save_every=6) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(rows, batch_size=8)
        for step in session.steps(steps):
            for ids in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                session.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
