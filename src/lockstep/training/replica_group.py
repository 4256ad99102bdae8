"""The replicas of a run as one object: every replica commits a step, or all of them retry it.

    for k in replicas.micro_batches(step):
        replicas.backward(loss_of(replicas(inputs)))     of micro-batch k
    optimizer.step()                                     runs once per step, on every live replica

The `for` ends when all ranks have voted for the complete gradient. When a replica is lost before,
the others form the next generation and repeat the `for` with new shares of the micro-batches. If a
rank dies during the vote, some ranks may miss the result: they learn it when the next generation
forms, and commit then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn

from lockstep.checkpoint.state_dict import model_name, unwrap_model
from lockstep.data.order import splitmix64
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import STOP_REQUEST, StepDecision, find_divergent_ranks
from lockstep.elastic.fault_injection import FaultInjectingBoard, flip_bit
from lockstep.elastic.runtime import ElasticRuntime, record_event
from lockstep.elastic.world import Progress, decision_before, transfer_roles
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.layout import Layout
from lockstep.network.bucket_sizes import default_bucket_size
from lockstep.network.wire_format import Wire, wire_conflict
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.gradient_watch import Unused
from lockstep.parallel.groups import Connection
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.parallel.running_statistics import (
    BufferKinds,
    RunningStatistics,
    replace_sync_batchnorm,
)
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.signals import HostDrained, Stopped, StopSignals
from lockstep.runtime.work import static_group
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.divergence import STATE, ReplicaComparison, ReplicaState
from lockstep.training.leaves import Leaves
from lockstep.training.rehearsal import Rehearsal
from lockstep.training.share_balance import ShareBalance
from lockstep.training.state_transfer import StateMismatchError, transfer_state
from lockstep.training.step_runner import Ballot, Carried, StepRunner
from lockstep.training.update_checks import UpdateChecks
from lockstep.units import format_duration

if TYPE_CHECKING:
    from lockstep.training.rollback import SkippedMicroBatches

log = logging.getLogger("lockstep")

LINGER_S = 1.0  # a leaving worker may hold the store over which the others form their group


class ReplicaOptions(TypedDict, total=False):
    """The arguments of a ReplicaGroup that are also those of a Session."""

    wire: Wire
    bucket_bytes: int
    verify_every: int
    rehearse: bool
    on_nonfinite: Literal["raise", "ignore"]
    buffers: BufferKinds
    unused: Unused
    balance: Literal["auto", "off"]
    reduce_once_per_step: bool


class ReplicaGroup:
    """`model` trained by all replicas together. Only under an agent it recovers from lost workers.

    model          a module, of which each worker has a whole replica; or the part of it that this
                   worker holds (parallel/parallelize.py)
    checkpointer   provides the state for a worker that joins; None: no worker can join
    micro_batches, seed, wire  see Replica; reduce_once_per_step: UnitSource
    bucket_bytes   see Replica; 0: 100 MB on a GPU, 25 MB on a CPU
    signals        stop signals for the loop to act on. None: the group saves and ends the loop
    tracker        writes the metrics that a lost rank 0 did not write
    verify_every   steps between two comparisons of all replicas' weights; 0: never. At 1 a gradient
                   of a replica whose weights differ is never used; above that all replicas return
                   to a checkpoint when one differs. The state is always compared before a save
    rehearse       run micro-batch 0 once more in the first step of a start and after a join;
                   errors when loss or gradient differ between ranks, or from the run that saved
                   the checkpoint
    on_nonfinite   loss or gradient not finite: "raise" before the update; "ignore", for a
                   GradScaler
    buffers        what forward passes may change besides BatchNorm's statistics: RunningStatistics
    unused         a trained parameter without a gradient in a micro-batch: "raise", or "zero" for a
                   gradient of zero there, and in a step that does not use it at all
    balance        "auto": fast replicas compute more micro-batches than slow ones (ShareBalance)
    rollback       micro-batches to skip, and the rule to find them; None: none
    leaves         of the sum, by default micro-batches
    carried        what each leaf passes on to the next step
    """

    def __init__(  # many independent options, all by keyword and with defaults
        self,
        runtime: ElasticRuntime,
        model: nn.Module | LocalModel,
        checkpointer: Checkpointer | None = None,
        *,
        micro_batches: int,
        seed: int = 0,
        wire: Wire = "fp32",
        bucket_bytes: int = 0,
        signals: StopSignals | None = None,
        tracker: Tracker | BackgroundTracker | None = None,
        verify_every: int = 1,
        reduce_once_per_step: bool = False,
        rehearse: bool = True,
        on_nonfinite: Literal["raise", "ignore"] = "raise",
        buffers: BufferKinds | None = None,
        unused: Unused = "raise",
        balance: Literal["auto", "off"] = "auto",
        rollback: SkippedMicroBatches | None = None,
        leaves: Leaves | None = None,
        carried: Sequence[Carried] = (),
    ) -> None:
        if checkpointer:
            refuse_other_checkpointer(checkpointer, runtime, model)
        runtime.register(self)
        self.runtime = runtime
        self.checkpointer = checkpointer
        self.tracker = tracker
        self.on_nonfinite = on_nonfinite
        leaves = leaves or Leaves(micro_batches)
        self.commit_steps = leaves.steps
        module, self.local_model = unwrap_local_model(model)
        layout = self.local_model.layout if self.local_model else Layout(1)
        if conflict := wire_conflict(wire, layout.tensor, layout.pipeline, reduce_once_per_step):
            raise UsageError(*conflict)
        replace_sync_batchnorm(module)
        self.replica = leaves.build_replica(
            self.local_model or module,
            bucket_bytes=bucket_bytes or default_bucket_size(runtime.world.device.type),
            reduce_once_per_step=reduce_once_per_step,
            wire=wire,
            micro_batches=micro_batches,
            seed=seed,
            statistics=RunningStatistics(module, micro_batches, buffers or {}),
            unused=unused,
            init_sync=runtime.first_generation,
            connection=Connection(
                runtime.board,
                static_group if runtime.is_static else runtime.generation_error,
                runtime.group.track_subgroups,
            ),
        )
        if rollback:
            rollback.refuse_unsupported(
                {"a pipeline": layout.pipeline > 1, "DiLoCo learners": leaves.divisor > 0}
            )
        state = ReplicaState(
            self.replica, self.local_model, checkpointer, self.commit_steps * max(1, verify_every)
        )
        comparison = ReplicaComparison(runtime, checkpointer, state, verify_every)
        self.stops = signals is None and not runtime.is_static
        # Those of this group until the process exits.
        signals = StopSignals().__enter__() if self.stops else signals
        self.runner = StepRunner(
            runtime,
            self.replica,
            state,
            comparison,
            Ballot(runtime, checkpointer, signals),
            ShareBalance(runtime, self.replica, layout.shard, enabled=balance == "auto"),
            leaves.watch_changes(nn.Module() if self.local_model else module, checkpointer),
            Rehearsal(runtime, self.replica, comparison, checkpointer, self._save_before_exit)
            if rehearse
            else None,
            rollback,
            carried,
            leaves.divisor,
        )
        self.updates = UpdateChecks(checkpointer.optimizers if checkpointer else ())
        self.decision = decision_before(
            runtime.member_progress, checkpointer.facts if checkpointer else {}
        )
        self.in_step = False
        self.step = -1  # the newest that was started
        self.last_step = -1  # the newest that this group has committed
        self.attempt = 0  # at the newest step: its number, from 1
        if checkpointer:
            checkpointer.compare_before_saving(self.replicas_identical)
        runtime.set_stop_signal(self.runner.ballot.received)
        if isinstance(runtime.board, FaultInjectingBoard):
            frozen = state.frozen_state.frozen
            weights = [p for p in (*self.replica.parameters, *frozen) if p.numel()]
            runtime.board.set_flip(partial(flip_bit, weights))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass."""
        return self.replica(*inputs, **named)

    def backward(
        self,
        loss: torch.Tensor,
        count: int | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        samples: Sequence[int] = (),
    ) -> None:
        """Run the backward pass of a micro-batch; its loss becomes part of the vote.

        count    number of samples or tokens that `loss` sums over: the step's gradient and loss are
                 divided by the total count of the step. For all micro-batches of a step, or none
        scaler   scales the gradient, not the recorded loss; only in replicas and shards
        samples  numbers of samples that `loss` is the mean over. UsageError, on all ranks, if they
                 differ in a step
        """
        layout = self.replica.groups.layout
        if scaler and layout.tensor * layout.pipeline > 1:
            raise UsageError(
                f"scaler is not supported with the layout {layout}",
                "session.backward(loss, ...)",
                "train with whole replicas or shards, or scale the gradient yourself",
            )
        self.runner.ballot.add(count, samples, counts=self.replica.counts)
        self.updates.set_scaler(scaler)
        self.replica.backward(loss, scaler)

    def __enter__(self) -> ReplicaGroup:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.runtime.unregister(self)
        self.updates.close()
        self.replica.__exit__()
        if kind is None:
            self._refuse_unfinished()

    @property
    def loss(self) -> float:
        """The step's losses summed over all replicas; with counts, divided by the total count."""
        return self.decision.loss / (self.decision.count or self.decision.trained_share)

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield this replica's micro-batches of `step`, until the step is committed.

        UsageError at the next step or save, without gradients, if the loop ends early (break, or
        zip with something shorter); and for a second loop in one step.
        """
        self._begin(step)
        runner = self.runner
        try:
            while True:
                self.attempt += 1
                trained_s = self.runtime.ledger.spent("training", time.monotonic())
                with self.runtime.catch_peer_loss() as lost:
                    yield from runner.passes(step)
                    decision = runner.vote(step)
                    if decision and (rollback := runner.suspicion(step, decision)):
                        self.runtime.count_as_lost(trained_s)
                        yield from rollback.measure(step, self.replica, runner.ballot.counts)
                        continue
                    if decision:
                        self._commit(step, decision)
                        break
                if not runner.has_voted:
                    self.runtime.count_as_lost(trained_s)
                if self._regroup(step, lost.why or "replicas differ"):
                    break
            if self.checkpointer:
                self.checkpointer.attributes.end_loop(self.replica.statistics.names)
        except GeneratorExit:
            for p in self.replica.parameters:
                p.grad = None
            raise
        self.in_step = False
        self.last_step = step

    def _begin(self, step: int) -> None:
        """Collective where members change. Begin a step, or end the loop that was asked to stop."""
        self._refuse_unfinished()
        if step == self.last_step:
            raise UsageError(
                f"a second micro-batch loop in step {step + 1}: "
                "it would drop the gradient of the first",
                "loader(step) or session.micro_batches(step), called twice",
                "add the losses of each micro-batch in one loop",
            )
        self.runtime.set_progress(self._progress(step))
        self.attempt = 0
        if self.stops and self.decision.stop:
            self._stop(step)
        if self.decision.regroup and not self.runtime.is_static:
            self._regroup(step, "members change")
        self.runtime.ledger.switch("training", time.monotonic())
        self.in_step = True
        self.step = step
        if self.checkpointer:
            self.checkpointer.begin_step(step)
            self.checkpointer.attributes.begin_loop()

    def _refuse_unfinished(self) -> None:
        if self.in_step:
            raise UsageError(
                f"the micro-batch loop of step {self.step + 1} ended early",
                "by break, by zip, or by a second micro-batch loop inside it",
                "take every micro-batch that loader(step) gives; the first step of a start gives "
                "one more (docs/loop.md). With two loaders: "
                "`for k in session.micro_batches(step)`, and batch(step, k) of each loader",
            )

    def _stop(self, step: int) -> None:
        """Save and end a loop that does not handle stop signals itself."""
        if self.checkpointer:
            self.checkpointer.save(step)
            self.checkpointer.close()
        raise Stopped("" if self.decision.stop == STOP_REQUEST else self.decision.stop)

    def _save_before_exit(self, step: int) -> None:
        """Collective. Save the state before `step`. A joiner counts the step that it received as
        saved."""
        if self.checkpointer is None or not step:
            return
        self.in_step = False
        self.runtime.exchange_progress()  # a member that was late is in this step, too
        if any(all_gather_json(self.runtime, self.checkpointer.saved_step != step)):
            self.checkpointer.save(step, {"loss": self.loss}, again=True)
        self.checkpointer.close()

    def _commit(self, step: int, decision: StepDecision) -> None:
        """Commit `step`, which all ranks have agreed on."""
        replica, squared = self.replica, self.runner.squared
        if self.on_nonfinite != "ignore":
            self.runner.refuse_nonfinite(step, decision)
        self.runner.commit(step, decision)
        self.runtime.board.enter("updating")
        # All members exchange it when a generation forms.
        self.decision = replace(decision, micro_batch_us=())
        if self.checkpointer:
            self.checkpointer.drop_save_request()
        self.runtime.set_progress(self._progress(step + self.commit_steps))
        # All replicas draw the same numbers later, although they computed different micro-batches.
        key = splitmix64(replica.seed, step, replica.leaves)
        seed_generators(key >> 1, self.runtime.world.device)
        divisor = self.runner.divisor or decision.count or decision.trained_share
        self.updates.set_gradient(commit_gradient(replica.parameters, squared, divisor))

    def _progress(self, step: int) -> Progress:
        comparison, rehearsal = self.runner.comparison, self.runner.rehearsal
        return Progress(
            "step",
            step,
            self.decision,
            comparison.divergence.count,
            comparison.compare_all,
            rehearsal is not None and rehearsal.is_due,
        )

    def replicas_identical(self, step: int) -> bool:
        """Collective. See ReplicaComparison.compare_state."""
        self._refuse_unfinished()
        return self.runner.comparison.compare_state(step)

    def _regroup(self, step: int, why: str) -> bool:
        """Collective. Form the next generation; return whether others have committed `step`."""
        runtime, start_s = self.runtime, time.monotonic()
        before = runtime.ledger.switch("regrouping", start_s)
        runtime.board.enter("joining")
        self.replica.release_groups()
        self._form_next_generation(step, why)
        world, members = runtime.world, runtime.member_progress
        newest, sources, joined = transfer_roles(members)
        seconds = time.monotonic() - start_s
        runtime.ledger.switch(before, time.monotonic())
        self._record_generation(newest, joined, seconds)
        missed = newest != step
        if missed:
            decision = members[sources[0]].decision
            has_voted = self.runner.has_voted
            # Only one step can be committed late: its gradient is complete here, since this worker
            # voted.
            if newest != step + self.commit_steps or not has_voted or decision is None:
                raise PeersLostError(
                    f"this worker is in step {step + 1}, the others in {newest + 1}",
                    world.members[world.rank],
                )
            self._commit(step, replace(decision, regroup=False))
        else:
            self.decision = replace(self.decision, regroup=False)
            if self.checkpointer:
                self.checkpointer.retry_save(step)
        self.runner.follow_members(members, joined)
        return missed

    def _record_generation(self, step: int, joined: list[int], seconds: float) -> None:
        """Tell the user and events.jsonl which workers continue, with which attempt at `step`."""
        runtime = self.runtime
        world = runtime.world
        if runtime.shows_progress():
            workers = f"{world.size} {'worker' if world.size == 1 else 'workers'}"
            duration = format_duration(seconds)
            log.warning("%s; continuing with %s after %s", world.reason, workers, duration)
        if world.leader:
            record_event(
                runtime,
                "regrouped",
                why=world.reason,
                workers=list(world.members),
                joined=joined,
                step=step,
                attempt=self.attempt + 1 if step == self.step else 1,
                seconds=round(seconds, 4),
            )

    def _form_next_generation(self, step: int, why: str) -> None:
        """Collective. Form the next group and send the state to its joiners, until both succeed.
        HostDrained when this worker leaves."""
        runtime, checkpointer = self.runtime, self.checkpointer
        comparison, size = self.runner.comparison, self.replica.workers_per_replica
        is_leaving = self.runner.ballot.is_leaving

        def synchronize() -> None:
            if self.tracker:
                self.tracker.take_over(step + 1)
            try:
                transfer_state(
                    runtime,
                    checkpointer.state_dict if checkpointer else None,
                    size,
                    partial(comparison.state.digest, STATE),
                    checkpointer.attributes if checkpointer else None,
                )
            except StateMismatchError as error:
                divergent = find_divergent_ranks(error.digests, size)
                newest = transfer_roles(runtime.member_progress)[0]
                comparison.evict(newest, divergent, error.digests, STATE)
                raise

        try:
            reason = "its host is taken away" if is_leaving else why
            runtime.retry_across_generations(synchronize, reason, leaving=is_leaving)
        except FencedError:
            if not is_leaving:
                raise
            time.sleep(LINGER_S)
            raise HostDrained from None


def refuse_other_checkpointer(
    checkpointer: Checkpointer, runtime: ElasticRuntime, model: nn.Module | LocalModel
) -> None:
    """UsageError when the checkpointer saves another model than the group trains."""
    module, local_model = unwrap_local_model(model)
    same = local_model is not None or (
        isinstance(checkpointer.model, nn.Module)
        and unwrap_model(checkpointer.model) is unwrap_model(module)
    )
    if (
        checkpointer.runtime is not runtime
        or checkpointer.local_model is not local_model
        or not same
    ):
        raise UsageError(
            f"the ReplicaGroup trains {model_name(module)}, "
            f"the Checkpointer saves another {model_name(checkpointer.model)}",
            "Checkpointer(folder, runtime, model, ...) and ReplicaGroup(runtime, model, ...)",
            "give the same ElasticRuntime and module to both",
        )
    checkpointer.refuse_unsaved_parameters()
