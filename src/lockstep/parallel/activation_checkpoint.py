"""What the forward pass keeps for the backward pass, block by block: everything, the costly part, or nothing but the block's inputs.

    none       everything is kept                                               fastest
    selective  matrix products and attention; norms, turns, gates come again    little time
    full       the inputs of each block; it is computed a second time           a third more time

(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022, "Reducing Activation Recomputation".)
What comes again comes with the same randomness and from the same inputs by the same operations, so the gradient has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Mode = Literal["none", "selective", "full"]

aten = torch.ops.aten
KEPT = [  # by "selective"; not bmm, whose result attention by hand goes on writing in
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def recompute(blocks: Iterable[nn.Module], mode: Mode) -> None:
    """From now on these blocks keep what `mode` says. In place, before anything wraps or compiles them; no name changes."""
    if mode == "none":
        return
    for block in blocks:
        block.forward = MethodType(fully if mode == "full" else selectively, block)


# Functions of this file, for torch.compile does not look at one of torch that stands in the place of a forward pass.


def fully(block: nn.Module, *inputs: Any) -> Any:
    """The block's own forward pass; nothing but its inputs is kept."""
    return checkpoint(lambda: type(block).forward(block, *inputs), use_reentrant=False)


def selectively(block: nn.Module, *inputs: Any) -> Any:
    """The block's own forward pass; its inputs and the results of what stands in KEPT are kept."""
    return checkpoint(lambda: type(block).forward(block, *inputs), use_reentrant=False, context_fn=keeping)


def keeping() -> Any:
    return create_selective_checkpoint_contexts(KEPT)
