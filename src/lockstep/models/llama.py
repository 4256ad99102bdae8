"""A complete Llama: shapes by name, the model, its loss, first weights.

What the model is stands in this file (`loss.py` holds the cross-entropy). It knows no processes, no files, no run.
Touvron et al. 2023, "LLaMA", and the Llama team 2024, "The Llama 3 Herd of Models". Choices, and why:

* RMS norm before each sublayer and once at the end (Zhang and Sennrich 2019). No biases anywhere.
* Rotary positions (Su et al. 2021) in the arrangement of Hugging Face: dimension i of a head turns with i + E/2, not with
  i + 1. Weights then go in and out bit by bit, without a permutation. Angles are float32 and computed when needed, once a
  forward pass: no buffer to save, to move, or to forget on the meta device.
* Query, key and value are three matrices, gate and up are two: what tensor parallelism cuts and LoRA names.
* The loss is a sum over tokens, and the logits of all tokens never exist together. Whoever trains divides once.

Writing with it, token by token, is `decode.py`.

Letters in the margin: B rows, T positions, D width, H heads, G key-value heads, E width of a head, V vocabulary, L layers.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.loss import output_cross_entropy

IGNORED = -100  # a label that counts nothing, as in torch.nn.functional.cross_entropy

# -- shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaling:
    """How Llama 3.1 stretches rotary positions beyond the context it was trained on: slow turns become slower.

    A wave of more than `original_context / low` positions is stretched by `factor`, one of fewer than
    `original_context / high` stays, and between them goes over from one to the other.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the model but its values."""

    vocabulary: int  # words; memory and time of the output grow with it
    width: int  # numbers a position has between layers; parameters grow with its square
    layers: int
    heads: int  # queries a position asks in a layer
    key_value_heads: int  # keys and values that they share; the cache grows with it
    head_width: int  # numbers in a query, even
    feed_forward: int  # inner width of the gated unit, about 3.5 times the width
    context: int = 8192  # positions that it is made for; not a limit of this code
    rope_base: float = 500_000.0  # the slowest rotary wave is this many times as long as the fastest
    rope_scaling: Scaling | None = None
    norm_epsilon: float = 1e-5
    tied: bool = False  # the output matrix is the embedding

    def __post_init__(self) -> None:
        if self.heads % self.key_value_heads or self.head_width % 2:
            heads = f"{self.heads} heads over {self.key_value_heads} key-value heads of width {self.head_width}"
            raise ValueError(f"{heads}: the first must be a multiple of the second, the width even")

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_value_heads)
        layer = attention + 3 * self.width * self.feed_forward + 2 * self.width
        return self.layers * layer + self.width + self.vocabulary * self.width * (1 if self.tied else 2)


LLAMA_32 = Scaling(factor=32.0)
SHAPES = {
    # to try things with, on a CPU
    "1M": Shape(2048, 128, 4, 4, 2, 32, 384, 1024, 10_000.0, tied=True),
    "5M": Shape(4096, 256, 6, 4, 2, 64, 704, 1024, 10_000.0, tied=True),
    "25M": Shape(8192, 512, 8, 8, 4, 64, 1408, 2048, 10_000.0, tied=True),
    "100M": Shape(16_384, 768, 14, 12, 4, 64, 2048, 2048, 10_000.0, tied=True),
    # as published: Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B
    "1B": Shape(128_256, 2048, 16, 32, 8, 64, 8192, 131_072, rope_scaling=LLAMA_32, tied=True),
    "3B": Shape(128_256, 3072, 28, 24, 8, 128, 8192, 131_072, rope_scaling=LLAMA_32, tied=True),
    "8B": Shape(128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope_scaling=Scaling()),
    "70B": Shape(128_256, 8192, 80, 64, 8, 128, 28_672, 131_072, rope_scaling=Scaling()),
    "405B": Shape(128_256, 16_384, 126, 128, 8, 128, 53_248, 131_072, rope_scaling=Scaling()),
}

# -- positions --------------------------------------------------------------------------------------------------------


def turns(shape: Shape, device: torch.device) -> Tensor:
    """Radians that each pair of dimensions turns from one position to the next: (E/2,) float32."""
    pair = torch.arange(0, shape.head_width, 2, device=device).float()  # (E/2,)
    turn: Tensor = 1.0 / shape.rope_base ** (pair / shape.head_width)
    scaling = shape.rope_scaling
    if scaling is None:
        return turn
    waves = scaling.original_context * turn / (2 * math.pi)  # (E/2,): in the original context
    kept = ((waves - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return kept * turn + (1 - kept) * turn / scaling.factor


@dataclass(frozen=True)
class Rotation:
    """The angles of some positions, as cosines and sines: (B or 1, 1, T, E)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, shape: Shape, dtype: torch.dtype) -> Rotation:
        """positions (B or 1, T)."""
        angle = positions[:, None, :, None].float() * turns(shape, positions.device)  # (B, 1, T, E/2)
        angle = torch.cat((angle, angle), dim=-1)  # (B, 1, T, E)
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def turn(self, heads: Tensor) -> Tensor:
        """(B, H, T, E) -> (B, H, T, E)."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos.to(heads.dtype) + torch.cat((-second, first), dim=-1) * self.sin.to(heads.dtype)


def places_in(documents: Tensor) -> Tensor:
    """documents (B, T), equal ids side by side: the place (B, T) of each token in its own document, from 0."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return place - torch.where(begins, place, 0).cummax(dim=1).values


def visible_in(documents: Tensor) -> Tensor:
    """Which position (B, 1, T, T) sees which: those before it in the same document, and itself."""
    length = documents.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (past & (documents[:, :, None] == documents[:, None, :]))[:, None]


# -- attention --------------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Grouped-query attention (Ainslie et al. 2023) by torch's fused kernel: (B, H, T, E).

    query (B, H, T, E); key and value (B, G, S, E), head h asks key-value head h // (H / G)
    visible  (B or 1, 1, T, S) bool; None: each position sees itself and those before it

    Measured on one core (torch 2.13, fp32), forward and backward of 8 heads over 4 key-value heads, 2,048 positions in rows of
    128, 512, 2,048: 23, 69, 143 ms, by hand 38, 157, 648; it skips what is hidden, and here nothing is dropped out, which is what
    made it slow for the translator.
    """
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None, enable_gqa=True)


# -- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Rotary positions, grouped queries, the projection out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        inner, shared = shape.heads * shape.head_width, shape.key_value_heads * shape.head_width
        self.query = nn.Linear(shape.width, inner, bias=False)
        self.key = nn.Linear(shape.width, shared, bias=False)
        self.value = nn.Linear(shape.width, shared, bias=False)
        self.out = nn.Linear(inner, shape.width, bias=False)

    def heads(self, projected: Tensor) -> Tensor:
        """(B, T, H * E) -> (B, H, T, E), whatever H is."""
        rows, length, _ = projected.shape
        return projected.view(rows, length, -1, self.head_width).transpose(1, 2)

    def forward(self, states: Tensor, rotation: Rotation, visible: Tensor | None) -> Tensor:
        """states (B, T, D) -> (B, T, D)."""
        query = rotation.turn(self.heads(self.query(states)))  # (B, H, T, E)
        key = rotation.turn(self.heads(self.key(states)))  # (B, G, T, E)
        value = self.heads(self.value(states))
        mixed: Tensor = self.out(attend(query, key, value, visible).transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        narrowed: Tensor = self.out(F.silu(self.gate(states)) * self.up(states))
        return narrowed


class Layer(nn.Module):
    """Attention, then the gated unit; each on the norm of what it is added to."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, shape.norm_epsilon)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.width, shape.norm_epsilon)
        self.feed_forward = FeedForward(shape.width, shape.feed_forward)

    def forward(self, states: Tensor, rotation: Rotation, visible: Tensor | None) -> Tensor:
        states = states + self.attention(self.attention_norm(states), rotation, visible)
        further: Tensor = states + self.feed_forward(self.feed_norm(states))
        return further


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, shape.norm_epsilon)
        self.output = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """(V, D)."""
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of each next token; with labels the sum of their cross-entropy instead, a scalar.

        tokens     (B, T) int64
        labels     (B, T) int64, what follows each token; IGNORED counts nothing
        documents  (B, T) int64, equal ids side by side: tokens see and count places in their own document alone.
                   None: each row is one document
        """
        if documents is None:
            places, visible = torch.arange(tokens.shape[1], device=tokens.device)[None], None
        else:
            places, visible = places_in(documents), visible_in(documents)
        states = self.norm(self.through(tokens, places, visible))
        if labels is None:
            return F.linear(states, self.output_weight)
        return output_cross_entropy(states, self.output_weight, labels, smoothing=0.0, pad=IGNORED)

    def through(self, tokens: Tensor, places: Tensor, visible: Tensor | None) -> Tensor:
        """tokens (B, T) at places (B or 1, T) -> states (B, T, D) after all layers, before the last norm."""
        states = self.embedding(tokens)
        rotation = Rotation.of(places, self.shape, states.dtype)
        for layer in self.layers:
            states = layer(states, rotation, visible)
        return cast(Tensor, states)


# -- first weights ----------------------------------------------------------------------------------------------------


def build(shape: Shape, *, device: torch.device, seed: int, dtype: torch.dtype = torch.float32) -> Llama:
    """A new model in training mode on `device`: made on the meta device, given memory there, then its first values."""
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
    model.to_empty(device=device)
    initialise(model, seed)
    return model


def initialise(model: Llama, seed: int) -> None:
    """Gives each parameter its first value, which follows from (seed, name) alone. In place, one parameter at a time."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first_value(name, parameter.shape, model.shape.layers, seed))


def first_value(name: str, size: torch.Size, layers: int, seed: int) -> Tensor:
    """Float32 on the CPU: 1 for norms; else normal, of deviation inputs**-0.5 (for the embedding width**-0.5), divided by
    (2 * layers)**0.5 for what is added to the states, so that they do not grow with depth (Radford et al. 2019, section 2.3)."""
    if len(size) == 1:
        return torch.ones(size)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    deviation = size[1] ** -0.5 / ((2 * layers) ** 0.5 if name.endswith("out.weight") else 1.0)
    return torch.empty(size).normal_(std=deviation, generator=generator)
