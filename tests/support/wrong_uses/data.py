"""Uses that concern data."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from support.wrong_uses.loop import INPUTS, TARGETS, Batches, Loop, use
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


@use("a data set of another length on each rank")
class OtherLength(Loop):
    refused = r"is not the same on all workers|samples"
    workers = 2

    def configure(self) -> None:
        self.dataset = TensorDataset(INPUTS[: 48 - 8 * self.rank], TARGETS[: 48 - 8 * self.rank])


@use("another batch size on each rank")
class OtherBatch(Loop):
    refused = r"is not the same on all workers|batch_size"
    workers = 2

    def configure(self) -> None:
        self.loader_options["batch_size"] = 24 if self.rank == 1 else 12


@use("the share of the rank as the data set")
class ShareOfRank(Loop):
    refused = r"is not the same on all workers"
    workers = 2

    def configure(self) -> None:
        rows = slice(self.rank, None, int(os.environ["WORLD_SIZE"]))
        self.dataset = TensorDataset(INPUTS[rows].repeat(6, 1)[:48], TARGETS[rows].repeat(6)[:48])


@use("a DataLoader that the loop consumes")
class ConsumedLoader(Loop):
    refused = r"the loss of micro-batch 0 of step 1 is .* the first time and"

    def batches(self) -> Batches:
        if not hasattr(self, "stream"):
            self.stream = iter(
                DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2, shuffle=True)
            )
        for _ in self.session.micro_batches(self.step):
            yield tuple(next(self.stream))


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from a generator of the data set."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return INPUTS[i] + torch.rand(4, generator=self.generator), TARGETS[i]


@use("a generator of the data set")
class OwnGenerator(Loop):
    refused = r"the loss of micro-batch 0 of step 1 is .* the first time and"

    def configure(self) -> None:
        self.dataset = Drawing()


@use("a manual seed in the micro-batch loop")
class ManualSeed(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(5)
        return super().loss(x, y)


@use("a manual seed by rank in the micro-batch loop")
class SeedByRank(Loop):
    refused = r"is not the same on all workers"
    workers = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(self.rank)
        return super().loss(x, y)


@use("data that depend on the time")
class ByTime(Loop):
    refused = r"the loss of micro-batch 0 of step 1 is .* the first time and|is not the same on all workers"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + time.monotonic() % 1, y)


@use("a batch changed in place")
class BatchInPlace(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.mul_(2.0), y)


@use("rows of the data set changed in place")
class DataInPlace(Loop):
    refused = r"the loss of micro-batch 0 of step 1 is .* the first time and"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[2 * k : 2 * k + 2].mul_(1.1), TARGETS[2 * k : 2 * k + 2]


@use("an iterable data set")
class Iterable(Loop):
    refused = r"has no length or no index"

    def configure(self) -> None:
        class Stream(IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                return iter(INPUTS)

        self.dataset = Stream()


@use("a mean over ragged micro-batches")
class RaggedMean(Loop):
    refused = r"the micro-batches of a step have 1 to 6 samples, and their losses are means"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: k + 1], TARGETS[: k + 1]


@use("a mean over one micro-batch of another size on each rank")
class RaggedRanks(Loop):
    refused = r"the micro-batches of a step have 3 to 4 samples, and their losses are means"
    workers = 2

    def configure(self) -> None:
        self.options["micro_batches"] = 2

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: 3 + k], TARGETS[: 3 + k]


@use("a mean over rows of different lengths")
class RaggedRows(Loop):
    warned = r"micro-batches differ: 2 x 1 x 4, then 2 x 2 x 4\. session\.backward\(loss\) gives each the same weight"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            yield INPUTS[: 2 * (k + 1)].view(2, k + 1, 4), TARGETS[: 2 * (k + 1)]


@use("ragged micro-batches whose losses weigh the same")
class RaggedCountOfOne(RaggedMean):
    refused = ""

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y), count=1)


@use("some micro-batches with a count")
class SomeCounts(Loop):
    refused = r"some micro-batches of a step have a count and others have none"

    def batches(self) -> Batches:
        for k in self.session.micro_batches(self.step):
            self.k = k
            yield INPUTS[:2], TARGETS[:2]

    def micro_batch(self, x: Tensor, y: Tensor) -> None:
        self.session.backward(self.loss(x, y), count=2 if self.k % 2 else None)


@use("break in the micro-batch loop")
class Break(Loop):
    refused = r"the body of step 1 ran no micro-batches"

    def batches(self) -> Batches:
        for batch in self.loader(self.step):
            yield batch
            break


@use("a second micro-batch loop in a step")
class SecondLoop(Loop):
    refused = r"a second micro-batch loop in step 1"

    def update(self) -> None:
        for x, y in self.batches():
            self.micro_batch(x, y)
        super().update()
