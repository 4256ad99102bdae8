"""The gradients of a replica in slices, which FSDP2 gathers and reduces unit by unit.

FSDP2's two collectives are replaced (fsdp_units.py):

    all-gather      each shard sends its slice of a unit to the others, `prefetch_units` ahead
    reduce-scatter  micro-batches go to the shards of a replica in turn, so a pass of all shards
                    covers adjacent leaves of the tree in ordered_sum.py. Each shard receives its
                    rows of the gradients of all leaves of a pass and adds them in tree order. After
                    the last pass, workers with the same rows in other replicas finish the tree

So a shard's gradient is the same sum, in the same order, for any number of replicas and shards.
With `reduce_once_per_step` a shard keeps partial sums of whole gradients; the tree is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UsageError, refuse
from lockstep.network.pipeline_schedule import adjacent_blocks
from lockstep.parallel.digest import total_of, word_sum
from lockstep.parallel.fsdp_units import (
    CapturedReduceScatter,
    GroupAllGather,
    UnitOrder,
    fill_unused_gradients,
)
from lockstep.parallel.grad_norm import norm_squared_of_slices
from lockstep.parallel.gradient_source import GradientSource, Pass, PassPhase, StepPlan, SumOptions
from lockstep.parallel.groups import all_to_all_rows
from lockstep.parallel.ordered_sum import FlatSum, merged_subtrees, start_exchange
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.wire_sum import sum_in_format
from lockstep.runtime.torch_private import fsdp_shard_rows

UNITS_IN_FLIGHT = 2  # each takes the memory of a whole unit


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one unit in flight.

    sent  (S * n,), slice j for shard j
    out   (n,), for the sum of this shard's rows
    """

    unit: int
    now: Pass
    sent: Tensor
    out: Tensor


class UnitSource(GradientSource):
    """The units of this worker's part of a model (parallelize.py)."""

    def __init__(self, local: LocalModel, options: SumOptions) -> None:
        self.local = local
        self._collect_parameters()
        reducer = Reducer(
            self.parameters[0].device,
            local.groups.waits.generation_error,
            UNITS_IN_FLIGHT,
            side_stream=False,
        )
        super().__init__(local.groups, reducer, options)
        self.reduce_once_per_step = options.reduce_once_per_step and local.layout.shard > 1
        self._sums: Sequence[FlatSum] = ()  # of the units
        self._captured: list[Tensor] = []
        self._reduced_units: set[int] = set()  # in this pass
        self._word_sums: list[Tensor] = []  # of the units of a pass that is hashed
        self._is_finite = True  # the pass that is rehearsed
        if options.unused == "zero":
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
        self._unit_order = self._watch_forward_passes()

    def _watch_forward_passes(self) -> UnitOrder:
        """Install the hooks of a forward pass that runs at once."""
        local = self.local
        for module in (local.module, *(cast(nn.Module, units[-1]) for units in local.averages)):
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_forward_hook(self._after_forward)
        name_of = {module: name for name, module in local.module.named_modules()}
        blocks = cast(Sequence[nn.Module], local.fsdp_units[:-1])
        return UnitOrder({name_of[block]: block for block in blocks})

    @property
    def measures_passes(self) -> bool:
        """On a GPU a pass includes waiting for other replicas; with tensor ranks for them."""
        return self.local.layout.tensor == 1 and self.reducer.device.type == "cpu"

    def _collect_parameters(self) -> None:
        self.names = [name for name, p in self.local.local_params.items() if p.requires_grad]
        self._sharded = [cast(Any, p) for p in self.local.module.parameters() if p.requires_grad]
        self.parameters = [self.local.local_params[name] for name in self.names]

    def reset(self) -> None:
        self.reducer.start_step()
        self.local.refuse_replaced()
        for p in (*self.parameters, *self._sharded):
            p.grad = None  # so that nothing in the micro-batches uses the gradient of the last step

    def follow_parameters(self) -> bool:
        """Train the layers that are not frozen now."""
        params = self.local.local_params
        pairs = list(zip(params.values(), self.local.module.parameters(), strict=True))
        if self.names == list(compress(params, [q.requires_grad for _, q in pairs])):
            return False
        for p, q in pairs:
            p.grad = q.grad = None
            p.requires_grad_(q.requires_grad)
        self._collect_parameters()
        return True

    def start_step(self, plan: StepPlan) -> None:
        super().start_step(plan)
        shards = self.local.layout.shard
        self._sums = [
            sum_in_format(
                self.options.wire, partial(fsdp_shard_rows, unit, shards), plan.key, plan.shares
            )
            for unit in self.local.fsdp_units
        ]

    def start_pass(self, now: Pass, phase: PassPhase, where: str, *, is_hashed: bool) -> None:
        super().start_pass(now, phase, where, is_hashed=is_hashed)
        for p in self._sharded:
            p.grad = None
        self._word_sums = []
        self._is_finite = True
        self._reduced_units.clear()
        self._unit_order.start(where)
        if now.last:
            self.groups.board.enter("reducing")

    def forward(self, *inputs: Any, **named: Any) -> Any:
        try:
            return self.local.module(*inputs, **named)
        except (RuntimeError, ValueError, TypeError, IndexError):
            if self.local.plan_check:  # names the layers that do not run when they are split
                self.local.plan_check.compare(complete=False)
            raise

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        """Form the groups; refuse a pass whose gradients would belong to no micro-batch."""
        is_trained = self.phase is not PassPhase.OUTSIDE and module is self.local.module
        if torch.is_grad_enabled() and not is_trained:
            raise UsageError(
                "a forward pass with gradients outside of the micro-batches, or of an average",
                f"{type(module).__name__}, layout {self.local.layout}",
                "use torch.no_grad() or session.evaluate there: the weights are in shards",
            )
        if not self.groups.formed:
            self.groups.form()

    def _refuse_foreign(self, module: nn.Module, _: Any) -> None:
        """UsageError when a unit is called with other parameters, in whose place FSDP would set
        its own."""
        refuse(
            self.local.foreign_parameters(module),
            f"{type(module).__name__} was called with other parameters, in shards:",
            "torch.func.functional_call, in whose place FSDP would use the parameters of the model",
            "move it into forward() of the model, around layers that are not gathered one by one "
            "(session.prepare(..., units=()) gathers all at once), or train with whole replicas",
        )

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        """Free the root's weights after a pass without gradients: a later one must gather new
        ones."""
        if torch.is_grad_enabled():
            self._unit_order.end()
            return
        cast(FSDPModule, module).reshard()
        if self.phase is PassPhase.OUTSIDE:
            self.groups.raise_failure()

    def backward(self, loss: Tensor) -> None:
        self.count_backward("backward")
        loss.backward()

    def end_pass(self) -> None:
        super().end_pass()
        self.refuse_missing(self._missing(self.names), self.where)
        if self.local.plan_check and self.local.plan_check.is_due:
            self.local.plan_check.compare()

    def _missing(self, names: Collection[str]) -> list[str]:
        """Return which of these parameters have no gradient."""
        pairs = zip(self.names, self._sharded, strict=True)
        return [name for name, p in pairs if p.grad is None and name in names]

    def finish_step(self) -> None:
        local = self.local
        self._sums = ()
        self.refuse_missing(self._missing(self.names), f"step {self.plan.key[1] + 1}")
        local.refuse_changes(self.names)
        for p, sharded in zip(self.parameters, self._sharded, strict=True):
            p.grad = sharded.grad.to_local()
        gradients = {name: cast(Tensor, local.local_params[name].grad) for name in self.names}
        if local.plan_check and local.plan_check.is_due:
            local.plan_check.refuse_unequal(gradients)
        # Partial over the tensor axis, or tied across stages.
        for name in local.partial_grads:
            if name in gradients:
                self.groups.all_reduce_in_order(gradients[name], self.groups.tensor_group)
        for name in (*local.stage.borrowed, *local.stage.lent) if local.stage else ():
            if name in gradients:
                self.groups.all_reduce(gradients[name], self.groups.tied_group)
        self.groups.raise_failure()

    def pass_hash(self) -> int:
        return total_of(self._word_sums)

    def is_pass_finite(self) -> bool:
        return self._is_finite

    def norm_squared(self, *, is_scaled: bool) -> Tensor:
        return norm_squared_of_slices(self.local, self.groups, is_scaled=is_scaled)

    def release(self) -> None:
        if self.local.plan_check:
            self.local.plan_check.stop()
        super().release()
        self._sums = ()

    def _on_gradients(self, unit: int, out: Tensor) -> None:
        """FSDP's hook after a unit's backward pass: queue its gradients."""
        sent = self._captured.pop() if self._captured else out
        if unit in self._reduced_units:
            names = {id(module): name for name, module in self.local.module.named_modules()}
            raise UsageError(
                f"{names[id(self.local.fsdp_units[unit])] or 'the model'} ran more "
                f"than once in micro-batch {self.now.k}",
                f"layout {self.local.layout}",
                "leave it out of the units that are gathered one by one: "
                "session.prepare(..., units=...), () for none",
            )
        self._reduced_units.add(unit)
        if self.is_hashed:
            self._word_sums.append(word_sum(sent))
        if self.phase is PassPhase.REHEARSING:
            self._is_finite = self._is_finite and bool(sent.isfinite().all())
            return
        if self.phase is PassPhase.SKIPPING:
            sent.zero_()
        if sent.is_cuda:
            # FSDP reuses the memory after its reduce-scatter, without a wait for this exchange.
            sent.record_stream(torch.cuda.current_stream(sent.device))
        self.reducer.submit(partial(self._reduce, UnitGradients(unit, self.now, sent, out)))

    def _reduce(self, gradients: UnitGradients) -> None:
        """Collective. Add a pass to the unit's tree; after the last one write the sum to `out`."""
        groups = self.groups
        now = gradients.now
        sent = gradients.sent
        if groups.failure is not None or not groups.formed:
            return
        groups.board.enter_collective(sent.nbytes)
        total, tag = self._sums[gradients.unit], gradients.unit
        if not self.reduce_once_per_step:
            rows = sent.view(groups.layout.shard, -1)
            parts = [total.encode(now.k, total.split(row)) for row in rows]
            received = all_to_all_rows(parts, groups.scatter_group, groups.waits, tag)
            # In the last pass some shards only repeat a micro-batch; what they send does not count.
            for k, part in zip(now.leaves, received, strict=False):
                total.add(k, part)
            if len(rows) > 1 and not now.last:
                total.compact()  # a view would keep the rows of all shards alive
        elif now.counts:
            total.add(now.k, sent)
        if not now.last:
            return
        if self.reduce_once_per_step:
            self._exchange_rows(total, tag)
        self.sum_up(total, gradients.out, tag)

    def _exchange_rows(self, total: FlatSum, tag: int) -> None:
        """Collective. Replace the shard's partial sums of whole gradients by the sums of its rows
        over all leaves of the replica."""
        shards, group = self.groups.layout.shard, self.groups.scatter_group
        assert group is not None
        sums = [(subtree, flat.view(shards, -1)) for subtree, flat in total.tree.stack]
        rows = {
            (shard, subtree): torch.empty_like(sums[0][1][0])
            # Which partial sums a shard has follows from its block: no shard has to announce them.
            for shard, block in enumerate(adjacent_blocks(self.plan.leaves, shards))
            for subtree in merged_subtrees(block)
        }
        own = group.rank()
        rows |= {(own, subtree): parts[own] for subtree, parts in sums}
        sends = [
            (shard, parts[shard]) for shard in range(shards) if shard != own for _, parts in sums
        ]
        receives = [(shard, row) for (shard, _), row in rows.items() if shard != own]
        works = start_exchange(sends, receives, group, tag)
        self.groups.waits.wait(works, group)
        total.replace([(subtree, row) for (_, subtree), row in rows.items()])
