"""A complete encoder-decoder Transformer for translation: model, cached decoding, initial weights.

Attention and dropout are in `kernels.py`, the cross-entropy in `loss.py`. Choices, and why:

* Pre-norm (Xiong et al. 2020) trains without a long warm-up.
* One joint vocabulary, one matrix for source, target and output (Press and Wolf 2017), multiplied
  by dim**0.5 on input (Vaswani et al. 2017).
* No biases except those of the layer norms, which reach every projection: a twentieth of a step.
* Sinusoidal positions, computed when needed: no buffer to save, move or materialize.
* PAD only follows a sentence, so causal attention hides it in the decoder; elsewhere a mask does.
  Position 0 is never hidden: a row of PAD only, at the end of an epoch, gives finite numbers.
* The loss is a sum over tokens; the training loop divides by the tokens of the whole step.

Dimensions in the margin: B rows, S source and T target positions, D dim, H heads, E = D / H,
V vocabulary, L decoder layers, K beams, C capacity of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.corpus.tokenizer import PAD
from lockstep.models.kernels import (
    AttentionKernel,
    add_dropout,
    apply_dropout,
    attend,
    attend_packed,
    choose_attention,
)
from lockstep.models.loss import output_cross_entropy
from lockstep.parallel.deferred_init import generator_of, materialize
from lockstep.parallel.plans import Chunk, ParallelPlan, StagedModel

if TYPE_CHECKING:
    from lockstep.config.schema import ModelOptions


def sinusoidal_positions(length: int, like: Tensor) -> Tensor:
    """Sinusoids of positions 0..length-1: (T, D), as wide as `like`. Vaswani et al. 2017, section
    3.5."""
    dim, device = like.shape[1], like.device
    position = torch.arange(length, device=device, dtype=torch.float32)  # (T,)
    pair = torch.arange(0, dim, 2, device=device, dtype=torch.float32)  # (D/2,)
    angle = position[:, None] * torch.exp(pair * (-math.log(10_000.0) / dim))  # (T, D/2)
    return torch.cat((angle.sin(), angle.cos()), dim=1)[:, :dim].to(like.dtype)  # (T, D)


def mask_bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias of attention scores: 0, or -inf where `hidden` is true."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, float("-inf"))


def source_bias(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias (B, 1, 1, S) that hides PAD in source (B, S), but not at position 0."""
    first = torch.arange(source.shape[1], device=source.device) == 0  # (S,)
    return mask_bias(((source == PAD) & ~first)[:, None, None], dtype)


def causal_bias(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias (1, 1, T, T) that hides later tokens of target (B, T)."""
    length = target.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
    return mask_bias(hidden[None, None], dtype)


# -- layers ----------------------------------------------------------------------------------------


class MultiHeadAttention(nn.Module):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.n_heads = options.n_heads
        self.kernel = cast(AttentionKernel, options.attention)
        self.out = nn.Linear(options.dim, options.dim, bias=False)

    def split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, P * D) -> (B, T, P, H, E), P fused projections."""
        rows, length, _ = projected.shape
        return projected.view(rows, length, -1, self.n_heads, self.out.in_features // self.n_heads)

    def attend(self, queries: Tensor, others: Tensor | None, bias: Tensor) -> Tensor:
        """Return (B, T, D)."""
        return self.out(attend_packed(queries, others, bias, self.kernel))

    def attend_step(self, query: Tensor, keys_values: Tensor, bias: Tensor) -> Tensor:
        """query (B, H, K, E), keys_values (2, B, H, S, E) -> (B, K, D)."""
        keys, values = keys_values
        attended = attend(query, keys, values, bias, "plain")  # (B, H, K, E)
        return self.out(attended.transpose(1, 2).flatten(2))


class SelfAttention(MultiHeadAttention):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options)
        self.query_key_value = nn.Linear(options.dim, 3 * options.dim, bias=False)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        return self.attend(self.split_heads(self.query_key_value(states)), None, bias)


class CrossAttention(MultiHeadAttention):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options)
        self.query = nn.Linear(options.dim, options.dim, bias=False)
        self.key_value = nn.Linear(options.dim, 2 * options.dim, bias=False)

    def forward(self, states: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        query = self.split_heads(self.query(states))
        return self.attend(query, self.split_heads(self.key_value(memory)), bias)


class FeedForward(nn.Module):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.up = nn.Linear(options.dim, options.ffn_dim, bias=False)
        self.out = nn.Linear(options.ffn_dim, options.dim, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.out(F.relu(self.up(states), inplace=True))


class TransformerLayer(nn.Module):
    """Sublayers, each added to the states with dropout in training."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.dropout = options.dropout
        self.self_norm = nn.LayerNorm(options.dim)
        self.self_attention = SelfAttention(options)

    def add(self, states: Tensor, branch: Tensor) -> Tensor:
        return add_dropout(states, branch, self.dropout if self.training else 0.0)


class EncoderLayer(TransformerLayer):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options)
        self.feed_norm = nn.LayerNorm(options.dim)
        self.feed_forward = FeedForward(options)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        states = self.add(states, self.self_attention(self.self_norm(states), bias))
        return self.add(states, self.feed_forward(self.feed_norm(states)))


class DecoderLayer(TransformerLayer):
    def __init__(self, options: ModelOptions) -> None:
        super().__init__(options)
        self.cross_norm = nn.LayerNorm(options.dim)
        self.cross_attention = CrossAttention(options)
        self.feed_norm = nn.LayerNorm(options.dim)
        self.feed_forward = FeedForward(options)

    def forward(self, states: Tensor, causal: Tensor, memory: EncodedSource) -> Tensor:
        states = self.add(states, self.self_attention(self.self_norm(states), causal))
        crossed = self.cross_attention(self.cross_norm(states), memory.states, memory.bias)
        states = self.add(states, crossed)
        return self.add(states, self.feed_forward(self.feed_norm(states)))

    def step(self, states: Tensor, cache: BeamCache, layer: int, bias: Tensor) -> Tensor:
        """Advance K beams by one position: states (B, K, D), bias (B, 1, K, C * K) -> (B, K, D)."""
        own = self.self_attention
        cross = self.cross_attention
        packed = own.split_heads(own.query_key_value(self.self_norm(states)))  # (B, K, 3, H, E)
        packed = packed.permute(2, 0, 3, 1, 4)  # (3, B, H, K, E)
        written = cache.written[:, layer]  # (2, B, H, C, K, E)
        written.index_copy_(3, cache.position, packed[1:, :, :, None])
        states = states + own.attend_step(packed[0], written.flatten(3, 4), bias)
        query = cross.split_heads(cross.query(self.cross_norm(states)))[:, :, 0].transpose(1, 2)
        memory = cache.memory[:, layer]
        states = states + cross.attend_step(query, memory, cache.memory_bias)
        return states + self.feed_forward(self.feed_norm(states))


@dataclass(frozen=True)
class EncodedSource:
    states: Tensor  # (B, S, D)
    bias: Tensor  # (B, 1, 1, S): 0, or -inf at PAD


@dataclass
class BeamCache:
    """Keys and values of B sentences with K beams, which are never copied: `ancestors` selects."""

    written: Tensor  # (2, L, B, H, C, K, E): keys and values of the target
    ancestors: Tensor  # (B, K, C): whose token is at this position of the sentence of beam k
    position: Tensor  # (1,): of the next token
    memory: Tensor  # (2, L, B, H, S, E): keys and values of the source
    memory_bias: Tensor  # (B, 1, 1, S)
    positions: Tensor  # (C, D): sinusoids

    @property
    def capacity(self) -> int:
        return self.written.shape[4]

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return (B, 1, K, C * K): hides other beams' tokens and positions not written yet."""
        _, beams, capacity = self.ancestors.shape
        beam = torch.arange(beams, device=self.ancestors.device)
        position = torch.arange(capacity, device=self.ancestors.device)
        other = self.ancestors[..., None] != beam  # (B, K, C, K)
        hidden = other | (position > self.position)[:, None]
        return mask_bias(hidden.flatten(2)[:, None], dtype)

    def reorder(self, parents: Tensor) -> None:
        self.ancestors = self.ancestors.gather(1, parents[..., None].expand(-1, -1, self.capacity))

    def keep_rows(self, rows: Tensor) -> None:
        self.written = self.written[:, :, rows]
        self.memory = self.memory[:, :, rows]
        self.memory_bias = self.memory_bias[rows]
        self.ancestors = self.ancestors[rows]

    def grow(self) -> None:
        capacity = self.capacity
        self.written = F.pad(self.written, (0, 0, 0, 0, 0, capacity))
        self.ancestors = F.pad(self.ancestors, (0, capacity))
        self.positions = sinusoidal_positions(2 * capacity, self.positions)


# -- the model -------------------------------------------------------------------------------------


class Translator(StagedModel):
    """Encoder-decoder Transformer: `model(source, target)` returns the logits of each next token.

    vocab_size  of source and target; token PAD is never attended to
    """

    def __init__(self, vocab_size: int, options: ModelOptions) -> None:
        super().__init__()
        self.dim = options.dim
        self.n_heads = options.n_heads
        self.dropout = options.dropout
        self.embedding = nn.Embedding(vocab_size, options.dim)
        self.encoder = nn.ModuleList(EncoderLayer(options) for _ in range(options.encoder_layers))
        self.encoder_norm = nn.LayerNorm(options.dim)
        self.decoder: Any = nn.ModuleList(
            DecoderLayer(options) for _ in range(options.decoder_layers)
        )
        self.decoder_norm = nn.LayerNorm(options.dim)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        labels: Tensor | None = None,
        *,
        smoothing: float = 0.0,
    ) -> Tensor:
        """Return the logits (B, T, V); with labels (B, T) the sum of their cross-entropy, a scalar.

        source (B, S) and target (B, T) int64, PAD only after a sentence.
        """
        states = self.decode(target, self.encode(source))
        if labels is None:
            return F.linear(states, self.embedding.weight)
        return self.loss_of(states, labels, smoothing)

    def loss_of(self, states: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Return the summed loss of the decoder's states, which are normalized."""
        weight = self.embedding.weight
        return output_cross_entropy(states, weight, labels, smoothing=smoothing, ignore_index=PAD)

    def encode(self, source: Tensor) -> EncodedSource:
        bias = source_bias(source, self.embedding.weight.dtype)
        states = self.embed(source)
        for layer in self.encoder:
            states = layer(states, bias)
        return EncodedSource(self.encoder_norm(states), bias)

    def decode(self, target: Tensor, memory: EncodedSource) -> Tensor:
        causal = causal_bias(target, self.embedding.weight.dtype)
        states = self.embed(target)
        for layer in self.decoder:
            states = layer(states, causal, memory)
        return self.decoder_norm(states)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, D): scaled embeddings plus positions, with dropout."""
        positions = sinusoidal_positions(ids.shape[1], self.embedding.weight)
        states = torch.add(positions, self.embedding(ids), alpha=self.dim**0.5)
        return apply_dropout(states, self.dropout if self.training else 0.0)

    def new_cache(self, memory: EncodedSource, *, beams: int, capacity: int) -> BeamCache:
        """Return an empty cache for `memory`, with the keys and values of the source computed."""
        crosses = [layer.cross_attention for layer in self.decoder]
        projected = [cross.split_heads(cross.key_value(memory.states)) for cross in crosses]
        packed = torch.stack([heads.permute(2, 0, 3, 1, 4) for heads in projected], dim=1)
        both, layers, rows, heads, _, size = packed.shape
        return BeamCache(
            written=packed.new_zeros(both, layers, rows, heads, capacity, beams, size),
            ancestors=packed.new_zeros(rows, beams, capacity, dtype=torch.int64),
            position=packed.new_zeros(1, dtype=torch.int64),
            memory=packed,
            memory_bias=memory.bias,
            positions=sinusoidal_positions(capacity, self.embedding.weight),
        )

    def step(self, tokens: Tensor, cache: BeamCache) -> Tensor:
        """Append `tokens` (B, K), one per beam; return the logits (B, K, V) of the next ones."""
        beams = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        cache.ancestors.index_copy_(2, cache.position, beams[..., None])
        bias = cache.bias(self.embedding.weight.dtype)
        positions = cache.positions[cache.position]
        states = torch.add(positions, self.embedding(tokens), alpha=self.dim**0.5)  # (B, K, D)
        for i, layer in enumerate(self.decoder):
            states = layer.step(states, cache, i, bias)
        cache.position += 1
        return F.linear(self.decoder_norm(states), self.embedding.weight)

    # -- in parts

    def parallel_plan(self) -> ParallelPlan:
        layers = self.layer_names()
        decoder = layers[len(self.encoder) :]
        parts = ("self_attention", "cross_attention", "feed_forward")
        modules = dict(self.named_modules())
        regions = (f"{layer}.{part}" for layer in layers for part in parts)
        return ParallelPlan(
            # encoder_norm is a unit, or the root would gather it in mid-pass
            units=(*layers[: len(self.encoder)], "encoder_norm", *decoder),
            regions=tuple(name for name in regions if name in modules),
            column_parallel=(
                (r"query_key_value\.weight$", 3),
                (r"key_value\.weight$", 2),
                (r"(query|up)\.weight$", 1),
            ),
            row_parallel=r"(attention|feed_forward)\.out\.weight$",
            per_rank_counts=((r"_attention$", "n_heads"),),
            widths=(self.n_heads, len(self.get_parameter("decoder.0.feed_forward.up.weight"))),
            layers=len(layers),
        )

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        return ("embedding.weight",)

    def layer_names(self) -> list[str]:
        encoder = [f"encoder.{i}" for i in range(len(self.encoder))]
        return encoder + [f"decoder.{i}" for i in range(len(self.decoder))]

    def outer_modules(self, layers: Sequence[str], *, first: bool, last: bool) -> list[str]:
        uses = {
            "embedding": first or last,
            "encoder_norm": f"encoder.{len(self.encoder) - 1}" in layers,
            "decoder_norm": last,
        }
        return [name for name, used in uses.items() if used]

    def activation_shapes(self, source: Tensor, target: Tensor, *_: Any) -> list[tuple[int, ...]]:
        return [(*source.shape, self.dim), (*target.shape, self.dim)]

    def forward_chunk(
        self,
        chunk: Chunk,
        received: Sequence[Tensor],
        source: Tensor,
        target: Tensor,
        labels: Tensor,
        *,
        smoothing: float = 0.0,
    ) -> tuple[Tensor, ...]:
        """Run a chunk of `forward`: (source states, target states), or the loss."""
        dtype = next(self.parameters()).dtype
        bias, causal = source_bias(source, dtype), causal_bias(target, dtype)
        if chunk.first:
            received = (self.embed(source), self.embed(target))
        states, target_states = received
        for number in chunk.layers:
            layer = number - len(self.encoder)
            if layer >= 0:
                memory = EncodedSource(states, bias)
                target_states = self.decoder[layer](target_states, causal, memory)
                continue
            states = self.encoder[number](states, bias)
            if layer == -1:
                states = self.encoder_norm(states)
        if not chunk.last:
            return states, target_states
        return (self.loss_of(self.decoder_norm(target_states), labels, smoothing),)


# -- initial weights -------------------------------------------------------------------------------


def translator_on_meta(
    options: ModelOptions, vocab_size: int, device_type: str, length: int
) -> Translator:
    """Build a run's translator on the meta device, for sentences of up to `length` tokens."""
    if options.attention == "auto":
        options = replace(options, attention=choose_attention(device_type, length)[0])
    with torch.device("meta"):
        return Translator(vocab_size, options)


def build_translator(
    options: ModelOptions,
    *,
    vocab_size: int,
    device: torch.device,
    seed: int,
    length: int = 128,
) -> Translator:
    translator = translator_on_meta(options, vocab_size, device.type, length)
    return materialize(translator, device, lambda name, shape: init_param(name, shape, seed))


def init_param(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the initial value of a parameter: float32 on the CPU.

    Layer norms: 1 and 0. Embeddings: normal, deviation dim**-0.5. Matrices: Xavier uniform (Glorot
    and Bengio 2010), a fused projection as the square matrices it consists of.
    """
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    generator = generator_of(seed, name)
    if name.endswith("embedding.weight"):
        return torch.empty(shape).normal_(std=shape[1] ** -0.5, generator=generator)
    parts = shape[0] // shape[1] if "key_value" in name else 1
    bound = math.sqrt(6.0 / (shape[0] / parts + shape[1]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
