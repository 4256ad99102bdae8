"""The units of a user's module, and what cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.transformers_model import TransformersConfig
from lockstep.parallel.grad_norm import StepGradient, commit_gradient
from lockstep.parallel.own_model import refuse_unshardable, shard_module
from lockstep.parallel.parallelize import parallelize, shard_units
from lockstep.parallel.plans import Patterns, find_units
from lockstep.runtime.torch_private import mesh_without_backend
from lockstep.training.sharding import choose_replica_layout, refuse_incomplete_replicas


def block(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Nested(nn.Module):
    """Stages of blocks; the last block of each stage shares its weight with the head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(2))}) for _ in range(2)
        )
        self.head = nn.Linear(3, 3)
        if tied:
            self.stages[1]["blocks"][1][0].weight = self.head.weight  # type: ignore[index, union-attr]


class FromHub(Nested):
    _no_split_modules = ("Linear",)


@pytest.mark.parametrize(
    ("model", "patterns", "units"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), None, []),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), None, []),
        (nn.Sequential(block(), block()), None, ["0", "1"]),
        (Nested(), None, ["stages.0", "stages.1"]),
        (
            Nested(),
            "stages.*.blocks.*",
            ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"],
        ),
        (Nested(), ["stages.0", "head"], ["stages.0", "head"]),
        (Nested(), (), []),
        (Nested(tied=True), None, ["stages.0"]),
        (
            FromHub(),
            None,
            [*(f"stages.{i}.blocks.{j}.0" for i in range(2) for j in range(2)), "head"],
        ),
    ],
)
def test_units_of_a_module(model: nn.Module, patterns: Patterns, units: list[str]) -> None:
    assert find_units(model, patterns) == units


def test_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no module matches layers"):
        find_units(Nested(), "layers.*")


def with_scalar() -> nn.Module:
    model = block()
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    return model


def with_hook() -> nn.Module:
    model = block()
    model[0].weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[index, union-attr]
    return model


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(block(), block())
    model.compile()
    return model


def with_compiled_stages() -> nn.Module:
    model = Nested()
    model.stages.compile()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_scalar, "scalar parameters cannot be sharded: temperature"),
        (with_hook, "gradient hooks of parameters would not run in shards: 0.weight"),
        (
            lambda: nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last),
            "not contiguous cannot be sharded: weight",
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            "several dtypes: 0.bias is torch.float32, 1.bias is torch.float64",
        ),
        (lambda: nn.ModuleDict({"a": block()}), "a ModuleDict has no forward"),
        (compiled_in_place, "the model is compiled as one graph"),
        (
            lambda: torch.compile(block()),
            "torch.compile wraps the model, which renames the parameters",
        ),
        (
            lambda: nn.Sequential(torch.compile(block()), torch.compile(block())),
            "torch.compile wraps 0, 1, which renames",
        ),
        (with_compiled_stages, "stages is compiled as one graph"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        shard_module(make(), Layout(1, 2), Layout(1, 2).coordinates(0), torch.device("cpu"))


def test_recurrent_layers_are_refused_in_shards_on_a_gpu_only() -> None:
    layout, model = Layout(1, 2), nn.Sequential(nn.Embedding(4, 8), nn.LSTM(8, 8))
    with pytest.raises(UsageError, match="recurrent layers on a GPU cannot be sharded: 1\n"):
        shard_units(model, [], mesh_without_backend("cuda", 0, 2, "gpu"), True)
    shard_module(model, layout, layout.coordinates(0), torch.device("cpu"))


def test_compiled_units_can_be_sharded() -> None:
    model = Nested()
    units = find_units(model)
    assert units
    for unit in units:
        model.get_submodule(unit).compile()
    refuse_unshardable(model, units)


def test_scalar_parameters_of_a_transformers_model_cannot_be_sharded() -> None:
    pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    model = TransformersConfig(
        {"model_type": "qwen3", "num_key_value_heads": 2, **sizes}
    ).meta_model()
    model.inner.temperature = nn.Parameter(torch.ones((), device="meta"))
    with pytest.raises(
        UsageError,
        match=r"scalar parameters cannot be sharded: inner\.temperature\n  TransformersModel, in shards",
    ):
        parallelize(
            model,
            Layout(1, 2),
            Layout(1, 2).coordinates(0),
            lambda name, shape: torch.zeros(shape),
            torch.device("cpu"),
        )


def test_layout_of_a_replica_comes_from_the_command_line_or_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_replica_layout(Layout(1, 2), 4, None) == Layout(1, 2)
    monkeypatch.setenv("LOCKSTEP_LAYOUT_SHARD", "3")
    assert choose_replica_layout(Layout(1, 2), 4, None) == Layout(1, 3)
    with pytest.raises(UsageError, match="3 shards share 2 micro-batches"):
        choose_replica_layout(Layout(1, 2), 2, None)
    monkeypatch.setenv("LOCKSTEP_LAYOUT_SHARD", "two")
    with pytest.raises(UsageError, match="'two' is not a number"):
        choose_replica_layout(Layout(1, 2), 4, None)
    monkeypatch.delenv("LOCKSTEP_LAYOUT_SHARD")
    with pytest.raises(UsageError, match="pipeline=0 is not a number of workers"):
        choose_replica_layout(Layout(pipeline=0), 4, None)
    monkeypatch.setenv("LOCKSTEP_LAYOUT_PIPELINE", "2")
    assert choose_replica_layout(Layout(), 4, None) == Layout(pipeline=2)
    monkeypatch.setenv("LOCKSTEP_LAYOUT_TENSOR", "2")
    assert choose_replica_layout(Layout(), 4, None) == Layout(tensor=2, pipeline=2)


def test_workers_must_be_a_multiple_of_a_replica() -> None:
    refuse_incomplete_replicas(8, Layout(1, 2, 2))
    with pytest.raises(
        UsageError,
        match=r"6 workers cannot form replicas of 4 workers \(shard 2 x tensor 2\)\n.*\n.*--workers 8",
    ):
        refuse_incomplete_replicas(6, Layout(1, 2, 2))


def test_clipping_equals_that_of_torch_and_sees_changes() -> None:
    torch.manual_seed(0)
    ours, theirs = (
        [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))] for _ in range(2)
    )
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad / 3
    gradient = commit_gradient(ours, None, 3)
    torch.testing.assert_close(gradient.clip_(0.5), nn.utils.clip_grad_norm_(theirs, 0.5))
    torch.testing.assert_close([p.grad for p in ours], [q.grad for q in theirs])
    torch.testing.assert_close(gradient.clip_(0.1), nn.utils.clip_grad_norm_(theirs, 0.1))
    slices = StepGradient(ours, torch.ones(()), 1, in_slices=True)
    ours[0].grad = torch.ones(4, 3)
    with pytest.raises(UsageError, match="the gradient has changed"):
        slices.clip_(0.1)


def test_only_noise_on_slices_is_refused() -> None:
    p = nn.Parameter(torch.zeros(4, 3))
    p.grad = torch.ones(4, 3)
    gradient = commit_gradient([p], torch.ones(()), 1)
    p.grad.mul_(0.5)
    gradient.refuse_noise()
    p.grad.add_(torch.randn(4, 3))
    with pytest.raises(UsageError, match="random numbers were drawn"):
        gradient.refuse_noise()
    gradient = commit_gradient([p], torch.ones(()), 1)
    gradient.clip_(0.1)
    torch.randn(1)
    gradient.refuse_noise()
    p.grad.add_(float(np.random.default_rng(np.random.randint(9)).normal()))
    with pytest.raises(UsageError, match="random numbers were drawn"):
        gradient.refuse_noise()
    whole = commit_gradient([p], None, 1)
    p.grad.add_(torch.randn(4, 3))
    whole.refuse_noise()
