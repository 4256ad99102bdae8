"""A small GPT in the style of minGPT: `plain` and with lockstep.Session (`train`).

Run: python examples/gallery/gpt.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import lockstep

LETTERS, LENGTH, WIDTH, HEADS = 6, 12, 32, 4


class Sorting(Dataset[tuple[Tensor, Tensor]]):
    """Six letters, followed by the same letters in order: the task of minGPT's demo."""

    def __init__(self) -> None:
        letters = torch.randint(
            LETTERS, (240, LENGTH // 2), generator=torch.Generator().manual_seed(1)
        )
        self.rows = torch.cat([letters, letters.sort(1).values], 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        targets = self.rows[i, 1:].clone()
        targets[: LENGTH // 2 - 1] = -100  # the letters are given
        return self.rows[i, :-1], targets


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.attention(self.norm1(x)).chunk(3, 2)
        )
        x = x + self.projection(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        outputs: Tensor = x + self.mlp(self.norm2(x))
        return outputs


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the target tokens."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = Gpt(), 0
    optimizer = make_optimizer(model)
    loader = loader or DataLoader(Sorting(), batch_size=24, shuffle=True, drop_last=True)
    while step < steps:
        for ids, targets in loader:
            loss = model(ids, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/gpt", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = Gpt()
    optimizer = make_optimizer(model)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Sorting(), batch_size=24)
        for step in session.steps(steps):
            for ids, targets in loader(step):
                session.backward(model(ids, targets))
            session.clip_grad_norm_(1.0)
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
