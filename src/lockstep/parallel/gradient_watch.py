"""Refuse wrong sums of gradients, with the names of the parameters.

`GradientWatch` compares the `.grad` of every trained parameter before and after each backward pass: every parameter must get a gradient in
every micro-batch, from one `team.backward`, and nothing else may change it before the step's gradient is whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lockstep.checkpoint.state_dict import named_tensors
from lockstep.errors import UsageError
from lockstep.runtime.tensor_bytes import DTYPES
from lockstep.units import shown

Mark = tuple[Tensor | None, int]  # a gradient, and how often it had been changed in place


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a UsageError for parameters that cannot be summed or saved."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise UsageError("the model has no parameter to train", type(model).__name__, "set requires_grad_(True) on what is to be trained")
    if names := [name for name, p in trained.items() if not p.dtype.is_floating_point]:
        raise UsageError(
            f"{len(names)} trained parameters are not real floating-point numbers: {shown(names)} ({trained[names[0]].dtype})",
            type(model).__name__,
            "train the real and imaginary parts as two parameters, and combine them in forward()",
        )
    if names := [name for name, module in model.named_modules() if getattr(module, "sparse", False) and is_trained(module)]:
        raise UsageError(
            f"sparse gradients are not supported: {shown(names)}", "nn.Embedding or nn.EmbeddingBag with sparse=True", "use sparse=False"
        )
    if names := [f"{name} ({tensor.dtype})" for name, tensor in named_tensors(model).items() if tensor.dtype not in DTYPES]:
        raise UsageError(
            f"a checkpoint cannot hold these parameters or buffers: {shown(names)}",
            type(model).__name__,
            "use complex64 or a real dtype; a buffer that need not be saved takes persistent=False",
        )


def is_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module itself is trained."""
    return any(p.requires_grad for p in module.parameters(recurse=False))


class GradientWatch:
    """Detect changes to the gradients of `parameters` within the micro-batch loop.

    A change shows as another tensor in .grad, or as a new version of the same one; what is changed through `.data` does not show. Costs
    about 0.3 us a parameter and look, three looks a micro-batch.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self.names, self.parameters = names, parameters
        self.where = ""  # the micro-batch that the loop is at; "" outside of the loop
        self._backwards = 0  # in this micro-batch
        self._seen: list[Mark] = []

    def begin(self, step: int, k: int) -> None:
        """Start micro-batch `k`."""
        self.where, self._backwards = f"micro-batch {k} of step {step}", 0
        self._seen = self._look()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the micro-batch. UsageError when it is the second, or a gradient was changed or is missing after it."""
        if not self.where:
            raise UsageError(
                "team.backward was called outside of the micro-batch loop",
                "team.backward(loss)",
                "call it within: for k in team.micro_batches(step)",
            )
        if self._backwards:
            raise UsageError(
                f"team.backward was called twice in {self.where}",
                "team.backward(loss)",
                "add the losses of a micro-batch, and call it once",
            )
        self._refuse_changes("before team.backward")
        before = [(0 if gradient is None else gradient.data_ptr(), version) for gradient, version in self._seen]
        self._seen = []  # a reference would keep the old memory alive while DDP moves the gradients into its buckets
        loss.backward()
        self._backwards += 1
        self._seen = self._look()
        missing = [
            name
            for name, old, (gradient, version), p in zip(self.names, before, self._seen, self.parameters, strict=True)
            if (gradient is None or (gradient.data_ptr(), version) == old) and p.numel()
        ]
        if missing:
            raise UsageError(
                f"no gradient arrived for {len(missing)} of {len(self.names)} parameters in {self.where}: {shown(missing)}",
                "team.backward(loss)",
                "every trained parameter must take part in every micro-batch: freeze it with requires_grad_(False), "
                "or add 0.0 * parameter.sum() to the loss",
            )
        if sparse := [
            name for name, (gradient, _) in zip(self.names, self._seen, strict=True) if gradient is not None and gradient.is_sparse
        ]:
            raise UsageError(f"sparse gradients are not supported: {shown(sparse)}", self.where, "use sparse=False")

    def end(self) -> None:
        """End the micro-batch. UsageError when it had no backward pass, or a gradient was changed after it."""
        if not self._backwards:
            raise UsageError(
                f"no gradient arrived for the {len(self.names)} parameters in {self.where}: team.backward was not called",
                "for k in team.micro_batches(step)",
                "call team.backward(loss), not loss.backward(), once for every micro-batch",
            )
        self._refuse_changes("after team.backward")
        self.where, self._seen = "", []

    def _look(self) -> list[Mark]:
        return [(gradient, -1 if gradient is None else gradient._version) for p in self.parameters for gradient in (p.grad,)]

    def _refuse_changes(self, when: str) -> None:
        changed = [
            name
            for name, p, (gradient, version) in zip(self.names, self.parameters, self._seen, strict=True)
            if p.grad is not gradient or (gradient is not None and gradient._version != version)
        ]
        if changed:
            raise UsageError(
                f"the gradients of {len(changed)} of {len(self.names)} parameters were changed in {self.where}, {when}: {shown(changed)}",
                "by optimizer.zero_grad(), loss.backward(), gradient clipping or the like in the micro-batch loop",
                "remove zero_grad (each step starts without gradients), call team.backward(loss) instead of loss.backward(), "
                "and change gradients after the loop, where they are whole",
            )
