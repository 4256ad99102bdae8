"""All replicas of a run, as one loop sees them: a step is done by all of them, or it is done again.

    for k in team.micro_batches(step):
        team.backward(loss_of(team(inputs)))     of micro-batch k
    optimizer.step()                             what stands here happens once for each step, on every replica that lives

The `for` ends when the gradient of the step is whole and all have agreed on it. When a replica is lost before that, the others leave the
broken group, form the next generation and go through the same `for` again, each with its new share of the micro-batches. The agreement may
reach some and not others, when somebody dies in its midst: then those who missed it hear of it in the next generation, and since their
gradient was whole (they had voted so), they go on as if nothing had been. So no replica ever needs another one's weights, but a new one.
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

from lockstep.checkpoint.state_dict import bare, capture, kind_of, not_finite
from lockstep.data.order import mix
from lockstep.elastic.consensus import Verdict, Vote, agree, differing, gather
from lockstep.elastic.fault_injection import FaultyBoard, flip_bit
from lockstep.elastic.world import World
from lockstep.errors import DivergedError, FencedError, PeersLostError, UsageError
from lockstep.parallel.frozen_state import Buffer, Untrained
from lockstep.parallel.parallelize import Held, whole_or_held
from lockstep.parallel.replica import DIGEST_FACTOR, Replica, digest_of
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.record.events import note
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.exit_report import plainly
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.signals import Signals, Stopped
from lockstep.training.checkpointer import Keeper
from lockstep.training.state_transfer import StatesDiffer, hand_over, roles
from lockstep.units import show_seconds, shown

log = logging.getLogger("lockstep")

# What is compared: trained weights and a slice of the rest at a vote, all weights at a member's first vote, all state before a save.
WEIGHTS, ALL_WEIGHTS, STATE = "weights", "weights and buffers", "weights or optimizer state"
IN_A_ROW = 3  # divergences after which the loop itself is at fault
LINGER_S = 1.0  # who leaves may hold the store over which the others form their group


class Drained(SystemExit):
    """This worker has left the run as it was asked to, and the others go on without it."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass
class Divergence:
    """Count divergences in a row: replicas that differ after the first update since all had the same state.

    A bit may flip then once. Three times in a row, with no generation of a new worker in between that was alike after its first update, is
    the loop's own doing. All members of a generation have the same count: it is told when the generation forms.
    """

    count: int = 0
    generation: int = -1
    first_step: int = 0  # of the generation
    proven: bool = False  # all were alike after an update of this generation
    joined: bool = False  # the generation has a new worker

    def enter(self, world: World, step: int) -> None:
        """Start a new count when the generation is new; `step` is its first step."""
        if self.generation != world.generation:
            self.count = max((int(one.get("diverged", 0)) for one in world.standings), default=0)
            self.generation, self.first_step, self.proven = world.generation, step, False
            self.joined = bool(roles(world.standings)[2]) if world.standings else False

    def passed(self, step: int) -> None:
        """Record that all replicas are equal after `step` steps."""
        if step > self.first_step and not self.proven:
            self.proven = True
            self.count = 0 if self.joined else self.count

    def failed(self, step: int) -> None:
        """Record that replicas differ after `step` steps."""
        self.count += step > self.first_step and not self.proven


class Team:
    """`model` trained by all replicas together. Under an agent it heals; elsewhere a lost replica is an error.

    model          a module, of which each worker has a whole replica; or what this worker holds of one (parallel/parallelize.py)
    keeper         has the state that a joiner is given; None: nobody can join
    micro_batches, seed, reduce, bucket_bytes   see Replica
    together       see ShardedReplica
    signals        wishes to stop, agreed on at each step, for the loop to heed. None: the team itself saves and ends the loop when it is
                   to stop
    tracker        has the lines of steps that a lost leader did not write; they are written before a joiner is given the state
    verify_every   steps from one comparison of all replicas' weights to the next; 0: never. At 1 no gradient of a replica whose
                   weights differ is ever used; above that all go back to a checkpoint when one differs. What is saved is compared
                   before in any case, the optimizer's state with it
    rehearse       in the first step of a start, run micro-batch 0 twice on every worker. UsageError where its loss is not the same each
                   time: then the data or the random numbers do not follow from the step and the number of the micro-batch
    on_nonfinite   a loss or gradient that is not finite: "raise" DivergedError before the update; "ignore" where infinite gradients are
                   expected and skipped, as by a GradScaler
    local_buffers  buffers that the forward pass changes (BatchNorm's statistics) are accepted: they are each worker's own, rank 0's are
                   saved, and the bits depend on the number of workers
    """

    def __init__(
        self,
        world: World,
        model: nn.Module | Held,
        keeper: Keeper | None = None,
        *,
        micro_batches: int,
        seed: int = 0,
        reduce: Literal["ordered", "fast"] = "ordered",
        bucket_bytes: int = 25_000_000,
        signals: Signals | None = None,
        tracker: Tracker | BackgroundTracker | None = None,
        verify_every: int = 1,
        together: bool = False,
        rehearse: bool = True,
        on_nonfinite: Literal["raise", "ignore"] = "raise",
        local_buffers: bool = False,
    ) -> None:
        if keeper:
            refuse_another_keeper(keeper, world, model)
        world.take(self)
        self.world, self.keeper, self.tracker, self.verify_every, self.board = world, keeper, tracker, verify_every, world.board
        self.replica: Replica | ShardedReplica
        self.module, self.held = whole_or_held(model)
        if self.held:
            self.replica = ShardedReplica(self.held, micro_batches=micro_batches, seed=seed, together=together)
            self.replica.wires.laying = world.more_groups
        else:
            self.replica = Replica(
                self.module, micro_batches=micro_batches, seed=seed, reduce=reduce, bucket_bytes=bucket_bytes, equal=world.fresh
            )
        # A joiner does not rehearse: the others would not take part, and the loop may have its own collectives.
        self.rehearses = rehearse and world.fresh
        self.local_buffers = local_buffers
        self._trained, self.untrained = self.replica.parameters, self._what_is_untrained()
        self.compare_all = True  # a member has come whose frozen weights nobody has compared yet
        self.on_nonfinite = on_nonfinite
        self.squares: torch.Tensor | None = None
        self.replica.board = world.board
        if world.membership:
            self.replica.waits.broken = world.broken
        self.stops = signals is None and world.membership is not None
        self.signals = Signals().__enter__() if self.stops else signals  # until the process ends
        self.verdict = Verdict(0.0)
        self.leaving = False
        self.alike_at = -1  # the newest step after which all were found alike
        self.divergence = Divergence()
        self.unfinished: int | None = None  # the step whose loop has not come to its end
        if keeper and verify_every:
            keeper.alike = self.alike
        if world.membership:
            world.membership.wants = self.wants
        self.suspects = world.membership.arbiter.suspects() if world.membership else []
        if isinstance(world.board, FaultyBoard):
            world.board.flip = partial(flip_bit, [p for p in (*self.replica.parameters, *self.untrained.frozen) if p.numel()])

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's forward pass."""
        return self.replica(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch; its loss is kept for the vote."""
        self.replica.backward(loss)

    def exposed_s(self) -> float:
        """Seconds that this step waited for the wire after its last gradient was computed."""
        return self.replica.exposed_s()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        self.world.give_back(self)
        self.replica.__exit__()
        if kind is None:
            self._refuse_unfinished()

    @property
    def loss(self) -> float:
        """The sum of the losses of the step's micro-batches, over all replicas; its bits do not depend on their number."""
        return self.verdict.loss

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. The numbers of this replica's micro-batches of `step`, until the step's gradient is whole and agreed.

        A loop that is left before (break, or zip with something shorter) has no gradients, and the next step or save is a UsageError.
        """
        self._refuse_unfinished()
        self.world.standing = self._standing(step)
        if self.stops and self.verdict.stop:
            self._stop(step)
        if self.verdict.regroup and self.world.membership:
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
            voted, began_s = False, time.monotonic()
            self.divergence.enter(self.world, step)
            compared = ALL_WEIGHTS if self.compare_all else WEIGHTS
            buffers: dict[str, Buffer] = {}
            try:
                if self.rehearses and isinstance(self.replica, Replica):
                    self.rehearses = False  # not when the step is done again: some have rehearsed by then, others have not
                    yield from self._rehearse(self.replica, step)
                for k in self.replica.micro_batches(step):
                    self._follow_what_is_trained()
                    buffers = buffers or self.untrained.buffers()
                    self.board.enter("forward", step + 1)
                    yield k
                self._refuse_another_loss(step)
                self.untrained.refuse_changes(buffers, step)
                self.squares = self.replica.squares()
                vote = self._vote(step, compared)
                self.board.enter("voting")
                self.board.collective()
                voted = True
                verdict = agree(self.world, vote, told=self.replica.told(self.world.size), unit=self.replica.unit)
                if not verdict.differ:
                    if vote.digest:
                        self._found_alike(step)
                    self._name_culprits(step)
                    return self._commit(step, verdict)
                voted = False
                self._refuse_divergence(step)
                self._throw_out(step, verdict.differ, verdict.digests, compared)
                why = "replicas differ"
            except Exception as error:
                if not self.world.lost(error):
                    raise
                why = plainly(error)
                error.__traceback__ = None  # it holds the broken group
            if not voted:
                self.world.ledger.lost(time.monotonic() - began_s, time.monotonic())
            if self._regroup(step, why, voted=voted):
                return

    def _follow_what_is_trained(self) -> None:
        """Update the frozen weights after layers were frozen or unfrozen. UsageError when a trained parameter is in no optimizer."""
        if self.keeper and "trained" in self.keeper.facts:
            self.keeper.warn_of_other_trained()
        if self.replica.parameters is self._trained:
            return
        if self.keeper:
            self.keeper.refuse_what_is_left_out()
        self._trained, self.untrained = self.replica.parameters, self._what_is_untrained()

    def _what_is_untrained(self) -> Untrained:
        """The frozen weights that this worker holds, and the buffers."""
        frozen = [p for p in (self.held or self.module).parameters() if not p.requires_grad]
        return Untrained(self.module, frozen, local_buffers=self.local_buffers)

    def _rehearse(self, replica: Replica, step: int) -> Iterator[int]:
        """Collective. Micro-batch 0 on every replica. UsageError when it has not the same loss on all of them."""
        for k in replica.rehearsal(step):
            self.board.enter("forward", step + 1)
            yield k
        self.board.enter("voting")
        self.board.collective()
        losses = gather(self.world, str(replica.rehearsed))
        if len(set(losses)) > 1:
            listed = ", ".join(f"{loss} on rank {rank}" for rank, loss in enumerate(losses))
            raise not_keyed(f"the loss of micro-batch 0 of step {step} is not the same on all workers: {listed}")

    def _refuse_another_loss(self, step: int) -> None:
        """UsageError where this worker has done micro-batch 0 and its loss is not the one of the rehearsal."""
        replica = self.replica
        if isinstance(replica, Replica) and replica.rehearsed is not None:
            before, replica.rehearsed = replica.rehearsed, None
            if replica.mine.start == 0 and str(now := replica.losses()[0]) != str(before):
                raise not_keyed(f"the loss of micro-batch 0 of step {step} is {before} the first time and {now} the second time")

    def _stop(self, step: int) -> None:
        """End a loop that asks nobody whether it is to end: all have agreed."""
        if self.keeper:
            self.keeper.save(step)
            self.keeper.close()
        raise Stopped(self.verdict.stop)

    def _commit(self, step: int, verdict: Verdict) -> None:
        """All have agreed on `step`: from here on this replica stands behind it."""
        if self.on_nonfinite == "raise":
            self._refuse_to_diverge(step, verdict)
        self.compare_all = self.compare_all and not self._looks(step)
        self.board.enter("updating")
        self.verdict = verdict
        if self.keeper:
            self.keeper.moved_on()
        self.world.standing = self._standing(step + 1)
        # Later draws are then equal on all replicas, whatever micro-batch each computed last.
        seed_generators(mix(self.replica.seed, step, self.replica.leaves) >> 1, self.world.device)

    def _standing(self, step: int) -> dict[str, Any]:
        return {
            "at": "step",
            "step": step,
            "verdict": asdict(self.verdict),
            "diverged": self.divergence.count,
            "compare_all": self.compare_all,
        }

    def _refuse_to_diverge(self, step: int, verdict: Verdict) -> None:
        """DivergedError, on all replicas alike, when the agreed loss or the gradient is not finite."""
        if isinstance(self.replica, Replica):
            wrong = not_finite({name: p.grad for name, p in self.module.named_parameters() if p.grad is not None})
        else:
            wrong = [] if self.squares is None or bool(self.squares.isfinite()) else ["its norm"]
        if wrong or not verdict.finite:
            raise DivergedError(
                f"loss {verdict.loss} in step {step + 1}" + (f", gradient not finite: {shown(wrong)}" if wrong else ""),
                "agreed by all replicas before the update, which was not made; the checkpoints before are whole",
                "lower the learning rate or clip the gradients; where a GradScaler skips such steps: Team(..., on_nonfinite='ignore')",
            )

    def wants(self) -> str:
        """The signal with which this worker wants the run to stop; "" for none, also when only its host is to be taken away."""
        return "" if self._drains() or not self.signals else self.signals.received

    def _drains(self) -> bool:
        membership = self.world.membership
        return bool(membership and membership.seat.drain and self.signals and self.signals.received == "SIGUSR1")

    def _looks(self, step: int) -> bool:
        """Whether the replicas are compared at the vote on `step`."""
        return bool(self.verify_every) and step % self.verify_every == 0 and self.world.size > self.replica.unit

    def _vote(self, step: int, compared: str) -> Vote:
        membership = self.world.membership
        self.leaving = self.leaving or self._drains()
        wants = self.wants() or (membership.stop_wanted if membership else "")
        save_failed = bool(self.keeper and self.keeper.must_stop())
        joiners = bool(membership and membership.waiting)
        digest = self._digest(compared, step) if self._looks(step) else 0
        return Vote(self.replica.losses(), wants=wants, save_failed=save_failed, joiners=joiners, leaves=self.leaving, digest=digest)

    def alike(self, step: int) -> bool:
        """Collective. Whether all replicas hold the same weights and optimizer state after `step` steps; False, too, when somebody is lost.

        Those that do not are thrown out.
        """
        self._refuse_unfinished()
        world, unit = self.world, self.replica.unit
        if world.size <= unit:
            return True
        try:
            digests = gather(world, self._digest(STATE))
            differ = differing(digests, unit)
            if differ:
                self._refuse_divergence(step)
        except Exception as error:
            if not world.lost(error):
                raise
            error.__traceback__ = None  # it holds the broken group
            return False
        if not differ:
            self._found_alike(step)
            return True
        self._throw_out(step, differ, digests, STATE)
        return False

    def _found_alike(self, step: int) -> None:
        self.alike_at = step
        self.divergence.passed(step)

    def _refuse_divergence(self, step: int) -> None:
        """Collective. UsageError when the replicas differ again after all had the same state: that is no flipped bit."""
        again = [path for path, found in self.suspects if found["step"] == step]
        self.divergence.failed(step)
        self.world.standing = self.world.standing | {"diverged": self.divergence.count}
        if not again and self.divergence.count < IN_A_ROW:
            return
        names = self._differing_tensors()
        for path in again:
            path.unlink(missing_ok=True)
        raise UsageError(
            f"the replicas differ again before step {step + 1}, after all of them had taken the same state: {shown(names)}",
            "the digest of each tensor on each worker",
            "the update must be the same on every worker: no data, state or rank that differs, random numbers only from the global "
            "generators of torch, NumPy or random, and as many on each worker. Where one host alone differs, test its memory",
        )

    def _differing_tensors(self) -> list[str]:
        """Collective. Return the names of the tensors that differ between replicas."""
        unit = self.replica.unit
        state = self.keeper.capture() if self.keeper else capture(self.held.named if self.held else self.module)
        digests = gather(self.world, {name: str(digest_of([tensor])) for name, tensor in state.items()})
        return [name for name in state if len({one.get(name) for one in digests[self.world.rank % unit :: unit]}) > 1]

    def _digest(self, what: str, step: int = 0) -> int:
        """64 bits over WEIGHTS (of `step`), ALL_WEIGHTS or STATE of this replica."""
        slice_number = step // max(1, self.verify_every) if what == WEIGHTS else None
        weights = (self.replica.digest() + DIGEST_FACTOR * self.untrained.digest(slice_number)) % 2**64
        return weights ^ (self.keeper.optimizer_digest() if self.keeper and what == STATE else 0)

    def _throw_out(self, step: int, differ: Sequence[int], digests: Sequence[int | None], what_differs: str) -> None:
        """Go on without the replicas whose weights are not those of the majority; FencedError on these themselves.

        Where there is no majority nobody can be trusted, and where not every step was compared a gradient of theirs may have been used:
        then all start anew, from a checkpoint of a step after which all were alike. When they come to this step again, it shows who was
        wrong.
        """
        world = self.world
        listed = ", ".join(f"rank {rank} ({world.members[rank]})" if world.members else f"rank {rank}" for rank in differ)
        what = f"the {what_differs} of {listed} differ before step {step + 1}"
        held = [rank for rank, digest in enumerate(digests) if digest is not None]
        undecided = world.membership is None or list(differ) == held
        if undecided or self.verify_every > 1:
            how = "none is in the majority" if undecided else "their gradients may have been used"
            told = {world.members[rank]: str(digests[rank]) for rank in held if world.members}
            world.condemn(f"{what}, and {how}", {"step": step, "what": what_differs, "digests": told})
            if self.keeper:
                self.keeper.store.go_back(self.alike_at if self.alike_at >= 0 else max(0, step - self.verify_every))
            raise FencedError(f"{what}, and {how}", "a bit has flipped in one of them, or their updates differ", "the same command goes on")
        log.error("%s from those of the others: a bit has flipped there", what)
        if world.rank in differ:
            raise FencedError(what, "a bit has flipped here", "this worker is started anew and takes the state of the others")
        for rank in differ:
            world.evict(rank, f"its {what_differs} differ before step {step + 1}")

    def _name_culprits(self, step: int) -> None:
        """Now that a step is done again at which replicas differed, say which of them was wrong."""
        unit, place = self.replica.unit, self.world.rank
        if not self.suspects or place >= unit:
            return
        for path, found in self.suspects:
            if step == found["step"]:
                right = str(self._digest(found["what"], step))
                wrong = [id for id, digest in list(found["digests"].items())[place::unit] if digest != right]
                if wrong:
                    log.error("before step %d the %s of %s were wrong: a bit had flipped there", step + 1, found["what"], ", ".join(wrong))
                    note(path.parent.parent, "culprit found", step=step, wrong=wrong, why="the step was done again from a checkpoint")
            if step >= found["step"]:
                path.unlink(missing_ok=True)
        self.suspects = [(path, found) for path, found in self.suspects if step < found["step"]]

    def _regroup(self, step: int, why: str, *, voted: bool) -> bool:
        """Collective. Go on with the members of the next generation; True when `step` is committed, as others have heard that all agreed.

        voted  this replica's gradient of `step` is whole, and it said so
        """
        world, began_s = self.world, time.monotonic()
        before = world.ledger.switch("regrouping", began_s)
        self.board.enter("joining")
        self.replica.forget()
        while True:
            try:
                world.leave_group("its host is taken away" if self.leaving else why, leaving=self.leaving)
                world.form_next()
                if self.tracker:
                    self.tracker.take_over(step + 1)
                hand_over(world, self.keeper.capture if self.keeper else None, self.replica.unit, partial(self._digest, STATE))
                break
            except StatesDiffer as error:
                why = error.what
                self._throw_out(roles(world.standings)[0], differing(error.digests, self.replica.unit), error.digests, STATE)
            except FencedError:
                if not self.leaving:
                    raise
                time.sleep(LINGER_S)
                raise Drained from None
            except Exception as error:
                if not self.world.lost(error):
                    raise
                why = plainly(error)
                error.__traceback__ = None
        first, sources, joined = roles(world.standings)
        new = bool(joined) or any(one.get("compare_all") for one in world.standings)  # the same on all: their digests must be, too
        seconds = time.monotonic() - began_s
        world.ledger.switch(before, time.monotonic())
        if world.shows():
            who = "1 worker goes" if world.size == 1 else f"{world.size} workers go"
            log.warning("%s; %s on after %s", why, who, show_seconds(seconds))
        if world.leader and world.membership:
            facts = {"why": why, "workers": list(world.members), "joined": joined, "step": first, "seconds": round(seconds, 4)}
            note(world.membership.folder, "regrouped", generation=world.generation, **facts)
        if first == step:
            self.verdict = replace(self.verdict, regroup=False)
            self.compare_all = new
            if self.keeper:
                self.keeper.take_over(step)
            return False
        if first != step + 1 or not voted:
            raise PeersLostError(f"this worker stands at step {step}, the others at {first}", self.world.members[self.world.rank])
        self._commit(step, replace(Verdict(**self.world.standings[sources[0]]["verdict"]), regroup=False))
        self.compare_all = new
        return True


def not_keyed(what: str) -> UsageError:
    """The error for a loop that is not a function of the step and the micro-batch."""
    return UsageError(
        what,
        "the first step of a start runs micro-batch 0 twice on every worker, to compare the loss",
        "data and random numbers of a micro-batch must follow from its step and number alone: no DataLoader or iterator consumed in the "
        "loop, no prefetched batch, no unseeded data set, no rank in a seed, only deterministic kernels (docs/loop.md); "
        "Team(rehearse=False) leaves the comparison out",
    )


def refuse_another_keeper(keeper: Keeper, world: World, model: nn.Module | Held) -> None:
    """Raise a UsageError when the keeper saves another model than the team trains."""
    module, held = whole_or_held(model)
    same = held is not None or (isinstance(keeper.model, nn.Module) and bare(keeper.model) is bare(module))
    if keeper.world is not world or keeper.held is not held or not same:
        what = f"the Team trains {kind_of(module)}, the Keeper saves another {kind_of(keeper.model)}"
        raise UsageError(what, "Keeper(folder, world, model, ...) and Team(world, model, ...)", "give the same World and module to both")
    keeper.refuse_what_is_left_out()
