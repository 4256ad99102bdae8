"""One whole copy of a model among those that train together.

DistributedDataParallel does what it is good at: it cuts the gradients into buckets and hands each over while the backward pass still
runs. Everything that crosses the wire is done by its communication hook, so DDP itself gets a group of one process and the group of all
replicas stays ours to change. The hook hands a bucket to one courier thread, which takes bucket after bucket in the same order on every
replica (collectives issued from several threads, or from a future's callback, may pair up wrongly between processes and dead-lock).

Micro-batches before the last run under `no_sync()`. Their gradients are added as the tree of `ordered.py` says: two sibling leaves by
autograd itself, which adds the second onto the first; larger subtrees by a binary counter. log2(K) copies of the gradients at most.
"""

from __future__ import annotations

import inspect
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, untyped

from lockstep.data.order import mix
from lockstep.errors import PeersLostError, UsageError
from lockstep.parallel.gradient_watch import GradientWatch, refuse_unsupported
from lockstep.parallel.ordered_sum import Span, Tree, exchange, refuse_empty_shares, share
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.status_board import Board
from lockstep.runtime.work import Waits
from lockstep.units import shown

# torch 2.13 renamed the switch.
DDP_NAMES = inspect.signature(nn.parallel.DistributedDataParallel).parameters
LEAVE_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in DDP_NAMES else "broadcast_buffers": False}
DIGEST_FACTOR = 0x9E3779B97F4A7C15  # odd, so that nothing is lost in a product modulo 2**64


@dataclass
class Gradients:
    """The gradients of all parameters; adding reuses the left side's memory."""

    tensors: list[torch.Tensor]

    def __add__(self, right: Gradients) -> Gradients:
        torch._foreach_add_(self.tensors, right.tensors)
        return self


@dataclass(frozen=True)
class Parcel:
    """One bucket on its way: its flat buffer, each gradient as DDP's view of it, and where these stand among all parameters.

    A view has the memory order of its parameter, such as channels_last: what is added to it or copied into it is added by element.
    """

    buffer: torch.Tensor
    gradients: list[torch.Tensor]
    places: list[int]
    arrived: torch.futures.Future[torch.Tensor]

    def flat(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """Sums of these gradients in one row, each in the memory order that it has in the buffer."""
        row = torch.empty_like(self.buffer)
        first = self.buffer.storage_offset()
        torch._foreach_copy_([row.as_strided(g.size(), g.stride(), g.storage_offset() - first) for g in self.gradients], sums)
        return row


class Replica:
    """`model` wrapped for training by all processes of `group`; the sum of gradients is the same bits for any number of them.

    micro_batches  K of a step, over all replicas together; at least the number of processes
    seed           of the randomness within the model, keyed by (seed, step, micro-batch)
    reduce         "ordered": the fixed tree; "fast": the backend's all-reduce, with other bits for every number of processes
    bucket_bytes   gradients that travel together
    equal          make all replicas equal now: Collective, every one gets the weights of rank 0. False: they are, or one joins others that
                   are at work (World.fresh)

    Errors: UsageError when there are more processes than micro-batches, or when no backward pass reached the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        seed: int = 0,
        reduce: Literal["ordered", "fast"] = "ordered",
        bucket_bytes: int = 25_000_000,
        equal: bool = True,
    ) -> None:
        self.leaves, self.seed, self.ordered, self.bucket_bytes = micro_batches, seed, reduce == "ordered", bucket_bytes
        self.model = model
        self.unit = 1  # workers of a replica
        self._take_parameters()
        self.device = self.parameters[0].device
        self.waits = Waits()  # `broken` is asked before each micro-batch, and while buckets are in flight
        self.board = Board(None)
        self.failure: Exception | None = None
        self._buckets = 0  # of a step; 0 until one is done
        self._earlier: Tree[Gradients] = Tree()
        self._held: Span | None = None  # the leaves whose sum stands in the parameters' .grad
        self._losses: list[torch.Tensor] = []
        self.rehearsed: float | None = None  # the loss of micro-batch 0 in `rehearsal`
        self._clock = Clock(self.device)
        self.ddp: nn.parallel.DistributedDataParallel | None = None
        self._alone: dist.ProcessGroup | None = None  # this process, in the present generation
        self._same_trained = False  # whether all replicas are known to train the same parameters
        if equal:
            self._wrap()
            if self.group.size() > 1:
                for tensor in [*model.parameters(), *model.buffers()]:
                    dist.broadcast(tensor.detach(), group=self.group, group_src=0)
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        else:
            self._queue: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
            self._courier = threading.Thread(target=self._deliver, name="lockstep-courier", daemon=True)
            self._courier.start()

    def _take_parameters(self) -> None:
        """Take the parameters with requires_grad. UsageError for those that cannot be summed or saved."""
        refuse_unsupported(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self._place = {id(p): i for i, p in enumerate(self.parameters)}
        self._watch = GradientWatch(list(trained), self.parameters)

    def _wrap_what_is_trained(self) -> nn.parallel.DistributedDataParallel:
        """Return the wrapped model. Collective when the group is new or layers were frozen or unfrozen.

        UsageError when not all replicas train the same parameters.
        """
        if [id(p) for p in self.model.parameters() if p.requires_grad] != list(self._place):
            for p in self.parameters:
                p.grad = None
            self._take_parameters()
            self.ddp, self._buckets = None, 0
        ddp = self.ddp or self._wrap()
        if not self._same_trained:
            names = self._watch.names
            hashes = gather_json(self.group.size(), sha256(json.dumps(names).encode()).hexdigest())
            if len(set(hashes)) > 1:
                unlike = Counter(name for some in gather_json(self.group.size(), names) for name in some)
                listed = sorted(name for name, count in unlike.items() if count < self.group.size())
                raise UsageError(
                    f"not all workers train the same parameters: {shown(listed)}",
                    "requires_grad of the model's parameters, when the step began",
                    "let requires_grad follow from the step, so that a worker that joins or resumes later has it too: "
                    "layer.requires_grad_(step >= 300) in every step",
                )
            self._same_trained = True
        return ddp

    def _wrap(self) -> nn.parallel.DistributedDataParallel:
        """Wrap the model for the group that there is now. DDP cuts its buckets anew after a first backward pass, so that replicas which
        have done a different number of passes would exchange different buckets: a new group begins with new ones on every replica."""
        everybody = dist.group.WORLD
        assert everybody is not None, "World.join comes first"
        self.group: dist.ProcessGroup = everybody
        refuse_empty_shares(self.group.size(), self.leaves)
        self.mine = share(self.group.rank(), self.group.size(), self.leaves)
        if self._alone is None and dist.get_world_size() > 1:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ddp = nn.parallel.DistributedDataParallel(
            self.model, process_group=self._alone, bucket_cap_mb=self.bucket_bytes / 2**20, gradient_as_bucket_view=True, **LEAVE_BUFFERS
        )
        hook = self._on_cuda if self.device.type == "cuda" else self._on_cpu
        ddp.register_comm_hook(None, lambda _, bucket: hook(bucket))  # DDP refuses annotations that are still text
        self.ddp, self._same_trained = ddp, False
        return ddp

    def forget(self) -> None:
        """Let go of the group, which is broken or left; the next step wraps the model for the new one. The gradients stay."""
        self.ddp, self.failure, self._buckets, self._alone = None, None, 0, None
        self.__dict__.pop("group", None)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward pass."""
        ddp = self.ddp or self._wrap()
        return ddp(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch; its loss is kept for `losses`."""
        self.board.enter("backward")
        self._watch.backward(loss)
        self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """The losses of this replica's micro-batches of this step, in their order. Waits for the device."""
        return [float(loss) for loss in torch.stack(self._losses).tolist()] if self._losses else []

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. The numbers of this replica's micro-batches of `step`: do a forward and a backward pass for each.

        When the loop ends, the parameters' .grad is the sum over all K micro-batches of all replicas.
        """
        ddp = self._wrap_what_is_trained()
        self._earlier, self._held, self._losses = Tree(), None, []
        self._clock.begin()
        for p in self.parameters:
            p.grad = None
        for k in self.mine:
            if why := self.waits.broken():
                raise PeersLostError(why, "Replica.micro_batches")
            leaf = Span(k, 1)
            if self._held and self.ordered and not self._held.sibling_of(leaf):
                self._put_away()
            seed_generators(mix(self.seed, step, k) >> 1, self.device)
            self._held = Span(self._held.first, self._held.leaves + 1) if self._held else leaf
            self._watch.begin(step, k)
            with nullcontext() if k == self.mine[-1] else ddp.no_sync():
                yield k
            self._watch.end()
        self._buckets = self._clock.parcels
        if not self._clock.parcels:
            raise UsageError(
                f"the gradients of step {step} were not summed over the workers",
                f"the forward pass of micro-batch {self.mine[-1]}",
                "call the team, not the model: team(inputs)",
            )
        if self.failure:
            raise self.failure

    def rehearsal(self, step: int) -> Iterator[int]:
        """Micro-batch 0 of `step` on every replica. Only its loss stays, in `rehearsed`: its gradients are dropped, the model's buffers put
        back. It begins with gradients of zero, so that a zero_grad before the backward pass shows."""
        ddp = self._wrap_what_is_trained()
        buffers = [
            (module, name, one, one.clone()) for module in self.model.modules() for name, one in module._buffers.items() if one is not None
        ]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self._losses = []
        seed_generators(mix(self.seed, step, 0) >> 1, self.device)
        self._watch.begin(step, 0)
        with ddp.no_sync():
            yield 0
        self._watch.end()
        self.rehearsed = float(self._losses[0])
        for p in self.parameters:
            p.grad = None
        for module, name, one, before in buffers:
            module._buffers[name] = one.copy_(before)

    def told(self, size: int) -> list[int]:
        """How many losses each of `size` ranks tells."""
        return [len(share(rank, size, self.leaves)) for rank in range(size)]

    def squares(self) -> None:
        """The parameters' .grad is the whole gradient: whoever wants its norm has it."""

    def digest(self) -> int:
        """64 bits over the weights, of which a flipped one shows."""
        return digest_of(self.parameters)

    def exposed_s(self) -> float:
        """Seconds that this step waited for the wire after its last gradient was computed."""
        return self._clock.exposed_s()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        """End the courier thread, and let go of the group: whoever leaves it then ends its threads, too."""
        if self.device.type != "cuda":
            self._queue.put(None)
            self._courier.join(timeout=5)
        self.forget()

    def _put_away(self) -> None:
        """Move the sum in .grad to the tree, so that the next leaf starts from nothing."""
        assert self._held is not None
        self._earlier.add(self._held, Gradients([p.grad for p in self.parameters if p.grad is not None]))
        for p in self.parameters:
            p.grad = None
        self._held = None

    def _reduce(self, parcel: Parcel) -> None:
        """Collective. The sum over all replicas, into the bucket's own buffer."""
        self.board.collective(parcel.buffer.nbytes)
        if not self.ordered:
            work = dist.all_reduce(parcel.buffer, group=self.group, async_op=True)
            if parcel.buffer.is_cuda:
                work.wait()  # the stream waits, not this thread
            else:
                self.waits.finish([work], self.group)
            return
        assert self._held is not None
        span, earlier = self._held, list(self._earlier.stack)
        while earlier and earlier[-1][0].sibling_of(span):
            left, sums = earlier.pop()
            torch._foreach_add_(parcel.gradients, [sums.tensors[i] for i in parcel.places])
            span = Span(left.first, 2 * left.leaves)
        rows = [(left, parcel.flat([sums.tensors[i] for i in parcel.places])) for left, sums in earlier]
        exchange([*rows, (span, parcel.buffer)], self.leaves, self.group, parcel.buffer, self.waits)

    def _parcel(self, bucket: GradBucket, arrived: torch.futures.Future[torch.Tensor]) -> Parcel:
        self._clock.sent()
        if self._clock.parcels == self._buckets:
            self.board.enter("reducing")
        places = [self._place[id(p)] for p in bucket.parameters()]
        # bucket.gradients() would be views in row-major order, whatever the order of the memory
        gradients = [p.grad for p in bucket.parameters() if p.grad is not None]
        return Parcel(bucket.buffer(), gradients, places, arrived)

    def _on_cpu(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        parcel = self._parcel(bucket, torch.futures.Future())
        self._queue.put(parcel)
        return parcel.arrived

    def _deliver(self) -> None:
        """The courier: bucket after bucket, in the order of the backward pass. Never raises: a failure is for the step to report."""
        while (parcel := self._queue.get()) is not None:
            if self.failure is None:
                try:
                    self._reduce(parcel)
                except Exception as error:
                    self.failure = error
            self._clock.received()
            parcel.arrived.set_result(parcel.buffer)

    def _on_cuda(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """NCCL's collectives only queue work, so the hook itself queues them, on a stream beside the backward pass."""
        parcel = self._parcel(bucket, torch.futures.Future(devices=[self.device]))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            try:
                self._reduce(parcel)
            except Exception as error:
                self.failure = error
            self._clock.received()
            parcel.arrived.set_result(parcel.buffer)
        return parcel.arrived


def words_of(parameter: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """The memory of a parameter on the CPU as whole numbers, eight times as fast to sum as torch's hash; None where it is elsewhere."""
    if parameter.is_cuda or not parameter.is_contiguous():
        return None
    raw = parameter.detach().view(-1).view(torch.uint8).numpy()
    return raw.view(next(kind for kind in (np.uint64, np.uint32, np.uint16, np.uint8) if raw.nbytes % np.dtype(kind).itemsize == 0))


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """64 bits over tensors in their order, of which a flipped one shows: of each the sum of its words; torch's hash where it has none."""
    total = 0
    for tensor in tensors:
        if (its := words_of(tensor)) is not None:
            one = int(np.add.reduce(its, dtype=np.uint64))
        else:  # item() cannot give what is above 2**63
            one = int(torch.hash_tensor(tensor.detach()).view(torch.int64)) if tensor.numel() else 0
        total = (total * DIGEST_FACTOR + one) % 2**64
    return total


class Clock:
    """When the last bucket of a step was handed over, and when the last one came back; on CUDA by events in its streams."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        self.parcels = 0
        self._last_sent: Any = None
        self._last_received: Any = None

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sent(self) -> None:
        self.parcels += 1
        self._last_sent = self.now()

    def received(self) -> None:
        self._last_received = self.now()

    def exposed_s(self) -> float:
        if self._last_sent is None or self._last_received is None:
            return 0.0
        if not self.cuda:
            return max(0.0, float(self._last_received - self._last_sent))
        self._last_received.synchronize()
        return max(0.0, float(self._last_sent.elapsed_time(self._last_received)) / 1000)
