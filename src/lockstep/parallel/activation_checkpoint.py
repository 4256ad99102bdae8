"""Activation checkpointing: what the forward pass of each block keeps for its backward pass.

    none       all activations                                                    fastest
    selective  matrix products and attention; norms, rotations, gates recomputed  little time
    full       the block's inputs; the block is recomputed                        a third more time

Recomputation uses the same inputs, operations and random state, so the gradient has the same bits.
Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lockstep.errors import UsageError
from lockstep.runtime.numerics import generator_states
from lockstep.runtime.torch_private import ATTENTION_OPS

CPU = torch.device("cpu")
Mode = Literal["none", "selective", "full"]

# Saved by "selective"; not bmm, whose result plain attention overwrites.
SAVED_OPS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *ATTENTION_OPS]


def checkpoint_activations(blocks: Iterable[nn.Module], mode: Mode) -> None:
    """Make blocks keep only the activations of `mode`, in place, before wrapping or compiling."""
    for block in blocks if mode != "none" else ():
        block.forward = MethodType(
            full_checkpoint if mode == "full" else selective_checkpoint, block
        )


# Functions of this file: torch.compile skips a forward pass that is one of torch's functions.


def full_checkpoint(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    return run_twice(block, lambda: type(block).forward(block, *inputs, **named))


def selective_checkpoint(block: nn.Module, *inputs: Any, **named: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, SAVED_OPS)
    return run_twice(
        block, lambda: type(block).forward(block, *inputs, **named), context_fn=contexts
    )


def run_twice(block: nn.Module, forward: Callable[[], Any], **options: Any) -> Any:
    """Run a forward pass that is repeated in the backward pass. UsageError when it draws from the
    generators of Python or NumPy: torch restores only its own for the second pass."""
    if torch.compiler.is_compiling():
        return checkpoint(forward, use_reentrant=False, **options)
    before = generator_states(CPU)[2:]
    output = checkpoint(forward, use_reentrant=False, **options)
    if generator_states(CPU)[2:] != before:
        raise UsageError(
            "a forward pass drew numbers from NumPy's or Python's generator",
            f"{type(block).__name__}, whose activations are computed twice",
            "use torch's generators in the model, torch.rand(()), or keep its activations",
        )
    return output
