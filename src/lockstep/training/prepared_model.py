"""The model that Session.prepare returns."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.training.loader import MeanSizes, Sizes
from lockstep.training.model_options import autocast, in_float32


class PreparedModel(nn.Module):
    """A model whose forward pass runs through the ReplicaGroup inside micro-batches. Elsewhere
    (evaluation, no_grad) it is the plain model.

    module            the model that was passed to Session.prepare; its attributes are available
                      here, too
    replicas_in_loop  returns the ReplicaGroup inside a micro-batch; None elsewhere
    precision         of forward passes, whose output is float32: "fp32", "bf16"; None: the caller's
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        replicas_in_loop: Callable[[], Callable[..., Any] | None],
        device: torch.device,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        self.module, self._replicas_in_loop = module, replicas_in_loop
        self._device = device
        self.precision = precision
        self._sizes, self._inputs = MeanSizes(), Sizes((), 0)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if replicas := self._replicas_in_loop():
            self._inputs = Sizes(
                tuple(tuple(tensor.shape) for tensor in tensors_of((inputs, named))), 0
            )
        with autocast(self._device, self.precision):
            output = (replicas or self.module)(*inputs, **named)
        return in_float32(output) if self.precision == "bf16" else output

    def samples_of_mean(self) -> int | None:
        """Return the number of samples in the newest inputs, if all tensors have as many rows."""
        inputs, self._inputs = self._inputs, Sizes((), 0)
        return self._sizes.samples(inputs) if inputs.shapes else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the plain model, for an EMA."""
        return deepcopy(self.module, memo)
