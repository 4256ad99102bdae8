"""The replicas of a run as one object: every replica commits a step, or all of them retry it.

    for k in replicas.micro_batches(step):
        replicas.backward(loss_of(replicas(inputs)))     of micro-batch k
    optimizer.step()                                     runs once per step, on every live replica

The `for` ends when the gradient of the step is complete and all ranks have voted for it. When a
replica is lost before that, the others leave the group, form the next generation and repeat the
`for`, each with its new share of the micro-batches. If a rank dies during the vote, some ranks may
miss the result. They learn it when the next generation forms, and commit then: their gradient is
complete, since they had voted. So a replica needs another one's weights only when it joins.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep.checkpoint.state_dict import get_state_dict, model_name, nonfinite_tensors, unwrap_model
from lockstep.data.order import splitmix64
from lockstep.elastic.consensus import StepDecision, Vote, all_gather_json, find_divergent_ranks, vote_on_step
from lockstep.elastic.fault_injection import FaultInjectingBoard, flip_bit
from lockstep.elastic.world import World
from lockstep.errors import DivergedError, FencedError, PeersLostError, UsageError
from lockstep.parallel.frozen_state import BufferSnapshot, FrozenState
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.parallel.replica import DIGEST_FACTOR, Replica, digest_of
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.record.events import append_event
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.signals import Stopped, StopSignals
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.state_transfer import StateMismatchError, transfer_roles, transfer_state
from lockstep.units import format_duration, join_names

log = logging.getLogger("lockstep")

# What is compared: trained weights and a slice of the rest at a vote; all weights at a member's first vote; all state before a save.
WEIGHTS, ALL_WEIGHTS, STATE = "weights", "weights and buffers", "weights or optimizer state"
MAX_DIVERGENCES = 3  # in a row; then the loop itself is nondeterministic
LINGER_S = 1.0  # a leaving worker may hold the store over which the others form their group


class HostDrained(SystemExit):
    """This worker has left the run because its host is drained; the run continues without it."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class Divergence:
    """Counter of divergences in a row: replicas that differ after the first update since all
    received the same state.

    One such divergence may be a flipped bit. MAX_DIVERGENCES in a row, with no generation in
    between that has a new worker and is equal after its first update, are the fault of the loop.
    All members of a generation have the same count, which is exchanged when it forms.
    """

    count: int = 0
    generation: int = -1
    first_step: int = 0  # of the generation
    proven: bool = False  # all replicas were equal after an update of this generation
    joined: bool = False  # the generation has a new worker

    def start_generation(self, world: World, step: int) -> None:
        """Take the count of all members when the generation is new; `step` is its first step."""
        if self.generation != world.generation:
            self.count = max((int(standing.get("diverged", 0)) for standing in world.standings), default=0)
            self.generation, self.first_step, self.proven = world.generation, step, False
            self.joined = bool(transfer_roles(world.standings)[2]) if world.standings else False

    def record_equal(self, step: int) -> None:
        """Record that all replicas are equal after `step` steps."""
        if step > self.first_step and not self.proven:
            self.proven = True
            self.count = 0 if self.joined else self.count

    def record_difference(self, step: int) -> None:
        """Record that replicas differ after `step` steps."""
        self.count += step > self.first_step and not self.proven


class ReplicaGroup:
    """`model` trained by all replicas together. Under an agent it recovers from lost workers;
    elsewhere a lost replica is an error.

    model          a module, of which each worker has a whole replica; or the part of it that this
                   worker holds (parallel/parallelize.py)
    checkpointer   provides the state for a worker that joins; None: no worker can join
    micro_batches, seed, reduce, bucket_bytes   see Replica
    reduce_once_per_step  see ShardedReplica
    signals        stop signals, agreed on at each step, for the loop to act on. None: the group
                   itself saves and ends the loop
    tracker        holds the metrics that a lost rank 0 did not write; they are written before a
                   joiner receives the state
    verify_every   steps between two comparisons of all replicas' weights; 0: never. At 1 a gradient
                   of a replica whose weights differ is never used; above that all replicas return
                   to a checkpoint when one differs. The state is always compared before it is
                   saved, including the optimizer's
    rehearse       in the first step of a start, run micro-batch 0 twice on every worker. UsageError
                   when the losses differ: then data or random numbers do not follow from the step
                   and the number of the micro-batch
    on_nonfinite   for a loss or gradient that is not finite: "raise" a DivergedError before the
                   update; "ignore" where infinite gradients are expected and skipped, as with a
                   GradScaler
    local_buffers  accept buffers that the forward pass changes (BatchNorm's statistics): each
                   worker has its own, those of rank 0 are saved, and the bits depend on the number
                   of workers
    """

    def __init__(
        self,
        world: World,
        model: nn.Module | LocalModel,
        checkpointer: Checkpointer | None = None,
        *,
        micro_batches: int,
        seed: int = 0,
        reduce: Literal["ordered", "fast"] = "ordered",
        bucket_bytes: int = 25_000_000,
        signals: StopSignals | None = None,
        tracker: Tracker | BackgroundTracker | None = None,
        verify_every: int = 1,
        reduce_once_per_step: bool = False,
        rehearse: bool = True,
        on_nonfinite: Literal["raise", "ignore"] = "raise",
        local_buffers: bool = False,
    ) -> None:
        if checkpointer:
            refuse_other_checkpointer(checkpointer, world, model)
        world.register(self)
        self.world, self.checkpointer, self.tracker, self.board = world, checkpointer, tracker, world.board
        self.verify_every, self.on_nonfinite, self.local_buffers = verify_every, on_nonfinite, local_buffers
        self.replica: Replica | ShardedReplica
        self.module, self.local_model = unwrap_local_model(model)
        if self.local_model:
            self.replica = ShardedReplica(
                self.local_model, micro_batches=micro_batches, seed=seed, reduce_once_per_step=reduce_once_per_step
            )
            self.replica.groups.form_context = world.track_subgroups
        else:
            self.replica = Replica(
                self.module,
                micro_batches=micro_batches,
                seed=seed,
                reduce=reduce,
                bucket_bytes=bucket_bytes,
                init_sync=world.first_generation,
            )
        # A joiner does not rehearse: the others would not take part, and the loop may have its own collectives.
        self.rehearses = rehearse and world.first_generation
        self._trained, self.frozen_state = self.replica.parameters, self._make_frozen_state()
        self.compare_all = True  # the frozen weights of a new member have not been compared yet
        self.grad_norm_squared: torch.Tensor | None = None
        self.stops = signals is None and world.membership is not None
        self.signals = StopSignals().__enter__() if self.stops else signals  # until the process exits
        self.decision = StepDecision(0.0)
        self.leaving = False
        self.identical_at = -1  # the last step after which all replicas were found equal
        self.divergence = Divergence()
        self.unfinished: int | None = None  # the step whose micro-batch loop has not ended
        if checkpointer and verify_every:
            checkpointer.compare_before_saving(self.replicas_identical)
        self.divergence_records = world.membership.generation_log.divergence_records() if world.membership else []
        self._attach_to_world()

    def _attach_to_world(self) -> None:
        """Connect the replica's collectives, the stop signal and injected faults to the world."""
        self.replica.board = self.world.board
        if self.world.membership:
            self.replica.waits.generation_error = self.world.generation_error
            self.world.membership.local_stop_signal = self.stop_signal
        if isinstance(self.world.board, FaultInjectingBoard):
            parameters = [p for p in (*self.replica.parameters, *self.frozen_state.frozen) if p.numel()]
            self.world.board.flip = partial(flip_bit, parameters)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass."""
        return self.replica(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch; its loss becomes part of the vote."""
        self.replica.backward(loss)

    def exposed_s(self) -> float:
        """Return the seconds of this step spent waiting for communication after the backward."""
        return self.replica.exposed_s()

    def __enter__(self) -> ReplicaGroup:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.world.unregister(self)
        self.replica.__exit__()
        if kind is None:
            self._refuse_unfinished()

    @property
    def loss(self) -> float:
        """The sum of the step's losses over all replicas, the same bits for any number of them."""
        return self.decision.loss

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield the numbers of this replica's micro-batches of `step`, until its
        gradient is complete and agreed on.

        A loop that ends early (break, or zip with something shorter) has no gradients, and the next
        step or save is a UsageError.
        """
        self._refuse_unfinished()
        self.world.standing = self._standing(step)
        if self.stops and self.decision.stop:
            self._stop(step)
        if self.decision.regroup and self.world.membership:
            self._regroup(step, "members change", voted=False)
        self.world.ledger.switch("training", time.monotonic())
        self.unfinished = step
        try:
            yield from self._until_committed(step)
        except GeneratorExit:
            for p in self.replica.parameters:
                p.grad = None
            raise
        self.unfinished = None

    def _refuse_unfinished(self) -> None:
        if self.unfinished is not None:
            raise UsageError(
                f"the micro-batch loop of step {self.unfinished} was left before its end",
                "by break, or by zip with something shorter",
                "take every micro-batch that team.micro_batches(step) gives; the first step of a start gives one more (docs/loop.md)",
            )

    def _until_committed(self, step: int) -> Iterator[int]:
        while True:
            voted, start_s = False, time.monotonic()
            self.divergence.start_generation(self.world, step)
            compared = ALL_WEIGHTS if self.compare_all else WEIGHTS
            buffers: dict[str, BufferSnapshot] = {}
            try:
                if self.rehearses and isinstance(self.replica, Replica):
                    self.rehearses = False  # not when the step is retried: only some ranks may have rehearsed by then
                    yield from self._rehearse(self.replica, step)
                for k in self.replica.micro_batches(step):
                    self._update_trained_parameters()
                    buffers = buffers or self.frozen_state.buffers()
                    self.board.enter("forward", step + 1)
                    yield k
                self._refuse_another_loss(step)
                self.frozen_state.refuse_changes(buffers, step)
                self.grad_norm_squared = self.replica.grad_norm_squared()
                vote = self._vote(step, compared)
                self.board.enter("voting")
                self.board.enter_collective()
                voted = True
                losses_per_rank = self.replica.losses_per_rank(self.world.size)
                decision = vote_on_step(self.world, vote, losses_per_rank=losses_per_rank, replica_size=self.replica.workers_per_replica)
                if not decision.divergent_ranks:
                    if vote.digest:
                        self._record_identical(step)
                    self._name_culprits(step)
                    return self._commit(step, decision)
                voted = False
                self._refuse_repeated_divergence(step)
                self._evict_divergent(step, decision.divergent_ranks, decision.digests, compared)
                why = "replicas differ"
            except Exception as error:
                if not self.world.is_peer_loss(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None  # it references the group
            if not voted:
                self.world.ledger.move_to_lost(time.monotonic() - start_s, time.monotonic())
            if self._regroup(step, why, voted=voted):
                return

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
        """Return the frozen weights that this worker holds, and the buffers."""
        frozen = [p for p in (self.local_model or self.module).parameters() if not p.requires_grad]
        return FrozenState(self.module, frozen, local_buffers=self.local_buffers)

    def _rehearse(self, replica: Replica, step: int) -> Iterator[int]:
        """Collective. Yield micro-batch 0. UsageError when its loss differs between ranks."""
        for k in replica.rehearsal(step):
            self.board.enter("forward", step + 1)
            yield k
        self.board.enter("voting")
        self.board.enter_collective()
        losses = all_gather_json(self.world, str(replica.rehearsed))
        if len(set(losses)) > 1:
            listed = ", ".join(f"{loss} on rank {rank}" for rank, loss in enumerate(losses))
            raise nondeterministic_loss_error(f"the loss of micro-batch 0 of step {step} is not the same on all workers: {listed}")

    def _refuse_another_loss(self, step: int) -> None:
        """UsageError when micro-batch 0 has another loss here than in the rehearsal."""
        replica = self.replica
        if isinstance(replica, Replica) and replica.rehearsed is not None:
            before, replica.rehearsed = replica.rehearsed, None
            if replica.own_leaves.start == 0 and str(now := replica.losses()[0]) != str(before):
                what = f"the loss of micro-batch 0 of step {step} is {before} the first time and {now} the second time"
                raise nondeterministic_loss_error(what)

    def _stop(self, step: int) -> None:
        """Save, and end a loop without stop handling of its own, once all ranks agreed to stop."""
        if self.checkpointer:
            self.checkpointer.save(step)
            self.checkpointer.close()
        raise Stopped(self.decision.stop)

    def _commit(self, step: int, decision: StepDecision) -> None:
        """Commit `step`, which all ranks have agreed on."""
        if self.on_nonfinite == "raise":
            self._raise_if_diverged(step, decision)
        self.compare_all = self.compare_all and not self._compares(step)
        self.board.enter("updating")
        self.decision = decision
        if self.checkpointer:
            self.checkpointer.drop_save_request()
        self.world.standing = self._standing(step + 1)
        # Later draws are then equal on all replicas, whatever micro-batch each computed last.
        seed_generators(splitmix64(self.replica.seed, step, self.replica.leaves) >> 1, self.world.device)

    def _standing(self, step: int) -> dict[str, Any]:
        """Return this worker's progress, which is exchanged when a generation forms."""
        return {
            "at": "step",
            "step": step,
            "decision": asdict(self.decision),
            "diverged": self.divergence.count,
            "compare_all": self.compare_all,
        }

    def _raise_if_diverged(self, step: int, decision: StepDecision) -> None:
        """DivergedError, on all replicas, when the agreed loss or the gradient is not finite."""
        if isinstance(self.replica, Replica):
            wrong = nonfinite_tensors({name: p.grad for name, p in self.module.named_parameters() if p.grad is not None})
        else:
            wrong = [] if self.grad_norm_squared is None or bool(self.grad_norm_squared.isfinite()) else ["its norm"]
        if wrong or not decision.finite:
            raise DivergedError(
                f"loss {decision.loss} in step {step + 1}" + (f", gradient not finite: {join_names(wrong)}" if wrong else ""),
                "agreed by all replicas before the update, which was not made; the checkpoints before are whole",
                "lower the learning rate or clip the gradients; with a GradScaler: ReplicaGroup(..., on_nonfinite='ignore')",
            )

    def stop_signal(self) -> str:
        """Return the signal that asks to stop the run; "" for none, or to drain the host only."""
        return "" if self._is_drained() or not self.signals else self.signals.received

    def _is_drained(self) -> bool:
        membership = self.world.membership
        return bool(membership and membership.worker_env.drain and self.signals and self.signals.received == "SIGUSR1")

    def _compares(self, step: int) -> bool:
        """True when the replicas are compared at the vote on `step`."""
        return bool(self.verify_every) and step % self.verify_every == 0 and self.world.size > self.replica.workers_per_replica

    def _vote(self, step: int, compared: str) -> Vote:
        membership = self.world.membership
        self.leaving = self.leaving or self._is_drained()
        stop = self.stop_signal() or (membership.stop_signal if membership else "")
        save_failed = bool(self.checkpointer and self.checkpointer.save_failed())
        joiners = bool(membership and membership.joiner_count)
        digest = self._digest(compared, step) if self._compares(step) else 0
        return Vote(
            self.replica.losses(), stop_signal=stop, save_failed=save_failed, joiners_waiting=joiners, leaving=self.leaving, digest=digest
        )

    # -- comparing the replicas ---------------------------------------------------------------------------------------

    def replicas_identical(self, step: int) -> bool:
        """Collective. True when all replicas hold the same weights and optimizer state after `step`
        steps.

        False when a peer is lost, too. Replicas that differ are evicted.
        """
        self._refuse_unfinished()
        world, unit = self.world, self.replica.workers_per_replica
        if world.size <= unit:
            return True
        try:
            digests = all_gather_json(world, self._digest(STATE))
            divergent = find_divergent_ranks(digests, unit)
            if divergent:
                self._refuse_repeated_divergence(step)
        except Exception as error:
            if not world.is_peer_loss(error):
                raise
            error.__traceback__ = None  # it references the group
            return False
        if not divergent:
            self._record_identical(step)
            return True
        self._evict_divergent(step, divergent, digests, STATE)
        return False

    def _record_identical(self, step: int) -> None:
        self.identical_at = step
        self.divergence.record_equal(step)

    def _refuse_repeated_divergence(self, step: int) -> None:
        """Collective. UsageError when replicas differ again: that is not a flipped bit."""
        again = [path for path, record in self.divergence_records if record["step"] == step]
        self.divergence.record_difference(step)
        self.world.standing = self.world.standing | {"diverged": self.divergence.count}
        if not again and self.divergence.count < MAX_DIVERGENCES:
            return
        names = self._differing_tensors()
        for path in again:
            path.unlink(missing_ok=True)
        raise UsageError(
            f"the replicas differ again before step {step + 1}, after all of them had taken the same state: {join_names(names)}",
            "the digest of each tensor on each worker",
            "the update must be the same on every worker: no data, state or rank that differs, random numbers only from the global "
            "generators of torch, NumPy or random, and as many on each worker. If one host alone differs, test its memory",
        )

    def _differing_tensors(self) -> list[str]:
        """Collective. Return the names of the tensors that differ between replicas."""
        unit = self.replica.workers_per_replica
        state = (
            self.checkpointer.state_dict()
            if self.checkpointer
            else get_state_dict(self.local_model.local_params if self.local_model else self.module)
        )
        digests = all_gather_json(self.world, {name: str(digest_of([tensor])) for name, tensor in state.items()})
        return [name for name in state if len({rank_digests.get(name) for rank_digests in digests[self.world.rank % unit :: unit]}) > 1]

    def _digest(self, what: str, step: int = 0) -> int:
        """Return 64 bits over WEIGHTS (of `step`), ALL_WEIGHTS or STATE of this replica."""
        slice_number = step // max(1, self.verify_every) if what == WEIGHTS else None
        weights = (self.replica.digest() + DIGEST_FACTOR * self.frozen_state.digest(slice_number)) % 2**64
        return weights ^ (self.checkpointer.optimizer_digest() if self.checkpointer and what == STATE else 0)

    def _evict_divergent(self, step: int, divergent: Sequence[int], digests: Sequence[int | None], what: str) -> None:
        """Continue without the replicas whose state differs from the majority; FencedError on these
        replicas.

        FencedError on all when there is no majority, or when steps between two comparisons may have
        used their gradients: then all workers restart from a checkpoint of a step after which all
        were equal. The repeated steps show which replica was wrong.
        """
        world = self.world
        listed = ", ".join(f"rank {rank} ({world.members[rank]})" if world.members else f"rank {rank}" for rank in divergent)
        message = f"the {what} of {listed} differ before step {step + 1}"
        holders = [rank for rank, digest in enumerate(digests) if digest is not None]
        no_majority = world.membership is None or list(divergent) == holders
        if no_majority or self.verify_every > 1:
            message += ", and none is in the majority" if no_majority else ", and their gradients may have been used"
            digest_of_member = {world.members[rank]: str(digests[rank]) for rank in holders if world.members}
            world.mark_untrusted(message, {"step": step, "what": what, "digests": digest_of_member})
            if self.checkpointer:
                self.checkpointer.store.set_aside_after(self.identical_at if self.identical_at >= 0 else max(0, step - self.verify_every))
            raise FencedError(message, "a bit has flipped in one of them, or their updates differ", "the same command resumes the run")
        log.error("%s from those of the others: a bit has flipped there", message)
        if world.rank in divergent:
            raise FencedError(message, "a bit has flipped here", "this worker is restarted and receives the state of the others")
        for rank in divergent:
            world.evict(rank, f"its {what} differ before step {step + 1}")

    def _name_culprits(self, step: int) -> None:
        """Report which replica was wrong, once the step at which replicas differed is repeated."""
        unit, position = self.replica.workers_per_replica, self.world.rank
        if not self.divergence_records or position >= unit:
            return
        for path, record in self.divergence_records:
            if step == record["step"]:
                right = str(self._digest(record["what"], step))
                wrong = [id for id, digest in list(record["digests"].items())[position::unit] if digest != right]
                if wrong:
                    log.error("before step %d the %s of %s were wrong: a bit had flipped there", step + 1, record["what"], ", ".join(wrong))
                    append_event(
                        path.parent.parent, "culprit found", step=step, wrong=wrong, why="the step was done again from a checkpoint"
                    )
            if step >= record["step"]:
                path.unlink(missing_ok=True)
        self.divergence_records = [(path, record) for path, record in self.divergence_records if step < record["step"]]

    # -- the next generation ------------------------------------------------------------------------------------------

    def _regroup(self, step: int, why: str, *, voted: bool) -> bool:
        """Collective. Continue with the members of the next generation; True when `step` is
        committed, since others learned the vote.

        voted  this replica's gradient of `step` is complete, and it has voted for it
        """
        world, start_s = self.world, time.monotonic()
        before = world.ledger.switch("regrouping", start_s)
        self.board.enter("joining")
        self.replica.release_groups()
        why = self._form_next_generation(step, why)
        newest, sources, joined = transfer_roles(world.standings)
        # The same on all ranks, so that their digests can be compared.
        compare_all = bool(joined) or any(standing.get("compare_all") for standing in world.standings)
        seconds = time.monotonic() - start_s
        world.ledger.switch(before, time.monotonic())
        if world.shows_progress():
            log.warning("%s; continuing with %d %s after %s", why, world.size, "workers"[: 6 + (world.size > 1)], format_duration(seconds))
        if world.leader and world.membership:
            facts = {"why": why, "workers": list(world.members), "joined": joined, "step": newest, "seconds": round(seconds, 4)}
            append_event(world.membership.folder, "regrouped", generation=world.generation, **facts)
        if newest == step:
            self.decision = replace(self.decision, regroup=False)
            self.compare_all = compare_all
            if self.checkpointer:
                self.checkpointer.retry_save(step)
            return False
        if newest != step + 1 or not voted:
            raise PeersLostError(f"this worker is at step {step}, the others at {newest}", self.world.members[self.world.rank])
        self._commit(step, replace(StepDecision(**self.world.standings[sources[0]]["decision"]), regroup=False))
        self.compare_all = compare_all
        return True

    def _form_next_generation(self, step: int, why: str) -> str:
        """Collective. Leave the group, form the next one and send the state to its joiners, until
        all of it succeeds.

        Return why the last attempt was necessary. HostDrained when this worker leaves.
        """
        world = self.world
        while True:
            try:
                world.leave_group("its host is taken away" if self.leaving else why, leaving=self.leaving)
                world.form_next()
                if self.tracker:
                    self.tracker.take_over(step + 1)
                get_state = self.checkpointer.state_dict if self.checkpointer else None
                transfer_state(world, get_state, self.replica.workers_per_replica, partial(self._digest, STATE))
                return why
            except StateMismatchError as error:
                why = error.what
                divergent = find_divergent_ranks(error.digests, self.replica.workers_per_replica)
                self._evict_divergent(transfer_roles(world.standings)[0], divergent, error.digests, STATE)
            except FencedError:
                if not self.leaving:
                    raise
                time.sleep(LINGER_S)
                raise HostDrained from None
            except Exception as error:
                if not self.world.is_peer_loss(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None


def nondeterministic_loss_error(what: str) -> UsageError:
    """Return the error for a loop whose loss is not a function of the step and the micro-batch."""
    return UsageError(
        what,
        "the first step of a start runs micro-batch 0 twice on every worker, to compare the loss",
        "data and random numbers of a micro-batch must follow from its step and number alone: no DataLoader or iterator consumed in the "
        "loop, no prefetched batch, no unseeded data set, no rank in a seed, only deterministic kernels (docs/loop.md); "
        "ReplicaGroup(rehearse=False) skips the comparison",
    )


def refuse_other_checkpointer(checkpointer: Checkpointer, world: World, model: nn.Module | LocalModel) -> None:
    """UsageError when the checkpointer saves another model than the group trains."""
    module, local_model = unwrap_local_model(model)
    same = local_model is not None or (
        isinstance(checkpointer.model, nn.Module) and unwrap_model(checkpointer.model) is unwrap_model(module)
    )
    if checkpointer.world is not world or checkpointer.local_model is not local_model or not same:
        raise UsageError(
            f"the ReplicaGroup trains {model_name(module)}, the Checkpointer saves another {model_name(checkpointer.model)}",
            "Checkpointer(folder, world, model, ...) and ReplicaGroup(world, model, ...)",
            "give the same World and module to both",
        )
    checkpointer.refuse_unsaved_parameters()
