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
        return AddDropout.apply(residual, branch, probability)  # type: ignore[no-untyped-call]
    return residual + F.dropout(branch, probability)


def apply_dropout(states: Tensor, probability: float) -> Tensor:
    if probability == 0.0:
        return states
    if use_cpu_kernels(states):
        return states * dropout_mask(states.shape, probability, states.dtype)
    return F.dropout(states, probability)


def choose_attention(device_type: str, length: int) -> tuple[AttentionKernel, str]:
    """Return (kernel, reason) for sentences of up to `length` tokens on this kind of device.

    With torch's flash kernel a whole step on a CPU takes 1.4 to 1.8 times as long at 16 tokens
    (torch 2.13), because its backward pass is slow for short sentences.
    """
    if device_type != "cpu":
        return "sdpa", f"torch's fused attention is fastest on {device_type}"
    if length <= 512:
        return "plain", f"on a CPU torch's fused attention is slower up to {length} tokens"
    return "sdpa", f"the attention scores of {length} tokens would not fit a CPU's cache"


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
    return score.softmax(dim=-1) @ value


def attend_packed(
    queries: Tensor, others: Tensor | None, bias: Tensor, kernel: AttentionKernel
) -> Tensor:
    """`attend` for fused projections: (B, T, H * E).

    self-attention   queries (B, T, 3, H, E) hold query, key and value; others is None
    cross-attention  queries (B, T, 1, H, E) hold the query, others (B, S, 2, H, E) key and value
    """
    if kernel == "plain" and use_cpu_kernels(queries):
        return PackedAttention.apply(queries, others, bias)  # type: ignore[no-untyped-call]
    parts = [*queries.unbind(2), *(() if others is None else others.unbind(2))]
    query, key, value = (part.transpose(1, 2) for part in parts)  # (B, H, T or S, E)
    return attend(query, key, value, bias, kernel).transpose(1, 2).flatten(2)


def heads_first(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, T, P, H, E) -> (P, B * H, T, E), contiguous."""
    return copied(packed.permute(2, 0, 3, 1, 4), dtype).flatten(1, 2)


def heads_last(parts: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(P, B * H, T, E) -> (B, T, P, H, E), contiguous."""
    return copied(parts.unflatten(1, (rows, -1)).permute(1, 3, 0, 2, 4), dtype)


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


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
            # (B * H, T or S, E)
            query = own[0]
            key = other[0]
            value = other[1]
            score = torch.bmm(query, key.transpose(1, 2)).unflatten(0, (rows, heads))
            torch.add(bias, score, alpha=size**-0.5, out=score)  # (B, H, T, S)
            weight = torch.softmax(score, dim=-1, out=score).flatten(0, 1)  # (B * H, T, S)
            attended = torch.bmm(weight, value)  # (B * H, T, E)
        ctx.save_for_backward(own, other, weight)
        ctx.rows = rows
        ctx.dtype = queries.dtype
        ctx.is_self_attention = others is None
        return heads_last(attended[None], rows, queries.dtype).view(rows, length, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        own, other, weight = ctx.saved_tensors
        size = own.shape[-1]
        (attended_grad,) = heads_first(grad.unflatten(2, (1, -1, size)), weight.dtype)
        own_grad = torch.empty_like(own)
        other_grad = own_grad[1:] if ctx.is_self_attention else torch.empty_like(other)
        with torch.autocast("cpu", enabled=False):
            torch.bmm(weight.transpose(1, 2), attended_grad, out=other_grad[1])
            weight_grad = torch.bmm(attended_grad, other[1].transpose(1, 2))  # (B * H, T, S)
            score_grad = softmax_backward(weight_grad, weight)
            score_grad.mul_(size**-0.5)
            torch.bmm(score_grad, other[0], out=own_grad[0])
            torch.bmm(score_grad.transpose(1, 2), own[0], out=other_grad[0])
        queries_grad = heads_last(own_grad, ctx.rows, ctx.dtype)
        if ctx.is_self_attention:
            return queries_grad, None, None
        return queries_grad, heads_last(other_grad, ctx.rows, ctx.dtype), None
