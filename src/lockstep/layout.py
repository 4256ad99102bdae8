"""Which worker holds what: a layout is the size of each axis, `replicate x pipeline x shard x tensor`.

A *replica* is one whole copy of the model on `unit` = pipeline * shard * tensor workers. It is whole or dead: it heals from another one.
Ranks are counted with tensor fastest, then shard, then pipeline, then replicate, since those that talk most shall be neighbours:

    tensor     every layer, in the middle of it: activations of the whole micro-batch
    shard      every unit, beside the computation: parameters and gradients
    pipeline   every micro-batch: activations between two layers
    replicate  once a step: gradients

Everything here is arithmetic on whole numbers; nothing imports torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product

from lockstep.errors import UsageError

AXES = ("replicate", "shard", "tensor", "pipeline")


@dataclass(frozen=True)
class Layout:
    """The size of each axis."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def unit(self) -> int:
        """Workers of one replica."""
        return self.shard * self.tensor * self.pipeline

    @property
    def workers(self) -> int:
        return self.replicate * self.unit

    @property
    def loaders(self) -> int:
        """How many workers are given micro-batches of their own."""
        return self.replicate * self.shard

    def spot(self, rank: int) -> Spot:
        """Where `rank` stands."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        replica, stage = divmod(rest, self.pipeline)
        return Spot(replica, shard, tensor, stage)

    def rank(self, spot: Spot) -> int:
        """Who stands there."""
        return ((spot.replica * self.pipeline + spot.stage) * self.shard + spot.shard) * self.tensor + spot.tensor

    def along(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` in one axis alone, in its order, `rank` among them."""
        here = self.spot(rank)
        name = {"replicate": "replica", "pipeline": "stage"}.get(axis, axis)
        return [self.rank(replace(here, **{name: place})) for place in range(getattr(self, axis))]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, astuple(self), strict=True) if size > 1) or "one worker"


@dataclass(frozen=True)
class Spot:
    """A place in the layout; each number counts from 0."""

    replica: int
    shard: int
    tensor: int
    stage: int


@dataclass(frozen=True)
class Bounds:
    """What a model and a run can be cut into.

    micro_batches    of a step: each replica's shard needs one
    tensor           numbers that the tensor axis must divide: heads, key-value heads, inner width; empty: it cannot be cut so
    stages           layers that can be dealt to stages; 0: it cannot be cut so
    """

    micro_batches: int
    tensor: tuple[int, ...] = ()
    stages: int = 0

    def why_not(self, layout: Layout) -> str:
        """What forbids the layout; "" when it works."""
        if layout.loaders > self.micro_batches:
            return f"{layout.loaders} shards of all replicas share {self.micro_batches} micro-batches a step"
        if layout.tensor > 1 and not self.tensor:
            return "this model has no tensor plan"
        if uneven := [size for size in self.tensor if size % layout.tensor]:
            return f"tensor {layout.tensor} does not divide {', '.join(map(str, uneven))} (heads, key-value heads, inner width)"
        if layout.pipeline > 1 and layout.pipeline > self.stages:
            return (
                f"pipeline {layout.pipeline} needs as many layers, the model has {self.stages}" if self.stages else "this model has no cuts"
            )
        return ""


def choose(asked: Layout, workers: int, bounds: Bounds, where: str) -> Layout:
    """The layout that `workers` processes make. `asked.replicate` 0: as many replicas as there are.

    UsageError, with the nearest layouts that work, when it does not come out.
    """
    layout = asked if asked.replicate else replace(asked, replicate=max(1, workers // asked.unit))
    why = bounds.why_not(layout)
    if not why and layout.workers != workers:
        why = f"it takes {layout.workers} workers, and there are {workers}"
    if why:
        near = nearest(layout, workers, bounds)
        hint = "these work: " + "; ".join(flags(one) for one in near) if near else f"give {layout.workers} workers"
        raise UsageError(f"the layout {layout} does not work: {why}", where, hint)
    return layout


def nearest(wrong: Layout, workers: int, bounds: Bounds, most: int = 3) -> list[Layout]:
    """The layouts of `workers` processes that work, those first that differ least in their axes."""
    sizes = [size for size in range(1, workers + 1) if workers % size == 0]
    every = (Layout(*some) for some in product(sizes, repeat=4))
    works = [one for one in every if one.workers == workers and not bounds.why_not(one)]

    def distance(one: Layout) -> tuple[int, int]:
        differing = [a != b for a, b in zip(astuple(one), astuple(wrong), strict=True)]
        return sum(differing), sum(abs(a - b) for a, b in zip(astuple(one), astuple(wrong), strict=True))

    return sorted(works, key=distance)[:most]


def flags(layout: Layout) -> str:
    """As it is given on the command line."""
    return " ".join(f"--layout.{axis} {size}" for axis, size in zip(AXES, astuple(layout), strict=True) if size > 1) or "one replica"
