"""The loss of each row of a micro-batch, where the loss function computes one.

Every loss of torch with a `reduction` is computed once more without it, below autograd, and so is
the fused loss of Lockstep's models. What the loop computes stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.runtime.torch_private import TorchDispatchMode

NO_REDUCTION = 0
FUSED = "lockstep::loss_of_states"  # models/loss.py
SELECTIONS = ("aten::masked_select", "aten::nonzero")


class SampleLosses(TorchDispatchMode):
    """Context manager around the passes of a micro-batch of so many rows; 0: it has none."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.rows = rows
        self._losses: list[Tensor] = []
        self._selects = False  # elements by a mask: those of the loss may be of any row

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        if "reduction" in names and not func._schema.name.endswith("_backward"):
            given = dict(zip(names, args, strict=False)) | kwargs | {"reduction": NO_REDUCTION}
            each = func(**given)
            self._take(each[0] if isinstance(each, tuple) else each)
        elif func._schema.name == FUSED and self.rows and len(args[0]) % self.rows == 0:
            states, weight, labels, *options = args
            parts = zip(states.chunk(self.rows), labels.chunk(self.rows), strict=True)
            sums = [func(own, weight, words, *options[:-1], False)[0] for own, words in parts]
            counts = (labels.view(self.rows, -1) != options[2]).sum(1).clamp(min=1)
            self._losses.append(torch.stack(sums).double() / counts)
        masks = args[1] if func._schema.name == "aten::index" else []
        self._selects |= func._schema.name in SELECTIONS or any(
            mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in masks
        )
        return func(*args, **kwargs)

    def _take(self, each: Tensor) -> None:
        """Take the mean over the elements of each row; masked ones are 0."""
        if self.rows and each.numel() and each.numel() % self.rows == 0:
            by_row = each.detach().reshape(self.rows, -1).double()
            self._losses.append(by_row.sum(1) / (by_row != 0).sum(1).clamp(min=1))

    def by_row(self) -> list[float]:
        """Return the losses of the rows, added up over the loss functions; [] if unknown."""
        known = [] if self._selects else self._losses
        losses: list[float] = torch.stack(known).sum(0).tolist() if known else []
        return losses
