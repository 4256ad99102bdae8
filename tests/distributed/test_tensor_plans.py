"""A user's own modules split by a tensor plan: the losses of one worker, one digest for all layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.optim import swa_utils

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.parallelize import SplitOptions
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import Samples, mean_over
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.sharding import shard_session

STEPS, MICRO_BATCHES, WORDS, HEAD = 4, 4, 23, 4
PLAN: dict[str, Any] = {
    "blocks.*.attention.packed": ("colwise", 3),
    "blocks.*.attention.head_norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.gate": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "reader": "colwise_gather_output",
    "writer": "rowwise_split_input",
}


class Attention(nn.Module):
    """One matrix for query, key and value; a norm of each head; biases."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.packed, self.out, self.head_norm = (
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            nn.LayerNorm(HEAD),
        )
        nn.init.zeros_(
            self.out.weight
        )  # as many models start: nothing of the attention shows in the first loss

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = (
            x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in self.packed(states).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            self.head_norm(query), key, value, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class GatedBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norms, self.attention = (
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(2)),
            Attention(dim),
        )
        self.gate, self.up, self.down = nn.Linear(dim, 12), nn.Linear(dim, 12), nn.Linear(12, dim)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attention(self.norms[0](states))
        normed = self.norms[1](states)
        return states + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class GatedModel(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(WORDS, dim),
            nn.ModuleList(GatedBlock(dim) for _ in range(2)),
        )
        self.reader, self.writer, self.head = (
            nn.Linear(dim, 10),
            nn.Linear(10, dim),
            nn.Linear(dim, WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embed(tokens)
        for block in self.blocks:
            states = block(states)
        states = states + self.writer(
            self.reader(states).sort(-1).values
        )  # a function of all features
        return nn.functional.cross_entropy(
            self.head(states)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


def tokens_of(step: int, k: int) -> Tensor:
    return torch.randint(WORDS, (2, 5 + k), generator=torch.Generator().manual_seed(100 * step + k))


def train_split(
    runtime: ElasticRuntime,
    layout: Layout,
    folder: str,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Train to step `steps` and save; return the loss, the norm and the scores of each step."""
    torch.manual_seed(1)
    model = GatedModel().to(dtype)
    model.blocks[0].norms[0].requires_grad_(False)  # type: ignore[union-attr, operator]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    state = {
        "ema": swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))
    }
    local = (
        model
        if layout.workers_per_replica == 1
        else shard_session(
            runtime, model, [optimizer], layout, {}, state, splits=SplitOptions(tensor_plan=PLAN)
        )
    )
    results: list[Any] = []
    with Checkpointer(
        Path(folder) / "checkpoints", runtime, local, [optimizer], state=state
    ) as checkpointer:
        first = checkpointer.resume()
        with ReplicaGroup(runtime, local, checkpointer, micro_batches=MICRO_BATCHES) as replicas:
            for step in range(first, steps):
                for k in replicas.micro_batches(step):
                    replicas.backward(replicas(tokens_of(step, k)), 2 * (4 + k))
                norm = replicas.updates.gradient.clip_(0.5)
                optimizer.step()
                state["ema"].update_parameters(model)
                data = [tokens_of(99, 1) for _ in range(3)]
                samples = Samples(data, "a test", 1, None, 0, layout.workers_per_replica)
                scores = [
                    mean_over(runtime, samples, lambda rows, m=m: m(rows[0]))
                    for m in (model, state["ema"])
                ]
                results.append((replicas.loss, float(norm), *scores))
        checkpointer.save(steps)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return list(
        run_ranks(
            train_split, 1, Layout(), str(tmp_path_factory.mktemp("alone")), STEPS, torch.float64
        )[0]
    )


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tensor")
    by_rank = run_ranks(train_split, 2, Layout(tensor=2), str(folder), STEPS)
    assert by_rank[0] == by_rank[1]
    return folder, by_rank[0]


@pytest.mark.parametrize(
    ("workers", "layout"), [(2, Layout(tensor=2)), (4, Layout(shard=2, tensor=2))], ids=str
)
def test_split_layers_have_the_losses_and_norms_of_one_worker(
    workers: int, layout: Layout, alone: list[Any], tmp_path: Path
) -> None:
    torch.testing.assert_close(
        run_ranks(train_split, workers, layout, str(tmp_path), STEPS, torch.float64)[0],
        alone,
        rtol=1e-10,
        atol=0,
    )


@pytest.mark.parametrize(
    ("workers", "layout"), [(4, Layout(tensor=2)), (4, Layout(shard=2, tensor=2))], ids=str
)
def test_same_tensor_size_has_one_digest(
    workers: int, layout: Layout, in_two: tuple[Path, Any], tmp_path: Path
) -> None:
    by_rank = run_ranks(train_split, workers, layout, str(tmp_path), STEPS)
    assert all(results == in_two[1] for results in by_rank)
    assert digest_line(tmp_path) == digest_line(in_two[0])


def test_split_checkpoint_resumes_in_another_layout(
    in_two: tuple[Path, Any], tmp_path: Path
) -> None:
    run_ranks(train_split, 2, Layout(tensor=2), str(tmp_path / "stopped"), 2)
    for workers, layout in ((1, Layout()), (4, Layout(shard=2, tensor=2))):
        resumed = tmp_path / str(layout)
        shutil.copytree(tmp_path / "stopped", resumed)
        results = run_ranks(train_split, workers, layout, str(resumed), STEPS)[0]
        torch.testing.assert_close(results, in_two[1][2:], rtol=1e-4, atol=0)
        assert (digest_line(resumed) == digest_line(in_two[0])) == (layout.tensor == 2)


class TwoLayers(nn.Module):
    """Layers whose parts depend on `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.outer, self.scale = (
            kind,
            nn.Linear(6, 12),
            nn.Linear(4, 6),
            nn.Linear(6, 1),
        )
        self.norm, self.batch_norm = nn.LayerNorm(2), nn.BatchNorm1d(4)
        self.elsewhere: list[nn.Linear] = []  # layers of other modules

    def forward(self, rows: Tensor) -> Tensor:
        hidden, *others = (
            self.inner(rows).chunk(3, -1)
            if self.kind != "split by whole sizes"
            else self.inner(rows).split(4, -1)
        )
        hidden = hidden * others[0] + others[1]
        if self.kind == "whole heads":
            hidden = hidden.view(-1, 2, 2).sin().flatten(1)
        if self.kind == "a norm of parts":
            hidden = self.norm(hidden.unflatten(-1, (-1, 2))).flatten(-2)
        if self.kind == "running statistics":
            hidden = self.batch_norm(hidden)
        if self.kind == "a factor of the rows":
            hidden = hidden * self.scale(rows)
        for layer in self.elsewhere:
            hidden = hidden * layer.bias.sum()
        return rows + self.outer(hidden)


PACKED: dict[str, Any] = {"1.inner": ("colwise", 3), "1.outer": "rowwise"}
REFUSALS: dict[str, tuple[Any, str]] = {
    "packed as one": (
        {"1.inner": "colwise", "1.outer": "rowwise"},
        "compute something else than whole ones: output 0 of 1",
    ),
    "whole heads": (PACKED, "1 does not run with its layers split over 2 tensor ranks: "),
    "split by whole sizes": (PACKED, "1 does not run with its layers split over 2 tensor ranks: "),
    "running statistics": (PACKED, "1 does not run with its layers split over 2 tensor ranks: "),
    "a norm of parts": (
        PACKED,
        "whole ones: the gradient of 1.norm.weight, the gradient of 1.norm.bias",
    ),
    "a factor of the rows": (
        PACKED,
        "whole ones: the gradient of input 0 of 1, the gradient of 1.scale.weight",
    ),
    "a weight of another module": (
        PACKED,
        "the gradients of whole weights differ between tensor ranks: 0.bias",
    ),
    "no partner": (
        {"1.inner": ("colwise", 3)},
        "1.inner is colwise, and the model does not have both",
    ),
    "an unknown style": (
        {"1.inner": "column"},
        "styles of layers that are not supported: column of 1.inner",
    ),
    "an unknown layer": ({"2.inner": "colwise"}, "no module matches 2.inner"),
    "a norm": ({"1.norm": "colwise"}, "only nn.Linear can be split: 1.norm is a LayerNorm"),
    "uneven": (
        {"1.inner": ("colwise", 4), "1.outer": "rowwise"},
        "tensor 2 does not divide the 12 output features in 4 packed matrices",
    ),
    "no plan": (None, "there is no plan of the layers of Sequential"),
    "not a model of transformers": ("auto", "there is no plan of the layers of Sequential"),
    "accepted": (PACKED, "accepted"),
    "a norm in the plan": ({**PACKED, "1.norm": "replicated_with_grad_allreduce"}, "accepted"),
}


def refusals(runtime: ElasticRuntime) -> dict[str, str]:
    """Return the error of each plan of REFUSALS."""
    texts = {}
    for kind, (plan, _) in REFUSALS.items():
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(6, 6), TwoLayers("a norm of parts" if kind == "a norm in the plan" else kind)
        )
        unused = {
            "a norm of parts": ("scale", "batch_norm"),
            "a norm in the plan": ("scale", "batch_norm"),
        }
        unused |= {
            "running statistics": ("scale", "norm"),
            "a factor of the rows": ("norm", "batch_norm"),
        }
        for name in unused.get(kind, ("scale", "norm", "batch_norm")):
            model[1].get_submodule(name).requires_grad_(False)
        if kind == "a weight of another module":
            model[1].elsewhere.append(model[0])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        try:
            local = shard_session(
                runtime,
                model,
                [optimizer],
                Layout(tensor=2),
                {},
                {},
                splits=SplitOptions(tensor_plan=plan),
            )
            with ReplicaGroup(runtime, local, micro_batches=1) as replicas:
                for k in replicas.micro_batches(0):
                    replicas.backward(
                        replicas(torch.randn(5, 6, generator=torch.Generator().manual_seed(k)))
                        .square()
                        .sum()
                    )
            texts[kind] = "accepted"
        except UsageError as error:
            texts[kind] = str(error)
    return texts


def test_plans_that_would_compute_something_else_are_refused_with_names() -> None:
    for texts in run_ranks(refusals, 2):
        wrong = {
            kind: texts[kind]
            for kind, (_, expected) in REFUSALS.items()
            if expected not in texts[kind]
        }
        assert not wrong


def fine_tune(runtime: ElasticRuntime, tensor: int) -> list[float]:
    """Return the losses of a small Qwen 3 of transformers, whose layers get a cache of keys and values."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.Qwen3Config(
        vocab_size=WORDS, hidden_size=16, intermediate_size=12, num_hidden_layers=2, **heads
    )
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    local = (
        shard_session(
            runtime,
            model,
            [optimizer],
            Layout(tensor=tensor),
            {},
            {},
            splits=SplitOptions(tensor_plan="auto"),
        )
        if tensor > 1
        else model
    )
    losses = []
    with ReplicaGroup(runtime, local, micro_batches=2) as replicas:
        for step in range(3):
            for k in replicas.micro_batches(step):
                replicas.backward(
                    replicas(input_ids=tokens_of(step, k), labels=tokens_of(step, k)).loss / 2
                )
            optimizer.step()
            losses.append(replicas.loss)
    return losses


def test_models_of_transformers_bring_their_plan() -> None:
    alone = run_ranks(fine_tune, 1, 1)[0]
    split = run_ranks(fine_tune, 2, 2)
    assert split[0] == split[1] == pytest.approx(alone, rel=1e-5)


def count_all_reduces(runtime: ElasticRuntime, make: Callable[[], nn.Module]) -> int:
    """Return the all-reduces over the tensor axis of a micro-batch after the first step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = shard_session(
        runtime, model, [optimizer], Layout(tensor=2), {}, {}, splits=SplitOptions(tensor_plan=PLAN)
    )
    calls: list[int] = []
    with ReplicaGroup(runtime, local, micro_batches=1) as replicas:
        for step in range(2):
            for k in replicas.micro_batches(step):
                assert local.groups
                before = collectives_in(local.groups.tensor_group)
                replicas.backward(replicas(tokens_of(step, k)))
                calls.append(collectives_in(local.groups.tensor_group) - before)
            optimizer.step()
    return calls[-1]


def collectives_in(group: Any) -> int:
    from lockstep.runtime.torch_private import collectives_of

    return int(collectives_of(group))


def test_layers_with_one_input_share_an_all_reduce() -> None:
    # per block 2 forward and 2 backward (gate and up share one); reader and writer: 2 forward, 2 backward
    assert run_ranks(count_all_reduces, 2, GatedModel) == [2 * 4 + 4] * 2
