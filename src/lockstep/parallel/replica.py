"""A replica of the model, one of several: whole, or split over several workers.

The gradients of the K micro-batches of a step are added in the tree of ordered_sum.py, for any
number of replicas and shards. The replica runs the passes: random numbers, losses, hashes,
statistics and failures of each; its source (gradient_source.py) adds up the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.order import splitmix64
from lockstep.errors import PeersLostError, UsageError
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.parallel.digest import Digest, start_digest
from lockstep.parallel.gradient_source import GradientSource, Pass, PassPhase, StepPlan, plan_passes
from lockstep.parallel.reducer import seconds_between, time_mark
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.torch_private import own_buffers


def do_nothing() -> None: ...


class PassResult(NamedTuple):
    """The result of a micro-batch that was computed alone, on this worker.

    loss  None: another stage has it
    hash  64 bits over the gradient
    """

    loss: float | None = None
    is_finite: bool = True
    hash: int | None = None


class StepResults(NamedTuple):
    """The results of a step on one worker, for its vote.

    losses     by micro-batch; {} where another worker has them
    is_finite  its part of the gradient; False also if its sum overflows, or the norm is not finite
    digests    that were asked for
    """

    losses: dict[int, float]
    is_finite: bool
    digests: list[int]


class Replica:
    """The passes of a replica on one worker, with sums of the same bits for any number of workers.

    module         whose forward passes run
    micro_batches  K of a step, over all replicas; at least the number of shards of all replicas
    seed           of the randomness within the model, keyed by (seed, step, micro-batch)
    statistics     of BatchNorm layers; None: the model has none
    """

    def __init__(
        self,
        source: GradientSource,
        module: nn.Module,
        *,
        micro_batches: int,
        seed: int = 0,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self.source = source
        self.groups = source.groups
        self.module = module
        self.leaves = micro_batches
        self.seed = seed
        self.statistics = statistics or RunningStatistics(nn.Module(), micro_batches, {})
        self.own_leaves: list[int] = []  # micro-batches of this worker in the newest step
        self.hashed = PassResult()  # of the newest pass that was rehearsed, or hashed in its step
        self._hash_leaf: int | None = None  # the micro-batch whose gradient is hashed
        self._losses: dict[int, Tensor] = {}  # by micro-batch
        self._is_scaled = False  # the gradient of the step, by a GradScaler
        self._computed: tuple[Any, Any] | None = None  # marks around the passes of the step
        self._is_agreed = False  # the ranks of this generation train the same parameters

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.source.parameters

    @property
    def workers_per_replica(self) -> int:
        return self.groups.layout.workers_per_replica

    @property
    def counts(self) -> bool:
        """Whether the current micro-batch is this worker's, and not skipped; False: it only joins
        the collectives."""
        return self.source.now.counts and self.source.phase is not PassPhase.SKIPPING

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward pass; in a pipeline, only store the inputs."""
        return self.source.forward(*inputs, **named)

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Run the backward pass of a micro-batch, scaled, and keep its unscaled loss."""
        self.groups.board.enter("backward")
        self._is_scaled = scaler is not None
        self.source.backward(scaler.scale(loss) if scaler else loss)
        if self.counts:
            self._losses[self.source.now.k] = loss.detach()

    def losses(self) -> dict[int, float]:
        """Return the losses by micro-batch, {} where another worker has them."""
        return self.results().losses

    def results(self, squared: Tensor | None = None, digests: Sequence[Digest] = ()) -> StepResults:
        """Return the results of the newest step, in one copy to the host. squared: norm of the
        gradient."""
        _, layout, at = self.groups.position
        is_elsewhere = at.tensor or at.stage < layout.pipeline - 1
        losses = {} if is_elsewhere else self._losses
        checked = [*self.source.slice_sums, *([] if squared is None else [squared])]
        device = self.parameters[0].device  # a loop may compute its loss elsewhere
        parts = [torch.stack(part).flatten() for part in ([*losses.values()], checked) if part]
        parts = [part.double().to(device).view(torch.int64) for part in parts]
        on_device = [d.device.reshape(1).to(device) for d in digests if d.device is not None]
        together = torch.cat([*parts, *on_device]).cpu() if parts or on_device else torch.tensor([])
        count = len(losses) + len(checked)
        values = together[:count].view(torch.float64).tolist()
        read = iter(together[count:].tolist())
        return StepResults(
            dict(zip(losses, values, strict=False)),
            all(map(math.isfinite, values[len(losses) :])),
            [Digest(d.host + (0 if d.device is None else next(read))).read() for d in digests],
        )

    def hash_gradient_of(self, leaf: int | None) -> None:
        """Set `hashed` in the next step, on the rank of this micro-batch; None: of none.
        Not in a pipeline; with tensor parallelism over this worker's part of it.
        """
        self._hash_leaf = leaf

    def micro_batches(
        self,
        step: int,
        meanwhile: Callable[[], None] = do_nothing,
        shares: tuple[int, ...] = (),
    ) -> Iterator[int]:
        """Collective. Yield this worker's micro-batches of `step`, each for forward and backward.

        After the loop .grad is the sum over all K micro-batches of all replicas, or this worker's
        rows of it.

        meanwhile  called after the last micro-batch, while gradients are still being sent
        shares     number of micro-batches by replica, the same on all ranks; (): equal shares
        """
        self._prepare()
        shares, leaves = self._deal(shares)
        yield from self.sum_leaves(step, shares, leaves, meanwhile=meanwhile)

    def _deal(self, shares: tuple[int, ...] = ()) -> tuple[tuple[int, ...], list[int]]:
        """Return the shares, equal ones for (), and the micro-batches of this replica."""
        _, layout, at = self.groups.position
        shares = shares or equal_shares(layout.replicate, self.leaves)
        if len(leaves := leaves_of_rank(at.replica, shares)) < self.source.shards:
            raise UsageError(
                f"{layout.data_parallel_size} shards of all replicas are running, "
                f"a step has {self.leaves} micro-batches",
                "each shard needs at least one micro-batch",
                f"start fewer replicas, or set micro_batches={layout.data_parallel_size}",
            )
        return shares, leaves

    def _plan(self, leaves: list[int]) -> list[Pass]:
        """Return this worker's passes over the micro-batches of its replica."""
        source = self.source
        shard = min(self.groups.position.at.shard, source.shards - 1)
        passes = plan_passes(
            leaves, shard, source.shards, reduce_once_per_step=source.reduce_once_per_step
        )
        self.own_leaves = [now.k for now in passes if now.counts]
        return passes

    def _prepare(self) -> None:
        """Collective in a new generation, and after changes of the trained parameters."""
        if not self.groups.formed:
            self.groups.form()
        self.source.reset()
        if self.source.follow_parameters() or not self._is_agreed:
            self.source.agree()
            self._is_agreed = True

    def sum_leaves(
        self,
        step: int,
        shares: tuple[int, ...],
        leaves: list[int],
        first: int = 0,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Iterator[int]:
        """Collective. Yield this worker's part of `leaves`; then .grad is the sum over all leaves.
        first: number in the step of leaf 0."""
        source = self.source
        passes = self._plan(leaves)
        group = self.groups.replica_group if len(shares) > 1 else None
        self._losses = {}
        self.groups.waited_s = 0.0
        self.statistics.start_step()
        source.start_step(StepPlan((self.seed, step), shares, leaves, passes, group))
        # Statistics are summed over tensor ranks too, which have the same: the first one gives
        # them.
        takes_buffers = source.runs_at_once and self.groups.position.at.tensor == 0
        start = time_mark(self.parameters[0].device)
        for now in passes:
            k = first + now.k
            is_hashed = now.counts and k == self._hash_leaf
            self._start_pass(step, k, now, PassPhase.TRAINING, is_hashed=is_hashed)
            yield k
            self._end_pass()
            if is_hashed:
                self.hashed = PassResult(hash=source.pass_hash())
            self.statistics.end_micro_batch(now.k, counts=takes_buffers and now.counts)
        losses = source.run_passes(self.statistics)
        if losses is not None:
            self._losses = dict(zip(self.own_leaves, losses, strict=False))
        if source.measures_passes:
            self._computed = start, time_mark(self.parameters[0].device)
        meanwhile()
        source.reducer.drain()
        self._raise_failure()
        # Not of other stages, which have other buffers.
        for axis_group in (self.groups.tensor_group, self.groups.gather_group, group):
            if axis_group is not None:
                self.statistics.exchange(axis_group, self.groups.waits.wait)
        source.finish_step()

    def _start_pass(
        self, step: int, k: int, now: Pass, phase: PassPhase, *, is_hashed: bool
    ) -> None:
        seed_generators(splitmix64(self.seed, step, k) >> 1, self.parameters[0].device)
        self.source.start_pass(
            now, phase, f"micro-batch {k} of step {step + 1}", is_hashed=is_hashed
        )

    def _end_pass(self) -> None:
        if reason := self.groups.waits.generation_error():
            raise PeersLostError(reason, "Replica.micro_batches")
        self._raise_failure()
        self.source.end_pass()

    def _raise_failure(self) -> None:
        if failure := self.groups.failure or self.source.reducer.failure:
            raise failure

    def rehearsal(self, step: int, k: int = 0) -> Iterator[int]:
        """Collective. Yield micro-batch `k` of `step` on every worker; then restore buffers, drop
        gradients."""
        self._prepare()
        self._plan(self._deal()[1])
        self._losses = {}
        with restored_buffers(self.module):
            now = Pass(k, True, (), False)
            self.source.start_step(StepPlan((self.seed, step), passes=[now]))
            self._start_pass(step, k, now, PassPhase.REHEARSING, is_hashed=True)
            yield k
            self._end_pass()
            losses = self.source.run_passes(self.statistics)
        losses = [*self._losses.values()] if losses is None else losses
        self._raise_failure()
        self.hashed = PassResult(
            float(losses[0]) if losses else None,
            self.source.is_pass_finite(),
            self.source.pass_hash(),
        )
        self.source.reset()

    def grad_norm_squared(self) -> Tensor | None:
        """Collective in the replica. Return the squared norm summed over its workers; None: this
        worker has the whole gradient."""
        return self.source.norm_squared(is_scaled=self._is_scaled)

    def digest(self) -> Digest:
        return start_digest(self.parameters)

    def measured_s(self) -> tuple[float, float] | None:
        """Return the mean seconds of the replica's micro-batches, without waiting for other ranks,
        and of the exchange after them. None: not measured."""
        if self._computed is None:
            return None
        reducer = self.source.reducer
        computed_s = seconds_between(*self._computed) - reducer.blocked_s
        count = len(self.source.plan.passes) * self.source.shards
        return computed_s / count, reducer.exposed_s()

    def exposed_s(self) -> float:
        """Return the seconds this step waited for parameters, and after its last gradient."""
        return self.groups.waited_s + self.source.reducer.exposed_s()

    def release_groups(self) -> None:
        """Release the groups of a generation that is over; the next step forms new ones."""
        self.groups.clear()
        self.source.release()
        self._is_agreed = False

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Give the buffers of a module the values that they had before, at the end."""
    holders = [own_buffers(m) for m in module.modules()]
    saved = [
        (holder, name, buffer, buffer.clone())
        for holder in holders
        for name, buffer in holder.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for holder, name, buffer, before in saved:
                holder[name] = buffer.copy_(before)
