"""One whole copy of a model among the replicas that train together.

DistributedDataParallel passes each bucket of gradients to a communication hook while the backward
pass still runs. The hook does all communication, so DDP gets a process group of one process, and
the group of all replicas can change between generations. On a CPU one reducer thread reduces all
buckets: collectives from several threads may pair up wrongly between processes and deadlock.

All micro-batches but the last run under `no_sync()`. Their gradients are added in the tree of
ordered_sum.py: two sibling leaves by autograd, larger subtrees by SumTree.
"""

from __future__ import annotations

import inspect
import json
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public at run time

from lockstep.data.order import splitmix64
from lockstep.errors import PeersLostError, UsageError
from lockstep.parallel.comm_timer import CommTimer
from lockstep.parallel.digest import digest_of
from lockstep.parallel.gradient_watch import GradientWatch, refuse_unsupported
from lockstep.parallel.ordered_sum import Subtree, SumTree, leaves_of_rank, refuse_idle_ranks, tree_all_reduce
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.torch_private import foreach_add_, foreach_copy_, own_buffers
from lockstep.runtime.work import WorkWaiter, static_group
from lockstep.units import join_names

# torch 2.13 renamed the argument.
DDP_NAMES = inspect.signature(nn.parallel.DistributedDataParallel).parameters
LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in DDP_NAMES else "broadcast_buffers": False}


@dataclass
class Gradients:
    """The gradients of all parameters; adding overwrites the left operand."""

    tensors: list[torch.Tensor]

    def __add__(self, right: Gradients) -> Gradients:
        foreach_add_(self.tensors, right.tensors)
        return self


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients in flight.

    gradients  DDP's views of the flat buffer, in the memory formats of their parameters
    indices    of these parameters among all trained ones
    """

    buffer: torch.Tensor
    gradients: list[torch.Tensor]
    indices: list[int]
    future: torch.futures.Future[torch.Tensor]

    def flatten(self, sums: list[torch.Tensor]) -> torch.Tensor:
        """Copy sums of these gradients into one row, in the memory formats of the buffer."""
        row = torch.empty_like(self.buffer)
        first = self.buffer.storage_offset()
        foreach_copy_([row.as_strided(g.size(), g.stride(), g.storage_offset() - first) for g in self.gradients], sums)
        return row


class Replica:
    """A whole replica: `model`, with gradient sums of the same bits for any number of processes.

    micro_batches  K of a step, over all replicas; at least the number of processes
    seed           of the randomness within the model, keyed by (seed, step, micro-batch)
    reduce         "ordered": the fixed tree; "fast": the backend's all-reduce, other bits
    bucket_bytes   gradients reduced together
    init_sync      Collective: broadcast rank 0's weights. False: they are equal, or received later
    board             where the current phase is recorded
    generation_error  returns why the generation is over; "" while it is intact
    UsageError: more processes than micro-batches, or no backward pass ran.
    """

    def __init__(  # 9 parameters: independent values of the run, most with a default
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        seed: int = 0,
        reduce: Literal["ordered", "fast"] = "ordered",
        bucket_bytes: int = 25_000_000,
        init_sync: bool = True,
        board: StatusBoard | None = None,
        generation_error: Callable[[], str] = static_group,
    ) -> None:
        self.leaves, self.seed, self.ordered, self.bucket_bytes = micro_batches, seed, reduce == "ordered", bucket_bytes
        self.model = model
        self.workers_per_replica = 1
        self._collect_parameters()
        self.device = self.parameters[0].device
        self.waits = WorkWaiter(generation_error)  # checks it before each micro-batch, and while buckets are in flight
        self.board = board or StatusBoard(None)
        self.failure: Exception | None = None
        self._bucket_count = 0  # of a step; 0 before the first one
        self._tree: SumTree[Gradients] = SumTree()
        self._current: Subtree | None = None  # the micro-batches whose sum is in .grad
        self._losses: list[torch.Tensor] = []
        self.rehearsed: float | None = None  # loss of micro-batch 0 in `rehearsal`
        self._timer = CommTimer(self.device)
        self.ddp: nn.parallel.DistributedDataParallel | None = None
        self._alone: dist.ProcessGroup | None = None  # this process alone, in this generation
        self._same_trained = False  # verified: all replicas train the same parameters
        if init_sync:
            self._wrap()
            if self.group.size() > 1:
                for tensor in [*model.parameters(), *model.buffers()]:
                    dist.broadcast(tensor.detach(), group=self.group, group_src=0)
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
        else:
            self._queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
            self._reducer = threading.Thread(target=self._reduce_buckets, name="lockstep-reducer", daemon=True)
            self._reducer.start()

    def _collect_parameters(self) -> None:
        refuse_unsupported(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._watch = GradientWatch(list(trained), self.parameters)

    def _wrap_if_needed(self) -> nn.parallel.DistributedDataParallel:
        """Return the wrapped model. Collective if the group is new or requires_grad changed."""
        if [id(p) for p in self.model.parameters() if p.requires_grad] != list(self._index):
            for p in self.parameters:
                p.grad = None
            self._collect_parameters()
            self.ddp, self._bucket_count = None, 0
        ddp = self.ddp or self._wrap()
        if not self._same_trained:
            names = self._watch.names
            hashes = gather_json(self.group.size(), sha256(json.dumps(names).encode()).hexdigest())
            if len(set(hashes)) > 1:
                counts = Counter(name for trained in gather_json(self.group.size(), names) for name in trained)
                listed = sorted(name for name, count in counts.items() if count < self.group.size())
                raise UsageError(
                    f"not all workers train the same parameters: {join_names(listed)}",
                    "requires_grad of the model's parameters at the start of the step",
                    "derive requires_grad from the step, so that workers that join or resume later agree: "
                    "layer.requires_grad_(step >= 300) in every step",
                )
            self._same_trained = True
        return ddp

    def _wrap(self) -> nn.parallel.DistributedDataParallel:
        """Wrap the model for the current group.

        A wrapper of an earlier group may have other buckets: DDP changes them after its first pass.
        """
        world = dist.group.WORLD
        assert world is not None, "ElasticRuntime.join comes first"
        self.group: dist.ProcessGroup = world
        refuse_idle_ranks(self.group.size(), self.leaves)
        self.own_leaves = leaves_of_rank(self.group.rank(), self.group.size(), self.leaves)
        if self._alone is None and dist.get_world_size() > 1:
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ddp = nn.parallel.DistributedDataParallel(
            self.model, process_group=self._alone, bucket_cap_mb=self.bucket_bytes / 2**20, gradient_as_bucket_view=True, **LOCAL_BUFFERS
        )
        hook = self._on_cuda if self.device.type == "cuda" else self._on_cpu
        ddp.register_comm_hook(None, lambda _, bucket: hook(bucket))  # DDP rejects string annotations
        self.ddp, self._same_trained = ddp, False
        return ddp

    def release_groups(self) -> None:
        """Release the group of a generation that is over; the next step wraps for the new one."""
        self.ddp, self.failure, self._bucket_count, self._alone = None, None, 0, None
        self.__dict__.pop("group", None)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return (self.ddp or self._wrap())(*inputs, **named)

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Run the backward pass of a micro-batch, scaled, and keep its unscaled loss."""
        self.board.enter("backward")
        self._watch.backward(scaler.scale(loss) if scaler else loss)
        self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        return [float(loss) for loss in torch.stack(self._losses).tolist()] if self._losses else []

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield this replica's micro-batches of `step`, each for forward and backward.

        After the loop .grad is the sum over all K micro-batches of all replicas.
        """
        ddp = self._wrap_if_needed()
        self._tree, self._current, self._losses = SumTree(), None, []
        self._timer.begin()
        for p in self.parameters:
            p.grad = None
        for k in self.own_leaves:
            if reason := self.waits.generation_error():
                raise PeersLostError(reason, "Replica.micro_batches")
            leaf = Subtree(k, 1)
            if self._current and self.ordered and not self._current.sibling_of(leaf):
                self._store_subtree()
            seed_generators(splitmix64(self.seed, step, k) >> 1, self.device)
            self._current = Subtree(self._current.first, self._current.leaves + 1) if self._current else leaf
            self._watch.begin(step, k)
            with nullcontext() if k == self.own_leaves[-1] else ddp.no_sync():
                yield k
            self._watch.end()
        self._bucket_count = self._timer.buckets
        if not self._timer.buckets:
            where = f"the forward pass of micro-batch {self.own_leaves[-1]}"
            raise UsageError(f"the gradients of step {step} were not summed over the workers", where, "call the replicas, not the model")
        if self.failure:
            raise self.failure

    def rehearsal(self, step: int) -> Iterator[int]:
        """Yield micro-batch 0 of `step` on every replica; then restore buffers, drop gradients."""
        ddp = self._wrap_if_needed()
        buffers = [(m, name, b, b.clone()) for m in self.model.modules() for name, b in own_buffers(m).items() if b is not None]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)  # so that a zero_grad before the backward pass shows
        self._losses = []
        seed_generators(splitmix64(self.seed, step, 0) >> 1, self.device)
        self._watch.begin(step, 0)
        with ddp.no_sync():
            yield 0
        self._watch.end()
        self.rehearsed = float(self._losses[0])
        for p in self.parameters:
            p.grad = None
        for module, name, buffer, before in buffers:
            own_buffers(module)[name] = buffer.copy_(before)

    def losses_per_rank(self, size: int) -> list[int]:
        return [len(leaves_of_rank(rank, size, self.leaves)) for rank in range(size)]

    def grad_norm_squared(self) -> None:
        """Return None; a ShardedReplica returns the squared norm summed over its workers."""

    def digest(self) -> int:
        return digest_of(self.parameters)

    def exposed_s(self) -> float:
        """Return the seconds of communication after the last gradient of this step was computed."""
        return self._timer.exposed_s()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type != "cuda":
            self._queue.put(None)
            self._reducer.join(timeout=5)
        self.release_groups()

    def _store_subtree(self) -> None:
        """Move the sum in .grad to the tree, so that the next leaf starts without gradients."""
        assert self._current is not None
        self._tree.add(self._current, Gradients([p.grad for p in self.parameters if p.grad is not None]))
        for p in self.parameters:
            p.grad = None
        self._current = None

    def _reduce(self, bucket: Bucket) -> None:
        """Collective. Sum a bucket over all replicas, in place."""
        self.board.enter_collective(bucket.buffer.nbytes)
        if not self.ordered:
            work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
            if bucket.buffer.is_cuda:
                work.wait()  # the stream waits, not this thread
            else:
                self.waits.wait([work], self.group)
            return
        assert self._current is not None
        subtree, earlier = self._current, list(self._tree.stack)
        while earlier and earlier[-1][0].sibling_of(subtree):
            left, sums = earlier.pop()
            foreach_add_(bucket.gradients, [sums.tensors[i] for i in bucket.indices])
            subtree = Subtree(left.first, 2 * left.leaves)
        rows = [(left, bucket.flatten([sums.tensors[i] for i in bucket.indices])) for left, sums in earlier]
        tree_all_reduce([*rows, (subtree, bucket.buffer)], self.leaves, self.group, bucket.buffer, self.waits)

    def _make_bucket(self, grad_bucket: GradBucket) -> Bucket:
        self._timer.sent()
        if self._timer.buckets == self._bucket_count:
            self.board.enter("reducing")
        indices = [self._index[id(p)] for p in grad_bucket.parameters()]
        # grad_bucket.gradients() would be row-major views, even of channels_last parameters
        gradients = [p.grad for p in grad_bucket.parameters() if p.grad is not None]
        devices: list[int | str | torch.device] | None = [self.device] if self.device.type == "cuda" else None
        return Bucket(grad_bucket.buffer(), gradients, indices, torch.futures.Future(devices=devices))

    def _on_cpu(self, grad_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket = self._make_bucket(grad_bucket)
        self._queue.put(bucket)
        return bucket.future

    def _reduce_buckets(self) -> None:
        while (bucket := self._queue.get()) is not None:
            self._complete(bucket, reduce=self.failure is None)

    def _on_cuda(self, grad_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Queue the collectives here, since NCCL's do not block, on a separate stream."""
        bucket = self._make_bucket(grad_bucket)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._complete(bucket)
        return bucket.future

    def _complete(self, bucket: Bucket, reduce: bool = True) -> None:
        """Reduce a bucket and hand it to DDP. Never raises; the step reports a failure."""
        try:
            if reduce:
                self._reduce(bucket)
        except Exception as error:
            self.failure = error
        self._timer.received()
        bucket.future.set_result(bucket.buffer)
