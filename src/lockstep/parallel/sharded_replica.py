"""A replica of several workers with slices of the model; sums with the bits of whole replicas.

FSDP2 gathers each unit's parameters and passes on its gradients; its two collectives are replaced
(fsdp_comm.py):

    all-gather      each shard sends its slice of a unit to the others, `prefetch_units` ahead
    reduce-scatter  micro-batches go to the shards of a replica in turn, so a pass of all shards
                    covers adjacent leaves of the tree in ordered_sum.py. Each shard receives its
                    rows of the gradients of all leaves of a pass and adds them in tree order. After
                    the last pass, workers with the same rows in other replicas finish the tree

So a shard's gradient is the same sum, in the same order, for any number of replicas and shards. A
Reducer works beside the backward pass, as in replica.py. With `reduce_once_per_step` a shard
keeps partial sums of whole gradients; the tree is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.data.order import splitmix64
from lockstep.errors import PeersLostError, UsageError
from lockstep.network.subtrees import Subtree, equal_shares, leaves_of_rank
from lockstep.network.wire_format import Wire
from lockstep.parallel.digest import digest_of, total_of, word_sum
from lockstep.parallel.exchange import Traffic, tree_all_reduce
from lockstep.parallel.fsdp_comm import CapturedReduceScatter, GroupAllGather
from lockstep.parallel.grad_norm import norm_squared_of_slices
from lockstep.parallel.gradient_watch import (
    UNUSED_HINT,
    Unused,
    hash_of,
    refuse_different_parameters,
)
from lockstep.parallel.ordered_sum import PartialSum, SumTree
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.pipeline import (
    ChunkForward,
    PendingMicroBatch,
    PipelineRunner,
    PipelineStage,
)
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.parallel.shard_passes import (
    ShardPass,
    UnitGradients,
    add_rows,
    exchange_rows,
    plan_passes,
    reduce_encoded,
    refuse_idle_shards,
    reports_losses,
)
from lockstep.parallel.unit_order import UnitOrder, fill_unused_gradients
from lockstep.parallel.wire_sum import WireSum
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.torch_private import fsdp_shard_rows
from lockstep.runtime.work import static_group
from lockstep.units import join_names

UNITS_IN_FLIGHT = 2  # each takes the memory of a whole unit


class ShardedReplica:
    """A replica whose model is split over several workers; the interface of `Replica`.

    local                 this worker's part of the model (parallelize.py)
    wire                  how gradients travel (network/wire_format.py)
    reduce_once_per_step  after the last micro-batch: less traffic, more memory
    unused                see Replica; "zero" needs a model that is gathered at once
    statistics            of BatchNorm layers; None: the model has none
    board, generation_error, form_context  see `ProcessGroups.connect`
    """

    def __init__(  # 11 parameters: independent values of the run, most with a default
        self,
        local: LocalModel,
        *,
        micro_batches: int,
        seed: int = 0,
        wire: Wire = "fp32",
        reduce_once_per_step: bool = False,
        unused: Unused = "raise",
        statistics: RunningStatistics | None = None,
        board: StatusBoard | None = None,
        generation_error: Callable[[], str] = static_group,
        form_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        assert local.groups is not None
        local.groups.connect(board or StatusBoard(None), generation_error, form_context)
        self.local, self.leaves, self.seed = local, micro_batches, seed
        self._collect_parameters()
        self.groups, self.workers_per_replica = local.groups, local.layout.workers_per_replica
        self.reduce_once_per_step = reduce_once_per_step and local.layout.shard > 1
        self.statistics = statistics or RunningStatistics(nn.Module(), micro_batches, {})
        self._trees: list[SumTree[PartialSum]] = []
        self.wire, self._wire_sums = wire, list[WireSum]()
        self._pass = ShardPass(0, True, (), True)
        self._losses: list[Tensor] = []
        self._pending: list[PendingMicroBatch] = []
        self._captured: list[Tensor] = []
        self._reducer = Reducer(
            self.parameters[0].device, generation_error, UNITS_IN_FLIGHT, side_stream=False
        )
        self.traffic = Traffic()
        if unused == "zero":
            fill_unused_gradients(local)
        for number, unit in enumerate(
            unit for units in (local.fsdp_units, *local.averages) for unit in units
        ):
            unit.set_custom_all_gather(cast(Any, GroupAllGather(self.groups, number)))
        refuse_foreign = torch.compiler.disable(self._refuse_foreign)
        for number, unit in enumerate(local.fsdp_units):
            cast(nn.Module, unit).register_forward_pre_hook(refuse_foreign, prepend=True)
            unit.set_custom_reduce_scatter(cast(Any, CapturedReduceScatter(self._captured)))
            unit.set_all_reduce_hook(partial(self._on_gradients, number))
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for module in (
            ()
            if local.stage
            else (local.module, *(cast(nn.Module, units[-1]) for units in local.averages))
        ):
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_forward_hook(self._after_forward)
        blocks = () if local.stage else cast(Sequence[nn.Module], local.fsdp_units[:-1])
        name_of = {module: name for name, module in local.module.named_modules()}
        self._unit_order = UnitOrder({name_of[block]: block for block in blocks})
        self._in_step = self._rehearsing = False
        self._reduced_units: set[int] = set()  # in this pass
        self.own_leaves, self.shares = (
            list[int](),
            tuple[int, ...](),
        )  # micro-batches of this worker; their numbers by replica
        self._first_leaf = 0  # number in the step of micro-batch 0 of the tree
        self._micro_batch_s: float | None = None
        self.rehearsed: float | None = None  # loss of the micro-batch in `rehearsal`
        self.rehearsed_finite = True  # this worker's gradient of it
        self.hashed_gradient: int | None = None  # 64 bits over the newest gradient that was hashed
        self._hash_leaf: int | None = None  # the micro-batch whose gradient is hashed
        self._word_sums: list[Tensor] = []  # of its units
        self._skipping = False  # the gradients of this pass become zero
        self._backwards, self._scaled = 0, False  # in this pass; by a GradScaler, in this step
        self._is_compared = (
            False  # the trained parameters are those of the other ranks of this generation
        )

    def release_groups(self) -> None:
        """Release the groups of a generation that is over; the next step forms new ones."""
        self.groups.clear()
        if self.local.plan_check:
            self.local.plan_check.stop()
        self._reducer.drain()
        self._trees, self._is_compared = [], False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward pass; in a pipeline, only store the inputs."""
        if self.local.stage is None:
            try:
                return self.local.module(*inputs, **named)
            except (RuntimeError, ValueError, TypeError, IndexError):
                if self.local.plan_check:
                    self.local.plan_check.compare(
                        complete=False
                    )  # names the layers that do not run when they are split
                raise
        if self._backwards:
            what = f"forward_backward() was called twice in micro-batch {self._pass.k}"
            raise UsageError(what, f"layout {self.local.layout}", "add its losses and call it once")
        self._backwards += 1
        self._pending.append(
            self.local.stage.pend(self._pass.k, inputs, named, self.parameters[0].device)
        )
        return torch.zeros(())

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Form the groups; refuse a pass whose gradients would belong to no micro-batch."""
        if torch.is_grad_enabled() and not (self._in_step and module is self.local.module):
            what = "a forward pass with gradients outside of the micro-batches, or of an average"
            hint = "use torch.no_grad() or session.evaluate there: the weights are in shards"
            raise UsageError(what, f"{type(module).__name__}, layout {self.local.layout}", hint)
        if not self.groups.formed:
            self.groups.form()

    def _refuse_foreign(self, module: nn.Module, _: Any) -> None:
        """UsageError when a unit is called with other parameters, in whose place FSDP would set
        its own."""
        if names := self.local.foreign_parameters(module):
            raise UsageError(
                f"{type(module).__name__} was called with other parameters, in shards: {join_names(names)}",
                "torch.func.functional_call, in whose place FSDP would use the parameters of the model",
                "move it into forward() of the model, around layers that are not gathered one by one "
                "(session.prepare(..., units=()) gathers all at once), or train with whole replicas",
            )

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        """Free the root's weights after a pass without gradients: a later one must gather new
        ones."""
        if torch.is_grad_enabled():
            self._unit_order.end()
        if not torch.is_grad_enabled():
            cast(FSDPModule, module).reshard()
            if not self._in_step:
                self.groups.raise_failure()

    @property
    def counts(self) -> bool:
        """Whether the current micro-batch is this worker's, and not skipped; False: it only joins
        the collectives."""
        return self._pass.counts and not self._skipping

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        if self.local.stage is not None:
            return
        if self._backwards:
            raise UsageError(
                f"backward() was called twice in micro-batch {self._pass.k}",
                "",
                "add its losses and call it once",
            )
        self._backwards += 1
        self.groups.board.enter("backward")
        self._scaled = scaler is not None
        (scaler.scale(loss) if scaler else loss).backward()
        if self._rehearsing:
            self.rehearsed = float(loss.detach())
        elif self.counts:
            self._losses.append(loss.detach())

    @property
    def _replica_group(self) -> dist.ProcessGroup | None:
        """The workers with the same rows, which finish the tree; None: the replica has all
        leaves."""
        return self.groups.replica_group

    def skip(self) -> bool:
        """Drop the loss and the gradients of this pass; return False: FSDP needs a pass all the
        same, over any other micro-batch."""
        self._skipping = True
        return False

    def losses(self) -> list[float]:
        reports = reports_losses(self.local.layout.coordinates(dist.get_rank()), self.local.layout)
        return (
            [float(loss) for loss in torch.stack(self._losses).flatten().tolist()]
            if self._losses and reports
            else []
        )

    def hash_gradient_of(self, leaf: int | None) -> None:
        """Set `hashed_gradient` in the next step, on the rank of this micro-batch; None: of none.
        Not in a pipeline; with tensor parallelism over this worker's part of it.
        """
        self._hash_leaf = leaf
        self._word_sums = []

    def micro_batches(
        self, step: int, meanwhile: Callable[[], None] = lambda: None, shares: tuple[int, ...] = ()
    ) -> Iterator[int]:
        """Collective. Yield this worker's micro-batches of `step`, each for a forward and backward.

        After the loop .grad is this worker's rows of the sum over all K micro-batches.

        meanwhile  called after the last micro-batch, while gradients are still being sent
        shares     number of micro-batches by replica, the same on all ranks; (): equal shares
        """
        if not self.groups.formed:
            self.groups.form()
        layout = self.groups.current_layout()
        coordinates = layout.coordinates(dist.get_rank())
        self.shares = shares or equal_shares(layout.replicate, self.leaves)
        self.replica_leaves = leaves_of_rank(coordinates.replica, self.shares)
        refuse_idle_shards(
            layout.data_parallel_size, self.leaves, len(self.replica_leaves), layout.shard
        )
        yield from self._sum_passes(step, meanwhile)

    def _sum_passes(self, step: int, meanwhile: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Collective. Yield this worker's part of `replica_leaves`; see `micro_batches`."""
        layout = self.groups.current_layout()
        coordinates = layout.coordinates(dist.get_rank())
        self._trees = [SumTree() for _ in self.local.fsdp_units]
        units = self.local.fsdp_units if self.wire != "fp32" else ()
        self._wire_sums = [
            WireSum(self.wire, fsdp_shard_rows(u, layout.shard), (self.seed, step), self.shares)
            for u in units
        ]
        self._losses, self.groups.waited_s, self._pending, self.traffic = [], 0.0, [], Traffic()
        self._reducer.start_step()
        self.statistics.start_step()
        self.local.refuse_replaced()
        for local in self.parameters:
            local.grad = (
                None  # so that nothing in the micro-batch loop uses the gradient of the last step
            )
        self._follow_requires_grad()
        passes = plan_passes(
            self.replica_leaves,
            coordinates.shard,
            layout.shard,
            reduce_once_per_step=self.reduce_once_per_step,
        )
        self.own_leaves = [shard_pass.k for shard_pass in passes if shard_pass.counts]
        start = time.perf_counter()
        for shard_pass in passes:
            yield self._start_pass(step, shard_pass)
            self._in_step = False
            if self._failure():
                break
            self._refuse_missing(
                f"micro-batch {self._pass.k} of step {step}",
                () if self.local.stage else self._names,
            )
            if self.local.stage is None:
                self._compare_with_whole()
                self._end_hash()
                self.statistics.end_micro_batch(
                    self._pass.k, counts=self._pass.counts and coordinates.tensor == 0
                )
        if self.local.stage is not None and not self._failure():
            self._run_pipeline(self.local.stage, step, passes)
        elif (
            layout.tensor == 1 and self._reducer.device.type == "cpu"
        ):  # on a GPU a pass includes waiting for other replicas
            self._micro_batch_s = (time.perf_counter() - start - self._reducer.blocked_s) / (
                len(passes) * layout.shard
            )
        meanwhile()
        self._reducer.drain()
        self._trees = []
        if failure := self._failure():
            raise failure
        for group in (self.groups.tensor_group, self.groups.gather_group, self._replica_group):
            if group is not None:  # not of other stages, which have other buffers
                self.statistics.exchange(group, self.groups.waits.wait)
        self._refuse_missing(f"step {step}", self._names)
        self.local.refuse_changes(self._names)
        for local, sharded in zip(self.parameters, self._sharded, strict=True):
            local.grad = sharded.grad.to_local()
        if self.local.plan_check and self.local.plan_check.is_due:
            self.local.plan_check.refuse_unequal(
                {
                    name: cast(Tensor, p.grad)
                    for name, p in zip(self._names, self.parameters, strict=True)
                }
            )
        self._sum_shared_gradients()

    def _start_pass(self, step: int, shard_pass: ShardPass) -> int:
        if reason := self.groups.waits.generation_error():
            raise PeersLostError(reason, "ShardedReplica.micro_batches")
        for p in self._sharded:
            p.grad = None
        k = self._first_leaf + shard_pass.k
        seed_generators(splitmix64(self.seed, step, k) >> 1, self.parameters[0].device)
        self._pass, self._backwards, self._in_step, self._skipping = shard_pass, 0, True, False
        self._reduced_units.clear()
        self._unit_order.start(f"micro-batch {k} of step {step}")
        if shard_pass.last:
            self.groups.board.enter("reducing")
        return k

    def rehearsal(self, step: int, k: int = 0) -> Iterator[int]:
        """Collective. Yield micro-batch `k` of `step` on every worker; then drop its gradients.

        The step itself restores the running statistics.
        """
        if not self.groups.formed:
            self.groups.form()
        self._follow_requires_grad()
        self.statistics.start_step()
        self._rehearsing = True
        self.rehearsed_finite = True
        self._word_sums = []
        self._pending, shard_pass = [], ShardPass(k, True, (), False)
        yield self._start_pass(step, shard_pass)
        self._in_step = False
        if self.local.stage is not None and not self._failure():
            self._refuse_missing(f"micro-batch {k} of step {step}", ())
            self._run_pipeline(self.local.stage, step, [shard_pass])
            self.rehearsed = next(iter(self.losses()), None)
        self._end_hash()
        self._rehearsing = False
        if failure := self._failure():
            raise failure
        self._refuse_missing(f"micro-batch {k} of step {step}", self._names)
        self._compare_with_whole()

    @property
    def _is_hashed(self) -> bool:
        """Whether the gradient of this pass is hashed."""
        return self._rehearsing or (self._pass.k == self._hash_leaf and self._pass.counts)

    def _end_hash(self) -> None:
        if self._is_hashed:
            self.hashed_gradient = total_of(self._word_sums)

    def _failure(self) -> Exception | None:
        return self.groups.failure or self._reducer.failure

    def _collect_parameters(self) -> None:
        self._names = [name for name, p in self.local.local_params.items() if p.requires_grad]
        self._sharded = [cast(Any, p) for p in self.local.module.parameters() if p.requires_grad]
        self.parameters = [self.local.local_params[name] for name in self._names]

    def _follow_requires_grad(self) -> None:
        """Train the layers that are not frozen now, equal on all ranks. Collective in a new
        generation and after changes."""
        pairs, wait = (
            list(
                zip(self.local.local_params.values(), self.local.module.parameters(), strict=True)
            ),
            self.groups.waits.wait,
        )
        trained = [q.requires_grad for _, q in pairs]
        has_changed = trained != [name in self._names for name in self.local.local_params]
        if self.local.stage or (self._is_compared and not has_changed):
            return
        names = list(compress(self.local.local_params, trained))
        refuse_different_parameters(
            gather_json(dist.get_world_size(), hash_of(names), wait), names, wait
        )
        self._is_compared = True
        if has_changed:
            for p, q in pairs:
                p.grad = q.grad = None
                p.requires_grad_(q.requires_grad)
            self._collect_parameters()

    def _refuse_missing(self, where: str, names: Container[str]) -> None:
        """UsageError when a parameter of `names` has no gradient."""
        missing = [
            name
            for name, p in zip(self._names, self._sharded, strict=True)
            if name in names and p.grad is None
        ]
        if missing or not self._backwards:
            raise UsageError(
                f"no gradient arrived for {len(missing)} of {len(self._names)} parameters in {where}: {join_names(missing)}",
                "session.backward(loss)" if self._backwards else "backward() was not called",
                UNUSED_HINT
                if self._backwards
                else "call session.backward(loss) once for every micro-batch",
            )

    def _compare_with_whole(self) -> None:
        if self.local.plan_check and self.local.plan_check.is_due:
            self.local.plan_check.compare()

    def _run_pipeline(self, stage: PipelineStage, step: int, passes: list[ShardPass]) -> None:
        def backward(
            outputs: list[Tensor], gradients: Sequence[Tensor] | None, micro: int, chunk: int
        ) -> None:
            self._pass = passes[micro]
            self._reduced_units.clear()
            names = {name for name in self._names if stage.holds(chunk, name)}
            for name, p in zip(self._names, self._sharded, strict=True):
                p.grad = None if name in names else p.grad
            if outputs:
                torch.autograd.backward(outputs, gradients)
            self._refuse_missing(f"micro-batch {self._pass.k} of step {step}", names)

        def after_forward(k: int) -> None:
            tensor_group = self.groups.tensor_group
            self.statistics.end_micro_batch(
                k,
                counts=k in self.own_leaves and (tensor_group is None or tensor_group.rank() == 0),
            )

        forward = ChunkForward(
            self.local.module,
            stage,
            self._pending,
            (self.seed, step),
            self.parameters[0].device,
            after_forward,
        )
        losses = PipelineRunner(forward, self.groups, backward).step(len(passes))
        self._losses = [
            loss for loss, shard_pass in zip(losses, passes, strict=False) if shard_pass.counts
        ]

    def _sum_shared_gradients(self) -> None:
        """Collective. Sum gradients that are partial over the tensor axis or tied across stages."""
        stage, gradients = (
            self.local.stage,
            {name: p.grad for name, p in self.local.local_params.items()},
        )
        for name in self.local.partial_grads:
            if (gradient := gradients[name]) is not None:
                self.groups.all_reduce_in_order(gradient, self.groups.tensor_group)
        for name in (*stage.borrowed, *stage.lent) if stage else ():
            if (gradient := gradients[name]) is not None:
                self.groups.all_reduce(gradient, self.groups.tied_group)
        self.groups.raise_failure()

    def grad_norm_squared(self) -> Tensor:
        return norm_squared_of_slices(self.local, self.groups, is_scaled=self._scaled)

    def is_gradient_finite(self) -> bool:
        """Return True: grad_norm_squared shows infinities and NaN."""
        return True

    def digest(self) -> int:
        return digest_of(self.parameters)

    def measured_s(self) -> tuple[float, float] | None:
        """See Replica; None in pipelines, with tensor parallelism, and on a GPU: not measured."""
        return (
            None
            if self._micro_batch_s is None
            else (self._micro_batch_s, self._reducer.exposed_s())
        )

    def exposed_s(self) -> float:
        """Return the seconds this step waited for parameters, and after its last gradient."""
        return self.groups.waited_s + self._reducer.exposed_s()

    def __enter__(self) -> ShardedReplica:
        return self

    def __exit__(self, *_: object) -> None:
        self._reducer.close()
        self.groups.clear()

    # -- FSDP's collectives ------------------------------------------------------------------------

    def _on_gradients(self, unit: int, out: Tensor) -> None:
        """FSDP's hook after a unit's backward pass: queue its gradients."""
        sent = self._captured.pop() if self._captured else out
        if unit in self._reduced_units:
            names = {id(module): name for name, module in self.local.module.named_modules()}
            what = f"{names[id(self.local.fsdp_units[unit])] or 'the model'} ran more than once in micro-batch {self._pass.k}"
            hint = "leave it out of the units that are gathered one by one: session.prepare(..., units=...), () for none"
            raise UsageError(what, f"layout {self.local.layout}", hint)
        self._reduced_units.add(unit)
        if self._is_hashed:
            self._word_sums.append(word_sum(sent))
        if self._rehearsing:
            self.rehearsed_finite = self.rehearsed_finite and bool(sent.isfinite().all())
            return
        if self._skipping:
            sent.zero_()
        if (
            sent.is_cuda
        ):  # FSDP reuses the memory after its reduce-scatter, without a wait for this exchange
            sent.record_stream(torch.cuda.current_stream(sent.device))
        self._reducer.submit(partial(self._reduce, UnitGradients(unit, self._pass, sent, out)))

    def _reduce(self, gradients: UnitGradients) -> None:
        """Collective. Add a pass to the unit's tree; after the last one write the sum to `out`."""
        if self.groups.failure is not None or not self.groups.formed:
            return
        self.groups.board.enter_collective(gradients.sent.nbytes)
        if self._wire_sums:
            return reduce_encoded(
                gradients, self._wire_sums[gradients.unit], self.groups, self.traffic
            )
        tree = self._trees[gradients.unit]
        if not self.reduce_once_per_step:
            add_rows(gradients, tree, self.groups)
        elif gradients.shard_pass.counts:
            tree.add(Subtree(gradients.shard_pass.k, 1), PartialSum(gradients.sent))
        if not gradients.shard_pass.last:
            return
        if self.reduce_once_per_step:
            tree = exchange_rows(
                tree, self.groups, self.traffic, gradients.unit, self.replica_leaves
            )
        if self._replica_group is None:
            gradients.out.copy_(tree.total().tensor)
        else:
            partials = [(subtree, part.tensor) for subtree, part in tree.stack]
            waits = self.groups.waits
            tree_all_reduce(
                partials,
                self.shares,
                self._replica_group,
                gradients.out,
                waits,
                self.traffic,
                gradients.unit,
            )
