"""Uses that concern the model."""

from __future__ import annotations

import torch
from support.wrong_uses.loop import Loop, use
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


@use("a buffer that counts forward passes")
class ChangingBuffer(Loop):
    refused = r"buffers changed in the forward passes of step 1: calls"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, inputs: module.calls.add_(1) and None)
        return model


@use("a number in a module that counts forward passes")
class CountingAttribute(Loop):
    warned = r"calls changed in the micro-batch loop of step 1: if forward passes depend on it"

    def make_model(self) -> nn.Module:
        class Counting(nn.Sequential):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return super().forward(x) * (1.0 if self.calls < 9 else 0.5)

        return Counting(*super().make_model())


@use("an unused parameter")
class UnusedParameter(Loop):
    refused = r"(?s)no gradient arrived for 1 of 5 parameters in micro-batch 0 of step 1: unused\n.*Session\(\.\.\., unused=\"zero\"\)"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
        return model


@use("a parameter used in odd steps only")
class SometimesUnused(UnusedParameter):
    refused = r"no gradient arrived for 1 of 5 parameters in micro-batch \d of step 3: unused"
    committed = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + (self.plain.unused.square().sum() if self.step < 2 else 0.0)


@use("new values through .data after the micro-batch loop")
class NewMemory(Loop):
    def update(self) -> None:
        super().update()
        for p in self.plain.parameters():
            p.data = 0.99 * p.data


@use("new values through .data after the micro-batch loop, in shards")
class NewMemoryInShards(NewMemory):
    refused = (
        r"(?s)have left the memory that the shards gather: 0\.weight.*in place: p\.data\.copy_"
    )
    committed = 1
    workers = shard = 2


@use("a parameter replaced between two steps, in shards")
class ReplacedInShards(NewMemoryInShards):
    def update(self) -> None:
        Loop.update(self)
        self.plain[0].weight = nn.Parameter(self.plain[0].weight.detach().clone())


@use("functional_call with other weights, in shards")
class FunctionalInShards(Loop):
    refused = r"(?s)called with other parameters, in shards: 0\.weight.*move it into forward"
    workers = shard = 2

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: 0.9 * p for name, p in self.plain.named_parameters()}
        return mse_loss(torch.func.functional_call(self.plain, weights, (x,)), y)


@use("an unused parameter in shards")
class UnusedInShards(UnusedParameter):
    workers = shard = 2


class Skipping(nn.Module):
    """Blocks, the second of which some forward passes leave out."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if not (self.skips and i == 1 and float(torch.rand(())) < 0.5):
                x = block(x)
        return self.last(x).flatten(0)


@use("a block in shards that some micro-batches leave out")
class SkippedBlock(Loop):
    refused = (
        r"(?s)blocks\.1 did not run before blocks\.2 in micro-batch \d of step 3.*unused=\"zero\""
    )
    committed = 2
    workers = shard = 2

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return Skipping()

    def before(self) -> None:
        self.plain.skips = self.step >= 2


@use("a block that some micro-batches leave out, with gradients of zero")
class SkippedBlockWithZeros(SkippedBlock):
    refused = ""

    def configure(self) -> None:
        self.options["unused"] = "zero"


@use("a model in DistributedDataParallel")
class WrappedInDdp(Loop):
    refused = r"DistributedDataParallel"

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


@use("a module that is not on the device")
class OffDevice(Loop):
    refused = r"(?i)meta"

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[3] = nn.Linear(8, 1, device="meta")
        return model


@use("a model in eval mode")
class EvalMode(Loop):
    def make_model(self) -> nn.Module:
        return super().make_model().eval()


@use("eval mode left on by rank 0")
class EvalOnRankZero(Loop):
    refused = r"the weights of rank 0.* differ before step 3"
    workers = 2
    committed = 2

    def before(self) -> None:
        if self.step == 2 and self.rank == 0:
            self.plain.eval()


@use("eval mode left on by all ranks")
class EvalLeftOn(Loop):
    warned = r"other modules in eval mode: the model then, none now"

    def before(self) -> None:
        if self.step == 2:
            self.plain.eval()


@use("an evaluation by rank 0 between two steps")
class EvaluationByRankZero(Loop):
    def before(self) -> None:
        self.plain.train()

    def update(self) -> None:
        super().update()
        if self.rank == 0:
            self.plain.eval()


@use("other weights on each rank at the start")
class OtherWeights(Loop):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        with torch.no_grad():
            model[0].weight += self.rank
        return model


@use("another architecture on each rank")
class OtherArchitecture(Loop):
    refused = r"not all workers train the same parameters: 5\.bias, 5\.weight"
    workers = 2

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            *super().make_model(), nn.Linear(12, 12) if self.rank else nn.Identity()
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + sum(p.sum() for p in self.plain.parameters())


@use("other frozen layers on each rank")
class OtherFrozen(Loop):
    refused = r"not all workers train the same parameters: 0\.bias"
    workers = 2

    def make_model(self) -> nn.Module:
        model = super().make_model()
        model[0].bias.requires_grad_(self.rank != 1)
        return model
