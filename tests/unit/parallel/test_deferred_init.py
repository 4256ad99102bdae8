"""Modules without memory for their weights: the bits of a module built at once, and refusals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.deferred_init import deferred_init, move_to

CPU = torch.device("cpu")


class OwnInit(nn.Module):
    """Values set again at the end, tied weights, padding, views, buffers of all kinds."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 30, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.BatchNorm1d(width), nn.Linear(width, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(2, width))
        self.table = nn.Parameter(
            torch.from_numpy(np.arange(12, dtype=np.float32)).reshape(3, 4) / 7
        )
        self.register_buffer(
            "rotation", 1e4 ** (-torch.arange(0, width, 2).float() / width), persistent=False
        )
        self.register_buffer("mask", torch.ones(9, 9).tril().bool())
        self.register_buffer("data", torch.tensor([1.5, -2.0]))
        self.apply(self.init)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2))
        with torch.no_grad():
            self.scale[1].uniform_(-0.1, 0.1)
            self.scale.mul_(self.rotation.sum())
            square = self.blocks[1].linear1.weight[:24]
            square.copy_(square.t().flip(0))
            self.head.weight.copy_(self.head.weight)
        nn.init.orthogonal_(self.blocks[0].linear1.weight)
        nn.init.trunc_normal_(self.blocks[1].linear1.weight, std=0.02)
        nn.init.trunc_normal_(self.blocks[0].linear2.weight, mean=0.5, a=-1.0, b=1.0)
        nn.init.trunc_normal_(self.blocks[1].linear2.weight, std=3.0, a=-0.1, b=0.1)
        self.head.weight = self.embed.weight

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)


def gemma() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 4,
    }
    config = transformers.AutoConfig.for_model(
        "gemma3_text", **sizes, num_key_value_heads=2, tie_word_embeddings=True
    )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


class ReadsValues(nn.Module):
    """Numbers read from tensors, a generator besides the global one, and draws into tensors of data."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.rates = torch.linspace(0, torch.rand(()).item(), 4).tolist()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)
        nn.init.normal_(self.layer.weight, generator=generator)
        self.layer.bias.data.copy_(torch.tensor(self.rates).normal_())
        with torch.no_grad():
            self.layer.weight[self.layer.weight > self.rates[1]] *= 0.5
            self.norm.weight.copy_(
                torch.randn(4, generator=generator)
                if self.layer.weight.sum() > 0
                else torch.ones(4)
            )
            self.norm.bias.copy_(
                torch.nonzero(self.layer.weight.flatten() > self.rates[3]).sum().expand(4)
            )
            torch.tensor([1.0, 2.0]).copy_(self.norm.weight[:2])


class MixesData(nn.Module):
    """Tensors of data beside computed ones, as in the rotary frequencies of Phi-3 and positions of XGLM."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        exponents = torch.arange(0, 8, 2).float() / 8
        self.register_buffer(
            "frequencies", 1.0 / (torch.tensor([1.0, 1.5, 2.0, 4.0]) * 1e4**exponents)
        )
        self.register_buffer(
            "positions", torch.arange(6).float().unsqueeze(1) * torch.tensor([[1.0, 0.5]])
        )
        self.positions[2, :] = 0


FUNCTIONS: list[Callable[[], nn.Module]] = [
    OwnInit,
    ReadsValues,
    gemma,
    lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 4, 2), nn.PReLU()
    ),
    lambda: nn.LSTM(7, 9, num_layers=2, bidirectional=True),
    lambda: nn.Linear(5, 6, dtype=torch.bfloat16).to(torch.float64),
    MixesData,
]


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


@pytest.mark.parametrize(
    "function",
    FUNCTIONS,
    ids=["own init", "reads values", "gemma", "convolutions", "lstm", "casts", "data"],
)
def test_deferred_weights_have_the_bits_of_a_module_built_at_once(
    function: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(5)
    expected = function()
    drawn = torch.get_rng_state()
    torch.manual_seed(5)
    module = deferred_init(function)
    assert torch.equal(torch.get_rng_state(), drawn), "later code draws the same numbers"
    before = dict(module.named_parameters())
    assert all(parameter.is_meta or name == "table" for name, parameter in before.items())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    torch.manual_seed(6)
    state = torch.get_rng_state()
    move_to(module, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensors(module).keys() == tensors(expected).keys()
    for name, value in tensors(expected).items():
        assert tensors(module)[name].dtype == value.dtype and torch.equal(
            tensors(module)[name], value
        ), name
    assert all(p is before[name] for name, p in module.named_parameters())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(map(id, module.parameters()))
    sum(p.sum() for p in module.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert not torch.equal(next(module.parameters()), next(expected.parameters()))


ON_META = nn.Linear(2, 2, device="meta")


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known, self.unset = nn.Linear(2, 2), nn.Parameter(torch.empty(3))


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.weight.data.numpy()[:] = 1.0


class UsesAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.weight.data.copy_(ON_META.weight)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Uninitialized, "does not initialize unset"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), ON_META),
            r"does not initialize 1\.weight, 1\.bias",
        ),
        (UsesAnother, "is not the function's"),
        (SharesMemory, "cannot run without values.*numpy"),
    ],
)
def test_functions_that_cannot_be_repeated_are_refused(
    function: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        deferred_init(function)


def test_weights_that_would_be_lost_are_refused() -> None:
    loaded, replaced = deferred_init(nn.Linear, 2, 2), deferred_init(nn.Linear, 2, 2)
    with pytest.warns(UserWarning, match="no-op"):
        loaded.load_state_dict(nn.Linear(2, 2).state_dict())
    replaced.weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    for module in (loaded, replaced):
        with pytest.raises(
            UsageError, match="weights changed between deferred_init and their computation: weight"
        ):
            move_to(module, CPU)


MEASURE = """
import re, sys, torch
from pathlib import Path
from torch import nn
from lockstep.layout import Layout
from lockstep.parallel.deferred_init import deferred_init, recording_of
from lockstep.parallel.own_model import shard_module
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
block = lambda: nn.Sequential(nn.Linear(1000, 1000), nn.ReLU())
make = lambda: nn.Sequential(*(block() for _ in range(30)))
layout = Layout(1, 4)
shard_module(nn.Sequential(block(), block()), layout, layout.coordinates(1), torch.device("cpu"))
before = peak()
if sys.argv[1] == "deferred":
    model = deferred_init(make)
    recording = recording_of(model)
    local = shard_module(model, layout, layout.coordinates(1), torch.device("cpu"), init_param=lambda name, _: recording.value(name))
else:
    local = shard_module(make(), layout, layout.coordinates(1), torch.device("cpu"))
print(peak() - before)
"""


def test_a_shard_has_memory_for_its_slices_only() -> None:
    """120 MB of weights in four shards. Without the setting, glibc may keep freed memory."""
    grown, environ = {}, {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    for how in ("deferred", "at once"):
        shown = subprocess.run(
            [sys.executable, "-c", MEASURE, how],
            check=True,
            capture_output=True,
            text=True,
            env=environ,
        ).stdout
        grown[how] = float(shown)
    print(f"growth of a worker in MiB: {grown}")
    assert grown["deferred"] < 100 < 120 < grown["at once"], grown
