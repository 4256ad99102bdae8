"""Compare the replicas, and act when their weights or optimizer states differ."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.runtime import ElasticRuntime, record_event
from lockstep.elastic.world import transfer_roles
from lockstep.errors import FencedError, UsageError
from lockstep.parallel.digest import DIGEST_FACTOR, NOTHING, Digest, digest_of
from lockstep.parallel.frozen_state import FrozenState
from lockstep.parallel.gradient_watch import hash_of
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.replica import Replica
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.update_checks import names_by_memory, refuse_new_memory
from lockstep.units import join_names

log = logging.getLogger("lockstep")

# What is compared: trained weights and a slice of the rest at a vote; all weights at a member's
# first vote; all state before a save.
WEIGHTS = "weights"
ALL_WEIGHTS = "weights and buffers"
STATE = "weights, optimizer state or values of session.state"
RECORD_EVERY = 10  # steps between two digests in the record of one replica, which compares none
MAX_DIVERGENCES = 3  # in a row; then the loop itself is nondeterministic


class ReplicaState:
    """The state of this replica, or of this worker's part of it.

    local         None: a whole replica
    checkpointer  of the optimizers and the session's state; None: the weights are all
    slice_steps   steps after which WEIGHTS has the next slice of the frozen weights
    """

    def __init__(
        self,
        replica: Replica,
        local: LocalModel | None,
        checkpointer: Checkpointer | None,
        slice_steps: int,
    ) -> None:
        self.replica = replica
        self.local = local
        self.checkpointer = checkpointer
        self.slice_steps = slice_steps
        self._take_parameters()
        self._shared_memory = names_by_memory(self._modules()) if not local else set()

    def _take_parameters(self) -> None:
        module, statistics = self.replica.module, self.replica.statistics
        self._trained = self.replica.parameters
        self.frozen_state = FrozenState(
            module,
            [p for p in (self.local or module).parameters() if not p.requires_grad],
            followed=statistics.names,
            local=statistics.local,
        )

    def follow_parameters(self) -> None:
        """Follow frozen and unfrozen layers. UsageError for a parameter in no optimizer."""
        if self.checkpointer and "trained" in self.checkpointer.facts:
            self.checkpointer.warn_if_trained_layers_changed()
        if self.replica.parameters is self._trained:
            return
        if self.checkpointer:
            self.checkpointer.refuse_unsaved_parameters()
        self._take_parameters()

    def refuse_moved(self, step: int) -> None:
        """UsageError: parameters have left the memory that they had before the loop."""
        if self.local:
            self.local.refuse_replaced()
        else:
            refuse_new_memory(self._shared_memory, self._modules(), step)

    def _modules(self) -> dict[str, nn.Module]:
        """Return the model and the modules of the state, by the prefix of their names."""
        state = (self.checkpointer.state or {}) if self.checkpointer else {}
        averages = {
            f"state.{name}.": value for name, value in state.items() if isinstance(value, nn.Module)
        }
        return {"": self.replica.module, **averages}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        module = self.replica.module
        modes = {
            f"training mode of {name or 'the model'}": torch.tensor(m.training)
            for name, m in module.named_modules()
        }
        if self.checkpointer:
            return modes | self.checkpointer.state_dict()
        return modes | get_state_dict(self.local.local_params if self.local else module)

    def common(self) -> dict[str, Tensor]:
        """Return the tensors which all workers of a replica hold."""
        return self.checkpointer.common_state() if self.checkpointer else {}

    def digest(self, what: str, step: int = 0) -> int:
        """Return 64 bits over WEIGHTS (of `step`), ALL_WEIGHTS or STATE of this replica."""
        return self.start_digests(what, step)[1].read()

    def start_digests(self, what: str, step: int = 0) -> tuple[Digest, Digest]:
        """Return the digest of the trained weights, and `digest`. A device still has a part of
        them."""
        number = step // self.slice_steps if what == WEIGHTS else None
        trained = self.replica.digest()
        weights = trained + self.frozen_state.digest(number) * DIGEST_FACTOR
        if what != STATE:
            return trained, weights + Digest(self.frozen_state.mode_digest())
        # Without modes: between steps, one rank may evaluate.
        optimizers = self.checkpointer.optimizer_digest() if self.checkpointer else 0
        return trained, weights + Digest(optimizers)


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

    def start_generation(self, runtime: ElasticRuntime, step: int) -> None:
        """Take the count of all members when the generation is new; `step` is its first step."""
        if self.generation != runtime.world.generation:
            members = runtime.member_progress
            self.count = max((member.divergences for member in members), default=0)
            self.generation = runtime.world.generation
            self.first_step = step
            self.proven = False
            self.joined = bool(transfer_roles(members)[2]) if members else False

    def record_equal(self, step: int) -> None:
        """Record that all replicas are equal after `step` steps."""
        if step > self.first_step and not self.proven:
            self.proven = True
            self.count = 0 if self.joined else self.count

    def record_difference(self, step: int) -> None:
        """Record that replicas differ after `step` steps."""
        self.count += step > self.first_step and not self.proven


class ReplicaComparison:
    """Finds replicas that differ, and evicts them.

    state          of this replica
    verify_every   steps between two comparisons; 0: never
    identical_at   the last step after which all replicas were found equal
    compare_all    at the next vote all weights: a member is new
    logged         [step, number] of session.log by name, since the last comparison of the state
    """

    def __init__(
        self,
        runtime: ElasticRuntime,
        checkpointer: Checkpointer | None,
        state: ReplicaState,
        verify_every: int,
    ) -> None:
        self.runtime = runtime
        self.checkpointer = checkpointer
        self.state = state
        self.replica_size = state.replica.workers_per_replica
        self.verify_every = verify_every
        self.compare_all = True
        self.record_every = RECORD_EVERY
        self.identical_at = -1
        self.logged: dict[str, list[float]] = {}
        self._warned: set[str] = set()  # the names whose numbers differ
        self.divergence = Divergence()
        self._unexplained = runtime.membership.divergence_records()

    def is_due(self, step: int) -> bool:
        """Return whether the replicas are compared at the vote on `step`."""
        return (
            bool(self.verify_every)
            and step % self.verify_every == 0
            and self.runtime.world.size > self.replica_size
        )

    def start_digests(self, step: int) -> tuple[Digest, Digest]:
        """Return the digest of the trained weights for the record of `step`, and of what the vote
        on it compares. NOTHING where `verify_every` leaves the step out."""
        if not self.verify_every or step % self.verify_every:
            return NOTHING, NOTHING
        if not self.is_due(step):  # no other replica
            is_recorded = step // self.state.slice_steps % self.record_every == 0
            return self.state.replica.digest() if is_recorded else NOTHING, NOTHING
        return self.state.start_digests(self.what_is_compared(), step)

    def record_all(self) -> None:
        """Start a digest in every step, with one replica too: a replay compares them."""
        self.record_every = 1

    def what_is_compared(self) -> str:
        """Return what the next vote compares."""
        return ALL_WEIGHTS if self.compare_all else WEIGHTS

    def follow(self, *, compare_all: bool) -> None:
        """Take from the members of a new generation what the next vote compares."""
        self.compare_all = compare_all

    def commit(self, step: int) -> None:
        self.compare_all = self.compare_all and not self.is_due(step)

    def record_equal(self, step: int) -> None:
        """Record that all replicas are equal after `step` steps."""
        self.identical_at = step
        self.divergence.record_equal(step)

    def compare_state(self, step: int) -> bool:
        """Collective. Return whether all replicas hold the same weights and optimizer state after
        `step` steps.

        False when a peer is lost, too. Replicas that differ are evicted.
        """
        self.state.refuse_moved(step)
        if not self.verify_every:
            return True
        if self.runtime.world.size == 1 or self.runtime.is_late:
            return True
        attributes = self.checkpointer.attributes if self.checkpointer else None
        with self.runtime.catch_peer_loss() as loss:
            common = digests_of(self.state.common()) if self.replica_size > 1 else {}
            own = {"digest": self.state.digest(STATE, step), "common": hash_of(common)}
            own["attributes"] = attributes.describe() if attributes else None
            own["logged"] = self.logged
            answers = all_gather_json(self.runtime, own)
            self.logged = {}
            self._warned |= warn_of_logged([row["logged"] for row in answers], self._warned)
            digests = [answer["digest"] for answer in answers]
            if attributes:
                attributes.agree([answer["attributes"] for answer in answers])
            divergent = find_divergent_ranks(digests, self.replica_size)
            if divergent:
                self.refuse_repeated(step)
            elif len({answer["common"] for answer in answers}) > 1:
                self.refuse_uncommon(step, common)
        if loss.why:
            return False
        if divergent:
            self.evict(step, divergent, digests, STATE)
            return False
        self.record_equal(step)
        return True

    def refuse_repeated(self, step: int) -> None:
        """Collective. UsageError when replicas differ again: that is not a flipped bit."""
        runtime = self.runtime
        again = [name for name, record in self._unexplained if record["step"] == step]
        self.divergence.record_difference(step)
        runtime.set_progress(replace(runtime.progress, divergences=self.divergence.count))
        if not again and self.divergence.count < MAX_DIVERGENCES:
            return
        state = self.state.tensors()
        digests = all_gather_json(runtime, digests_of(state))
        same_position = digests[runtime.world.rank % self.replica_size :: self.replica_size]
        names = [
            name
            for name in state
            if len({rank_digests.get(name) for rank_digests in same_position}) > 1
        ]
        self._remove_records(again)
        raise UsageError(
            f"the replicas differ again before step {step + 1}, "
            f"after all of them had taken the same state: {join_names(names)}",
            "the digest of each tensor on each worker",
            "the update must be the same on every worker: no data, state or rank that differs, "
            "random numbers only from the global generators of torch, NumPy or random, "
            "and as many on each worker. If one host alone differs, test its memory",
        )

    def refuse_uncommon(self, step: int, common: dict[str, str]) -> None:
        """Collective. UsageError: the workers of a replica differ in what belongs to no slice."""
        digests = all_gather_json(self.runtime, common)
        names = [name for name in common if len({by_name.get(name) for by_name in digests}) > 1]
        raise UsageError(
            f"the workers of a replica hold different state after step {step}, "
            f"and nothing was saved: {join_names(names)}",
            "session.state(name=object) and parameter groups, which are equal on all shards",
            "change them alike on every worker: "
            "by no rank, no slice of a weight or gradient, and no number of micro-batches",
        )

    def evict(
        self, step: int, divergent: Sequence[int], digests: Sequence[int | None], what: str
    ) -> None:
        """Continue without the replicas whose state differs from the majority; FencedError on these
        replicas.

        FencedError on all when there is no majority, or when steps between two comparisons may have
        used their gradients: then all workers restart from a checkpoint of a step after which all
        were equal. The repeated steps show which replica was wrong.
        """
        world, members = self.runtime.world, self.runtime.world.members
        listed = ", ".join(
            f"rank {rank} ({members[rank]})" if members else f"rank {rank}" for rank in divergent
        )
        message = f"the {what} of {listed} differ before step {step + 1}"
        holders = [rank for rank, digest in enumerate(digests) if digest is not None]
        no_majority = self.runtime.is_static or list(divergent) == holders
        if no_majority or self.verify_every > 1:
            message += (
                ", and none is in the majority"
                if no_majority
                else ", and their gradients may have been used"
            )
            digest_of_member = {members[rank]: str(digests[rank]) for rank in holders if members}
            facts = {"step": step, "what": what, "digests": digest_of_member}
            self.runtime.membership.mark_untrusted(world.generation, message, facts)
            if self.checkpointer:
                self.checkpointer.store.set_aside_after(
                    self.identical_at
                    if self.identical_at >= 0
                    else max(0, step - self.verify_every)
                )
            raise FencedError(
                message,
                "a bit has flipped in one of them, or the loop gives each worker other values",
                "the same command resumes the run; if this repeats, compute what session.state and "
                "the update hold from session.loss or gathered values, not from one worker's own",
            )
        log.error("%s from those of the others: a bit has flipped there", message)
        if world.rank in divergent:
            raise FencedError(
                message,
                "a bit has flipped here",
                "this worker is restarted and receives the state of the others",
            )
        for rank in divergent:
            self.runtime.evict(rank, f"its {what} differ before step {step + 1}")

    def name_culprits(self, step: int) -> None:
        """Report which replica was wrong, once the step at which replicas differed is repeated."""
        position = self.runtime.world.rank
        if not self._unexplained or position >= self.replica_size:
            return
        remaining: list[tuple[str, dict[str, Any]]] = []
        for name, record in self._unexplained:
            if step < record["step"]:
                remaining.append((name, record))
                continue
            if step == record["step"]:
                right = str(self.state.digest(record["what"], step))
                same_position = list(record["digests"].items())[position :: self.replica_size]
                wrong = [id for id, digest in same_position if digest != right]
                if wrong:
                    log.error(
                        "before step %d the %s of %s were wrong: a bit had flipped there",
                        step + 1,
                        record["what"],
                        ", ".join(wrong),
                    )
                    record_event(
                        self.runtime,
                        "culprit found",
                        step=step,
                        wrong=wrong,
                        why="the step was repeated from a checkpoint",
                    )
            self._remove_records([name])
        self._unexplained = remaining

    def _remove_records(self, names: list[str]) -> None:
        if names:
            self.runtime.member.remove_divergence_records(names)


def warn_of_logged(
    answers: Sequence[Mapping[str, list[float]]], warned: Collection[str]
) -> set[str]:
    """Warn of numbers of session.log that differ between the workers; return their names.

    answers  of all ranks: ReplicaComparison.logged
    warned   names to leave out
    """
    differing: set[str] = set()
    for name, (step, number) in answers[0].items():
        logged = [answer[name] for answer in answers if name in answer]
        others = {f"{other:.12g}" for at, other in logged if at == step} - {f"{number:.12g}"}
        if others and name not in warned:
            differing.add(name)
            log.warning(
                "session.log recorded %s %.6g for step %d, and other workers have %s: it is rank "
                "0's own. For a number of all workers take session.gather, "
                "session.per_micro_batch(tensor).rows or session.loss (docs/questions.md)",
                name,
                number,
                step,
                join_names(sorted(others)),
            )
    return differing


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: str(digest_of([tensor])) for name, tensor in tensors.items()}
