"""Materialize a model from the meta device: each tensor once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.parallel.deferred_init import materialize


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_parameter("absent", None)


def test_materialize_initializes_each_tensor_once_and_keeps_kinds() -> None:
    with torch.device("meta"):
        model = Parts()
    initialized: list[str] = []

    def init_param(name: str, shape: torch.Size) -> Tensor:
        initialized.append(name)
        return torch.full(shape, float(len(initialized)))

    assert materialize(model, torch.device("cpu"), init_param) is model
    assert initialized == ["frozen", "embedding.weight", "seen"]
    assert (
        isinstance(model.frozen, nn.Parameter)
        and not model.frozen.requires_grad
        and model.embedding.weight.requires_grad
    )
    assert torch.equal(model.embedding.weight, torch.full((5, 3), 2.0))
    assert torch.equal(model.seen, torch.full((2,), 3.0)) and not isinstance(
        model.seen, nn.Parameter
    )
