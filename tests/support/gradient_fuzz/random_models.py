"""Random models of layers that have been hard for gradient reducers.

A layer maps (rows, length, width) to the same shape, so that any order of layers is a model. A layer
casts its input to the dtype of its parameters: one model can have several dtypes. Dropout is drawn
in float32, so a float64 copy of the model drops the same features.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 13


class Convolution(nn.Module):
    """A convolution along the sequence; channels_last where it has two spatial dimensions."""

    def __init__(self, width: int, dimensions: int, bias: bool) -> None:
        super().__init__()
        self.one = nn.Conv1d(width, width, 3, padding=1, bias=bias) if dimensions == 1 else None
        self.two = (
            nn.Conv2d(width, width, (3, 1), padding=(1, 0), bias=bias) if dimensions == 2 else None
        )
        if self.two:
            self.two.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return (self.one(x) if self.one else self.two(x.unsqueeze(3)).squeeze(3)).transpose(1, 2)


class Norm(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if kind == "layer" else nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.norm(x)
            if isinstance(self.norm, nn.LayerNorm)
            else self.norm(x.transpose(1, 2)).transpose(1, 2)
        )


class Recurrent(nn.Module):
    def __init__(self, width: int, kind: type[nn.RNN] | type[nn.GRU]) -> None:
        super().__init__()
        self.recurrent = kind(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(
            "cpu", enabled=False
        ):  # torch's CPU kernels take one dtype for input and state
            return self.recurrent(x)[0]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Strided(nn.Module):
    """A transposed matrix and one with gaps in memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(width, width).t() / width)
        self.gaps = nn.Parameter(torch.randn(width, 2 * width)[:, ::2] / width)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.across.t() @ self.gaps


class Shapeless(nn.Module):
    """A scalar, a parameter of one element, and two without elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(1))
        self.empty, self.no_rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, width))

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.cat([x.flatten(0, 1), self.no_rows]).view(x.shape) * self.scale
            + self.shift
            + self.empty.sum()
        )


class SharedGradient(nn.Module):
    """Autograd gives both offsets one gradient tensor, and `summed` an expanded one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.summed = (nn.Parameter(torch.randn(width)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.first + self.second) + self.summed.sum()


class Lists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict; one of them is in both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offsets = nn.ParameterList([torch.randn(width) for _ in range(2)])
        self.named = nn.ParameterDict(
            {"again": self.offsets[0], "scale": nn.Parameter(torch.rand(width))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.offsets[0] - self.offsets[1]) * self.named["scale"] + self.named["again"]


class Dropout(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * (torch.rand(x.shape) < 0.8))


class Again(nn.Module):
    """Apply an earlier layer once more, as its own submodule: all its parameters are used twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "linear without bias": lambda width: nn.Linear(width, width, bias=False),
    "weight norm": lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    "conv1d": lambda width: Convolution(width, 1, bias=True),
    "conv2d": lambda width: Convolution(width, 2, bias=True),
    "conv2d without bias": lambda width: Convolution(width, 2, bias=False),
    "layer norm": lambda width: Norm(width, "layer"),
    "group norm": lambda width: Norm(width, "group"),
    "rnn": lambda width: Recurrent(width, nn.RNN),
    "gru": lambda width: Recurrent(width, nn.GRU),
    "attention": Attention,
    "strided": Strided,
    "shapeless": Shapeless,
    "shared gradient": SharedGradient,
    "lists": Lists,
    "dropout": Dropout,
    "nested": lambda width: nn.Sequential(
        nn.Linear(width, 2 * width), nn.Tanh(), nn.Sequential(nn.Linear(2 * width, width))
    ),
}
NO_BFLOAT16 = (
    "rnn",
    "gru",
)  # torch has no bfloat16 kernel for their backward pass on every processor


class RandomModel(nn.Module):
    """Layers of the named kinds between an embedding and an output tied to it or a separate one.

    "again" applies an earlier layer once more. The layers `checkpointed` are computed again in the
    backward pass. The caller of forward() may leave one layer out.
    """

    def __init__(
        self,
        kinds: list[str],
        dtypes: list[torch.dtype],
        width: int,
        *,
        checkpointed: list[int],
        tied: bool,
        seed: int,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        choose, self.checkpointed = Random(seed), checkpointed
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        layers: list[nn.Module] = []
        for kind, dtype in zip(kinds, dtypes, strict=True):
            layers.append(
                Again(choose.choice(layers)) if kind == "again" else KINDS[kind](width).to(dtype)
            )
        self.layers = nn.ModuleList(layers)
        self.head = None if tied else nn.Linear(width, VOCABULARY)
        for ends in (self.embedding, self.head):
            if ends is not None:
                ends.to(dtypes[0])

    def forward(self, tokens: Tensor, leave_out: int | None = None) -> Tensor:
        """Return the sum of the losses of all tokens."""
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if i != leave_out:
                x = x + 0.5 * self._run(i, layer, x)
        x = x.to(self.embedding.weight.dtype)
        logits = (
            self.head(x) if self.head is not None else functional.linear(x, self.embedding.weight)
        )
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(
            wide.flatten(0, 1), tokens.roll(1, 1).flatten(), reduction="sum"
        )

    def _run(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        inputs: Any = x.to(next(layer.parameters()).dtype)
        return (
            checkpoint(layer, inputs, use_reentrant=False)
            if number in self.checkpointed
            else layer(inputs)
        )


def tokens_of(step: int, k: int) -> Tensor:
    """Return the (2, 5) tokens of micro-batch `k`; rows may hold the padding token 0."""
    return torch.randint(
        0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(100 * step + k)
    )
