"""The model that Session.prepare returns."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import nn


class PreparedModel(nn.Module):
    """A model whose forward pass runs through the ReplicaGroup inside micro-batches. Elsewhere
    (evaluation, no_grad) it is the plain model.

    module            the model that was passed to Session.prepare; its attributes are available here, too
    replicas_in_loop  returns the ReplicaGroup inside a micro-batch; None elsewhere
    """

    module: nn.Module

    def __init__(self, module: nn.Module, replicas_in_loop: Callable[[], Callable[..., Any] | None]) -> None:
        super().__init__()
        self.module, self._replicas_in_loop = module, replicas_in_loop

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return (self._replicas_in_loop() or self.module)(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the plain model, for an EMA."""
        return deepcopy(self.module, memo)
