"""State dicts in a checkpoint: schedulers, EMA, GradScaler, several optimizers."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint.json_tree import differing_paths, pack, unpack
from lockstep.checkpoint.state_dict import digest
from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, LockstepError, UsageError
from lockstep.training.checkpointer import Checkpointer

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.7),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5]),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda n: 0.9**n),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.5, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
    ),
}


class Run:
    """A model, two optimizers, a scheduler, an EMA and a disabled GradScaler."""

    def __init__(self, folder: Path, scheduler: str = "StepLR") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        first = torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9)
        self.optimizers = [first, torch.optim.AdamW(self.model[1].parameters(), lr=0.01)]
        self.scheduler = SCHEDULERS[scheduler](first)
        self.ema = AveragedModel(self.model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
        state = {
            "scheduler": self.scheduler,
            "ema": self.ema,
            "scaler": torch.amp.GradScaler("cpu", enabled=False),
        }
        self.checkpointer = Checkpointer(
            folder, alone(), self.model, self.optimizers, state=state, every_steps=3
        )

    def train(self, steps: range) -> str:
        for step in steps:
            self.model(torch.full((2, 3), float(step % 5))).square().sum().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loss = [1.0] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []
            self.scheduler.step(*loss)
            self.ema.update_parameters(self.model)
            self.checkpointer.save_if_due(step + 1)
        self.checkpointer.close()
        return digest(self.checkpointer.state_dict())


def alone() -> ElasticRuntime:
    return ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_resumed_run_has_the_learning_rates_and_bits_of_an_uninterrupted_one(
    tmp_path: Path, scheduler: str
) -> None:
    undisturbed = Run(tmp_path / "undisturbed", scheduler)
    expected = undisturbed.train(range(9))
    Run(tmp_path / "resumed", scheduler).train(range(4))
    resumed = Run(tmp_path / "resumed", scheduler)
    step = resumed.checkpointer.resume()
    assert step == 3
    assert resumed.train(range(step, 9)) == expected
    assert (
        resumed.optimizers[0].param_groups[0]["lr"]
        == undisturbed.optimizers[0].param_groups[0]["lr"]
        != 0.1
    )
    assert digest(CheckpointStore(tmp_path / "resumed").load(9).tensors) == expected


def test_values_and_types_are_restored_exactly() -> None:
    tree = {
        "numbers": [1, -0.0, math.inf, 2**80, 0.1, True, None, "text \ud800"],
        3: (1, (2.5,)),
        ("a", 1): OrderedDict(b=1, a=2),
        None: Counter({5: 2}),
        "a.b": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "a": {"b": torch.tensor(7), "b:json": torch.empty(0)},
    }
    tensors = pack("state.x", tree)
    unpacked = unpack("state.x", tensors)
    assert repr(unpacked) == repr(tree)
    assert {"state.x:json", "state.x.a.b", "state.x.a.b'", "state.x.a.b:json'"} == set(tensors)
    tree["numbers"][1] = 0.0  # type: ignore[index]
    assert differing_paths("state.x", tensors, pack("state.x", tree)) == ["state.x.numbers.1"]


class Odd:
    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"inner": [self.value]}

    def load_state_dict(self, state: dict[str, object]) -> None: ...


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"odd": Odd({1, 2})}, "state.odd.inner.0 is a set, which a checkpoint cannot hold"),
        (
            {"odd": Odd(torch.eye(2).to_sparse())},
            "cannot hold a tensor of torch.float32, torch.sparse_coo\n  state.odd.inner.0",
        ),
        ({"odd": 0.5}, "state 'odd' is a float, which has no state_dict and load_state_dict"),
        ({"a.b": Odd(1)}, "'a.b' is not a name for a state"),
        (
            {"second": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "state 'second' is an optimizer",
        ),
    ],
)
def test_unsupported_state_is_refused_at_construction(
    tmp_path: Path, state: dict[str, Any], what: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(LockstepError, match=what):
        Checkpointer(tmp_path, alone(), model, torch.optim.SGD(model.parameters()), state=state)


def keeper_of(folder: Path, optimizers: Callable[[nn.Module], Any], **state: Any) -> Checkpointer:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return Checkpointer(folder, alone(), model, optimizers(model), state=state)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("optimizers", "state", "what"),
    [
        (sgd, {}, "in the checkpoint, but not in session.state\\(name=object\\): state.odd"),
        (sgd, {"odd": Odd(1), "more": Odd(2)}, "missing in the checkpoint: state.more"),
        (
            lambda m: torch.optim.AdamW(m.parameters()),
            {"odd": Odd(1)},
            "the checkpoint's optimizers are SGD, this run's AdamW",
        ),
        (
            lambda m: [torch.optim.SGD(layer.parameters()) for layer in m],
            {"odd": Odd(1)},
            "optimizers are SGD, this run's SGD, SGD",
        ),
        (
            lambda m: torch.optim.SGD([{"params": layer.parameters()} for layer in m]),
            {"odd": Odd(1)},
            "hold other parameters",
        ),
        (
            sgd,
            {"odd": Odd(2)},
            "state.odd \\(Odd\\) differs from the saved state after load_state_dict: state.odd.inner.0",
        ),
    ],
)
def test_checkpoint_of_other_state_or_optimizers_is_refused_by_name(
    tmp_path: Path, optimizers: Callable[[nn.Module], Any], state: dict[str, Any], what: str
) -> None:
    with keeper_of(tmp_path, sgd, odd=Odd(1)) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(CheckpointError, match=what):
        keeper_of(tmp_path, optimizers, **state).resume()


def test_checkpoint_without_parameter_groups_is_refused(tmp_path: Path) -> None:
    checkpointer = keeper_of(tmp_path, sgd)
    checkpointer.store.save(
        1,
        {
            name: tensor
            for name, tensor in checkpointer.state_dict().items()
            if name.startswith(("model.", "optim."))
        },
        {},
    )
    with pytest.raises(CheckpointError, match="missing in the checkpoint: groups"):
        checkpointer.resume()


def test_shared_parameters_and_non_optimizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"several optimizers hold the same parameters: 0\.weight"):
        keeper_of(tmp_path, lambda m: [sgd(m), sgd(m)])
    with pytest.raises(UsageError, match="not an optimizer of torch: StepLR"):
        keeper_of(tmp_path, lambda m: [schedulers.StepLR(sgd(m), 1)])


def test_learning_rate_tensor_is_restored_in_place(tmp_path: Path) -> None:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))

    with keeper_of(tmp_path, adamw) as checkpointer:
        checkpointer.optimizers[0].param_groups[0]["lr"].fill_(0.25)
        checkpointer.save(1)
    restored = keeper_of(tmp_path, adamw)
    rate: Tensor = restored.optimizers[0].param_groups[0]["lr"]
    restored.resume()
    assert restored.optimizers[0].param_groups[0]["lr"] is rate and float(rate) == 0.25
