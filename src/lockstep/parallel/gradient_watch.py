"""Detect wrong sums of gradients, and name the parameters.

Every trained parameter must get a gradient in every micro-batch, from one call of `backward`, and
nothing else may change it before the gradient of the step is complete.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.state_dict import named_tensors
from lockstep.errors import UsageError, refuse
from lockstep.parallel.digest import digest_of
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.tensor_bytes import DTYPES
from lockstep.runtime.torch_private import version_of
from lockstep.units import join_names

# A parameter without a gradient in a micro-batch: error, or zeros.
Unused = Literal["raise", "zero"]
UNUSED_HINT = (
    "every trained parameter must take part in every micro-batch: "
    "freeze it with requires_grad_(False), "
    'or give it a gradient of zero where it does not: Session(..., unused="zero")'
)
Mark = tuple[Tensor | None, int]  # a gradient and its in-place version
Wait = Callable[[list[dist.Work | None]], None]


def refuse_unsupported(model: nn.Module) -> None:
    """UsageError: the model has parameters that cannot be summed or saved."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError(
            "the model has no parameter to train",
            type(model).__name__,
            "call requires_grad_(True) on some",
        )
    if names := [name for name, p in trained.items() if not p.dtype.is_floating_point]:
        raise UsageError(
            f"{len(names)} trained parameters are not real floating-point numbers: "
            f"{join_names(names)} ({trained[names[0]].dtype})",
            type(model).__name__,
            "train the real and imaginary parts as two parameters and combine them in forward()",
        )
    refuse(
        [
            name
            for name, module in model.named_modules()
            if getattr(module, "sparse", False)
            and any(p.requires_grad for p in module.parameters(recurse=False))
        ],
        "sparse gradients are not supported:",
        "nn.Embedding or nn.EmbeddingBag with sparse=True",
        "use sparse=False",
    )
    tensors = (*model.named_parameters(), *model.named_buffers())
    sparse = [(name, tensor.layout) for name, tensor in tensors if tensor.layout != torch.strided]
    refuse(
        [f"{name} ({layout})" for name, layout in sparse],
        "sparse parameters and buffers are not supported:",
        type(model).__name__,
        "keep indices and values as two buffers, and build the sparse tensor in forward()",
    )
    refuse(
        [
            f"{name} ({tensor.dtype})"
            for name, tensor in named_tensors(model).items()
            if tensor.dtype not in DTYPES
        ],
        "a checkpoint cannot hold these parameters or buffers:",
        type(model).__name__,
        "use complex64 or a real dtype; give a buffer that need not be saved persistent=False",
    )


def refuse_different_parameters(hashes: Sequence[str], names: Sequence[str], wait: Wait) -> None:
    """Collective if the hashes differ. UsageError: this rank trains the parameters `names`, others
    do not.

    hashes  of the names, by rank
    """
    if len(set(hashes)) > 1:
        counts = Counter(
            name for trained in gather_json(len(hashes), names, wait) for name in trained
        )
        listed = sorted(name for name, count in counts.items() if count < len(hashes))
        raise UsageError(
            f"not all workers train the same parameters: {join_names(listed)}",
            "requires_grad of the model's parameters at the start of the step",
            "derive requires_grad from the step, so that workers that join or resume later agree: "
            "layer.requires_grad_(step >= 300) in every step",
        )


def hash_of(value: Any) -> str:
    """Return a hash of a JSON value."""
    return sha256(json.dumps(value).encode()).hexdigest()


class GradientWatch:
    """Detect changes to the gradients of `parameters` within the micro-batch loop.

    A change gives .grad another tensor or a higher version; a change through `.data` shows in a
    `thorough` micro-batch only, which compares the values.
    Costs about 0.3 us per parameter and snapshot, two snapshots per micro-batch.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.names, self.parameters = names, parameters
        self._thorough = False
        self._seen: list[Mark] = []

    def start(self, *, thorough: bool) -> None:
        self._thorough = thorough
        self.mark()

    def mark(self) -> None:
        """Take the gradients as they are now."""
        self._seen = self._snapshot()

    def refuse_wrong(self, repeated: list[str], where: str) -> None:
        """UsageError: gradients that were removed, are sparse, or arrived twice in one pass."""
        named = list(zip(self.names, self.parameters, strict=True))
        refuse(
            [name for name, p in named if p.grad is None],
            f"a hook has removed gradients in {where}:",
            "Tensor.register_post_accumulate_grad_hook",
            "update in optimizer.step() after the loop, with the sum of all micro-batches",
        )
        refuse(
            [name for name, p in named if p.grad is not None and p.grad.is_sparse],
            "sparse gradients are not supported:",
            where,
            "use sparse=False",
        )
        if repeated:
            raise UsageError(
                "the gradient of a parameter arrived twice in one backward pass, "
                f"in {where}: {join_names(repeated)}",
                "reentrant activation checkpointing runs a backward pass inside the backward pass",
                "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )

    def _snapshot(self) -> list[Mark]:
        gradients = [p.grad for p in self.parameters]
        mark: Callable[[Tensor], int] = (
            (lambda gradient: digest_of([gradient])) if self._thorough else version_of
        )
        return [(gradient, -1 if gradient is None else mark(gradient)) for gradient in gradients]

    def refuse_changes(self, when: str) -> None:
        """UsageError: gradients are not as they were at the last mark."""
        pairs = zip(self.names, self._seen, self._snapshot(), strict=True)
        if changed := [
            name
            for name, (before, mark), (now, new_mark) in pairs
            if before is not now or mark != new_mark
        ]:
            raise UsageError(
                f"the gradients of {len(changed)} "
                f"of {len(self.names)} parameters were changed in {when}: {join_names(changed)}",
                "by optimizer.zero_grad(), loss.backward(), "
                "gradient clipping or the like in the micro-batch loop",
                "remove zero_grad (each step starts without gradients), "
                "call session.backward(loss) instead of loss.backward(), "
                "and change gradients after the loop, when they are complete",
            )
