"""Gradients of a learner's micro-batches in a whole replica."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.parallel.learner_passes import own_memory


def test_gradients_that_share_memory_are_copied() -> None:
    """autograd.grad gives both summands of a sum the same tensor, and an expanded view to a sum."""
    a, b, unused = (nn.Parameter(torch.ones(3)) for _ in range(3))
    for loss in (((a + b) * 2).sum(), (a + b).sum()):
        found = torch.autograd.grad(loss, [a, b, unused], allow_unused=True)
        assert found[0].data_ptr() == found[1].data_ptr()
        expected = [1 + g if g is not None else torch.ones(3) for g in found]
        own = own_memory(found, [a, b, unused])
        for gradient in own:
            gradient += 1
        assert all(map(torch.equal, own, expected))
