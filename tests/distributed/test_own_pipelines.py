"""A user's own nn.Sequential in a pipeline: the digest of one worker, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.parallelize import LocalModel
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.owner_update import apply_owner_rule
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.sharding import shard_session

STEPS, MICRO_BATCHES, WORDS, DIM = 3, 5, 17, 6
ONE_WORKER = Layout(1)


class Pair(nn.Module):
    """Two outputs, one of which has integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), tokens


class Block(nn.Module):
    """A tuple in and out, dropout, and a buffer that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 11),
            nn.Linear(11, DIM),
        )
        self.register_buffer("shift", torch.linspace(0, 1, 11))

    def forward(self, received: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        states, tokens = received
        states = (
            states.mul_(1.5).transpose(0, 1).contiguous().transpose(0, 1)
        )  # in place, then with other strides
        hidden = nn.functional.dropout(
            (self.inner(self.norm(states)) + self.shift).relu(), 0.2, self.training
        )
        return states + self.outer(hidden) * (tokens > 3).unsqueeze(-1), tokens


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, received: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(received[0])


def make(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    if kind == "norms":
        hidden = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Tanh())
        return nn.Sequential(
            hidden,
            nn.Linear(9, 8),
            nn.Dropout(0.3),
            nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)),
        )
    model = nn.Sequential(Pair(), *(Block() for _ in range(3)), Head())
    model[2].inner.weight.requires_grad_(False)
    if kind == "tied":
        model[4].out.weight = model[0].embed.weight
    return model


def micro_batch(kind: str, step: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + k)
    if kind == "norms":
        return torch.randn(6, 7, generator=generator) + k, torch.randn(6, 1, generator=generator)
    return torch.randint(WORDS, (2, 3 + k), generator=generator), torch.randint(
        WORDS, (2, 3 + k), generator=generator
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if output.shape == target.shape:
        return (output - target).square().mean() / MICRO_BATCHES
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": vectors}, {"params": matrices[::2], "weight_decay": 0.2}], lr=1e-2
    )
    return [adamw, torch.optim.Muon(matrices[1::2], lr=1e-2)]


def train(runtime: ElasticRuntime, kind: str, layout: Layout, folder: str, steps: int) -> list[Any]:
    """Train to step `steps`, and save; return losses, norms and learning rates."""
    model = make(kind)
    optimizers = make_optimizers(model)
    if kind == "norms":  # optimizers that have state already
        model(micro_batch(kind, 0, 0)[0]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, Any] = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)}
    local = (
        shard_session(runtime, model, optimizers, layout, {}, state)
        if layout.workers > 1
        else model
    )
    results = []
    with Checkpointer(
        Path(folder) / "checkpoints", runtime, local, optimizers, state=state
    ) as checkpointer:
        first = checkpointer.resume()
        with ReplicaGroup(runtime, local, checkpointer, micro_batches=MICRO_BATCHES) as replicas:
            for step in range(first, steps):
                for k in replicas.micro_batches(step):
                    inputs, target = micro_batch(kind, step, k)
                    count = None if kind == "norms" else target.numel()
                    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "blocks"):
                        loss = (
                            replicas(inputs, target, loss_of)
                            if layout.pipeline > 1
                            else loss_of(replicas(inputs), target)
                        )
                    replicas.backward(loss, count)
                norm = replicas.updates.gradient.clip_(0.3)
                for optimizer in optimizers:
                    optimizer.step()
                state["scheduler"].step()
                results.append((replicas.loss, float(norm), state["scheduler"].get_last_lr()))
        checkpointer.save(steps)
    return results


@pytest.mark.parametrize("kind", ["blocks", "norms"])
def test_pipelines_of_own_models_have_the_digest_of_one_worker(kind: str, tmp_path: Path) -> None:
    alone = run_ranks(train, 1, kind, ONE_WORKER, str(tmp_path / "alone"), STEPS)[0]
    assert all(norm > 0.3 for _, norm, _ in alone[:2])
    for layout in (Layout(1, 1, 1, 2), Layout(1, 1, 1, 3), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2)):
        folder = tmp_path / str(layout)
        by_rank = run_ranks(
            train,
            layout.workers,
            kind,
            Layout(1, layout.shard, 1, layout.pipeline),
            str(folder),
            STEPS,
        )
        assert all(results == alone for results in by_rank), (layout, by_rank, alone)
        assert digest_line(folder) == digest_line(tmp_path / "alone"), layout


def test_tied_parameters_have_one_digest_for_pipelines_of_one_size(tmp_path: Path) -> None:
    alone = run_ranks(train, 1, "tied", ONE_WORKER, str(tmp_path / "alone"), STEPS)[0]
    for layout in (Layout(1, 1, 1, 2), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2)):
        by_rank = run_ranks(
            train,
            layout.workers,
            "tied",
            Layout(1, layout.shard, 1, layout.pipeline),
            str(tmp_path / str(layout)),
            STEPS,
        )
        assert [loss for loss, _, _ in by_rank[0]] == pytest.approx(
            [loss for loss, _, _ in alone], rel=1e-5
        ), layout
    assert (
        len(
            {
                digest_line(tmp_path / str(layout))
                for layout in (Layout(1, 1, 1, 2), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2))
            }
        )
        == 1
    )


def test_a_checkpoint_of_a_pipeline_resumes_in_other_layouts(tmp_path: Path) -> None:
    run_ranks(train, 1, "norms", ONE_WORKER, str(tmp_path / "alone"), STEPS)
    run_ranks(train, 2, "norms", Layout(1, 1, 1, 2), str(tmp_path / "first"), 2)
    for layout in (ONE_WORKER, Layout(1, 1, 1, 3), Layout(1, 2)):
        shutil.copytree(tmp_path / "first", tmp_path / str(layout))
        run_ranks(train, layout.workers, "norms", layout, str(tmp_path / str(layout)), STEPS)
        assert digest_line(tmp_path / str(layout)) == digest_line(tmp_path / "alone"), layout


class Estimating(torch.optim.SGD):
    """An optimizer that estimates a number from all parameters, as Prodigy does."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["estimate"] = self.param_groups[0].get("estimate", 1.0) + 0.5
        return super().step(closure)


def test_an_optimizer_that_couples_parameters_is_refused_in_a_pipeline() -> None:
    model = nn.Linear(2, 2)
    optimizer = Estimating([{"params": [*model.parameters()], "estimate": 1.0}], lr=0.1)
    apply_owner_rule(optimizer, LocalModel(model, Layout(1)), cast(Any, None))
    optimizer.step()
    apply_owner_rule(optimizer, LocalModel(model, Layout(1, 1, 1, 2)), cast(Any, None))
    with pytest.raises(UsageError, match="Estimating changes the values of its parameter groups"):
        optimizer.step()
