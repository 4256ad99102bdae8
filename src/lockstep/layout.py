"""Device layout: the size of each axis of `replicate x pipeline x shard x tensor`.

A *replica* is one full copy of the model on pipeline * shard * tensor workers. It lives or fails as
a unit, and recovers from another replica. Ranks are numbered with tensor as the fastest axis, then
shard, pipeline and replicate, so that the ranks that communicate most are neighbors:

    tensor     within every layer: activations of the whole micro-batch
    shard      for every unit, overlapped with computation: parameters and gradients
    pipeline   for every micro-batch: activations between two layers
    replicate  once per step: gradients

This module is integer arithmetic only and does not import torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from itertools import product

from lockstep.errors import UsageError

REPLICA_AXES = ("shard", "tensor", "pipeline")
AXES = ("replicate", *REPLICA_AXES)


@dataclass(frozen=True)
class Layout:
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def workers_per_replica(self) -> int:
        return self.shard * self.tensor * self.pipeline

    @property
    def workers(self) -> int:
        return self.replicate * self.workers_per_replica

    @property
    def data_parallel_size(self) -> int:
        """The number of workers that train different micro-batches."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        replica, stage = divmod(rest, self.pipeline)
        return Coordinates(replica, shard, tensor, stage)

    def rank(self, at: Coordinates) -> int:
        return (
            (at.replica * self.pipeline + at.stage) * self.shard + at.shard
        ) * self.tensor + at.tensor

    def ranks_along(self, rank: int, axis: str) -> list[int]:
        """Return the ranks that differ from `rank` only in `axis`, including `rank`, in order."""
        coordinates = self.coordinates(rank)
        name = {"replicate": "replica", "pipeline": "stage"}.get(axis, axis)
        return [
            self.rank(replace(coordinates, **{name: index})) for index in range(getattr(self, axis))
        ]

    def __str__(self) -> str:
        return (
            " x ".join(
                f"{axis} {size}" for axis, size in zip(AXES, astuple(self), strict=True) if size > 1
            )
            or "one worker"
        )


@dataclass(frozen=True)
class Coordinates:
    """The position of a rank along each axis, from 0 (DeviceMesh: coordinate)."""

    replica: int
    shard: int
    tensor: int
    stage: int


@dataclass(frozen=True)
class LayoutLimits:
    """Upper bounds on a layout, from a model and a run."""

    micro_batches: int  # per step: each shard of each replica needs at least one
    # To be divided by the tensor axis: heads, key-value heads, inner width; empty: not supported.
    tensor: tuple[int, ...] = ()
    stages: int = 0  # layers that can be split over stages; 0: not supported by the model

    def problem_with(self, layout: Layout) -> str:
        """Return why the layout does not work, or ""."""
        if layout.data_parallel_size > self.micro_batches:
            return (
                f"{layout.data_parallel_size} shards "
                f"of all replicas share {self.micro_batches} micro-batches a step"
            )
        if layout.tensor > 1 and not self.tensor:
            return "this model does not support tensor parallelism"
        if uneven := [str(size) for size in self.tensor if size % layout.tensor]:
            return (
                f"tensor {layout.tensor} does not divide {', '.join(uneven)} "
                "(heads, key-value heads, inner width)"
            )
        if layout.pipeline > 1 and not self.stages:
            return "this model does not support pipeline parallelism"
        if layout.pipeline > 1 and layout.pipeline > self.stages:
            return f"pipeline {layout.pipeline} needs as many layers, the model has {self.stages}"
        return ""


def choose_layout(asked: Layout, workers: int, bounds: LayoutLimits, where: str) -> Layout:
    """Return `asked` as a layout of `workers` processes; replicate 0: as many as fit.

    UsageError, with the nearest layouts that work: `asked`, whose source is `where`, does not fit.
    """
    layout = (
        asked
        if asked.replicate
        else replace(asked, replicate=max(1, workers // asked.workers_per_replica))
    )
    why = bounds.problem_with(layout)
    if not why and layout.workers != workers:
        why = f"it needs {layout.workers} workers, {workers} are running"
    if why:
        raise UsageError(
            f"the layout {layout} does not work: {why}", where, hint_for(layout, workers, bounds)
        )
    return layout


def hint_for(wrong: Layout, workers: int, bounds: LayoutLimits) -> str:
    """Name the nearest layouts that work, and what else to change so that `wrong` works."""
    needed = wrong.data_parallel_size
    changes = [f"give {wrong.workers} workers"] if wrong.workers != workers else []
    if needed > bounds.micro_batches:
        changes.append(f"set micro_batches={needed}")
    if replace(bounds, micro_batches=needed).problem_with(wrong):
        changes = [f"leave out the [layout] and set micro_batches={workers}"]
    nearest = nearest_layouts(wrong, workers, bounds)
    if not nearest:
        return " and ".join(changes)
    hint = "these work: " + "; ".join(map(layout_flags, nearest))
    return (
        f"{hint}; or {changes[0]}"
        if wrong.workers == workers and needed > bounds.micro_batches
        else hint
    )


def nearest_layouts(wrong: Layout, workers: int, bounds: LayoutLimits) -> list[Layout]:
    """Return up to three valid layouts of `workers` processes, the closest to `wrong` first."""
    sizes = [size for size in range(1, workers + 1) if workers % size == 0]
    candidates = (Layout(*axes) for axes in product(sizes, repeat=4))
    valid = [
        layout
        for layout in candidates
        if layout.workers == workers and not bounds.problem_with(layout)
    ]

    def distance(layout: Layout) -> tuple[int, int]:
        pairs = list(zip(astuple(layout), astuple(wrong), strict=True))
        return sum(a != b for a, b in pairs), sum(abs(a - b) for a, b in pairs)

    return sorted(valid, key=distance)[:3]


def layout_flags(layout: Layout) -> str:
    return (
        " ".join(
            f"--layout.{axis} {size}"
            for axis, size in zip(AXES, astuple(layout), strict=True)
            if size > 1
        )
        or "one replica"
    )
