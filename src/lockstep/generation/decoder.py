"""A Llama arranged for writing: the same arithmetic, token by token, with as few and as fast operations as the device allows.

One token of a small model is hundreds of operations of a few microseconds on a handful of rows, and every weight is read
once. So here, other than in `llama.py`,

* query, key and value are one matrix, gate and up another: 4 products a layer instead of 7;
* query and key turn together, in place, by angles from a table made once for the capacity of the cache;
* one copy writes keys and values of all rows to the cache, at places computed once a token, not once a layer;
* on a CPU matrices are laid out for a few rows: see `choose_layout`.

The cache has one size from start to end, and each row its own position in it: rows of different lengths go on together
without padding before them, and no shape changes from token to token, so one compiled step serves all.

Letters in the margin: B rows, T positions, D width, H heads, G key-value heads, E width of a head, F inner width, V
vocabulary, L layers, C capacity of a cache, S places of it that are looked at. Under tensor parallelism H, G and F are
those of this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.models.llama import Layer, Llama, Rotation

Layout = Literal["plain", "columns", "packed"]


def choose_layout(device_type: str, dtype: torch.dtype, rows: int) -> tuple[Layout, str]:
    """(choice, reason): how a matrix lies in memory when it is multiplied with `rows` rows, again and again.

    By bench/decode.py --layouts; what a whole step gains by it stands in docs/llama.md.
    """
    if device_type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return "plain", f"no other layout is faster for {str(dtype).removeprefix('torch.')} on {device_type}"
    if dtype == torch.float32 and rows == 1:
        return "columns", "one row: the product is a sum of columns, which are read from end to end"
    return "packed", "oneDNN packs the matrix once instead of at every product"


class Matrix(nn.Module):
    """states (..., K) -> (..., N) by a weight (N, K) that stays as it is."""

    def __init__(self, weight: Tensor, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        if layout == "columns":
            weight = weight.t().contiguous().t()
        elif layout == "packed":  # as torch.compile packs the frozen weights of a graph
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        self.register_buffer("weight", weight, persistent=False)
        self.weight: Tensor

    def forward(self, states: Tensor) -> Tensor:
        if self.layout == "packed":
            packed: Tensor = torch.ops.mkldnn._linear_pointwise(states, self.weight, None, "none", [], "")
            return packed
        return F.linear(states, self.weight)


class Norm(nn.Module):
    """RMS norm in four operations, sums in float32 or wider: w * sqrt(D) * x / sqrt(|x|^2 + D * epsilon)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        width = len(weight)
        scale = weight.to(torch.promote_types(weight.dtype, torch.float32)) * width**0.5
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("floor", scale.new_full((), (width * epsilon) ** 0.5), persistent=False)
        self.scale: Tensor
        self.floor: Tensor

    def forward(self, states: Tensor) -> Tensor:
        wide = states.to(self.scale.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot(self.floor)
        normed: Tensor = (wide / length).mul_(self.scale)
        return normed.to(states.dtype)


class Block(nn.Module):
    """A layer of the model, around its attention, which is different for many new positions and for one."""

    def __init__(self, layer: Layer, head_width: int, layout: Layout, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        attention, feed = layer.attention, layer.feed_forward
        self.head_width, self.group = head_width, group
        self.attention_norm = Norm(whole(layer.attention_norm.weight), cast(float, layer.attention_norm.eps))
        self.feed_norm = Norm(whole(layer.feed_norm.weight), cast(float, layer.feed_norm.eps))
        self.queries, self.shared = (len(mine(one.weight)) // head_width for one in (attention.query, attention.key))  # H, G
        self.asked = Matrix(torch.cat([mine(one.weight) for one in (attention.query, attention.key, attention.value)]), layout)
        self.attention_out = Matrix(mine(attention.out.weight), layout)
        self.gated = Matrix(torch.cat([mine(feed.gate.weight), mine(feed.up.weight)]), layout)
        self.feed_out = Matrix(mine(feed.out.weight), layout)

    def heads(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """states (B, T, D) -> queries, keys and values (B, T, H + 2G, E), the first two turned."""
        rows, length, _ = states.shape
        heads = self.asked(self.attention_norm(states)).view(rows, length, -1, self.head_width)
        turned = heads[:, :, : self.queries + self.shared]
        swapped = turned.roll(self.head_width // 2, -1)
        turned.mul_(cos).addcmul_(swapped, sin)
        return cast(Tensor, heads)

    def rest(self, states: Tensor, mixed: Tensor) -> Tensor:
        """states (B, T, D) and what attention found (B, T, H * E) -> (B, T, D)."""
        states = states + self.summed(self.attention_out(mixed))
        gate, up = self.gated(self.feed_norm(states)).chunk(2, dim=-1)  # (B, T, F)
        return states + self.summed(self.feed_out(F.silu(gate).mul_(up)))

    def summed(self, part: Tensor) -> Tensor:
        """Collective under tensor parallelism, where each process has a part of the sum."""
        if self.group is not None:
            dist.all_reduce(part, group=self.group)
        return part


def mine(weight: Tensor) -> Tensor:
    """This process's part of a weight that tensor parallelism has cut; else the weight."""
    return cast(DTensor, weight.detach()).to_local() if isinstance(weight, DTensor) else weight.detach()


def whole(weight: Tensor) -> Tensor:
    """A weight that is not cut."""
    return cast(DTensor, weight.detach()).full_tensor() if isinstance(weight, DTensor) else weight.detach()


@dataclass
class Cache:
    """What is remembered of B rows, and the angles of the places that they may reach."""

    kept: Tensor  # (L, 2, B, G, C, E): keys, values
    cos: Tensor  # (C, E)
    sin: Tensor  # (C, E): with the sign that the swapped half gets
    base: Tensor  # (2 * B * G,): where each row of keys and values begins in a layer, in places
    position: Tensor  # (B,) int64: where the next token of each row goes

    @property
    def capacity(self) -> int:
        return self.kept.shape[4]


class Decoder(nn.Module):
    """What writes with the weights of `model`.

    rows     that are usually written together
    layout   None: chosen by device, precision and rows; "plain" for torch.compile, which packs by itself
    group    the processes that tensor parallelism has cut the model over; None: it is whole
    release  take the weights away from the model, layer by layer, so that they are in memory once (an embedding that is also
             the output twice); the model is of no use afterwards
    """

    def __init__(
        self, model: Llama, *, rows: int = 1, layout: Layout | None = None, group: dist.ProcessGroup | None = None, release: bool = False
    ) -> None:
        super().__init__()
        weight = whole(model.embedding.weight)
        self.shape = model.shape
        self.layout, self.reason = (layout, "as asked") if layout else choose_layout(weight.device.type, weight.dtype, rows)
        self.register_buffer("embedding", weight, persistent=False)
        self.embedding: Tensor
        self.blocks = nn.ModuleList()
        for number, layer in enumerate(model.layers):
            self.blocks.append(Block(cast(Layer, layer), self.shape.head_width, self.layout, group))
            if release:
                model.layers[number] = nn.Identity()
        self.norm = Norm(whole(model.norm.weight), cast(float, model.norm.eps))
        self.output = Matrix(whole(model.output_weight), self.layout)
        if release:
            model.output = None

    def start(self, rows: int, capacity: int) -> Cache:
        """An empty cache for `rows` rows of up to `capacity` tokens."""
        weight, block, width = self.embedding, cast(Block, self.blocks[0]), self.shape.head_width
        kept = weight.new_zeros(len(self.blocks), 2, rows, block.shared, capacity, width)
        angles = Rotation.of(torch.arange(capacity, device=weight.device)[None], self.shape, weight.dtype)
        sign = torch.ones(width, device=weight.device, dtype=weight.dtype)
        sign[: width // 2] = -1
        base = torch.arange(2 * rows * block.shared, device=weight.device) * capacity
        position = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        return Cache(kept, angles.cos[0, 0], angles.sin[0, 0] * sign, base, position)

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: Cache) -> Tensor:
        """Logits (B, V) of what follows each row; the empty cache is filled.

        tokens (B, T), row b being its first `lengths[b]` tokens (at least 1) and then anything: what lies behind a row is
        never seen by it, and is overwritten as the row grows.
        """
        rows, length = tokens.shape
        cos, sin = cache.cos[None, :length, None], cache.sin[None, :length, None]  # (1, T, 1, E)
        states = F.embedding(tokens, self.embedding)
        for block, kept in zip(self.blocks, cache.kept.unbind(0), strict=True):
            block = cast(Block, block)
            heads = block.heads(states, cos, sin)  # (B, T, H + 2G, E)
            query, key, value = heads.transpose(1, 2).split((block.queries, block.shared, block.shared), dim=1)
            kept[0, :, :, :length], kept[1, :, :, :length] = key, value
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)  # (B, H, T, E)
            states = block.rest(states, mixed.transpose(1, 2).flatten(2))
        cache.position.copy_(lengths)
        last = states[torch.arange(rows, device=tokens.device), lengths - 1]  # (B, D)
        return cast(Tensor, self.output(self.norm(last)))

    def step(self, tokens: Tensor, cache: Cache, places: int) -> Tensor:
        """Logits (B, V) of what follows `tokens` (B,), the newest of each row; the cache moves on by one position.

        places  S, more than the position of any row: what lies behind is not looked at. A compiled step is given the capacity
        """
        rows, scale = len(tokens), self.shape.head_width**-0.5
        shared = cast(Block, self.blocks[0]).shared
        cos, sin = (table.index_select(0, cache.position)[:, None, None] for table in (cache.cos, cache.sin))  # (B, 1, 1, E)
        hidden = torch.arange(places, device=tokens.device) > cache.position[:, None]  # (B, S)
        bias = torch.zeros_like(hidden, dtype=self.embedding.dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat_interleave(shared, 0)[:, None]  # (B * G, 1, S)
        goes_to = cache.base + cache.position.repeat_interleave(shared).repeat(2)  # (2 * B * G,)
        states = F.embedding(tokens[:, None], self.embedding)
        for block, kept in zip(self.blocks, cache.kept.unbind(0), strict=True):
            block = cast(Block, block)
            heads = block.heads(states, cos, sin)[:, 0]  # (B, H + 2G, E)
            query = heads[:, : block.queries].reshape(rows * shared, -1, self.shape.head_width)  # (B * G, H / G, E)
            new = heads[:, block.queries :].view(rows, 2, -1).transpose(0, 1)  # (2, B, G * E)
            kept.view(-1, self.shape.head_width).index_copy_(0, goes_to, new.reshape(-1, self.shape.head_width))
            keys, values = kept.flatten(1, 2)[:, :, :places].unbind(0)  # (B * G, S, E)
            score = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=scale)  # (B * G, H / G, S)
            mixed = torch.bmm(score.softmax(dim=-1), values)  # (B * G, H / G, E)
            states = block.rest(states, mixed.view(rows, 1, -1))
        cache.position += 1
        return cast(Tensor, self.output(self.norm(states[:, 0])))
