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
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.data.order import splitmix64
from lockstep.elastic.collectives import all_gather_json, vote_on_step
from lockstep.elastic.consensus import (
    STOP_REQUEST,
    StepDecision,
    Vote,
    find_divergent_ranks,
    parse_count,
)
from lockstep.elastic.fault_injection import FaultInjectingBoard, flip_bit
from lockstep.elastic.progress import Progress, decision_before, transfer_roles
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.layout import Layout
from lockstep.network.wire_format import Wire
from lockstep.parallel.digest import DIGEST_FACTOR
from lockstep.parallel.frozen_state import FrozenState
from lockstep.parallel.grad_norm import StepGradient, commit_gradient
from lockstep.parallel.gradient_watch import Unused
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.parallel.replica import Replica
from lockstep.parallel.running_statistics import (
    BufferKinds,
    RunningStatistics,
    replace_sync_batchnorm,
)
from lockstep.record.events import append_event
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.device import default_bucket_bytes
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.signals import HostDrained, Stopped, StopSignals
from lockstep.training.build_replica import build_replica, refuse_other_checkpointer
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.divergence import ALL_WEIGHTS, STATE, WEIGHTS, ReplicaComparison
from lockstep.training.loop_changes import LoopChanges
from lockstep.training.nonfinite import refuse_nonfinite_gradient
from lockstep.training.rehearsal import Rehearsal
from lockstep.training.share_balance import ShareBalance
from lockstep.training.state_transfer import StateMismatchError, transfer_state
from lockstep.training.update_checks import names_by_memory, refuse_closure, refuse_new_memory
from lockstep.units import format_duration

if TYPE_CHECKING:
    from lockstep.training.rollback import SkippedMicroBatches

log = logging.getLogger("lockstep")

LINGER_S = 1.0  # a leaving worker may hold the store over which the others form their group


class Carried(Protocol):
    """What each attempt at a step collects on all workers, and its commit keeps."""

    def start_attempt(self) -> None: ...

    def exchange(
        self, group: dist.ProcessGroup | None, wait: Callable[[list[dist.Work | None]], None]
    ) -> None:
        """Collective, before the vote."""

    def commit(self) -> None: ...


class ReplicaGroup:
    """`model` trained by all replicas together. Only under an agent it recovers from lost workers.

    model          a module, of which each worker has a whole replica; or the part of it that this
                   worker holds (parallel/parallelize.py)
    checkpointer   provides the state for a worker that joins; None: no worker can join
    micro_batches, seed, wire  see Replica; reduce_once_per_step: ShardedReplica
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
    commit_steps   H: a leaf of the sum is a learner of H steps (learners.py); 0: it is a
                   micro-batch
    carried        what each micro-batch or learner passes on to the next step
    divisor        of the summed gradient, instead of the step's count; 0: the count
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
        commit_steps: int = 0,
        carried: Sequence[Carried] = (),
        divisor: int = 0,
    ) -> None:
        if checkpointer:
            refuse_other_checkpointer(checkpointer, runtime, model)
        runtime.register(self)
        self.runtime, self.board, self.checkpointer, self.tracker = (
            runtime,
            runtime.board,
            checkpointer,
            tracker,
        )
        self.rollback, self.trained = rollback, rollback.trained if rollback else lambda _: None
        self.on_nonfinite, self.commit_steps, (self.module, self.local_model) = (
            on_nonfinite,
            commit_steps or 1,
            unwrap_local_model(model),
        )
        replace_sync_batchnorm(self.module)
        self.statistics = RunningStatistics(self.module, micro_batches, buffers or {})
        self.replica = build_replica(
            runtime,
            model,
            bucket_bytes=bucket_bytes or default_bucket_bytes(runtime.world.device),
            reduce_once_per_step=reduce_once_per_step,
            has_learners=commit_steps > 0,
            wire=wire,
            micro_batches=micro_batches,
            seed=seed,
            statistics=self.statistics,
            unused=unused,
        )
        layout = self.local_model.layout if self.local_model else Layout(1)
        if rollback:
            rollback.refuse_unsupported(
                {"a pipeline": layout.pipeline > 1, "DiLoCo learners": commit_steps > 0}
            )
        self.rehearsal: Rehearsal | None = None
        if rehearse:
            saves = (
                None if commit_steps else checkpointer
            )  # a learner of DiLoCo has no gradient to record
            slices = (layout.tensor, layout.pipeline)
            self.rehearsal = Rehearsal(runtime, self.replica, saves, slices, self._save_before_exit)
        self.rehearsal_due = True  # a member is new, and has not rehearsed with the others
        self.balance = ShareBalance(runtime, self.replica, layout.shard, enabled=balance == "auto")
        self._trained, self.frozen_state = self.replica.parameters, self._make_frozen_state()
        self.loop_changes = LoopChanges(
            nn.Module() if self.local_model else self.module,
            checkpointer,
            has_learners=commit_steps > 0,
        )
        self.carried = carried
        self.divisor = divisor
        self._shared_memory = names_by_memory(self._modules()) if not self.local_model else set()
        self.compare_all = True  # the frozen weights of a new member have not been compared yet
        self.grad_norm_squared: torch.Tensor | None = None
        self.gradient = StepGradient((), None, 1, in_slices=False)  # of the last step
        optimizers = checkpointer.optimizers if checkpointer else ()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers
        ]
        self.scaler: torch.amp.GradScaler | None = None  # of the newest backward pass
        self.stops = signals is None and runtime.membership is not None
        self.signals = (
            StopSignals().__enter__() if self.stops else signals
        )  # until the process exits
        self.decision = decision_before(
            runtime.member_progress, checkpointer.facts if checkpointer else {}
        )
        self.last_step, self._stop_requested, self.leaving = (
            -1,
            False,
            False,
        )  # the newest step that this group has committed
        self.unfinished: int | None = None  # the step whose micro-batch loop has not ended
        self._counts: list[int | None] = []  # of this step's micro-batches
        self._samples: list[int] = []  # of those whose loss is a mean
        self.comparison = ReplicaComparison(
            runtime,
            checkpointer,
            replica_size=self.replica.workers_per_replica,
            verify_every=verify_every,
            get_digest=self._digest,
            get_state=self._state_dict,
            get_common=checkpointer.common_state if checkpointer else dict,
        )
        if checkpointer:
            checkpointer.compare_before_saving(self.replicas_identical)
        runtime.set_stop_signal(lambda: self.signals.received if self.signals else "")
        if isinstance(self.board, FaultInjectingBoard):
            weights = [
                p for p in (*self.replica.parameters, *self.frozen_state.frozen) if p.numel()
            ]
            self.board.set_flip(partial(flip_bit, weights))

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

        count   number of samples or tokens that `loss` sums over: the step's gradient and loss are
                divided by the total count of the step. For all micro-batches of a step, or for none
        scaler  scales the gradient, not the recorded loss; only in replicas and shards
        samples  numbers of samples that `loss` is the mean over. UsageError, on all ranks, if they
                 differ in a step
        """
        count = None if count is None else parse_count(count)
        if (
            scaler
            and self.local_model
            and self.local_model.layout.tensor * self.local_model.layout.pipeline > 1
        ):
            what = f"scaler is not supported with the layout {self.local_model.layout}"
            raise UsageError(
                what,
                "session.backward(loss, ...)",
                "train with whole replicas or shards, or scale the gradient yourself",
            )
        if self._counts and (count is None) != (self._counts[0] is None):
            what = "some micro-batches of a step have a count and others have none"
            raise UsageError(
                what,
                f"session.backward(loss, count=...), step {self.unfinished}",
                "give a count to all of them, or to none",
            )
        if self.replica.counts:
            self._counts.append(count)
            self._samples += samples
        self.scaler = scaler
        self.replica.backward(loss, scaler)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Hook of `optimizer.step`. UsageError: an update that would differ between workers."""
        refuse_closure(optimizer, args, kwargs)
        self.gradient.refuse_noise()

    def __enter__(self) -> ReplicaGroup:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.runtime.unregister(self)
        while self._hooks:
            self._hooks.pop().remove()
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
        self._refuse_unfinished()
        if step == self.last_step:
            what = (
                f"a second micro-batch loop in step {step}: it would drop the gradient of the first"
            )
            raise UsageError(
                what,
                "loader(step) or session.micro_batches(step), called twice",
                "add the losses of each micro-batch in one loop",
            )
        self.runtime.set_progress(self._progress(step))
        if self.stops and self.decision.stop:
            self._stop(step)
        if self.decision.regroup and self.runtime.membership:
            self._regroup(step, "members change", voted=False)
        self.runtime.ledger.switch("training", time.monotonic())
        self.unfinished = step
        if self.checkpointer:
            self.checkpointer.begin_step(step)
            self.checkpointer.attributes.begin_loop()
        try:
            yield from self._until_committed(step)
            if self.checkpointer:
                self.checkpointer.attributes.end_loop(self.statistics.names)
        except GeneratorExit:
            for p in self.replica.parameters:
                p.grad = None
            raise
        self.unfinished, self.last_step = None, step

    def _refuse_unfinished(self) -> None:
        if self.unfinished is not None:
            raise UsageError(
                f"the micro-batch loop of step {self.unfinished} ended early",
                "by break, by zip with something shorter, or by a second micro-batch loop inside it",
                "take every micro-batch that loader(step) gives; the first step of a start gives one more (docs/loop.md)",
            )

    def _until_committed(self, step: int) -> Iterator[int]:
        while True:
            self._voted, start_s = False, time.monotonic()
            self.comparison.divergence.start_generation(self.runtime, step)
            with self.runtime.catch_peer_loss() as lost:
                committed = yield from self._attempt(step)
            if not lost.why and committed:
                return
            if not self._voted:
                self.runtime.ledger.move(
                    "training", "lost", time.monotonic() - start_s, time.monotonic()
                )
            if self._regroup(step, lost.why or "replicas differ", voted=self._voted):
                return

    def _attempt(self, step: int) -> Generator[int, None, bool]:
        """Collective. Compute `step`, vote and commit. False: replicas differ and were evicted."""
        skipped = self.rollback.start(step) if self.rollback else []
        first = self._first_trained(skipped)
        if self.rehearsal and self.rehearsal_due:
            yield from self.rehearsal.run(step, first)
        start_s = time.monotonic()
        compared, due = ALL_WEIGHTS if self.compare_all else WEIGHTS, self.comparison.is_due(step)
        self._counts, self._samples, digests = [], [], [0]
        if self.rehearsal:
            self.replica.hash_gradient_of(first if self.rehearsal.hashes(step) else None)
        for carried in self.carried:
            carried.start_attempt()

        def compute_digest() -> None:
            digests.append(self._digest(compared, step) if due else 0)

        for k in self.replica.micro_batches(step, compute_digest, self.balance.shares):
            self._update_trained_parameters()
            if not self._counts:
                self.loop_changes.start(self.frozen_state)
            self.board.enter("forward", step + 1)
            if k not in skipped:
                yield k
            elif not self.replica.skip():
                yield first
        self.loop_changes.refuse(self.frozen_state, step)
        if self.rehearsal:
            self.rehearsal.compare(step, first)
        for carried in self.carried:
            carried.exchange(dist.group.WORLD, self.runtime.group.wait)
        self.grad_norm_squared = self.replica.grad_norm_squared()
        vote = self._vote(digests[-1])
        self.board.enter("voting")
        self.board.enter_collective()
        self._voted = True
        decision = vote_on_step(self.runtime, vote, replica_size=self.replica.workers_per_replica)
        if self.rollback:
            decision = self.rollback.with_share(decision, skipped)
        if decision.divergent_ranks:
            self._voted = False
            self.comparison.refuse_repeated(step)
            self.comparison.evict(step, decision.divergent_ranks, decision.digests, compared)
            return False
        if vote.digest:
            self.comparison.record_equal(step)
        self.comparison.name_culprits(step)
        if self.rollback and self.rollback.suspects(step, decision):
            self._voted = False
            self.runtime.ledger.move(
                "training", "lost", time.monotonic() - start_s, time.monotonic()
            )
            yield from self.rollback.measure(step, self.replica, self._counts)
            return (yield from self._attempt(step))
        self._commit(step, decision)
        self.balance.decide(decision, step)
        return True

    def _first_trained(self, skipped: Sequence[int]) -> int:
        return next(k for k in range(self.replica.leaves) if k not in skipped)

    def _save_before_exit(self, step: int) -> None:
        """Collective. Save the state before `step`. A joiner counts the step that it received as
        saved."""
        if self.checkpointer is None or not step:
            return
        self.unfinished = None
        self.runtime.exchange_progress()  # a member that was late is in this step, too
        if any(all_gather_json(self.runtime, self.checkpointer.saved_step != step)):
            self.checkpointer.save(step, {"loss": self.loss}, again=True)
        self.checkpointer.close()

    def leave_witness(self, step: int) -> Iterator[int]:
        """Collective. Yield the first micro-batch of `step`, which a resume compares. A failure is
        logged: the run has been saved, and is about to exit."""
        newest = max((member.step for member in self.runtime.member_progress), default=-1)
        if (
            self.rehearsal is None or newest >= step
        ):  # a group that formed after the last update takes no part in passes
            return
        try:
            skipped = self.rollback.skipped(step) if self.rollback else []
            yield from self.rehearsal.run(step, self._first_trained(skipped))
        except Exception as error:  # of any type: the exit code is that of a run that is saved
            log.warning("what step %d begins with was not recorded: %s", step + 1, error)

    def _update_trained_parameters(self) -> None:
        """Follow frozen and unfrozen layers. UsageError for a parameter in no optimizer."""
        if self.checkpointer and "trained" in self.checkpointer.facts:
            self.checkpointer.warn_if_trained_layers_changed()
        if self.replica.parameters is self._trained:
            return
        if self.checkpointer:
            self.checkpointer.refuse_unsaved_parameters()
        self._trained, self.frozen_state = self.replica.parameters, self._make_frozen_state()

    def _make_frozen_state(self) -> FrozenState:
        frozen = [p for p in (self.local_model or self.module).parameters() if not p.requires_grad]
        return FrozenState(
            self.module, frozen, followed=self.statistics.names, local=self.statistics.local
        )

    def _stop(self, step: int) -> None:
        """Save and end a loop that does not handle stop signals itself."""
        if self.checkpointer:
            self.checkpointer.save(step)
            self.checkpointer.close()
        raise Stopped("" if self.decision.stop == STOP_REQUEST else self.decision.stop)

    def request_stop(self) -> None:
        """Ask all replicas to stop: the next vote carries it as `decision.stop`."""
        self._stop_requested = True

    def _commit(self, step: int, decision: StepDecision) -> None:
        """Commit `step`, which all ranks have agreed on."""
        if self.on_nonfinite == "raise":
            refuse_nonfinite_gradient(
                decision,
                step,
                self.module if isinstance(self.replica, Replica) else None,
                self.grad_norm_squared,
            )
        if self.rollback:
            self.rollback.commit(step, decision)
        if self.rehearsal:
            self.rehearsal.commit(step)
        self.statistics.commit(self.trained(step))
        for carried in self.carried:
            carried.commit()
        self.compare_all = self.compare_all and not self.comparison.is_due(step)
        self.rehearsal_due = False
        self.board.enter("updating")
        self.decision = replace(
            decision, micro_batch_us=()
        )  # all members exchange it when a generation forms
        if self.checkpointer:
            self.checkpointer.drop_save_request()
        self.runtime.set_progress(self._progress(step + self.commit_steps))
        # All replicas draw the same numbers later, although they computed different micro-batches.
        seed_generators(
            splitmix64(self.replica.seed, step, self.replica.leaves) >> 1, self.runtime.world.device
        )
        self.gradient = commit_gradient(
            self.replica.parameters,
            self.grad_norm_squared,
            self.divisor or decision.count or decision.trained_share,
        )

    def _progress(self, step: int) -> Progress:
        divergences = self.comparison.divergence.count
        return Progress(
            "step", step, self.decision, divergences, self.compare_all, self.rehearsal_due
        )

    def stop_signal(self) -> str:
        """Return the signal that asks to stop the run; "" for none, or to drain the host only."""
        return "" if self._is_drained() or not self.signals else self.signals.received

    def _is_drained(self) -> bool:
        membership = self.runtime.membership
        return bool(
            membership
            and membership.worker_env.drain
            and self.signals
            and self.signals.received == "SIGUSR1"
        )

    def _vote(self, digest: int) -> Vote:
        membership = self.runtime.membership
        self.leaving = self.leaving or self._is_drained()
        counts, squared = (
            [count for count in self._counts if count is not None],
            self.grad_norm_squared,
        )
        return Vote(
            self.replica.losses(),
            count=sum(counts) if counts else None,
            samples=self._samples,
            stop_signal=self.stop_signal()
            or (membership.stop_signal if membership else "")
            or STOP_REQUEST * self._stop_requested,
            save_failed=bool(self.checkpointer and self.checkpointer.save_failed()),
            joiners_waiting=bool(membership and membership.joiner_count),
            leaving=self.leaving,
            digest=digest,
            gradient_finite=self.replica.is_gradient_finite()
            and (squared is None or bool(squared.isfinite())),
            step=self.unfinished or 0,
            **self.balance.measured_us(),
        )

    def replicas_identical(self, step: int) -> bool:
        """Collective. See ReplicaComparison.compare_state; True with verify_every=0."""
        self._refuse_unfinished()
        if self.local_model:
            self.local_model.refuse_replaced()
        else:
            refuse_new_memory(self._shared_memory, self._modules(), step)
        return self.comparison.compare_state(step) if self.comparison.verify_every else True

    def _modules(self) -> dict[str, nn.Module]:
        """Return the model and the modules of the state, by the prefix of their names."""
        state = (self.checkpointer.state or {}) if self.checkpointer else {}
        averages = {
            f"state.{name}.": value for name, value in state.items() if isinstance(value, nn.Module)
        }
        return {"": self.module, **averages}

    def _state_dict(self) -> dict[str, torch.Tensor]:
        model = self.local_model.local_params if self.local_model else self.module
        modes = {
            f"training mode of {name or 'the model'}": torch.tensor(m.training)
            for name, m in self.module.named_modules()
        }
        return modes | (
            self.checkpointer.state_dict() if self.checkpointer else get_state_dict(model)
        )

    def _digest(self, what: str, step: int = 0) -> int:
        """Return 64 bits over WEIGHTS (of `step`), ALL_WEIGHTS or STATE of this replica."""
        slice_number = (
            step // self.commit_steps // max(1, self.comparison.verify_every)
            if what == WEIGHTS
            else None
        )
        weights = (
            self.replica.digest() + DIGEST_FACTOR * self.frozen_state.digest(slice_number)
        ) % 2**64
        modes = (
            0 if what == STATE else self.frozen_state.mode_digest()
        )  # between steps, one rank may evaluate
        return (
            weights
            ^ modes
            ^ (self.checkpointer.optimizer_digest() if self.checkpointer and what == STATE else 0)
        )

    def _regroup(self, step: int, why: str, *, voted: bool) -> bool:
        """Collective. Form the next generation; return whether others have committed `step`.

        voted  this replica's gradient of `step` is complete, and it has voted for it
        """
        runtime, start_s = self.runtime, time.monotonic()
        before = runtime.ledger.switch("regrouping", start_s)
        self.board.enter("joining")
        self.replica.release_groups()
        self._form_next_generation(step, why)
        world, members, why = runtime.world, runtime.member_progress, runtime.leave_reason
        newest, sources, joined = transfer_roles(members)
        # The same on all ranks, so that their digests can be compared.
        compare_all = bool(joined) or any(member.compare_all for member in members)
        rehearsal_due = bool(joined) or any(member.rehearse for member in members)
        seconds = time.monotonic() - start_s
        runtime.ledger.switch(before, time.monotonic())
        if runtime.shows_progress():
            log.warning(
                "%s; continuing with %d %s after %s",
                why,
                world.size,
                "workers"[: 6 + (world.size > 1)],
                format_duration(seconds),
            )
        if world.leader and runtime.membership:
            facts = {
                "why": why,
                "workers": list(world.members),
                "joined": joined,
                "step": newest,
                "seconds": round(seconds, 4),
            }
            append_event(
                runtime.membership.folder, "regrouped", generation=world.generation, **facts
            )
        if newest == step:
            self.decision, self.compare_all = replace(self.decision, regroup=False), compare_all
            self.rehearsal_due = rehearsal_due
            if self.checkpointer:
                self.checkpointer.retry_save(step)
            return False
        decision = members[sources[0]].decision
        if newest != step + self.commit_steps or not voted or decision is None:
            raise PeersLostError(
                f"this worker is at step {step}, the others at {newest}", world.members[world.rank]
            )
        self._commit(step, replace(decision, regroup=False))
        self.compare_all = compare_all
        self.rehearsal_due = rehearsal_due
        return True

    def _form_next_generation(self, step: int, why: str) -> None:
        """Collective. Form the next group and send the state to its joiners, until both succeed.
        HostDrained when this worker leaves."""

        def synchronize() -> None:
            if self.tracker:
                self.tracker.take_over(step + 1)
            get_state, attributes = (
                (self.checkpointer.state_dict, self.checkpointer.attributes)
                if self.checkpointer
                else (None, None)
            )
            try:
                transfer_state(
                    self.runtime,
                    get_state,
                    self.replica.workers_per_replica,
                    partial(self._digest, STATE),
                    attributes,
                )
            except StateMismatchError as error:
                divergent = find_divergent_ranks(error.digests, self.replica.workers_per_replica)
                self.comparison.evict(
                    transfer_roles(self.runtime.member_progress)[0], divergent, error.digests, STATE
                )
                raise

        try:
            reason = "its host is taken away" if self.leaving else why
            self.runtime.retry_across_generations(synchronize, reason, leaving=self.leaving)
        except FencedError:
            if not self.leaving:
                raise
            time.sleep(LINGER_S)
            raise HostDrained from None
