"""Optimizers whose state is more than tensors and numbers by parameter, and names with "." and ":"."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.state_dict import digest, escape, get_state_dict, set_state_dict, unescape
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, UsageError
from lockstep.training.checkpointer import Checkpointer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {}


class Plain(torch.optim.Optimizer):
    """Gradient descent; `update` returns the change of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def __init_subclass__(cls, *, resumable: bool = True) -> None:
        if resumable:
            OPTIMIZERS[cls.__name__] = cls

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(0.1 * self.update(p.grad, self.state[p]))

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return grad


class MADGRAD(Plain):
    """The layout of pytorch_optimizer's: a counter that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        if "k" not in self.state:
            self.state["k"] = torch.tensor([0], dtype=torch.long)
        super().step()
        self.state["k"].add_(1)

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return state.setdefault("s", torch.zeros_like(grad)).add_(
            grad * float(self.state["k"] + 1) ** 0.5
        )


class AggMo(Plain):
    """A dict of buffers by their momentum."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        buffers = state.setdefault(
            "momentum_buffer", {beta: torch.zeros_like(grad) for beta in (0.0, 0.9, 0.99)}
        )
        return torch.stack([buffer.mul_(beta).add_(grad) for beta, buffer in buffers.items()]).mean(
            0
        )


class AdaShift(Plain):
    """A queue of gradients."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        queue = state.setdefault("grad_queue", deque(maxlen=2))
        queue.append(grad.clone())
        return queue[0] + 0.5 * grad


class Nested(Plain):
    """Keys with "." and ":", a tuple, a string, a NumPy number and a large integer."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["m.1:int"] = 0.5 * state.get("m.1:int", torch.zeros_like(grad)) + grad
        state["n.1"] = state.get("n.1", 0) + 1
        state["list"] = [(grad.clone(), "text"), 2**70, None]
        state["scale"] = np.float32(0.9) * state.get("scale", np.float32(0.7))
        return state["m.1:int"] * float(state["scale"]) * state["n.1"]


class Counting(torch.optim.SGD):
    """A counter that its state_dict returns."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.k = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.k += 1
        self.param_groups[0]["lr"] = 0.1 / self.k
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.k = state_dict["k"]
        super().load_state_dict(state_dict)


class Forgetful(Counting):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "k": 0})


OPTIMIZERS["Counting"] = Counting


class Run:
    def __init__(
        self, folder: Path, make_optimizer: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = make_optimizer(self.model.parameters())
        runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
        self.checkpointer = Checkpointer(folder, runtime, self.model, self.optimizer, every_steps=2)

    def train(self, steps: range) -> str:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(torch.full((2, 3), float(step % 5))).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.save_if_due(step + 1)
        self.checkpointer.close()
        return digest(self.checkpointer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_any_layout_is_resumed_with_the_same_bits(tmp_path: Path, name: str) -> None:
    expected = Run(tmp_path / "undisturbed", OPTIMIZERS[name]).train(range(5))
    Run(tmp_path / "resumed", OPTIMIZERS[name]).train(range(3))
    resumed = Run(tmp_path / "resumed", OPTIMIZERS[name])
    step = resumed.checkpointer.resume()
    assert step == 2
    assert resumed.train(range(step, 5)) == expected


def test_load_state_dict_that_restores_less_than_it_saved_is_refused(tmp_path: Path) -> None:
    Run(tmp_path, Forgetful).train(range(2))
    with pytest.raises(
        CheckpointError,
        match=r"Forgetful differs from the saved state after load_state_dict: Forgetful.state_dict.k",
    ):
        Run(tmp_path, Forgetful).checkpointer.resume()


class Conda(Plain, resumable=False):
    """An object in the state."""

    def update(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["projector"] = self
        return grad


class Keyed(torch.optim.SGD):
    """A state_dict with parameters as keys."""

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "slow": {p: p.detach().clone() for p in self.param_groups[0]["params"]},
        }


class Wrapper(torch.optim.SGD):
    """An optimizer that holds another one, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make_optimizer", "what"),
    [
        (
            Conda,
            r"Conda keeps 'projector' as a Conda, which a checkpoint cannot hold\n  state of 0.weight",
        ),
        (
            Keyed,
            r"Keyed keeps 'slow' as a dict, which a checkpoint cannot hold\n  Keyed.state_dict\(\); .*slow is a dict by tensors",
        ),
        (
            Wrapper,
            r"Wrapper keeps another optimizer, SGD, in its attribute base, which its state_dict does not return",
        ),
    ],
)
def test_optimizer_that_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, make_optimizer: Any, what: str
) -> None:
    with pytest.raises((CheckpointError, UsageError), match=what):
        Run(tmp_path, make_optimizer).train(range(1))
        Run(tmp_path, make_optimizer).checkpointer.state_dict()


class Schedule(torch.optim.SGD):
    """A learning rate computed with NumPy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.9 * np.cos(self.param_groups[0]["lr"])
        self.param_groups[0]["weight_decay"] = np.float32(0.9) * np.float32(
            self.param_groups[0]["weight_decay"] + 0.01
        )
        super().step()


def test_numpy_numbers_of_parameter_groups_are_saved_exactly(tmp_path: Path) -> None:
    expected = Run(tmp_path / "undisturbed", Schedule).train(range(5))
    Run(tmp_path / "resumed", Schedule).train(range(3))
    resumed = Run(tmp_path / "resumed", Schedule)
    assert resumed.checkpointer.resume() == 2
    group = resumed.optimizer.param_groups[0]
    assert type(group["lr"]) is float and type(group["weight_decay"]) is np.float32
    assert resumed.train(range(2, 5)) == expected


def test_parameters_and_buffers_named_like_json_are_loaded_again(tmp_path: Path) -> None:
    def saver() -> Checkpointer:
        model = nn.Module()
        model.register_parameter("a:json", nn.Parameter(torch.ones(2)))
        model.register_buffer("b:json", torch.ones(1))
        runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
        return Checkpointer(
            tmp_path, runtime, model, torch.optim.SGD(model.parameters(), momentum=0.9)
        )

    with saver() as checkpointer:
        checkpointer.save(1)
    assert saver().resume() == 1


def test_names_without_separators_are_unchanged_and_others_are_distinct() -> None:
    keys = ["exp_avg", "50%", "%2E", ".", ":", "%", "%%3A", "%:", "%252E", "%2", "a.b:c"]
    assert [escape(key) for key in keys[:2]] == keys[:2]
    assert [unescape(escape(key)) for key in keys] == keys
    assert len({escape(key) for key in keys}) == len(keys)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    names = {
        f"optim.{p}.{key}" for p in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert set(get_state_dict(model, optimizer)) == names | {"model.weight", "model.bias"}


def test_strides_of_matrices_are_restored() -> None:
    """A product of a transposed matrix may have other bits."""
    model, restored = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer, restored_optimizer = MADGRAD(model.parameters()), MADGRAD(restored.parameters())
    optimizer.state[model.weight] = {
        "basis": torch.rand(4, 2).t(),
        "q": [torch.rand(2, 3, 4).permute(2, 0, 1)],
        "s": torch.rand(3, 2),
    }
    set_state_dict(restored, restored_optimizer, get_state_dict(model, optimizer))
    state = restored_optimizer.state[restored.weight]
    assert (state["basis"].stride(), state["q"][0].stride(), state["s"].stride()) == (
        (1, 2),
        (1, 12, 4),
        (2, 1),
    )
    assert digest(get_state_dict(restored, restored_optimizer)) == digest(
        get_state_dict(model, optimizer)
    )
