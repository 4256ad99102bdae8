"""The inner optimizers of DiLoCo's learners, which start without state in each outer step.

From the second outer step on, the moments of AdamW and Adam start from the learner's first
gradient (start_moments), and the learning rate is raised while they grow (mean_growth).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.parallel.grad_norm import row_norms
from lockstep.training.attributes import OPTIMIZER_INTERNALS
from lockstep.training.update_checks import refuse_closure

INNER_OPTIMIZERS = "inner-optimizers"  # name of their state in checkpoints
NO_BIAS_CORRECTION = 1e6  # steps of AdamW after which beta1**step and beta2**step are zero


@torch.no_grad()
def start_moments(optimizer: Optimizer, mean_square: Tensor) -> None:
    """Start the moments of an AdamW without state from the gradients, and leave the weights as
    they are. Its learning rates are zero afterwards.

    The second moment of an element is the mean square of its row, at least `mean_square`. Fresh
    moments would have squares of single elements in their place, whose noise costs more steps than
    the learners save. The first moment is zero, without bias correction, so steps grow at first.
    mean_square  of all elements of the whole gradient, 0-dim
    """
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # creates the state, with its dtypes and devices
    for p, state in optimizer.state.items():
        state["step"].fill_(NO_BIAS_CORRECTION)
        state["exp_avg"].zero_()
        if p.grad is None or not p.numel():
            continue
        norms = row_norms(p.grad)
        rows = torch.maximum(norms.square() * (len(norms) / p.numel()), mean_square)
        for name in ("exp_avg_sq", "max_exp_avg_sq"):  # the second one with amsgrad
            if name in state:
                state[name].copy_(rows.reshape(*p.shape[:1], *[1] * (p.dim() - 1)))


def mean_growth(beta1: float, steps: int) -> float:
    """Return the mean of 1 - beta1**t over steps t from 1: the share of a full step that AdamW
    takes while its first moment grows from zero."""
    return 1 - beta1 * (1 - beta1**steps) / (steps * (1 - beta1))


def has_adam_moments(optimizer: Optimizer) -> bool:
    """Return whether its state is that of AdamW: step, exp_avg and exp_avg_sq."""
    return isinstance(optimizer, torch.optim.Adam) or getattr(optimizer, "adam_moments", False)


class UpdateGuard(Protocol):
    """Allows the updates of inner optimizers."""

    def begin_update(self, optimizer: Optimizer) -> int | None:
        """Return the inner step that `optimizer` updates in; None: its gradient was lost.
        UsageError outside of such a step."""

    def mean_square(self) -> Tensor | None:
        """Collective in the replica. Return that of all elements of the learner's gradient; None:
        a peer was lost."""


class InnerOptimizers:
    """The optimizers of the learners. Checkpoints hold the values of their parameter groups, such
    as a learning rate that the loop sets, and the numbers that they keep as attributes.

    steps  of a learner
    """

    def __init__(self, optimizers: Sequence[Optimizer], steps: int, guard: UpdateGuard) -> None:
        self.optimizers = optimizers
        self.steps = steps
        self.guard = guard
        self._is_starting = False  # the moments, by a step of the optimizer
        self._rates: list[Any] = []  # of the user, during an update
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_starting:
            return
        refuse_closure(optimizer, args, kwargs)
        step = self.guard.begin_update(optimizer)
        # In the first outer step, AdamW starts as in a plain run.
        if step is None or step < self.steps or not has_adam_moments(optimizer):
            return
        mean_square = self.guard.mean_square() if step % self.steps == 0 else None
        if step % self.steps == 0 and mean_square is None:
            return
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if mean_square is not None:
            self._is_starting = True
            start_moments(optimizer, mean_square)
            self._is_starting = False
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate / mean_growth(group["betas"][0], self.steps)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_starting or not self._rates:
            return
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._rates = []

    # The state of one learner.

    def take_states(self) -> list[dict[Any, Any]]:
        return [dict(optimizer.state) for optimizer in self.optimizers]

    def put_states(self, states: Sequence[Mapping[Any, Any]]) -> None:
        """Replace the state by parameter; () for none."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.state.clear()
            optimizer.state.update(states[number] if states else {})

    # The state in checkpoints.

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ],
                "attributes": {
                    key: value
                    for key, value in vars(optimizer).items()
                    if key not in OPTIMIZER_INTERNALS and isinstance(value, int | float | str)
                },
            }
            for optimizer in self.optimizers
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
                group.update(values)
            vars(optimizer).update(saved["attributes"])
