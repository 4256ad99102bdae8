"""Attributes of modules and optimizers, and non-persistent buffers, as part of the state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.training.attributes import Attributes

CPU = torch.device("cpu")


class Model(nn.Module):
    """A model with what users and torch keep as attributes."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and in use
            self.first = nn.utils.weight_norm(nn.Linear(2, 2))
        self.lstm, self.norm = nn.LSTM(2, 2), nn.BatchNorm1d(2)
        self.tau, self.view, self.unused = torch.ones(2), self.norm.weight.data, {"a": [1, 2.0]}
        self.register_buffer("mask", torch.zeros(2), persistent=False)
        self.hook = print

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        self.last = self.lstm(self.norm(self.first(x)))[0]
        return self.last * self.tau


def make() -> tuple[Model, torch.optim.Optimizer, Attributes]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, optimizer, Attributes(model, [optimizer])


@contextmanager
def loop(attributes: Attributes) -> Iterator[None]:
    attributes.begin_loop()
    yield
    attributes.end_loop()


def train(model: Model, optimizer: Any, attributes: Attributes, steps: int = 2) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        with loop(attributes):
            model(torch.rand(3, 2)).sum().backward()
        optimizer.step()
        scheduler.step()


def test_training_alone_changes_nothing_that_is_saved() -> None:
    model, optimizer, attributes = make()
    train(model, optimizer, attributes)
    assert attributes.state_dict() == {}
    assert {"calls", "last", "first.weight"} <= attributes.excluded
    with attributes.unsaved_changes():
        model.score = torch.tensor(0.5)
    assert attributes.state_dict() == {}


def change(model: Model, optimizer: Any) -> None:
    model.tau.mul_(0.5)
    model.mask.add_(1)
    model.unused["a"].append(3)
    model.norm.momentum, model.new, optimizer.k = 0.3, torch.arange(3), 7


def test_what_the_loop_changes_is_restored() -> None:
    model, optimizer, attributes = make()
    train(model, optimizer, attributes)
    change(model, optimizer)
    state = attributes.state_dict()
    other, other_optimizer, restored = make()
    tau = other.tau
    restored.load_state_dict(state, CPU)
    assert (
        other.tau is tau and other.tau.tolist() == [0.5, 0.5] and other.mask.tolist() == [1.0, 1.0]
    )
    assert (
        other.unused == {"a": [1, 2.0, 3]}
        and other.norm.momentum == 0.3
        and other.new.tolist() == [0, 1, 2]
    )
    assert vars(other_optimizer)["k"] == 7
    assert {name: tensor.tolist() for name, tensor in restored.state_dict().items()} == {
        n: t.tolist() for n, t in state.items()
    }


def test_attributes_of_missing_modules_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, attributes = make()
    change(model, optimizer)
    Attributes(nn.Linear(2, 2), []).load_state_dict(attributes.state_dict(), CPU)
    assert "attributes of objects that this run lacks: norm.momentum, optimizer 0.k" in caplog.text


def test_attributes_that_cannot_be_compared_are_no_state() -> None:
    model = nn.Linear(2, 2)
    model.swapped, model.wide = np.zeros(2, ">f4"), np.zeros(2, np.longdouble)
    model.conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    attributes = Attributes(model, [])
    model.conjugate = torch.ones(2, dtype=torch.complex64).conj()
    assert not {"swapped", "wide"} & attributes.changed().keys()


def test_a_cache_that_grows_in_a_later_loop_is_no_state() -> None:
    model, optimizer, attributes = make()
    model.longest = 1
    attributes = Attributes(model, [optimizer])
    train(model, optimizer, attributes)
    with loop(attributes):
        model.longest = 300
    assert "longest" not in attributes.changed()


def test_what_differs_between_workers_is_named_and_not_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = [make() for _ in range(3)]
    for rank, (model, optimizer, attributes) in enumerate(workers):
        if rank:  # rank 0 has just joined
            train(model, optimizer, attributes)
        else:
            model(torch.rand(3, 2))
        change(model, optimizer)
        model.norm.momentum = (0.1, 0.25, 0.5)[rank]
    described = [attributes.describe() for _, _, attributes in workers]
    for _, _, attributes in workers:
        attributes.agree([*described, None])
    saved = [set(attributes.changed()) for _, _, attributes in workers]
    assert saved == [{"tau", "mask", "unused", "new", "optimizer 0.k"}] * 3
    messages = {record.getMessage() for record in caplog.records}
    assert (
        len(messages) == 1
        and "no checkpoint holds them: norm.momentum (norm.momentum: 0.25, 0.5, as constructed)"
        in messages.pop()
    )


def test_a_model_that_is_compiled_as_a_whole_needs_no_length() -> None:
    compiled: Any = torch.compile(Model())
    attributes = Attributes(compiled, [])
    compiled.tau = 7.0
    assert any("tau" in name for name in attributes.changed())


def test_an_object_that_the_loop_changes_is_named_and_one_of_the_forward_pass_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.rng, model.seen, model.cache = np.random.default_rng(0), set[int](), {0}
    model.register_forward_hook(lambda *_: model.cache.add(len(model.cache)))
    attributes = Attributes(model, [optimizer], {})
    train(model, optimizer, attributes)
    attributes.announce()
    assert not caplog.text
    model.seen.add(1)
    model.rng.random()
    with attributes.unsaved_changes():  # an evaluation before the save
        pass
    attributes.announce()
    attributes.announce()
    [warning] = [record.message for record in caplog.records]
    assert "attributes change that no checkpoint can hold: rng, seen. After" in warning
