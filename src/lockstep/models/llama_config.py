"""The numbers that define a Llama, and the configurations by size. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.models.llama import Llama


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies for contexts longer than the one trained on.

    Waves longer than `original_max_seq_len / low_freq_factor` positions are stretched by `factor`,
    those shorter than `original_max_seq_len / high_freq_factor` are kept; between, interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that defines the model except the values of its parameters."""

    vocab_size: int  # memory and time of the output layer grow with it
    dim: int  # width of the residual stream; parameters grow with its square
    n_layers: int
    n_heads: int  # query heads of a layer
    n_kv_heads: int  # key-value heads that they share; the cache grows with it
    head_dim: int  # even
    ffn_dim: int  # inner width of SwiGLU, about 3.5 times dim
    max_seq_len: int = 8192  # positions that it is trained for; this code does not enforce it
    rope_theta: float = (
        500_000.0  # the slowest rotary wave is this many times as long as the fastest
    )
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # the output matrix is the embedding
    qkv_bias: bool = False  # query, key and value have biases, as in Qwen 2
    qk_norm: bool = False  # RMSNorm of each query and key before its rotation, as in Qwen 3

    def __post_init__(self) -> None:
        if self.qkv_bias and self.qk_norm:
            raise ValueError(
                "qkv_bias cannot be combined with qk_norm: no supported architecture has both"
            )
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            heads = (
                f"n_heads {self.n_heads}, n_kv_heads {self.n_kv_heads}, head_dim {self.head_dim}"
            )
            raise ValueError(
                f"{heads}: n_heads must be a multiple of n_kv_heads, head_dim must be even"
            )

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.meta_model().parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {}

    def meta_model(self) -> Llama:
        import torch  # not needed to plan a run

        from lockstep.models.llama import Llama

        with torch.device("meta"):
            return Llama(self)


LLAMA_32 = RopeScaling(factor=32.0)
LLAMA_CONFIGS = {
    # small ones, for experiments on a CPU
    "1M": LlamaConfig(2048, 128, 4, 4, 2, 32, 384, 1024, 10_000.0, tie_embeddings=True),
    "5M": LlamaConfig(4096, 256, 6, 4, 2, 64, 704, 1024, 10_000.0, tie_embeddings=True),
    "25M": LlamaConfig(8192, 512, 8, 8, 4, 64, 1408, 2048, 10_000.0, tie_embeddings=True),
    "100M": LlamaConfig(16_384, 768, 14, 12, 4, 64, 2048, 2048, 10_000.0, tie_embeddings=True),
    # as published: Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B
    "1B": LlamaConfig(
        128_256, 2048, 16, 32, 8, 64, 8192, 131_072, rope_scaling=LLAMA_32, tie_embeddings=True
    ),
    "3B": LlamaConfig(
        128_256, 3072, 28, 24, 8, 128, 8192, 131_072, rope_scaling=LLAMA_32, tie_embeddings=True
    ),
    "8B": LlamaConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope_scaling=RopeScaling()),
    "70B": LlamaConfig(128_256, 8192, 80, 64, 8, 128, 28_672, 131_072, rope_scaling=RopeScaling()),
    "405B": LlamaConfig(
        128_256, 16_384, 126, 128, 8, 128, 53_248, 131_072, rope_scaling=RopeScaling()
    ),
}
