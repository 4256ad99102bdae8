"""Optimizers, parameter groups, schedules and the averaged weights of the recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.checkpoint import commands
from lockstep.checkpoint.shards import inference_weights
from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.resolve import resolve
from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.errors import ConfigError, UsageError
from lockstep.tasks.optim import (
    learning_rate,
    make_optimizers,
    set_learning_rate,
    update_average,
)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        self.output = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def names_by_optimizer(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        type(item).__name__: {names[id(p)] for group in item.param_groups for p in group["params"]}
        for item in optimizers
    }


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "muon", "adafactor"])
def test_each_kind_learns_a_permutation(kind: Any) -> None:
    model, values = (
        Small(),
        OptimOptions(
            kind=kind, learning_rate=0.3 if kind == "sgd" else 0.02, momentum=0.5, beta2=0.98
        ),
    )
    optimizers, losses = make_optimizers(model, values), []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(torch.arange(11)), torch.arange(11).roll(3))
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
    assert losses[0] > 2 and losses[-1] < losses[0] / 2, losses
    assert set.union(*names_by_optimizer(model, optimizers).values()) == {
        name for name, _ in model.named_parameters()
    }


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model = Small()
    names = names_by_optimizer(model, make_optimizers(model, OptimOptions(kind="muon")))
    assert names["Muon"] == {"layers.0.weight", "layers.1.weight"}
    assert {"embedding.weight", "output.weight", "norm.bias"} <= names["AdamW"]
    model.layers.requires_grad_(False)
    assert [*names_by_optimizer(model, make_optimizers(model, OptimOptions(kind="muon")))] == [
        "AdamW"
    ]


def test_first_matching_pattern_sets_the_rate_and_the_decay_of_a_parameter() -> None:
    model, values = (
        Small(),
        OptimOptions(weight_decay=0.1, groups=("embedding*:0.5:0", "*.weight:2:3")),
    )
    (optimizer,) = make_optimizers(model, values)
    set_learning_rate(optimizer, 0.01)
    options = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert options[id(model.embedding.weight)] == (0.005, 0.0)
    assert (
        options[id(model.norm.weight)]
        == options[id(model.layers[0].weight)]
        == (0.02, pytest.approx(0.3))
    )
    assert options[id(model.norm.bias)] == (0.01, 0.0), "no pattern: as without groups"
    with pytest.raises(UsageError, match=r"matches no trained parameter: embeding\*:0.5:0"):
        make_optimizers(model, replace(values, groups=("embeding*:0.5:0",)))


def test_wsd_is_stable_and_then_falls_to_the_floor() -> None:
    values = OptimOptions(
        learning_rate=1.0,
        warmup_steps=10,
        schedule="wsd",
        decay_steps=100,
        wsd_decay=0.2,
        floor=0.1,
    )
    assert learning_rate(5, values) == 0.5
    assert {learning_rate(update, values) for update in range(10, 82)} == {1.0}
    falling = [learning_rate(update, values) for update in range(81, 102)]
    assert falling == pytest.approx([1 - 0.9 * n / 20 for n in range(21)])
    assert learning_rate(1000, values) == pytest.approx(0.1)
    assert learning_rate(10, replace(values, wsd_decay=1.0)) == 1.0, (
        "the decay starts after the warm-up"
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "wsd"])
def test_no_schedule_falls_below_its_floor(schedule: Any) -> None:
    values = OptimOptions(learning_rate=2.0, schedule=schedule, floor=0.25, decay_steps=300)
    rates = [learning_rate(update, values) for update in range(60, 3000)]
    assert (
        rates[0] == 2.0
        and min(rates) == rates[-1] == pytest.approx(0.5)
        and rates == sorted(rates, reverse=True)
    )


def test_a_run_beyond_the_decay_trains_at_the_floor() -> None:
    flags = {
        "steps": "100",
        "optim.schedule": "wsd",
        "optim.floor": "0.1",
        "optim.decay_steps": "50",
    }
    assert resolve(None, flags).run.optim.floor == 0.1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"optim.kind": "lion", "memory.optimizer_state": "bf16"},
            "optim.kind=lion does not support memory.optimizer_state=bf16",
        ),
        (
            {"optim.kind": "sgd", "optim.fused": "true"},
            "optim.kind=sgd does not support optim.fused=true",
        ),
        (
            {"optim.kind": "muon", "layout.tensor": "2"},
            "optim.kind=muon does not support layout.tensor=2: it needs whole matrices",
        ),
        ({"optim.groups": "norm:2"}, "it must have two colons"),
        ({"optim.groups": "norm:-1:0"}, "both factors must be"),
        ({"optim.groups": "norm:nan:0"}, "both factors must be"),
        ({"optim.groups": "norm:x:0"}, "could not convert"),
        ({"optim.ema_decay": "1"}, "must be below 1"),
    ],
)
def test_unsupported_optimizer_values_are_refused(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(None, flags)
    assert words in str(caught.value)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_average_is_evaluated_and_exported_in_place_of_the_last_weights(
    weights: torch.dtype, tmp_path: Path
) -> None:
    model = Small().to(weights)
    memory = MemoryOptions(weights="bf16" if weights == torch.bfloat16 else "fp32")
    optimizers = make_optimizers(model, OptimOptions(learning_rate=0.1), memory)
    expected: dict[str, torch.Tensor] = {}
    for step in range(1, 6):
        for p in model.parameters():
            p.grad = torch.ones_like(p) * step
        for optimizer in optimizers:
            optimizer.step()
        update_average(optimizers, 0.5, step)
        share = 1 - min(0.5, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            weight = optimizers[0].state[p].get("master", p).detach().double()
            expected[name] = (
                weight.clone() if step == 1 else expected[name] + share * (weight - expected[name])
            )
    tensors = get_state_dict(model, optimizers)
    averaged = inference_weights(tensors)
    assert averaged.keys() == expected.keys()
    for name, tensor in averaged.items():
        assert tensor.dtype == torch.float32 and torch.allclose(
            tensor.double(), expected[name], atol=1e-6
        )
        assert not torch.equal(tensor, tensors[f"model.{name}"].float())
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(5, tensors, {})
    commands.export(tmp_path, None, tmp_path / "averaged.safetensors")
    exported = load_file(tmp_path / "averaged.safetensors")
    assert exported.keys() == averaged.keys() and all(
        torch.equal(exported[name], tensor) for name, tensor in averaged.items()
    )
    assert inference_weights({"model.a": 1, "optim.a.exp_avg": 2}) == {"a": 1}


def test_parameters_that_no_pattern_names_keep_the_bits_of_the_default() -> None:
    digests = []
    for groups in ((), ("embedding*:1:1", "*norm*:1:0")):
        model = Small()
        (optimizer,) = make_optimizers(model, OptimOptions(groups=groups))
        for p in model.parameters():
            p.grad = torch.sin(torch.arange(p.numel(), dtype=torch.float32)).view_as(p)
        optimizer.step()
        digests.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*digests, strict=True))
