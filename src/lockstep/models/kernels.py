"""Dropout and attention with fewer passes over memory, for training on a CPU.

On one core (Cascade Lake, torch 2.13), residual + F.dropout of 2,048 tokens of width 128 takes
3.0 ms, `add_dropout` 0.8 ms. On a GPU and inside torch.compile torch's operations are used: they
are fused there. On every path the bits follow from the inputs and torch.manual_seed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.runtime.torch_private import softmax_backward

AttentionKernel = Literal["plain", "sdpa"]


def use_cpu_kernels(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


# -- dropout ---------------------------------------------------------------------------------------


def dropout_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return dropout's factors: 0 with `probability` (to 1 in 65,536), else 1 / (1 - probability).

    Each element takes 16 bits of torch's integer generator, compared with a threshold as integers.
    """
    threshold = min(65_535, round(probability * 65_536))
    bits = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = bits.view(torch.int16)[: shape.numel()].ge_(threshold - 32_768)
    return keep.to(dtype).mul_(65_536 / (65_536 - threshold)).view(shape)


class AddDropout(torch.autograd.Function):
    """residual + mask * branch in one pass; the branch may have a narrower dtype."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor, probability: float) -> Tensor:
        mask = dropout_mask(branch.shape, probability, residual.dtype)
        ctx.save_for_backward(mask)
        ctx.dtype = branch.dtype
        return torch.addcmul(residual, branch.to(residual.dtype), mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grad, (grad * mask).to(ctx.dtype), None


def add_dropout(residual: Tensor, branch: Tensor, probability: float) -> Tensor:
    if probability == 0.0:
        return residual + branch
    if use_cpu_kernels(branch):
        added: Tensor = AddDropout.apply(residual, branch, probability)  # type: ignore[no-untyped-call]
        return added
    return residual + F.dropout(branch, probability)


def apply_dropout(states: Tensor, probability: float) -> Tensor:
    if probability == 0.0:
        return states
    if use_cpu_kernels(states):
        return states * dropout_mask(states.shape, probability, states.dtype)
    return F.dropout(states, probability)


# -- attention -------------------------------------------------------------------------------------
# Dimensions: B rows, T target and S source positions, H heads, E head dim, P fused projections.


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kernel: AttentionKernel
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2): (B, H, T, E).

    query (B, H, T, E), key and value (B, H, S, E), bias: to (B, H, T, S), -inf hides a position.
    """
    if kernel == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
    score = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1) + bias  # (B, H, T, S)
    attended: Tensor = score.softmax(dim=-1) @ value
    return attended


def attend_packed(
    queries: Tensor, others: Tensor | None, bias: Tensor, kernel: AttentionKernel
) -> Tensor:
    """`attend` for fused projections: (B, T, H * E).

    self-attention   queries (B, T, 3, H, E) hold query, key and value; others is None
    cross-attention  queries (B, T, 1, H, E) hold the query, others (B, S, 2, H, E) key and value
    """
    if kernel == "plain" and use_cpu_kernels(queries):
        attended: Tensor = PackedAttention.apply(queries, others, bias)  # type: ignore[no-untyped-call]
        return attended
    parts = [*queries.unbind(2), *(() if others is None else others.unbind(2))]
    query, key, value = (part.transpose(1, 2) for part in parts)  # (B, H, T or S, E)
    return attend(query, key, value, bias, kernel).transpose(1, 2).flatten(2)


def heads_first(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, P, H, E) -> (P, B * H, T, E), contiguous."""
    rows, length, parts, heads, size = packed.shape
    moved = torch.empty(parts, rows, heads, length, size, dtype=dtype)
    return moved.copy_(packed.permute(2, 0, 3, 1, 4)).view(parts, rows * heads, length, size)


def heads_last(parts: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """(P, B * H, T, E) -> `shape` (B, T, P, H, E), contiguous."""
    rows, length, count, heads, size = shape
    moved = torch.empty(shape, dtype=dtype)
    return moved.copy_(parts.view(count, rows, heads, length, size).permute(1, 3, 0, 2, 4))


class PackedAttention(torch.autograd.Function):
    """Attention over fused projections with one copy in and one copy out per pass.

    Always in float32 (or float64): for a few dozen positions the narrow dtypes are slower here.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, others: Tensor | None, bias: Tensor) -> Tensor:
        rows, length, _, heads, size = queries.shape
        dtype = torch.promote_types(queries.dtype, torch.float32)
        with torch.autocast("cpu", enabled=False):
            own = heads_first(queries, dtype)
            other = own[1:] if others is None else heads_first(others, dtype)
            query, key, value = own[0], other[0], other[1]  # (B * H, T or S, E)
            score = torch.bmm(query, key.transpose(1, 2)).view(
                rows, heads, length, -1
            )  # (B, H, T, S)
            torch.add(bias, score, alpha=size**-0.5, out=score)
            weight = torch.softmax(score, dim=-1, out=score).view(
                rows * heads, length, -1
            )  # (B * H, T, S)
            attended = torch.bmm(weight, value)  # (B * H, T, E)
        ctx.save_for_backward(own, other, weight)
        ctx.queries_shape, ctx.others_shape, ctx.dtype = (
            queries.shape,
            None if others is None else others.shape,
            queries.dtype,
        )
        return heads_last(
            attended[None], torch.Size((rows, length, 1, heads, size)), queries.dtype
        ).view(rows, length, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        own, other, weight = ctx.saved_tensors
        rows, length, _, heads, size = ctx.queries_shape
        attended_grad = heads_first(grad.view(rows, length, 1, heads, size), weight.dtype)[
            0
        ]  # (B * H, T, E)
        own_grad = torch.empty_like(own)
        other_grad = own_grad[1:] if ctx.others_shape is None else torch.empty_like(other)
        with torch.autocast("cpu", enabled=False):
            torch.bmm(weight.transpose(1, 2), attended_grad, out=other_grad[1])
            weight_grad = torch.bmm(attended_grad, other[1].transpose(1, 2))  # (B * H, T, S)
            score_grad = softmax_backward(weight_grad, weight)
            score_grad.mul_(size**-0.5)
            torch.bmm(score_grad, other[0], out=own_grad[0])
            torch.bmm(score_grad.transpose(1, 2), own[0], out=other_grad[0])
        queries_grad = heads_last(own_grad, ctx.queries_shape, ctx.dtype)
        if ctx.others_shape is None:
            return queries_grad, None, None
        return queries_grad, heads_last(other_grad, ctx.others_shape, ctx.dtype), None
