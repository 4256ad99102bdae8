"""A user's own modules in replicas and shards: one digest for all layouts, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import mean_over
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.sharding import shard_session

STEPS, MICRO_BATCHES, WORDS = 4, 5, 23


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(dim, 2 * dim + 1), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim + 1, dim))

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        states = states + self.attention(normed, normed, normed, need_weights=False)[0]
        return states + self.hidden(normed)


class SmallGPT(nn.Module):
    """Tied embeddings, repeated blocks, a frozen layer, and a buffer."""

    def __init__(self, dim: int = 10) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, dim), nn.ModuleList(Block(dim) for _ in range(3))
        self.scale, self.head = nn.Linear(dim, dim), nn.Linear(dim, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.scale(self.embed(tokens)) + self.shift
        for block in self.blocks:
            states = block(states)
        return nn.functional.cross_entropy(self.head(states)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


class SmallMLP(nn.Module):
    """No repeated blocks, running statistics, rows that no number of shards divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).square().mean()


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = SmallGPT() if name == "gpt" else SmallMLP()
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others}]
    if name == "gpt":
        return model, torch.optim.AdamW(groups, lr=1e-2)
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def batch(name: str, step: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + k)
    if name == "gpt":
        return torch.randint(WORDS, (2, 4 + k), generator=generator)
    return torch.randn(6, 7, generator=generator) + k


def train(runtime: ElasticRuntime, name: str, shards: int, folder: str, steps: int) -> list[Any]:
    """Train to step `steps`, and save; return the losses, norms and an evaluation."""
    model, optimizer = make(name)
    local = shard_session(runtime, model, [optimizer], shards, None, {}) if shards > 1 else model
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    results: list[Any] = []
    with Checkpointer(Path(folder), runtime, local, optimizer, state={"scheduler": scheduler}) as checkpointer:
        first = checkpointer.resume()
        with ReplicaGroup(runtime, local, checkpointer, micro_batches=MICRO_BATCHES) as replicas:
            for step in range(first, steps):
                for k in replicas.micro_batches(step):
                    inputs = batch(name, step, k)
                    with torch.no_grad():
                        model(inputs)
                    loss = replicas(inputs)
                    replicas.backward(loss if name == "gpt" else loss / MICRO_BATCHES, inputs.numel() if name == "gpt" else None)
                norm = replicas.gradient.clip_(0.3)
                optimizer.step()
                scheduler.step()
                model.eval()
                dataset = [batch("mlp", 9, k) if name == "mlp" else batch("gpt", 9, 1) for k in range(5)]
                score = mean_over(dataset, lambda rows: model(rows[0]), runtime, batch_size=1, collate_fn=None, seed=0, replica_size=shards)
                model.train()
                results.append((replicas.loss, float(norm), score))
        checkpointer.save(steps)
    return results


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_own_models_have_one_digest_for_all_layouts(name: str, tmp_path: Path) -> None:
    outcomes = {}
    for workers, shards in [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2)]:
        folder = tmp_path / f"{workers}-{shards}"
        by_rank = run_ranks(train, workers, name, shards, str(folder / "checkpoints"), STEPS)
        assert by_rank == [by_rank[0]] * workers
        outcomes[workers, shards] = digest_line(folder), by_rank[0]
    assert len(outcomes[1, 1][1]) == STEPS and all(norm > 0.3 for _, norm, _ in outcomes[1, 1][1][:2])
    assert set(map(str, outcomes.values())) == {str(outcomes[1, 1])}, outcomes


def test_checkpoint_in_shards_resumes_in_other_layouts(tmp_path: Path) -> None:
    run_ranks(train, 1, "gpt", 1, str(tmp_path / "whole" / "checkpoints"), STEPS)
    right = digest_line(tmp_path / "whole")
    for (workers, shards), others in {(2, 2): [(1, 1), (4, 2), (3, 3)], (1, 1): [(2, 2)]}.items():
        first = tmp_path / f"first-{shards}"
        run_ranks(train, workers, "gpt", shards, str(first / "checkpoints"), 2)
        for other_workers, other_shards in others:
            second = tmp_path / f"{shards}-{other_workers}-{other_shards}"
            shutil.copytree(first, second)
            run_ranks(train, other_workers, "gpt", other_shards, str(second / "checkpoints"), STEPS)
            assert digest_line(second) == right, (shards, other_workers, other_shards)
