"""What the parts of a model cost, as `count_model` counts them: a value without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Mode = Literal["none", "selective", "full"]
CHECKPOINT_MODES: tuple[Mode, ...] = get_args(Mode)


class Amount(NamedTuple):
    """A quantity of which the tensor axis divides one part."""

    whole: float
    split: float = 0

    def on(self, tensor: int) -> float:
        return self.whole + self.split / tensor


@dataclass(frozen=True)
class Unit:
    """A block of layers that the shard axis gathers at once, or the rest of the model, in one
    place.

    parameters   elements of each parameter, in the order of the module
    state        bytes of the optimizer's state
    macs         multiply-adds of a forward pass over a micro-batch
    saved        bytes that a forward pass keeps for its backward pass, by activation checkpointing
    sums         elements of each sum over the tensor axis, of a micro-batch: (forward pass,
                 backward pass)
    is_layer     False: a pipeline keeps it with the layer before it
    """

    kind: str
    parameters: tuple[Amount, ...]
    state: Amount
    macs: Amount
    saved: dict[Mode, Amount]
    sums: tuple[Sequence[float], Sequence[float]] = ((), ())
    is_layer: bool = True

    def elements(self, tensor: int) -> int:
        return int(sum(parameter.on(tensor) for parameter in self.parameters))


@dataclass(frozen=True)
class ModelCost:
    """A model as blocks in forward order, and the rest: embedding before them, norm and output
    after.

    heads       numbers that the tensor axis must divide; empty: it has no plan for the tensor axis
    vocabulary  words of the embedding and the output; 0: the loss is no sum over a vocabulary
    passed      elements of a micro-batch that a pipeline stage passes on
    tied        the output matrix is the embedding
    layers      that a pipeline can split; 0: none
    ragged      micro-batches have many shapes
    """

    name: str
    embedding: Unit
    blocks: tuple[Unit, ...]
    output: Unit
    tokens: int
    heads: tuple[int, ...]
    vocabulary: int = 0
    passed: float = 0
    tied: bool = False
    layers: int = 0
    ragged: bool = False

    @property
    def units(self) -> tuple[Unit, ...]:
        return (self.embedding, *self.blocks, self.output)

    @property
    def parameters(self) -> int:
        return sum(unit.elements(1) for unit in self.units)
