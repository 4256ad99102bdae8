"""Bits of the optimizers of torch: a tensor against its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lockstep.tasks.optim import LeanAdamW, Lion
from lockstep.training.owner_update import ELEMENTWISE, couples_elements

Options = dict[Callable[..., optim.Optimizer], list[dict[str, Any]]]
OPTIONS: Options = {
    optim.SGD: [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    ],
    optim.Adam: [{"weight_decay": 0.1}, {"amsgrad": True}],
    optim.AdamW: [{}, {"amsgrad": True}],
    optim.NAdam: [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    optim.RAdam: [{"weight_decay": 0.1}],
    optim.Adamax: [{}],
    optim.Adagrad: [{"lr_decay": 0.1}],
    optim.Adadelta: [{}],
    optim.RMSprop: [{}, {"momentum": 0.9, "centered": True}],
    optim.Rprop: [{}],
    optim.ASGD: [{}],
}
COUPLED: Options = {optim.Adafactor: [{}], optim.Muon: [{}]}
OWN: Options = {
    Lion: [{"weight_decay": 0.1}],
    LeanAdamW: [{"state_dtype": torch.bfloat16}],
}
SHAPES = [(37, 19), (64, 3), (24, 40)]


def trained(
    make: Callable[[Iterable[nn.Parameter]], optim.Optimizer], shape: tuple[int, ...], parts: int
) -> tuple[bool, list[Tensor]]:
    """Train a tensor in `parts` slices for seven steps. Return whether the optimizer is known to
    couple elements, and the weights and state, put together."""
    chance = torch.Generator().manual_seed(shape[0])
    parameters = [
        nn.Parameter(part.clone()) for part in torch.randn(shape, generator=chance).chunk(parts)
    ]
    optimizer = make(parameters)
    for step in range(7):
        gradient = torch.randn(shape, generator=chance) * 10.0 ** (step % 3 - 1)
        for parameter, part in zip(parameters, gradient.chunk(parts), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    tensors = [torch.cat([parameter.detach() for parameter in parameters])]
    for key, value in optimizer.state[parameters[0]].items():
        values = [optimizer.state[parameter][key] for parameter in parameters]
        if isinstance(value, Tensor) and value.dim():
            tensors.append(torch.cat(values))
        else:
            assert all(other == value for other in values), f"{key} differs between slices"
    return couples_elements(optimizer), tensors


def differs_in_slices(
    make: Callable[[Iterable[nn.Parameter]], optim.Optimizer],
) -> tuple[bool, bool]:
    """Return (is known to couple elements, a slice gets other bits than in the whole tensor)."""
    differs = False
    for shape in SHAPES:
        known, whole = trained(make, shape, 1)
        for parts in (2, 3, 5):
            sliced = trained(make, shape, parts)[1]
            differs |= any(not torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))
    return known, differs


def test_every_optimizer_of_torch_is_in_a_table() -> None:
    classes = {
        value
        for value in vars(optim).values()
        if isinstance(value, type) and issubclass(value, optim.Optimizer)
    }
    assert {*OPTIONS, *COUPLED} == classes - {optim.Optimizer, optim.LBFGS, optim.SparseAdam}
    assert set(ELEMENTWISE) == set(OPTIONS)


@pytest.mark.parametrize(
    "kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_torch_updates_a_slice_as_the_slice_of_the_tensor(
    kind: Any, kernel: dict[str, Any]
) -> None:
    if "fused" in kernel and kind not in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
        pytest.skip(f"{kind.__name__} has no fused kernel")
    outcomes = [
        differs_in_slices(partial(kind, lr=0.02, **kernel, **options)) for options in OPTIONS[kind]
    ]
    assert {known for known, _ in outcomes} == {"fused" in kernel}
    is_cut = (
        "fused" in kernel and kind is not optim.Adagrad
    )  # a fused kernel on a CPU computes the last elements otherwise
    assert any(differs for _, differs in outcomes) == is_cut


@pytest.mark.parametrize("kind", [*COUPLED, *OWN], ids=lambda kind: kind.__name__)
def test_coupled_optimizers_differ_and_ours_do_not(kind: Any) -> None:
    for options in (COUPLED | OWN)[kind]:
        known, differs = differs_in_slices(partial(kind, lr=0.02, **options))
        assert known == differs == (kind in COUPLED)


def test_an_unknown_optimizer_counts_as_coupled_unless_it_declares_otherwise() -> None:
    class Own(optim.AdamW):
        pass

    class Declared(Own):
        elementwise = True

    weight = nn.Parameter(torch.zeros(2, 2))
    assert couples_elements(Own([weight])) and not couples_elements(Declared([weight]))
