"""A model of transformers with LoRA adapters of peft: `plain` and with lockstep.Session (`train`).

Needs transformers and peft. The base weights are frozen: the gradients, the optimizer's state and
the votes cover the adapters, and the checkpoints hold both. `save_adapters` writes a folder of peft.

Run: python examples/gallery/peft_adapters.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that count up from a start."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) + i) % 64
        return {"input_ids": ids, "labels": ids}


def make_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found, unused-ignore]
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    base = LlamaForCausalLM(config)
    model: nn.Module = get_peft_model(
        base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    )
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = make_model(), 0
    optimizer = make_optimizer(model)
    loader = loader or DataLoader(Counting(), batch_size=12, shuffle=True, drop_last=True)
    while step < steps:
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/peft_adapters", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Counting(), batch_size=12)
        for step in session.steps(steps):
            for batch in loader(step):
                session.backward(model(**batch).loss)
            optimizer.step()


def save_adapters(weights: str, folder: str) -> None:
    """Write the adapters in peft's format.

    weights  file of `lockstep checkpoint export runs/peft_adapters --out FILE`
    """
    model: Any = make_model()
    model.load_state_dict(load_file(weights))
    model.save_pretrained(folder)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
