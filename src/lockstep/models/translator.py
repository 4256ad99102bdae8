"""A complete encoder-decoder Transformer for translation: embeddings, both stacks, decoding step by step, first weights.

What the model is stands in this file; `kernels.py` holds attention and dropout, `loss.py` the cross-entropy. It knows no
processes, no files, no run. Choices, and why:

* Layer norm before each sublayer and once at the end of each stack (pre-norm): trains without a long warm-up.
  Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture".
* One joint vocabulary, one matrix for source words, target words and the output (Press and Wolf 2017). Its entries have
  standard deviation width**-0.5 and are multiplied by width**0.5 on the way in, as in Vaswani et al. 2017.
* No biases but those of the layer norms, which reach every projection behind them: a twentieth of a step saved.
* Sinusoidal positions, computed when needed: no buffer to save, to move, or to forget on the meta device.
* PAD stands only behind a sentence, so causal attention alone hides it in the decoder; the encoder and the
  cross-attention hide it by a mask that is made once a forward pass. The first position of a row is never hidden:
  a row that is PAD throughout (the ragged end of an epoch) then gives finite numbers instead of 0 / 0.
* The loss is a sum over tokens. Whoever trains divides once, by the tokens of the whole step.

Letters in the margin: B rows, S source and T target positions, D width, H heads, E = D / H, V vocabulary, L decoder
layers, K beams, C capacity of a cache.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.kernels import Choice, add_dropped, attend, attend_packed, dropped
from lockstep.models.loss import output_cross_entropy


def positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sinusoids of the positions 0..length-1: (T, D) float32. Vaswani et al. 2017, section 3.5."""
    place = torch.arange(length, device=device, dtype=torch.float32)  # (T,)
    pair = torch.arange(0, width, 2, device=device, dtype=torch.float32)  # (D/2,)
    angle = place[:, None] * torch.exp(pair * (-math.log(10_000.0) / width))  # (T, D/2)
    return torch.cat((angle.sin(), angle.cos()), dim=1)[:, :width]  # (T, D)


def hidden_score(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores: 0, or minus infinity where `hidden` is true."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, float("-inf"))


# -- parts ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """What the two kinds of attention have in common: heads, the choice of kernel, the projection out."""

    def __init__(self, width: int, heads: int, choice: Choice, dropout: float) -> None:
        super().__init__()
        self.heads, self.choice, self.dropout = heads, choice, dropout
        self.out = nn.Linear(width, width, bias=False)

    def unpack(self, projected: Tensor) -> Tensor:
        """(B, T, P * D) -> (B, T, P, H, E)."""
        rows, length, _ = projected.shape
        return projected.view(rows, length, -1, self.heads, self.out.in_features // self.heads)

    def mix(self, queries: Tensor, others: Tensor | None, bias: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        mixed: Tensor = self.out(attend_packed(queries, others, bias, self.choice, dropout))
        return mixed  # (B, T, D)


class SelfAttention(Attention):
    """Attention of a sequence to itself; one projection gives query, key and value."""

    def __init__(self, width: int, heads: int, choice: Choice, dropout: float) -> None:
        super().__init__(width, heads, choice, dropout)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        return self.mix(self.unpack(self.query_key_value(states)), None, bias)


class CrossAttention(Attention):
    """Attention of the target to the encoded source; one projection of that gives key and value."""

    def __init__(self, width: int, heads: int, choice: Choice, dropout: float) -> None:
        super().__init__(width, heads, choice, dropout)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)

    def forward(self, states: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        return self.mix(self.unpack(self.query(states)), self.unpack(self.key_value(memory)), bias)


class FeedForward(nn.Module):
    """Two matrices with a ReLU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        narrowed: Tensor = self.out(F.relu(self.up(states), inplace=True))
        return narrowed


class EncoderLayer(nn.Module):
    """Self-attention, feed-forward; each on the norm of what it is added to."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attention_dropout: float, choice: Choice) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = SelfAttention(width, heads, choice, attention_dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        states = add_dropped(states, self.self_attention(self.self_norm(states), bias), p)
        return add_dropped(states, self.feed_forward(self.feed_norm(states)), p)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, feed-forward; each on the norm of what it is added to."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, attention_dropout: float, choice: Choice) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_norm = nn.LayerNorm(width)
        self.self_attention = SelfAttention(width, heads, choice, attention_dropout)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = CrossAttention(width, heads, choice, attention_dropout)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, hidden)

    def forward(self, states: Tensor, causal: Tensor, memory: Memory) -> Tensor:
        p = self.dropout if self.training else 0.0
        states = add_dropped(states, self.self_attention(self.self_norm(states), causal), p)
        states = add_dropped(states, self.cross_attention(self.cross_norm(states), memory.states, memory.bias), p)
        return add_dropped(states, self.feed_forward(self.feed_norm(states)), p)

    def step(self, states: Tensor, cache: Cache, layer: int, bias: Tensor) -> Tensor:
        """One position further for K beams a row: states (B, K, D), bias (B, 1, K, C * K) -> (B, K, D)."""
        own, cross = self.self_attention, self.cross_attention
        packed = own.unpack(own.query_key_value(self.self_norm(states))).transpose(1, 3)  # (B, H, 3, K, E)
        query, key, value = packed.unbind(2)
        keys = cache.keys[layer].index_copy_(2, cache.position, key[:, :, None])  # (B, H, C, K, E)
        values = cache.values[layer].index_copy_(2, cache.position, value[:, :, None])
        mixed = attend(query, keys.flatten(2, 3), values.flatten(2, 3), bias, "plain")  # (B, H, K, E)
        states = states + own.out(mixed.transpose(1, 2).flatten(2))
        query = cross.unpack(cross.query(self.cross_norm(states))).transpose(1, 3)[:, :, 0]  # (B, H, K, E)
        mixed = attend(query, cache.memory_keys[layer], cache.memory_values[layer], cache.memory_bias, "plain")
        states = states + cross.out(mixed.transpose(1, 2).flatten(2))
        further: Tensor = states + self.feed_forward(self.feed_norm(states))
        return further


@dataclass(frozen=True)
class Memory:
    """The encoded source: what the decoder attends to."""

    states: Tensor  # (B, S, D)
    bias: Tensor  # (B, 1, 1, S): 0, or minus infinity at PAD


@dataclass
class Cache:
    """What decoding remembers of B sentences, K beams each.

    Beams are never copied: each position keeps the keys of all K, and `ancestors` says whose a beam attends to there.
    """

    keys: Tensor  # (L, B, H, C, K, E)
    values: Tensor  # (L, B, H, C, K, E)
    ancestors: Tensor  # (B, K, C): the beam whose token stands at this position of the sentence of beam k
    position: Tensor  # (1,): where the next token goes
    memory_keys: Tensor  # (L, B, H, S, E)
    memory_values: Tensor  # (L, B, H, S, E)
    memory_bias: Tensor  # (B, 1, 1, S)
    places: Tensor  # (C, D): sinusoids

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def bias(self, dtype: torch.dtype) -> Tensor:
        """(B, 1, K, C * K): hides what a beam does not descend from, and what is not written yet."""
        beams, capacity = self.ancestors.shape[1:]
        beam = torch.arange(beams, device=self.ancestors.device)
        place = torch.arange(capacity, device=self.ancestors.device)
        other = self.ancestors[..., None] != beam  # (B, K, C, K)
        return hidden_score((other | (place > self.position)[:, None]).flatten(2)[:, None], dtype)

    def choose(self, parents: Tensor) -> None:
        """Let beam k of row b go on from beam parents[b, k]."""
        self.ancestors = self.ancestors.gather(1, parents[..., None].expand(-1, -1, self.capacity))

    def keep(self, rows: Tensor) -> None:
        """Forget all sentences but `rows`."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.memory_keys, self.memory_values = self.memory_keys[:, rows], self.memory_values[:, rows]
        self.memory_bias, self.ancestors = self.memory_bias[rows], self.ancestors[rows]

    def grow(self) -> None:
        """Double the capacity."""
        capacity = self.capacity
        self.keys = F.pad(self.keys, (0, 0, 0, 0, 0, capacity))
        self.values = F.pad(self.values, (0, 0, 0, 0, 0, capacity))
        self.ancestors = F.pad(self.ancestors, (0, capacity))
        self.places = positions(2 * capacity, self.places.shape[1], self.places.device).to(self.places.dtype)


# -- the model --------------------------------------------------------------------------------------------------------


class Translator(nn.Module):
    """Encoder-decoder Transformer; `model(source, target)` gives the logits of each next target token.

    vocabulary  joint, source and target; token `pad` is never attended to
    dropout     of the embeddings and of each sublayer's output; attention_dropout of the attention weights
    attention   "plain" (matrix product, softmax, matrix product) or "sdpa" (torch's fused kernels)
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        heads: int,
        encoder_layers: int,
        decoder_layers: int,
        feed_forward: int,
        dropout: float,
        attention: Choice,
        pad: int = 0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.dropout, self.pad = width, heads, dropout, pad
        layer = (width, heads, feed_forward, dropout, attention_dropout, attention)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(EncoderLayer(*layer) for _ in range(encoder_layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(*layer) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None, *, smoothing: float = 0.0) -> Tensor:
        """Logits (B, T, V) of each next token; with labels (B, T) the sum of their cross-entropy instead, a scalar.

        source (B, S) and target (B, T) int64, PAD only behind a sentence. The loss never holds the logits of all tokens:
        it is faster than making them, and needs far less memory.
        """
        states = self.decode(target, self.encode(source))
        weight = self.embedding.weight
        if labels is None:
            return F.linear(states, weight)
        return output_cross_entropy(states, weight, labels, smoothing=smoothing, pad=self.pad)

    def encode(self, source: Tensor) -> Memory:
        """source (B, S) -> Memory."""
        first = torch.arange(source.shape[1], device=source.device) == 0  # (S,)
        hidden = (source == self.pad) & ~first  # (B, S)
        bias = hidden_score(hidden[:, None, None], self.embedding.weight.dtype)  # (B, 1, 1, S)
        states = self.embed(source)
        for layer in self.encoder:
            states = layer(states, bias)
        return Memory(self.encoder_norm(states), bias)

    def decode(self, target: Tensor, memory: Memory) -> Tensor:
        """target (B, T) -> states (B, T, D), ready for the output matrix."""
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)  # (T, T)
        causal = hidden_score(future[None, None], self.embedding.weight.dtype)  # (1, 1, T, T)
        states = self.embed(target)
        for layer in self.decoder:
            states = layer(states, causal, memory)
        normed: Tensor = self.decoder_norm(states)
        return normed

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D): scaled embeddings plus positions, with dropout."""
        places = positions(ids.shape[1], self.width, ids.device).to(self.embedding.weight.dtype)
        states = torch.add(places, self.embedding(ids), alpha=self.width**0.5)
        return dropped(states, self.dropout if self.training else 0.0)

    def start(self, memory: Memory, *, beams: int, capacity: int) -> Cache:
        """An empty cache for the sentences of `memory`; keys and values of the source are computed here, once."""
        rows, size = len(memory.states), self.width // self.heads
        crosses = [cast(DecoderLayer, layer).cross_attention for layer in self.decoder]
        packed = torch.stack([c.unpack(c.key_value(memory.states)).permute(2, 0, 3, 1, 4) for c in crosses], dim=1)
        empty = packed.new_zeros(len(self.decoder), rows, self.heads, capacity, beams, size)
        device = memory.states.device
        return Cache(
            keys=empty,
            values=empty.clone(),
            ancestors=torch.zeros(rows, beams, capacity, dtype=torch.int64, device=device),
            position=torch.zeros(1, dtype=torch.int64, device=device),
            memory_keys=packed[0],
            memory_values=packed[1],
            memory_bias=memory.bias,
            places=positions(capacity, self.width, device).to(memory.states.dtype),
        )

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (B, K, V) of what follows `tokens` (B, K), the newest of each beam; the cache moves on by one position."""
        beams = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        cache.ancestors.index_copy_(2, cache.position, beams[..., None])
        bias = cache.bias(self.embedding.weight.dtype)
        states = torch.add(cache.places[cache.position], self.embedding(tokens), alpha=self.width**0.5)  # (B, K, D)
        for i, layer in enumerate(self.decoder):
            states = cast(DecoderLayer, layer).step(states, cache, i, bias)
        cache.position += 1
        return F.linear(self.decoder_norm(states), self.embedding.weight)


# -- first weights ----------------------------------------------------------------------------------------------------


def initialise(model: nn.Module, seed: int) -> None:
    """Gives each parameter its first value, which follows from (seed, name) alone: the same on any number of processes.

    Works in place, also on a model that was built on the meta device and given memory by `to_empty`.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first_value(name, parameter.shape, seed))


def first_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Float32 on the CPU: 1 and 0 for layer norms; normal, of deviation width**-0.5, for embeddings; Xavier's uniform
    distribution for matrices (Glorot and Bengio 2010), a fused projection being as many square ones as it holds."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    if name.endswith("embedding.weight"):
        return torch.empty(shape).normal_(std=shape[1] ** -0.5, generator=generator)
    parts = shape[0] // shape[1] if "key_value" in name else 1
    bound = math.sqrt(6.0 / (shape[0] / parts + shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
