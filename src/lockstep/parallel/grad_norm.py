"""Gradient norm and clipping; the bits of the norm do not depend on how tensors are sharded."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import compress

import torch

from lockstep.errors import UsageError
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.parallelize import LocalModel
from lockstep.runtime.numerics import generator_states
from lockstep.runtime.torch_private import foreach_mul_, version_of


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of (n, ...): (n,). Its bits do not depend on the other rows.

    Measured on one core: (2048, 704) in 148 us, as long as torch's norm of the whole.
    """
    count = len(gradient) if gradient.dim() else 1
    rows = gradient.reshape(count, -1 if gradient.numel() else 1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares, 0-dim float64: summed per row, per gradient, then over all."""
    return sum_of_rows([row_norms(gradient) for gradient in gradients])


def sum_of_rows(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of the gradients whose rows have these norms."""
    # Not slices of one tensor: on a GPU the order of a sum depends on where its operand starts.
    return torch.stack([rows.double().square().sum() for rows in norms]).sum()


def norm_squared_of_slices(
    local: LocalModel, groups: ProcessGroups, *, is_scaled: bool
) -> torch.Tensor:
    """Collective in the replica. Return the sum of squares of the whole gradient, float64.

    is_scaled  by a GradScaler: a gradient that is not finite on some shard becomes NaN on all of
               them, so that each skips the update
    """
    layout, shard = local.layout, groups.position.at.shard
    own = {
        name: p.grad
        for name, p in local.local_params.items()
        if p.requires_grad and not local.is_tied_copy(name)
    }
    slices = [local.tensor_slices[name] for name in own]  # of all shards together
    lengths = [part.local_shape[0] for part in slices]
    device = next(local.parameters()).device
    rows = torch.zeros(sum(lengths) + len(own), dtype=torch.float64, device=device)
    *rows_by_parameter, nonfinite = rows.split([*lengths, len(own)])
    for i, (gradient, of_all) in enumerate(zip(own.values(), rows_by_parameter, strict=True)):
        assert gradient is not None
        nonfinite[i] = not gradient.isfinite().all() if is_scaled else 0
        norms = row_norms(gradient)
        first = shard * -(-len(of_all) // layout.shard)
        of_all[first : first + len(norms)] = norms
    # Each row comes from one shard, so the sum is exact.
    groups.all_reduce(rows, groups.gather_group)
    if is_scaled:
        spread_nan(local, set(compress(own, nonfinite.tolist())))
    sums = torch.stack([parameter_rows.square().sum() for parameter_rows in rows_by_parameter])
    is_split = torch.tensor([not part.is_whole for part in slices], device=rows.device)
    parts = groups.all_reduce(torch.where(is_split, sums, 0.0), groups.tensor_group)
    grad_norm_squared = sum_over_stages(local, list(own), torch.where(is_split, parts, sums))
    groups.raise_failure()
    return grad_norm_squared


def sum_over_stages(local: LocalModel, own: Sequence[str], sums: torch.Tensor) -> torch.Tensor:
    """Collective in the stages. Return the sum of `sums`, one for each parameter of `own`, over all
    stages; of a user's model in the order of one worker."""
    if not local.placeholders:
        total = sums.sum()
        return local.groups.all_reduce(total, local.groups.pipeline_group)
    trained = [name for name, (_, marks) in local.originals.items() if marks[1]]
    of_all_stages = sums.new_zeros(len(trained))
    of_all_stages[[trained.index(name) for name in own]] = sums
    return local.groups.all_reduce(of_all_stages, local.groups.pipeline_group).sum()


def spread_nan(local: LocalModel, nonfinite: Set[str]) -> None:
    """Make the gradients of the parameters `nonfinite` NaN.

    A shard without rows of these gets a NaN in another parameter of the same optimizer, so that its
    GradScaler skips the update, too.
    """
    gradients = {name: p.grad for name, p in local.local_params.items() if p.grad is not None}
    gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
    for name in nonfinite:
        if name in gradients:
            gradients[name].fill_(torch.nan)
    for names in local.updated_together:
        here = [name for name in names if name in gradients]
        if here and nonfinite & {*names} and not nonfinite & {*here}:
            gradients[here[0]].fill_(torch.nan)


class StepGradient:
    """The gradient of a committed step, to be clipped by its global norm.

    squared    sum of squares before the gradient was divided by `divisor`; None: not computed
    in_slices  True: `parameters` are slices, so that only `squared` has the norm of all
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        squared: torch.Tensor | None,
        divisor: float,
        *,
        in_slices: bool,
    ) -> None:
        self.parameters = parameters
        self.squared = squared
        self.divisor = divisor
        self.in_slices = in_slices
        self._committed = self._accounted = self._marks()
        self._generators = generator_states(parameters[0].device) if in_slices else ()

    def _marks(self) -> list[tuple[torch.Tensor, int]]:
        return [(p.grad, version_of(p.grad)) for p in self.parameters if p.grad is not None]

    def _has_changed(self, since: list[tuple[torch.Tensor, int]]) -> bool:
        now = self._marks()
        return len(now) != len(since) or any(
            a is not b or m != n for (a, m), (b, n) in zip(now, since, strict=True)
        )

    @torch.no_grad()
    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients to a global norm of at most `max_norm`; return the norm before.

        UsageError: slices of the gradient have changed since the step was committed.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            raise UsageError(
                "there is no gradient to clip",
                "session.clip_grad_norm_",
                "call it between the micro-batches and optimizer.step()",
            )
        has_changed = self._has_changed(self._committed)
        if self.in_slices and has_changed:
            raise UsageError(
                "the gradient has changed since the micro-batches",
                "session.clip_grad_norm_, in shards",
                "clip once, before anything else that changes the gradient; "
                "or train with whole replicas",
            )
        if self.squared is None or has_changed:
            squared = sum_of_squares(gradients)
        else:
            squared = self.squared / self.divisor**2
        norm = squared.sqrt().to(torch.promote_types(gradients[0].dtype, torch.float32))
        foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._accounted = self._marks()
        return norm

    def refuse_noise(self) -> None:
        """UsageError: slices have changed, other than by `clip_`, and random numbers were drawn."""
        if (
            self.in_slices
            and self._has_changed(self._accounted)
            and generator_states(self.parameters[0].device) != self._generators
        ):
            raise UsageError(
                "the gradient was changed and random numbers were drawn: "
                "noise for slices differs from that for whole tensors",
                "between the micro-batches and optimizer.step(), in shards",
                "add the noise in the loss of a micro-batch, or train with whole replicas; "
                "draw other numbers after optimizer.step()",
            )


def commit_gradient(
    parameters: Sequence[torch.Tensor], squared: torch.Tensor | None, divisor: float
) -> StepGradient:
    """Divide the gradient by `divisor`: the step's count, or its share of trained micro-batches;
    return it.

    squared  sum of squares of the whole gradient, if these parameters are slices. The norm is taken
             before the division: so it is in every layout
    """
    in_slices = squared is not None
    if divisor != 1:
        norms = []
        for p in parameters:
            if p.grad is not None:
                if not in_slices:
                    norms.append(row_norms(p.grad))
                p.grad.div_(divisor)  # while the processor's cache has it
        squared = squared if in_slices else sum_of_rows(norms)
    return StepGradient(parameters, squared, divisor, in_slices=in_slices)
