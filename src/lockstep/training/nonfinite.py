"""DivergedError, on all workers, when a loss, gradient, weight or optimizer state is not finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lockstep.checkpoint.policy import show_steps
from lockstep.checkpoint.state_dict import nonfinite_tensors
from lockstep.elastic.consensus import StepDecision
from lockstep.errors import DivergedError
from lockstep.units import join_names


def refuse_nonfinite_gradient(
    decision: StepDecision, step: int, module: nn.Module | None, norm_squared: Tensor | None
) -> None:
    """DivergedError when the loss or the gradient is not finite.

    module        whose gradients are read; None: a part of the model, of which the norm is read
    norm_squared  of the gradient over all workers of the replica
    """
    if module and decision.gradient_finite:
        wrong = []
    elif module:
        wrong = nonfinite_tensors(
            {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        )
    else:
        wrong = [] if norm_squared is None or bool(norm_squared.isfinite()) else ["its norm"]
    if wrong or not decision.finite:
        raise DivergedError(
            f"loss {decision.loss} in step {step + 1}"
            + (f", gradient not finite: {join_names(wrong)}" if wrong else ""),
            "agreed by all replicas before the update, which was not made; the checkpoints before are whole",
            "lower the learning rate, lengthen its warm-up, or clip the gradients; "
            "on_divergence='rollback' skips samples that alone are the cause; "
            "with a GradScaler: on_nonfinite='ignore' and backward(loss, scaler=scaler)",
        )


def refuse_nonfinite_state(
    tensors: Mapping[str, Tensor], trained: Collection[str], step: int, saved_steps: list[int]
) -> None:
    """DivergedError for a nonfinite state: retention would delete the last good checkpoints."""
    names = {f"model.{name}" for name in trained}
    checked = {
        name: tensor
        for name, tensor in tensors.items()
        if name in names or name.startswith("optim.")
    }
    if wrong := nonfinite_tensors(checked):
        raise DivergedError(
            f"not finite after step {step}: {join_names(wrong)}",
            f"{len(wrong)} tensors of the state to save; {show_steps(saved_steps)}",
            "nothing was saved or deleted: resume from an earlier step with a lower learning rate, or clip the gradients",
        )
