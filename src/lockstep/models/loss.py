"""Cross-entropy over a large vocabulary, as a sum, without a float32 copy of all logits.

torch.nn.functional.cross_entropy takes a quarter of a step of a small model: it writes and reads
the logits of all tokens several times. Here the logits of a few hundred tokens at a time stay in
the cache. The forward pass also computes the gradient; the backward pass multiplies it by a number.

    loss of a token   (1 - s) * -log p(label) + s * mean over words of -log p(word),   s = smoothing
    its gradient      p - (1 - s) * [word = label] - s / words

as torch.nn.functional.cross_entropy(reduction="sum", label_smoothing=s) defines it. Labels equal to
`ignore_index` (a word or a negative number) have no loss. Custom operators do not break the graph
of torch.compile. Dimensions: N tokens, V vocabulary, D dim, R tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def output_cross_entropy(
    states: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, ignore_index: int
) -> Tensor:
    """Return the summed, smoothed cross-entropy of the logits `states @ weight.T`, which never
    exist all at once: a scalar.

    states (..., D), weight (V, D), labels (...). Products in autocast's dtype, sums in float32
    (float64 for float64 states).
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    with_grad = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    return loss_of_states(
        states.flatten(0, -2), weight, labels.flatten(), dtype, smoothing, ignore_index, with_grad
    )[0]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_losses(
    logits: Tensor, labels: Tensor, mean: Tensor, smoothing: float, with_grad: bool
) -> Tensor:
    """Return the loss of each row (R, 1) of logits (R, V), given labels and mean logits (R, 1).

    Overwrites the logits: with `with_grad` by p - (1 - smoothing) * [word = label]; the rest of the
    gradient is a constant.
    """
    labels = labels.clamp(min=0)  # a negative `ignore_index`: its loss and gradient are discarded
    logit = logits.gather(1, labels)  # (R, 1)
    torch.log_softmax(logits, dim=1, out=logits)
    log_p = logits.gather(1, labels)
    if with_grad:
        logits.exp_().scatter_(1, labels, log_p.exp() - (1 - smoothing))
    log_total = logit - log_p  # log of the sum of exp(logits)
    return smoothing * (log_total - mean) - (1 - smoothing) * log_p


@torch.library.custom_op("lockstep::loss_of_states", mutates_args=())
def loss_of_states(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    smoothing: float,
    ignore_index: int,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, gradient of states (N, D), gradient of weight (V, D)); products in `dtype`.

    The constant part of the logits' gradient, -smoothing / V, never becomes a matrix: times the
    weight it is a multiple of the sum of the weight's rows, times the states one of their sum.
    """
    counted = counted_rows(labels, ignore_index)
    chosen = labels[counted]
    real = (chosen != ignore_index)[:, None]  # (N, 1)
    used = (states[counted] * real).to(dtype)
    narrow = weight.to(dtype)  # (V, D)
    row_sum = weight.sum(dim=0, dtype=accumulation_dtype(dtype))  # (D,)
    total = row_sum.new_zeros(())
    used_grad = row_sum.new_empty(used.shape if with_grad else 0)
    weight_grad = row_sum.new_zeros(weight.shape if with_grad else 0)
    # R: what fits a CPU's cache; enough to fill a GPU
    step = 256 if states.device.type == "cpu" else 8192
    logits = used.new_empty(min(step, len(used)), len(weight))
    for first in range(0, len(used), step):
        rows = slice(first, first + step)
        chunk = used[rows]
        narrow_logits = logits[: len(used) - first]
        torch.mm(chunk, narrow.t(), out=narrow_logits)
        scores = narrow_logits.to(total.dtype)  # (R, V); the same memory unless dtype is narrow
        mean = (chunk.to(total.dtype) @ row_sum)[:, None] / len(weight)
        losses = row_losses(scores, chosen[rows, None], mean, smoothing, with_grad)
        total += (losses * real[rows]).sum()
        if with_grad and dtype == total.dtype:
            torch.mm(scores, narrow, out=used_grad[rows])
            weight_grad.addmm_(scores.t(), chunk)
        elif with_grad:
            narrow_logits.copy_(scores)
            used_grad[rows] = narrow_logits @ narrow
            weight_grad += narrow_logits.t() @ chunk
    if not with_grad:
        return total, used_grad.to(states.dtype), weight_grad.to(weight.dtype)
    used_grad.sub_(row_sum, alpha=smoothing / len(weight)).mul_(real)
    weight_grad.sub_(used.sum(dim=0, dtype=total.dtype), alpha=smoothing / len(weight))
    states_grad = torch.zeros_like(states)
    states_grad[counted] = used_grad.to(states.dtype)
    return total, states_grad, weight_grad.to(weight.dtype)


def counted_rows(labels: Tensor, ignore_index: int) -> Tensor | slice:
    """Return which rows to compute: on a CPU those with a loss; on a GPU all, to avoid a sync."""
    return (labels != ignore_index).nonzero()[:, 0] if labels.device.type == "cpu" else slice(None)


@loss_of_states.register_fake
def _(
    states: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    total = states.new_empty((), dtype=accumulation_dtype(dtype))
    if options[-1]:  # with_grad
        return total, states.new_empty(states.shape), weight.new_empty(weight.shape)
    return total, states.new_empty(0), weight.new_empty(0)


def save_grads(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])


def scale_grads(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    states_grad, weight_grad = ctx.saved_tensors
    return grad * states_grad, grad * weight_grad, None, None, None, None, None


loss_of_states.register_autograd(scale_grads, setup_context=save_grads)


@register_flop_formula(torch.ops.lockstep.loss_of_states)
def flops_of_loss(states: Any, weight: Any, *inputs: Any, **_: Any) -> int:
    """Return the operations of the product, and of two more for the gradients."""
    products = 3 if inputs[-1] else 1  # with_grad
    return int(2 * states[0] * weight[0] * weight[1] * products)
