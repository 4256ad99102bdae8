"""The interface of a model that is cut into the stages of a pipeline, between its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class Chunk(NamedTuple):
    """Adjacent layers of the model, and whether they are the model's first and last."""

    layers: Sequence[int]
    first: bool
    last: bool


class StagedModel(nn.Module):
    """A model of layers in a row, which can be on the meta device."""

    masks_follow_layers = False  # True: random masks follow from the layer, in every layout alike

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """Parameters of the first stage that the last one uses, too."""
        raise NotImplementedError

    def layer_names(self) -> list[str]:
        """Return the names of the layers, in the order of the forward pass."""
        raise NotImplementedError

    def outer_modules(self, layers: Sequence[str], *, first: bool, last: bool) -> list[str]:
        """Return the modules beside its layers that a chunk uses.

        first, last  whether it is the first chunk of the model, and the last
        """
        raise NotImplementedError

    def activation_shapes(self, *inputs: Any) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a chunk passes on, given the model's inputs."""
        raise NotImplementedError

    def forward_chunk(
        self, chunk: Chunk, received: Sequence[Tensor], *inputs: Any, **named: Any
    ) -> tuple[Tensor, ...]:
        """Run a chunk on what it has received; the last one returns (loss,)."""
        raise NotImplementedError
