"""Measure the memory of tensors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Count the bytes of live tensors created inside the context, and their peak.

    Temporary memory inside an operator does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not hasattr(
                storage := tensor.untyped_storage(), "counted"
            ):
                storage.counted = True  # type: ignore[attr-defined]
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.release, storage.nbytes())
        return result

    def release(self, size: int) -> None:
        self.bytes -= size
