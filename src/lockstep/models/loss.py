"""Cross-entropy over a large vocabulary, as a sum, without ever holding a float32 copy of all logits.

The textbook way writes the logits of all tokens (2,000 x 8,000), reads them for the maximum, writes their log-softmax in
float32, reads it for the loss, and does it all again backwards: a quarter of a step of a small model goes there. Here a
few hundred tokens go through at a time, so that their logits stay in the cache, and the gradient, which is almost the
softmax that the loss needs anyway, is made at once in the same memory. The backward pass only multiplies by a number.

    loss of a token   (1 - s) * -log p(label) + s * mean over words of -log p(word),   s = smoothing
    its gradient      p - (1 - s) * [word = label] - s / words

as `torch.nn.functional.cross_entropy(reduction="sum", label_smoothing=s)` defines it. Labels equal to `pad`, a word or a
negative number, count nothing.

Both functions are custom operators, which torch.compile takes as they are, without a graph break.
Letters in the margin: N tokens, V vocabulary, D width, R tokens that go through at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, *, smoothing: float, pad: int) -> Tensor:
    """Sum over the labels (...) that are not `pad` of the smoothed cross-entropy with logits (..., V): a scalar.

    The sum is float32 (float64 for float64 logits); the gradient has the type of the logits.
    """
    loss: Tensor = loss_of_logits(logits.flatten(0, -2), labels.flatten(), smoothing, pad, wants_slope(logits))[0]
    return loss


def output_cross_entropy(states: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, pad: int) -> Tensor:
    """`cross_entropy` of the logits `states @ weight.T`, which are never held together.

    states (..., D), weight (V, D), labels (...). Matrix products in autocast's type, sums in float32.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    slope = wants_slope(states, weight)
    loss: Tensor = loss_of_states(states.flatten(0, -2), weight, labels.flatten(), dtype, smoothing, pad, slope)[0]
    return loss


def wants_slope(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def rows_at_a_time(device: torch.device) -> int:
    """R: on a CPU what fits its cache; on a GPU enough to fill it."""
    return 256 if device.type == "cpu" else 8192


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def losses_of(logits: Tensor, labels: Tensor, mean: Tensor, smoothing: float, slope: bool, out: Tensor) -> Tensor:
    """The loss of each row (R, 1) of logits (R, V), labels (R, 1), given the mean logit of each row (R, 1).

    Writes to `out` (R, V), which may be the logits: with `slope`, p - (1 - smoothing) * [word = label]; the rest of the
    gradient is a constant.
    """
    labels = labels.clamp(min=0)  # a negative `pad`: its loss and gradient are thrown away
    logit = logits.gather(1, labels)  # (R, 1)
    torch.log_softmax(logits, dim=1, out=out)
    log_p = out.gather(1, labels)
    if slope:
        out.exp_().scatter_(1, labels, log_p.exp() - (1 - smoothing))
    log_total = logit - log_p  # log of the sum of exp(logits)
    return smoothing * (log_total - mean) - (1 - smoothing) * log_p


@torch.library.custom_op("lockstep::loss_of_logits", mutates_args=())
def loss_of_logits(logits: Tensor, labels: Tensor, smoothing: float, pad: int, slope: bool) -> tuple[Tensor, Tensor]:
    """(loss, its gradient with respect to logits (N, V), or nothing)."""
    total = torch.zeros((), dtype=wide(logits.dtype), device=logits.device)
    gradient = torch.empty_like(logits if slope else logits[:0])
    narrow = logits.dtype != total.dtype
    at_a_time = rows_at_a_time(logits.device)
    for first in range(0, len(logits), at_a_time):
        rows = slice(first, first + at_a_time)
        chosen, scores = labels[rows, None], logits[rows].to(total.dtype)
        out = scores if narrow else gradient[rows] if slope else torch.empty_like(scores)
        losses = losses_of(scores, chosen, scores.mean(dim=1, keepdim=True), smoothing, slope, out)
        total += (losses * (chosen != pad)).sum()
        if slope and smoothing:
            out.sub_(smoothing / logits.shape[1])
        if slope and narrow:
            gradient[rows] = out
    if slope:
        clear_rows(gradient, labels == pad)
    return total, gradient


def clear_rows(tensor: Tensor, which: Tensor) -> None:
    """Zero the rows that `which` names: on a CPU by their numbers, on a GPU without waiting for how many they are."""
    if tensor.device.type == "cpu":
        tensor.index_fill_(0, which.nonzero()[:, 0], 0)
    else:
        tensor.masked_fill_(which[:, None], 0)


@torch.library.custom_op("lockstep::loss_of_states", mutates_args=())
def loss_of_states(
    states: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, smoothing: float, pad: int, slope: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, its gradient with respect to states (N, D), to weight (V, D)); matrix products in `dtype`.

    The constant part of the logits' gradient, -smoothing / V, never becomes a matrix: times the weight it is a multiple of
    the sum of the weight's rows, and times the states a multiple of their sum.
    """
    places = counted_places(labels, pad)
    chosen, held = labels[places], states[places]
    real = (chosen != pad)[:, None]  # (N, 1)
    held = (held * real).to(dtype)
    narrow, row_sum = weight.to(dtype), weight.sum(dim=0, dtype=wide(dtype))  # (V, D), (D,)
    total = torch.zeros((), dtype=wide(dtype), device=states.device)
    held_slope = torch.empty(held.shape if slope else (0,), dtype=total.dtype, device=states.device)
    weight_slope = torch.zeros(weight.shape if slope else (0,), dtype=total.dtype, device=states.device)
    at_a_time = rows_at_a_time(states.device)
    logits = torch.empty(min(at_a_time, len(held)), len(weight), dtype=dtype, device=states.device)
    for first in range(0, len(held), at_a_time):
        rows = slice(first, first + at_a_time)
        chunk, narrow_logits = held[rows], logits[: len(held) - first]
        torch.mm(chunk, narrow.t(), out=narrow_logits)
        scores = narrow_logits.to(total.dtype)  # (R, V); the same memory unless dtype is narrow
        mean = (chunk.to(total.dtype) @ row_sum)[:, None] / len(weight)
        total += (losses_of(scores, chosen[rows, None], mean, smoothing, slope, scores) * real[rows]).sum()
        if slope and dtype == total.dtype:
            torch.mm(scores, narrow, out=held_slope[rows])
            weight_slope.addmm_(scores.t(), chunk)
        elif slope:
            narrow_logits.copy_(scores)
            held_slope[rows] = narrow_logits @ narrow
            weight_slope += narrow_logits.t() @ chunk
    if not slope:
        return total, held_slope.to(states.dtype), weight_slope.to(weight.dtype)
    held_slope.sub_(row_sum, alpha=smoothing / len(weight)).mul_(real)
    weight_slope.sub_(held.sum(dim=0, dtype=total.dtype), alpha=smoothing / len(weight))
    state_slope = torch.zeros_like(states)
    state_slope[places] = held_slope.to(states.dtype)
    return total, state_slope, weight_slope.to(weight.dtype)


def counted_places(labels: Tensor, pad: int) -> Tensor | slice:
    """Which rows to compute: on a CPU those that count; on a GPU all, since to know their number is to wait for it."""
    return (labels != pad).nonzero()[:, 0] if labels.device.type == "cpu" else slice(None)


@loss_of_logits.register_fake
def _(logits: Tensor, labels: Tensor, smoothing: float, pad: int, slope: bool) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=wide(logits.dtype)), torch.empty_like(logits if slope else logits[:0])


@loss_of_states.register_fake
def _(
    states: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype, smoothing: float, pad: int, slope: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = states.new_empty((), dtype=wide(dtype))
    return total, states.new_empty(states.shape if slope else (0,)), weight.new_empty(weight.shape if slope else (0,))


def keep_slopes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.others = len(inputs) - len(output[1:])


def scale_slopes(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients made on the way forward, times the gradient of the loss."""
    return *(slope * saved for saved in ctx.saved_tensors), *([None] * ctx.others)


loss_of_logits.register_autograd(scale_slopes, setup_context=keep_slopes)
loss_of_states.register_autograd(scale_slopes, setup_context=keep_slopes)
