"""A Llama arranged for generation: the same arithmetic in fewer and faster operations.

One token of a small model is hundreds of operations of a few microseconds. So, unlike `llama.py`,

* query, key and value are one matrix, gate and up another: 4 products a layer instead of 7;
* query and key are rotated together, in place, and written to the cache by one copy;
* on a CPU the weights are stored in a layout for few rows: see `choose_layout`.

The cache has a fixed size and a position for each row: rows of different lengths need no padding,
and no shape changes between tokens, so one compiled step serves all.

Dimensions in the margin: B rows, T positions, D dim, H heads, G key-value heads, E head dim,
F inner width, V vocabulary, L layers, C capacity of a cache, S positions attended to. Under tensor
parallelism H, G and F are those of this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lockstep.models.llama import Layer, Llama, RotaryEmbedding, attend
from lockstep.runtime.torch_private import pack_linear_weight, packed_linear

WeightLayout = Literal["plain", "columns", "packed"]


def choose_layout(device_type: str, dtype: torch.dtype, rows: int) -> WeightLayout:
    """Return the layout for `rows` rows per token; measured by bench/decode/run.py --layouts."""
    if (
        device_type != "cpu"
        or dtype not in (torch.float32, torch.bfloat16)
        or not torch.backends.mkldnn.is_available()
    ):
        return "plain"
    if dtype == torch.float32 and rows == 1:
        return "columns"  # the product is a sum of columns, read sequentially
    return "packed"  # oneDNN packs the matrix once instead of at every product


class Matrix(nn.Module):
    """Linear layer with a frozen weight."""

    def __init__(self, weight: Tensor, layout: WeightLayout) -> None:
        super().__init__()
        self.layout = layout
        weight = weight.detach()
        if layout == "columns":
            weight = weight.t().contiguous().t()
        elif layout == "packed":  # as torch.compile packs the frozen weights of a graph
            weight = pack_linear_weight(weight, 8)
        self.weight = nn.Buffer(weight, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        multiply = packed_linear if self.layout == "packed" else F.linear
        return multiply(states, self.weight)


class Norm(nn.Module):
    """RMSNorm in four operations: w * sqrt(D) * x / sqrt(|x|^2 + D * eps), summed in float32."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None
        weight = norm.weight.detach()
        dim = len(weight)
        scale = weight.to(torch.promote_types(weight.dtype, torch.float32)) * dim**0.5
        floor = scale.new_full((), (dim * norm.eps) ** 0.5)
        self.scale = nn.Buffer(scale, persistent=False)
        self.floor = nn.Buffer(floor, persistent=False)

    def forward(self, states: Tensor) -> Tensor:
        wide = states.to(self.scale.dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot(self.floor)
        return (wide / length).mul_(self.scale).to(states.dtype)


class Block(nn.Module):
    """A layer without its attention, which differs between prefill and step."""

    def __init__(self, layer: Layer, layout: WeightLayout, group: ProcessGroup | None) -> None:
        super().__init__()
        attention, feed = layer.attention, layer.feed_forward
        self.group = group
        self.head_dim = attention.head_dim
        self.n_heads = len(attention.query.weight) // self.head_dim  # H
        self.n_kv_heads = len(attention.key.weight) // self.head_dim  # G
        self.attention_norm = Norm(layer.attention_norm)
        projections = attention.query, attention.key, attention.value
        self.query_key_value = Matrix(torch.cat([part.weight for part in projections]), layout)
        biases = [part.bias.detach() for part in projections if part.bias is not None]
        self.bias = nn.Buffer(torch.cat(biases), persistent=False) if biases else None
        norms = attention.query_norm, attention.key_norm
        self.head_norms = nn.ModuleList(
            Norm(norm) for norm in norms if isinstance(norm, nn.RMSNorm)
        )
        self.attention_out = Matrix(attention.out.weight, layout)
        self.feed_norm = Norm(layer.feed_norm)
        self.gate_up = Matrix(torch.cat([feed.gate.weight, feed.up.weight]), layout)
        self.feed_out = Matrix(feed.out.weight, layout)

    def heads(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """states (B, T, D) -> queries, keys, values (B, T, H + 2G, E), the first two rotated."""
        rows, length, _ = states.shape
        projected = self.query_key_value(self.attention_norm(states))
        if self.bias is not None:
            projected = projected + self.bias
        heads = projected.view(rows, length, -1, self.head_dim)
        rotated = heads[:, :, : self.n_heads + self.n_kv_heads]
        parts = rotated.split([self.n_heads, self.n_kv_heads], dim=2)
        for norm, part in zip(self.head_norms, parts, strict=False):
            part.copy_(norm(part))
        swapped = rotated.roll(self.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)
        return heads

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """states (B, T, D) and attention output (B, T, H * E) -> (B, T, D)."""
        states = states + self.all_reduce(self.attention_out(attended))
        gate, up = self.gate_up(self.feed_norm(states)).chunk(2, dim=-1)  # (B, T, F)
        return states + self.all_reduce(self.feed_out(F.silu(gate).mul_(up)))

    def all_reduce(self, part: Tensor) -> Tensor:
        """Collective under tensor parallelism. Sum the parts of all processes, in place."""
        if self.group is not None:
            dist.all_reduce(part, group=self.group)
        return part


@dataclass
class KVCache:
    """Keys and values of B rows, and the rotation angles of all positions."""

    kv: Tensor  # (L, 2, B, G, C, E): keys, values
    cos: Tensor  # (K, C, E), of each kind of layer
    sin: Tensor  # (K, C, E): with the sign of the swapped half
    # (2 * B * G,): start of each row of keys and values within a layer, in positions
    row_starts: Tensor
    position: Tensor  # (B,) int64: of each row's next token

    @property
    def capacity(self) -> int:
        return self.kv.shape[4]


class Decoder(nn.Module):
    """Generate tokens with the weights of `model`.

    rows     usual batch size
    layout   None: chosen by device, precision and rows; "plain" for torch.compile
    group    process group of tensor parallelism; None: the model is whole
    release  take the weights from the model, so that they are in memory once (a tied
             embedding twice); the model is unusable afterwards
    """

    def __init__(
        self,
        model: Llama,
        *,
        rows: int = 1,
        layout: WeightLayout | None = None,
        group: ProcessGroup | None = None,
        release: bool = False,
    ) -> None:
        super().__init__()
        weight = model.embedding.weight.detach()
        self.config = model.config
        self.layout = layout or choose_layout(weight.device.type, weight.dtype, rows)
        self.embedding = nn.Buffer(weight, persistent=False)
        self.blocks: Any = nn.ModuleList()
        layers: Any = model.layers
        for number, layer in enumerate(layers):
            self.blocks.append(Block(layer, self.layout, group))
            if release:
                layers[number] = nn.Identity()
        first: Any = self.blocks[0]
        self.n_kv_heads: int = first.n_kv_heads
        self.norm = Norm(model.norm)
        self.output = Matrix(model.output_weight, self.layout)
        if release:
            model.output = None

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache for `rows` rows of up to `capacity` tokens."""
        weight = self.embedding
        head_dim = self.config.head_dim
        kv = weight.new_zeros(len(self.blocks), 2, rows, self.n_kv_heads, capacity, head_dim)
        positions = torch.arange(capacity, device=weight.device)[None]
        rotaries = RotaryEmbedding.of(positions, self.config, weight.dtype)
        cos = torch.stack([rotary.cos[0, 0] for rotary in rotaries])
        sin = torch.stack([rotary.sin[0, 0] for rotary in rotaries])
        sign = torch.ones(head_dim, device=weight.device, dtype=weight.dtype)
        sign[: head_dim // 2] = -1
        row_starts = torch.arange(2 * rows * self.n_kv_heads, device=weight.device) * capacity
        position = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        return KVCache(kv, cos, sin * sign, row_starts, position)

    def layers(self, cache: KVCache) -> Iterator[tuple[Block, int, Tensor]]:
        """Return (block, kind of its rotary frequencies, its keys and values) of each layer."""
        return zip(self.blocks, self.config.rope_kinds, cache.kv.unbind(0), strict=True)

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: KVCache) -> Tensor:
        """Fill the empty cache; return the logits (B, V) of each row's next token.

        tokens (B, T): row b has `lengths[b]` tokens (at least 1), then padding, never attended to.
        """
        rows, length = tokens.shape
        cos = cache.cos[:, None, :length, None]  # (K, 1, T, 1, E)
        sin = cache.sin[:, None, :length, None]
        states = F.embedding(tokens, self.embedding)
        for block, kind, layer_kv in self.layers(cache):
            heads = block.heads(states, cos[kind], sin[kind])  # (B, T, H + 2G, E)
            sizes = block.n_heads, self.n_kv_heads, self.n_kv_heads
            query, key, value = heads.transpose(1, 2).split(sizes, dim=1)
            layer_kv[0, :, :, :length] = key
            layer_kv[1, :, :, :length] = value
            attended = attend(query, key, value, None)  # (B, H, T, E)
            states = block.finish(states, attended.transpose(1, 2).flatten(2))
        cache.position.copy_(lengths)
        last = states[torch.arange(rows, device=tokens.device), lengths - 1]  # (B, D)
        return self.output(self.norm(last))

    def step(self, tokens: Tensor, cache: KVCache, window: int) -> Tensor:
        """Append `tokens` (B,), one per row; return the logits (B, V) of the next ones.

        window  S, more than any row's position: only the first S positions are attended to
        """
        rows = len(tokens)
        head_dim = self.config.head_dim
        n_kv_heads = self.n_kv_heads
        cos = cache.cos.index_select(1, cache.position)[:, :, None, None]  # (K, B, 1, 1, E)
        sin = cache.sin.index_select(1, cache.position)[:, :, None, None]
        hidden = torch.arange(window, device=tokens.device) > cache.position[:, None]  # (B, S)
        bias = torch.zeros_like(hidden, dtype=self.embedding.dtype)
        bias = bias.masked_fill_(hidden, float("-inf"))
        bias = bias.repeat_interleave(n_kv_heads, 0)[:, None]  # (B * G, 1, S)
        positions = cache.position.repeat_interleave(n_kv_heads).repeat(2)
        targets = cache.row_starts + positions  # (2 * B * G,)
        states = F.embedding(tokens[:, None], self.embedding)
        for block, kind, layer_kv in self.layers(cache):
            heads = block.heads(states, cos[kind], sin[kind])[:, 0]  # (B, H + 2G, E)
            query, new = heads.split([block.n_heads, 2 * n_kv_heads], dim=1)
            query = query.reshape(rows * n_kv_heads, -1, head_dim)  # (B * G, H / G, E)
            new = new.view(rows, 2, -1).transpose(0, 1)  # (2, B, G * E)
            layer_kv.view(-1, head_dim).index_copy_(0, targets, new.reshape(-1, head_dim))
            keys, values = layer_kv.flatten(1, 2)[:, :, :window]  # (B * G, S, E)
            # (B * G, H / G, S)
            score = torch.baddbmm(bias, query, keys.transpose(1, 2), alpha=head_dim**-0.5)
            attended = torch.bmm(score.softmax(dim=-1), values)  # (B * G, H / G, E)
            states = block.finish(states, attended.view(rows, 1, -1))
        cache.position += 1
        return self.output(self.norm(states[:, 0]))
