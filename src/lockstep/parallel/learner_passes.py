"""The passes of a DiLoCo learner in a whole replica; learner_shards.py has those of shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lockstep.data.order import splitmix64
from lockstep.errors import UsageError
from lockstep.network.subtrees import Subtree
from lockstep.parallel.gradient_watch import UNUSED_HINT
from lockstep.parallel.learner_shards import new_numbers
from lockstep.parallel.ordered_sum import SumTree
from lockstep.parallel.replica import Gradients, Replica
from lockstep.runtime.numerics import seed_generators
from lockstep.units import join_names


class WholePasses:
    """The passes of a learner's step in a whole replica: as LearnerShards has them."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.numbers = new_numbers(0, replica.device)
        self.squared: Tensor | None = None
        self.own_leaves: list[int] = []  # of the step, from 0
        self._leaf = 0
        self._gradients: list[Tensor] = []

    def passes(self, step: int, leaves: range) -> Iterator[int]:
        """Yield these micro-batches; then .grad is the sum over them."""
        replica = self.replica
        self.numbers = new_numbers(len(leaves), replica.device)
        self.own_leaves = list(range(len(leaves)))
        tree = SumTree[Gradients]()
        for self._leaf, k in enumerate(leaves):
            seed_generators(splitmix64(replica.seed, step, k) >> 1, replica.device)
            self._gradients = []
            yield k
            if not self._gradients:
                raise UsageError(
                    f"no gradient arrived in micro-batch {k} of step {step}",
                    "the loop over the micro-batches of a learner",
                    "call session.backward(loss) once for every micro-batch, not loss.backward()",
                )
            tree.add(Subtree(self._leaf, 1), Gradients(self._gradients))
        for p, gradient in zip(replica.parameters, tree.total().tensors, strict=True):
            p.grad = gradient

    def add_pass(self, loss: Tensor, count: int, samples: int) -> None:
        if self._gradients:
            raise UsageError(
                "backward() was called twice in a micro-batch",
                "session.backward(loss)",
                "add the losses of a micro-batch and call it once",
            )
        parameters = self.replica.parameters
        self.replica.board.enter("backward")
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        missing = {id(p) for p, g in zip(parameters, found, strict=True) if g is None}
        if missing and self.replica.unused == "raise":
            named = self.replica.model.named_parameters()
            names = [name for name, p in named if id(p) in missing]
            raise UsageError(
                f"no gradient arrived for {join_names(names)} in a learner's micro-batch",
                "session.backward(loss)",
                UNUSED_HINT,
            )
        self._gradients = own_memory(found, parameters)
        self.numbers[self._leaf] = torch.stack(
            [loss.detach().double().reshape(()), *self.numbers.new_tensor([count, samples])]
        )


def own_memory(
    gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Return gradients that can be changed in place: autograd gives one tensor to two parameters
    that are added, and a view for a sum. Zeros in place of None."""
    used = set[int]()
    own = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        storage = gradient.untyped_storage()
        if storage.data_ptr() in used or storage.nbytes() != gradient.nbytes:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        used.add(gradient.untyped_storage().data_ptr())
        own.append(gradient)
    return own
