"""One replica that is several workers, each with its pieces of the model; the sum of gradients is the same bits as that of whole replicas.

FSDP2 gathers each unit's parameters before it computes, frees them after, and hands the unit's gradients over when its backward pass is
done. Its two collectives are ours:

    gather   each shard sends its piece of a unit to the others; asked for `units_ahead`, so that it travels while another one computes
    reduce   micro-batches are dealt in turn to the shards of a replica, so that a round of all of them is adjacent leaves of the tree in
             ordered.py. Each shard takes its rows of the gradients of all leaves of a round and adds them in the order of the tree; with
             the last round of a step, those who hold the same rows in other replicas finish the tree (`exchange`)

So a shard's gradient is the same sum, in the same order, for every number of replicas and shards. The reducing is done by a courier thread
beside the backward pass, as in replicate.py. Between passes a shard keeps log2(K) partial sums of its own rows, never of the whole; or,
where the wire is dearer than memory (`together`), of whole gradients, and then micro-batches are dealt in adjacent blocks: the tree is the
same.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lockstep.data.order import mix
from lockstep.errors import PeersLostError, UsageError
from lockstep.parallel.grad_norm import row_norms
from lockstep.parallel.groups import Arrival, everybody_sends, exchange_rows
from lockstep.parallel.ordered_sum import Part, Span, Tree, exchange, runs, share
from lockstep.parallel.parallelize import Held
from lockstep.parallel.pipeline import Flow, Stage, travelling
from lockstep.parallel.replica import digest_of
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.status_board import Board
from lockstep.runtime.work import Waits
from lockstep.units import shown

PARCELS = 2  # units whose gradients are on their way at once; a whole unit's worth of memory each


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of all shards of a replica, as one of them does it.

    k       the micro-batch that it computes
    counts  False: only to take part, since there is no micro-batch left for it
    first, leaves  the leaves of the tree that all of them compute; where gradients stay whole for a while, this shard's own leaf
    """

    k: int
    counts: bool
    first: int
    leaves: int
    last: bool


def passes_of(block: range, shard: int, shards: int, *, together: bool) -> list[Pass]:
    """What a shard does of its replica's micro-batches.

    In turn: a pass of all shards is adjacent leaves. `together`: in adjacent blocks, so that a shard can add up its own ones first.
    """
    turns = -(-len(block) // shards)
    if together:
        own = share(shard, shards, len(block))
        mine = block[own.start : own.stop]
        ks = [(mine[min(turn, len(mine) - 1)], turn < len(mine)) for turn in range(turns)]
        return [Pass(k, counts, k, int(counts), turn == turns - 1) for turn, (k, counts) in enumerate(ks)]
    found = []
    for first in range(block.start, block.stop, shards):
        leaves = min(shards, block.stop - first)
        found.append(Pass(first + min(shard, leaves - 1), shard < leaves, first, leaves, first + shards >= block.stop))
    return found


@dataclass(frozen=True)
class Parcel:
    """The gradients of one unit on their way.

    sent  (S * n,), slice j for shard j
    out   (n,), where FSDP awaits the sum of this shard's rows
    """

    unit: int
    turn: Pass
    sent: Tensor
    out: Tensor


class Waiting(NamedTuple):
    """The inputs of a micro-batch for a pipeline, and autocast's type around its forward pass; None: off."""

    k: int
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    narrow: torch.dtype | None


class ShardedReplica:
    """What `Replica` is, for a model that is cut: see there. `held` is what this worker has of it (apply.py).

    together  reduce the gradients of a step together, after its last micro-batch: less traffic, but they stay whole until then
    """

    def __init__(self, held: Held, *, micro_batches: int, seed: int = 0, together: bool = False) -> None:
        assert held.wires is not None
        self.held, self.leaves, self.seed = held, micro_batches, seed
        self.parameters = [p for p in held.named.values() if p.requires_grad]
        self.wires, self.unit = held.wires, held.layout.unit
        self.together = together and held.layout.shard > 1
        self._trees: list[Tree[Part]] = []
        self._turn = Pass(0, True, 0, 0, True)
        self._losses: list[Tensor] = []
        self._waiting: list[Waiting] = []
        self._sent_s = self._done_s = 0.0
        self._handed: list[Tensor] = []
        self._queue: queue.SimpleQueue[Parcel | threading.Event | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(PARCELS)
        self._courier = threading.Thread(target=self._deliver, name="lockstep-courier", daemon=True)
        self._courier.start()
        for number, unit in enumerate(held.units):
            unit.set_custom_all_gather(Gather(self))
            unit.set_custom_reduce_scatter(Hand(self))
            unit.set_all_reduce_hook(partial(self._reduced, number))
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._names = [name for name, p in held.named.items() if p.requires_grad]
        self._sharded = [cast(Any, p) for p in held.module.parameters() if p.requires_grad]
        self._backwards = 0  # in this pass

    @property
    def board(self) -> Board:
        return self.wires.board

    @board.setter
    def board(self, board: Board) -> None:
        self.wires.board = board

    @property
    def waits(self) -> Waits:
        return self.wires.waits

    def forget(self) -> None:
        """Let go of the groups, which are broken or left; the next step makes new ones."""
        self.wires.drop()
        self._drain()
        self.wires.failure = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward pass. In a pipeline the inputs wait until those of all micro-batches of the step are there."""
        if not self.wires.laid:
            self.wires.lay()
        if self.held.stage is None:
            return self.held.module(*inputs, **named)
        kind = self.parameters[0].device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._waiting.append(Waiting(self._turn.k, inputs, named, narrow))
        return torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch; its loss is kept, unless this is a pass that only helps the other shards."""
        if self.held.stage is not None:
            return
        if self._backwards:
            raise UsageError(f"team.backward was called twice in micro-batch {self._turn.k}", "", "add its losses, and call it once")
        self._backwards += 1
        self.board.enter("backward")
        loss.backward()
        if self._turn.counts:
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """The losses of this worker's micro-batches of this step; of those who share a micro-batch one alone tells."""
        spot = self.held.layout.spot(dist.get_rank())
        tells = spot.tensor == 0 and spot.stage == self.held.layout.pipeline - 1
        return [float(loss) for loss in torch.stack(self._losses).tolist()] if self._losses and tells else []

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. The numbers of this worker's micro-batches of `step`: do a forward and a backward pass for each.

        When the loop ends, each parameter's .grad is this worker's rows of the sum over all K micro-batches of all replicas.
        """
        if not self.wires.laid:
            self.wires.lay()
        layout = self.wires.now()
        spot = layout.spot(dist.get_rank())
        block = share(spot.replica, layout.replicate, self.leaves)
        refuse_idle_shards(layout.loaders, self.leaves, len(block), layout.shard)
        self._refuse_frozen_or_unfrozen()
        self._trees = [Tree() for _ in self.held.units]
        self._losses, self.wires.waited_s, self._sent_s, self._waiting = [], 0.0, 0.0, []
        passes = passes_of(block, spot.shard, layout.shard, together=self.together)
        for self._turn in passes:
            if why := self.waits.broken():
                raise PeersLostError(why, "ShardedReplica.micro_batches")
            for p in self._sharded:
                p.grad = None
            seed_generators(mix(self.seed, step, self._turn.k) >> 1, self.parameters[0].device)
            self._backwards = 0
            if self._turn.last:
                self.board.enter("reducing")
            yield self._turn.k
            if self.wires.failure:
                break
            if self.held.stage is None:
                self._refuse_missing(f"micro-batch {self._turn.k} of step {step}")
        if self.held.stage is not None and not self.wires.failure:
            self._flow(self.held.stage, step, passes)
        self._drain()
        if self.wires.failure:
            raise self.wires.failure
        self._refuse_missing(f"step {step}")
        for own, sharded in zip(self.parameters, self._sharded, strict=True):
            own.grad = sharded.grad.to_local()
            sharded.grad = None
        self._add_what_others_have()

    def _refuse_frozen_or_unfrozen(self) -> None:
        """UsageError when other parameters are trained than when the model was cut."""
        pairs = zip(self.held.named.items(), self.held.module.parameters(), strict=True)
        if changed := [name for (name, p), q in pairs if {p.requires_grad, q.requires_grad} != {name in self._names}]:
            raise UsageError(
                f"requires_grad has changed since the model was cut: {shown(changed)}",
                f"layout {self.held.layout}",
                "freeze before the model is cut, or train with whole replicas",
            )

    def _refuse_missing(self, where: str) -> None:
        """UsageError when a trained parameter has no gradient."""
        missing = [name for name, p in zip(self._names, self._sharded, strict=True) if p.grad is None]
        if missing or not (self._backwards or self.held.stage):
            raise UsageError(
                f"no gradient arrived for {len(missing)} of {len(self._names)} parameters in {where}: {shown(missing)}",
                "team.backward(loss)" if self._backwards or self.held.stage else "team.backward was not called",
                "call team(inputs) and team.backward(loss) once for every micro-batch, in which every trained parameter takes part",
            )

    def _flow(self, stage: Stage, step: int, passes: list[Pass]) -> None:
        """The step of a pipeline: the micro-batches that wait, forward and backward."""
        module, kind = self.held.module, self.parameters[0].device.type

        def run(received: list[Tensor], part: int, micro: int) -> tuple[Tensor, ...]:
            k, inputs, named, narrow = self._waiting[micro]
            seed_generators(mix(self.seed, step, k, part * stage.stages + stage.number) >> 1, self.parameters[0].device)
            with torch.autocast(kind, narrow, enabled=narrow is not None):
                out: tuple[Tensor, ...] = module(received, part, inputs, named)
            return out

        def back(micro: int, part: int) -> None:
            self._turn = passes[micro]
            for name, p in zip(self._names, self._sharded, strict=True):
                if stage.holds(part, name):
                    p.grad = None

        dtype = next(iter(self.held.named.values())).dtype
        flow = Flow(stage, self.wires, run, back, lambda micro: travelling(module, dtype, self._waiting[micro].inputs))
        losses = flow.step(len(passes))
        self._losses = [loss for loss, turn in zip(losses, passes, strict=False) if turn.counts]

    def _add_what_others_have(self) -> None:
        """Collective. The gradients of adapters that the tensor axis leaves whole; and of a matrix that the first and the last stage both
        have: the sum of theirs, so that it stays the same."""
        for name in self.held.summands:
            gradient = self.held.named[name].grad
            if gradient is not None:
                self.wires.add_in_order(gradient, self.wires.tensor)
        stage = self.held.stage
        for name in (*stage.borrowed, *stage.lent) if stage else ():
            gradient = self.held.named[name].grad
            if gradient is not None:
                self.wires.add_up(gradient, self.wires.tied)
        if self.wires.failure:
            raise self.wires.failure

    def told(self, size: int) -> list[int]:
        """How many losses each of `size` ranks tells."""
        layout = self.wires.of(size)
        spots = [layout.spot(rank) for rank in range(size)]
        tell = [spot.tensor == 0 and spot.stage == layout.pipeline - 1 for spot in spots]
        blocks = [share(spot.replica, layout.replicate, self.leaves)[spot.shard :: layout.shard] for spot in spots]
        return [len(block) if tells else 0 for block, tells in zip(blocks, tell, strict=True)]

    def squares(self) -> Tensor:
        """Collective in the replica. The sum of the squares of the whole gradient, 0-dim float64; its bits do not depend on the shards."""
        layout, spot = self.held.layout, self.wires.now().spot(dist.get_rank())
        places = self.held.rows_of_trained(spot.shard)
        total = max((stop for _, stop, _, _ in places), default=0)
        rows = torch.zeros(total, device=self.parameters[0].device)
        own = [p for name, p in self.held.named.items() if p.requires_grad and not self.held.is_borrowed(name)]
        for parameter, (first, _, start, _) in zip(own, places, strict=True):
            assert parameter.grad is not None
            norms = row_norms(parameter.grad)
            rows[first + start : first + start + len(norms)] = norms
        self.wires.add_up(rows, self.wires.gather)  # each row comes from one shard alone, so the sum is exact
        sums = torch.stack([rows[first:stop].double().square().sum() for first, stop, _, _ in places])
        shared = torch.tensor([cut for _, _, _, cut in places], device=rows.device)
        parts = self.wires.add_up(torch.where(shared, sums, 0.0), self.wires.tensor)
        squares = torch.where(shared, parts, sums).sum()
        if layout.pipeline > 1:
            self.wires.add_up(squares, self.wires.stages)
        if self.wires.failure:
            raise self.wires.failure
        return squares

    def digest(self) -> int:
        """64 bits over this worker's pieces, of which a flipped one shows; equal on those who hold the same in other replicas."""
        return digest_of(self.parameters)

    def exposed_s(self) -> float:
        """Seconds that this step waited for the wire: for parameters, and after its last gradient was computed."""
        return self.wires.waited_s + max(0.0, self._done_s - self._sent_s)

    def __enter__(self) -> ShardedReplica:
        return self

    def __exit__(self, *_: object) -> None:
        """End the courier thread, and let go of the groups."""
        self._queue.put(None)
        self._courier.join(timeout=5)
        self.wires.drop()

    # -- FSDP's collectives ---------------------------------------------------------------------------------------------

    def _reduced(self, unit: int, out: Tensor) -> None:
        """FSDP has handed the gradients of a unit over: to `Hand` before, where there are several shards; else they are `out` itself."""
        sent = self._handed.pop() if self._handed else out
        self._sent_s = time.perf_counter()
        parcel = Parcel(unit, self._turn, sent, out)
        if out.is_cuda:
            self._reduce(parcel)
        else:
            self._room.acquire()
            self._queue.put(parcel)

    def _deliver(self) -> None:
        """The courier: parcel after parcel, in the order of the backward pass, which is the same on all. Never raises."""
        while (parcel := self._queue.get()) is not None:
            if isinstance(parcel, threading.Event):
                parcel.set()
                continue
            self._reduce(parcel)
            self._room.release()
            self._done_s = time.perf_counter()

    def _drain(self) -> None:
        """Wait for the courier."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def _reduce(self, parcel: Parcel) -> None:
        """Collective. The gradients of a pass into the unit's tree; with the last one this shard's rows of the sum, into `out`."""
        if self.wires.failure is not None or not self.wires.laid:
            return
        try:
            self.board.collective(parcel.sent.nbytes)
            tree = self._trees[parcel.unit]
            if self.together:
                self._add_whole(parcel, tree)
            else:
                self._add_rows(parcel, tree)
            if not parcel.turn.last:
                return
            if self.together:
                tree = self._rows_of_all(tree)
            if self.wires.across is None:
                parcel.out.copy_(tree.total().tensor)
            else:
                exchange([(span, part.tensor) for span, part in tree.stack], self.leaves, self.wires.across, parcel.out, self.wires.waits)
        except Exception as error:
            self.wires.fail(error)

    def _add_rows(self, parcel: Parcel, tree: Tree[Part]) -> None:
        """Collective. Each shard takes its rows of the gradients of all leaves of the pass."""
        parts = list(parcel.sent.view(self.held.layout.shard, -1))
        rows = exchange_rows(parts, self.wires.scatter, self.wires.waits)
        for number, row in enumerate(rows[: parcel.turn.leaves]):
            tree.add(Span(parcel.turn.first + number, 1), Part(row))
        kept = parcel.sent.untyped_storage().data_ptr()
        for _, part in tree.stack if len(parts) > 1 and not parcel.turn.last else ():
            if part.tensor.untyped_storage().data_ptr() == kept:  # a view would keep the rows of all shards
                part.tensor = part.tensor.clone()

    def _add_whole(self, parcel: Parcel, tree: Tree[Part]) -> None:
        """This shard's own leaf, of all rows."""
        if parcel.turn.counts:
            tree.add(Span(parcel.turn.first, 1), Part(parcel.sent))

    def _rows_of_all(self, own: Tree[Part]) -> Tree[Part]:
        """Collective. This shard's rows of what all shards have added up, put together."""
        layout, group = self.wires.now(), self.wires.scatter
        assert group is not None
        block = share(layout.spot(dist.get_rank()).replica, layout.replicate, self.leaves)
        mine = [(span, part.tensor.view(layout.shard, -1)) for span, part in own.stack]
        blocks = [share(shard, layout.shard, len(block)) for shard in range(layout.shard)]
        spans = [runs(block[one.start : one.stop]) for one in blocks]
        here, empty = group.rank(), mine[0][1][0]
        others = [shard for shard in range(layout.shard) if shard != here]
        rows = [[torch.empty_like(empty) for _ in some] for some in spans]
        rows[here] = [parts[here] for _, parts in mine]
        works = [dist.irecv(row, group=group, group_src=shard) for shard in others for row in rows[shard]]
        works += [dist.isend(parts[shard], group=group, group_dst=shard) for shard in others for _, parts in mine]
        self.wires.waits.finish(works, group)
        tree: Tree[Part] = Tree()
        for some, there in zip(spans, rows, strict=True):
            for span, row in zip(some, there, strict=True):
                tree.add(span, Part(row))
        return tree


class Hand(ReduceScatter):
    """FSDP's reduce-scatter: keeps what is to be sent for `_reduced`, which FSDP calls next."""

    def __init__(self, replica: ShardedReplica) -> None:
        self.replica = replica

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self.replica._handed.append(input_tensor)


class Gather(AllGather):
    """FSDP's all-gather."""

    def __init__(self, replica: ShardedReplica) -> None:
        self.replica = replica

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        wires = self.replica.wires
        there = wires.gather
        assert there is not None
        if output_tensor.is_cuda:
            wires.guard(lambda: [dist.all_gather_into_tensor(output_tensor, input_tensor, group=there)])
            return None
        parts = list(output_tensor.view(there.size(), -1))  # FSDP has put this worker's part in its place
        wires.board.collective(output_tensor.nbytes)
        return Arrival(wires, wires.guard(lambda: everybody_sends(parts, there)))


def refuse_idle_shards(loaders: int, leaves: int, block: int, shards: int) -> None:
    """UsageError when some shard would have no micro-batch."""
    if block < shards:
        raise UsageError(
            f"{loaders} shards of all replicas are running, a step has {leaves} micro-batches",
            "a shard without a micro-batch has nothing to do",
            f"start fewer replicas, or set batch.micro_batches={loaders}",
        )
