"""A complete Llama: the model and its initial weights.

The cross-entropy is in `loss.py`, generation in `generation/decoder.py`. Touvron et al. 2023,
"LLaMA"; the Llama team 2024, "The Llama 3 Herd of Models". Choices, and why:

* RMSNorm before each sublayer and once at the end (Zhang and Sennrich 2019). No biases, except
those
  of query, key and value in Qwen 2. Qwen 3 normalizes queries and keys instead, head by head.
  SmolLM 3 has layers without rotary positions.
* Rotary embeddings (Su et al. 2021) as in Hugging Face: dimension i of a head rotates with i + E/2,
  so weights load and export without a permutation. No buffer of angles to save or materialize.
* Query, key and value are three matrices, gate and up are two, for tensor parallelism and LoRA.

Dimensions in the margin: B rows, T positions, D dim, H heads, G key-value heads, E head dim,
V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.llama_config import LlamaConfig, RopeScaling
from lockstep.models.loss import output_cross_entropy
from lockstep.parallel.deferred_init import generator_of, materialize
from lockstep.parallel.plans import Chunk, ParallelPlan, StagedModel

# torch 2.11 groups heads without being asked, and has no such argument.
GROUPED: dict[str, Any] = {} if torch.__version__.startswith("2.11.") else {"enable_gqa": True}

IGNORE_INDEX = -100  # label without a loss, as in torch.nn.functional.cross_entropy

# -- positions -------------------------------------------------------------------------------------


def rope_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Radians that each pair of dimensions rotates per position: (K, E/2) float32.

    K  kinds of layers: `config.rope_kinds` has that of each
    """
    pair = torch.arange(0, config.head_dim, 2, device=device).float()  # (E/2,)
    frequency = 1.0 / config.rope_theta ** (pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        frequency = scaled_frequencies(frequency, scaling)
    # An angle of 0 leaves a layer without positions as it is.
    kinds = [frequency, torch.zeros_like(frequency)] if config.unrotated_layers else [frequency]
    return torch.stack(kinds)


def scaled_frequencies(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    # (E/2,): in the original context.
    waves = scaling.original_max_seq_len * frequency / (2 * math.pi)
    kept = (
        (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ).clamp(0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor


@dataclass(frozen=True)
class RotaryEmbedding:
    """Cosines and sines of the rotation angles of some positions: (B or 1, 1, T, E)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls, positions: Tensor, config: LlamaConfig, dtype: torch.dtype
    ) -> list[RotaryEmbedding]:
        """Return those of each kind of layer."""
        rotaries = []
        for frequency in rope_frequencies(config, positions.device):
            angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, E/2)
            angle = torch.cat((angle, angle), dim=-1)  # (B, 1, T, E)
            rotaries.append(cls(angle.cos().to(dtype), angle.sin().to(dtype)))
        return rotaries

    def rotate(self, heads: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos.to(heads.dtype) + torch.cat((-second, first), dim=-1) * self.sin.to(
            heads.dtype
        )


@dataclass(frozen=True)
class DocumentEnds:
    """Packed documents for variable-length attention, over the B * T positions of all rows.

    ends    (N + 1,) int32: 0 and the end of each document
    length  T: no document is longer
    dtype   of the attention, float16 or bfloat16: no other has a kernel
    """

    ends: Tensor
    length: int
    dtype: torch.dtype


def positions_and_mask(
    tokens: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | DocumentEnds | None]:
    """Return positions (B, T) in documents and the mask (B, 1, T, T): causal, within a document.

    documents  (B, T), equal ids side by side; None: each row is one, with positions (1, T), no mask
    On a GPU no kernel is fused with a mask and grouped heads: `DocumentEnds` replaces the mask.
    """
    length, device = tokens.shape[1], tokens.device
    positions, starts = document_positions(tokens, documents)
    if documents is None or starts is None:
        return positions, None
    if has_document_attention(device):
        ends = F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
        return positions, DocumentEnds(ends.int(), length, torch.get_autocast_dtype(device.type))
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return positions, (causal & (documents[:, :, None] == documents[:, None, :]))[:, None]


def document_positions(tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return positions in documents and where these start: (B or 1, T), the latter None for
    rows."""
    position = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if documents is None:
        return position, None
    starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return position - torch.where(starts, position, 0).cummax(dim=1).values, starts


def has_document_attention(device: torch.device) -> bool:
    """Return whether torch's variable-length attention runs here: on a GPU, in autocast."""
    return device.type == "cuda" and torch.is_autocast_enabled("cuda")


# -- attention -------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | DocumentEnds | None) -> Tensor:
    """Grouped-query attention (Ainslie et al. 2023): (B, H, T, E). Faster than separate operations.

    query (B, H, T, E); key and value (B, G, S, E); head h attends to key-value head h // (H / G)
    mask   (B or 1, 1, T, S) bool, True: visible; None: causal
    """
    if not isinstance(mask, DocumentEnds):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
    from torch.nn.attention import varlen  # imports torch._dynamo, for a second

    rows = len(query)
    length = mask.length
    ends = mask.ends
    query, key, value = (
        heads.to(mask.dtype).transpose(1, 2).flatten(0, 1) for heads in (query, key, value)
    )  # (B * T, H or G, E)
    attended: Any = varlen.varlen_attn(
        query, key, value, ends, ends, length, length, window_size=(-1, 0), **GROUPED
    )
    return attended.unflatten(0, (rows, length)).transpose(1, 2)


# -- the model -------------------------------------------------------------------------------------


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner, shared = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, inner, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, shared, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, shared, bias=config.qkv_bias)
        self.out = nn.Linear(inner, config.dim, bias=False)
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.key_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, H * E) -> (B, H, T, E), for any number of heads."""
        rows, length, _ = projected.shape
        return projected.view(rows, length, -1, self.head_dim).transpose(1, 2)

    def forward(
        self, states: Tensor, rotary: RotaryEmbedding, mask: Tensor | DocumentEnds | None
    ) -> Tensor:
        query = rotary.rotate(self.query_norm(self.split_heads(self.query(states))))  # (B, H, T, E)
        key = rotary.rotate(self.key_norm(self.split_heads(self.key(states))))  # (B, G, T, E)
        value = self.split_heads(self.value(states))
        return self.out(attend(query, key, value, mask).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.out = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(states)) * self.up(states))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = LlamaAttention(config)
        self.feed_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = SwiGLU(config.dim, config.ffn_dim)

    def forward(
        self, states: Tensor, rotary: RotaryEmbedding, mask: Tensor | DocumentEnds | None
    ) -> Tensor:
        states = states + self.attention(self.attention_norm(states), rotary, mask)
        return states + self.feed_forward(self.feed_norm(states))


class Llama(StagedModel):
    """`model(tokens)` returns logits; with labels the summed loss."""

    masks_follow_layers = True  # those of adapters, see lora.py

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = (
            None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        )

    @property
    def output_weight(self) -> Tensor:
        return self.embedding.weight if self.output is None else self.output.weight

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, T, V); with labels the sum of their cross-entropy, a scalar.

        tokens     (B, T) int64
        labels     (B, T) int64, the token after each token; IGNORE_INDEX: no loss there
        documents  (B, T) int64, see `positions_and_mask`
        """
        numbers = range(len(self.layers))
        states = self.forward_layers(numbers, self.embedding(tokens), tokens, documents)
        if labels is None:
            return F.linear(self.norm(states), self.output_weight)
        return self.loss_of(states, labels)

    def loss_of(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of the states after the last layer."""
        return output_cross_entropy(
            self.norm(states),
            self.output_weight,
            labels,
            smoothing=0.0,
            ignore_index=IGNORE_INDEX,
        )

    def forward_layers(
        self, numbers: Iterable[int], states: Tensor, tokens: Tensor, documents: Tensor | None
    ) -> Tensor:
        """States (B, T, D) before the layers of these numbers -> after them."""
        positions, mask = positions_and_mask(tokens, documents)
        rotaries = RotaryEmbedding.of(positions, self.config, states.dtype)
        for number in numbers:
            rotary = rotaries[self.config.rope_kinds[number]]
            states = self.layers[number](states, rotary, mask)
        return states

    # -- in parts

    def parallel_plan(self) -> ParallelPlan:
        layers, config = self.layer_names(), self.config
        return ParallelPlan(
            units=tuple(layers),
            regions=tuple(
                f"{layer}.{part}" for layer in layers for part in ("attention", "feed_forward")
            ),
            column_parallel=(
                (r"attention\.(query|key|value)\.(weight|bias|lora_up)$", 1),
                (r"feed_forward\.(gate|up)\.(weight|lora_up)$", 1),
            ),
            row_parallel=r"(attention|feed_forward)\.out\.(weight|lora_down)$",
            partial_grads=(
                r"\.out\.lora_up$"
                r"|\.(query|key|value|gate|up)\.lora_down$"
                r"|(query|key)_norm\.weight$"
            ),
            widths=(config.n_heads, config.n_kv_heads, config.ffn_dim),
            layers=config.n_layers,
        )

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        return ("embedding.weight",) if self.output is None else ()

    def layer_names(self) -> list[str]:
        return [f"layers.{i}" for i in range(len(self.layers))]

    def outer_modules(self, layers: Sequence[str], *, first: bool, last: bool) -> list[str]:
        embedding = ["embedding"] if first or (last and self.tied_parameters) else []
        return [*embedding, "norm", "output"] if last else embedding

    def activation_shapes(self, tokens: Tensor, *_: Any) -> list[tuple[int, ...]]:
        return [(*tokens.shape, self.config.dim)]

    def forward_chunk(
        self,
        chunk: Chunk,
        received: Sequence[Tensor],
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Run a chunk of `forward`: (states,) (B, T, D), or the loss at the end."""
        states = self.embedding(tokens) if chunk.first else received[0]
        states = self.forward_layers(chunk.layers, states, tokens, documents)
        return (self.loss_of(states, labels),) if chunk.last else (states,)


# -- initial weights -------------------------------------------------------------------------------


def build_llama(
    config: LlamaConfig, *, device: torch.device, seed: int, dtype: torch.dtype = torch.float32
) -> Llama:
    """Build a model on `device`, in training mode, without temporary memory."""
    return materialize(
        config.meta_model().to(dtype),
        device,
        lambda name, shape: init_param(name, shape, config.n_layers, seed),
    )


def init_param(name: str, shape: torch.Size, n_layers: int, seed: int) -> Tensor:
    """Return the initial value of a parameter: float32 on the CPU.

    1 for norms, 0 for biases, else normal with deviation fan_in**-0.5 (embedding: dim**-0.5), over
    (2 * n_layers)**0.5 before the residual stream (Radford et al. 2019, section 2.3).
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    deviation = shape[1] ** -0.5
    if name.endswith("out.weight"):
        deviation /= (2 * n_layers) ** 0.5
    return torch.empty(shape).normal_(std=deviation, generator=generator_of(seed, name))
