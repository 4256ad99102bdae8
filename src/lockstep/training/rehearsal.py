"""Compute a micro-batch once more and compare: loops whose loss depends on more than the step, the
micro-batch and what a checkpoint holds. It is the first one of a step that is not skipped.

    at a start      every rank computes it: all get the same, and again in the step itself
    after a resume  as the run that saved the checkpoint (witness.py)
    at a join       the joiner as the ranks that kept training
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, UsageError
from lockstep.log import log
from lockstep.parallel.replica import Replica
from lockstep.runtime.torch_private import collectives_of
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.divergence import ReplicaComparison
from lockstep.training.witness import FirstMicroBatch, WitnessFile, describe_difference

BELONGS = (
    "state that the loop changes belongs into the checkpoint: "
    "session.state(name=...), or buffers of the model; "
    "data and random numbers must follow from the step and the micro-batch alone (docs/loop.md)"
)


class Rehearsal:
    """The rehearsals of a replica.

    comparison    of the replicas, whose vote finds flipped bits
    checkpointer  whose run folder keeps the witnesses; None: nothing is compared after a resume
    save          Collective: save the state of a step before an error ends the run
    """

    def __init__(
        self,
        runtime: ElasticRuntime,
        replica: Replica,
        comparison: ReplicaComparison,
        checkpointer: Checkpointer | None,
        save: Callable[[int], None],
    ) -> None:
        self.runtime = runtime
        self.replica = replica
        self.comparison = comparison
        self.checkpointer = checkpointer
        layout = replica.groups.layout
        self.slices = (layout.tensor, layout.pipeline)  # gradients are compared where both are 1
        self._save = save
        self._file = WitnessFile(checkpointer.store.folder.parent) if checkpointer else None
        self.is_due = True  # a member is new, and has not rehearsed with the others
        self._rehearsed: FirstMicroBatch | None = None  # in this attempt; equal on all ranks
        self._own: FirstMicroBatch | None = None  # to be recorded when the step is committed

    def run(self, step: int, first: int = 0) -> Iterator[int]:
        """Collective. Yield micro-batch `first`. Errors, on all ranks, when its loss or gradient
        differs between ranks (UsageError), or from the run that saved this state
        (CheckpointError)."""
        self._rehearsed = None
        statistics = self.replica.statistics
        before = statistics.declared_values()
        if before and self.slices[1] == 1:  # in a pipeline forward passes follow the loop
            after = yield from self._pass(step, first, before)
            again = yield from self._pass(step, first, after)
            statistics.refuse_wrong_kinds(before, after, again)
        yield from self._pass(step, first, before)
        self.runtime.board.enter("voting")
        self.runtime.board.enter_collective()
        rehearsed = self.replica.hashed.loss  # None: a stage without the loss
        row: dict[str, Any] = {"loss": None if rehearsed is None else str(rehearsed)}
        row["gradient"] = self.replica.hashed.hash
        row["weights"] = self._digest(step)
        if self.runtime.world.leader and self._file and self._follows_save(step):
            record = self._file.read().get(step)
            row["saved"] = asdict(record) if record else None
            row["differences"] = self.checkpointer.differences if self.checkpointer else []
        rows = all_gather_json(self.runtime, row)
        if self._is_flipped(rows):
            return
        loss = next(row["loss"] for row in rows if row["loss"] is not None)
        gradient = rows[0]["gradient"] if self._has_whole_gradients else None
        self._rehearsed = FirstMicroBatch(first, loss, gradient, self.slices)
        saved = rows[0].get("saved")
        if self._file and "saved" in row and not saved:
            self._file.write(step, self._rehearsed, self._steps())
        self._refuse_unequal(step, first, rows)
        if saved:
            self._compare_with_saved(step, FirstMicroBatch.from_json(saved), rows[0]["differences"])

    def _pass(
        self, step: int, first: int, buffers: dict[str, Tensor]
    ) -> Generator[int, None, dict[str, Tensor]]:
        """Collective. Yield the micro-batch, with these values of declared buffers; return their
        values after it. UsageError for a collective in the loop."""
        after = buffers
        for k in self.replica.rehearsal(step, first):
            self.runtime.board.enter("forward", step + 1)
            self.replica.statistics.set_declared(buffers)
            before = collectives_of(dist.group.WORLD)
            yield k
            after = self.replica.statistics.declared_values()
            if collectives_of(dist.group.WORLD) != before:
                raise UsageError(
                    "a collective of torch.distributed ran in the micro-batch loop of "
                    f"step {step + 1}",
                    "workers run different numbers of micro-batches, "
                    "and gradients are being sent meanwhile",
                    "remove it, or run it after the loop: "
                    "gradients are summed, and the loss is averaged, over all workers already. "
                    "A loss over the samples of all workers: examples/gallery/contrastive.py",
                )
        return after

    def compare(self, step: int, first: int) -> None:
        """Collective in the attempt that rehearsed. UsageError, on all ranks, when micro-batch
        `first` was another one in the rehearsal."""
        before = self._rehearsed
        self._rehearsed = None
        self._own = None
        if before is None and not self._follows_save(step):
            return
        own = self._result_of(first)
        if before is None:
            self._own = own
            return
        row = {"own": asdict(own) if own else None, "weights": self._digest(step)}
        rows = all_gather_json(self.runtime, row)
        if self._is_flipped(rows):
            return
        for values in [row["own"] for row in rows if row["own"]]:
            again = FirstMicroBatch.from_json(values)
            if again.loss != before.loss:
                what = f"is {before.loss} the first time and {again.loss} the second time"
                raise _nondeterministic(
                    f"the loss of micro-batch {first} of step {step + 1} {what}"
                )
            if again != before:
                what = "has another gradient the second time, with the same loss"
                raise _nondeterministic(f"micro-batch {first} of step {step + 1} {what}")

    def follow(self, *, is_due: bool) -> None:
        """Take from the members of a new generation whether one is new."""
        self.is_due = is_due

    def commit(self, step: int) -> None:
        """Record the first micro-batch of a committed step, in a step after a save."""
        self.is_due = False
        own, self._own = self._own, None
        if own and self._file:
            self._file.write(step, own, self._steps())

    def hashes(self, step: int) -> bool:
        """Return whether this attempt hashes the gradient of its first micro-batch."""
        return self._has_whole_gradients and (
            self._rehearsed is not None or self._follows_save(step)
        )

    @property
    def _has_whole_gradients(self) -> bool:
        return self.slices == (1, 1)

    def _follows_save(self, step: int) -> bool:
        return self.checkpointer is not None and self.checkpointer.saved_step == step > 0

    def _steps(self) -> list[int]:
        return self.checkpointer.store.steps() if self.checkpointer else []

    def _result_of(self, first: int) -> FirstMicroBatch | None:
        """Return micro-batch `first` of this attempt, on the rank that reports its loss."""
        loss = self.replica.losses().get(first)
        if loss is None:
            return None
        gradient = self.replica.hashed.hash if self._has_whole_gradients else None
        return FirstMicroBatch(first, str(loss), gradient, self.slices)

    def _digest(self, step: int) -> int:
        """Return the digest of all weights; 0: the vote on `step` does not compare them."""
        if not self.comparison.is_due(step):
            return 0
        return (self.replica.digest() + self.comparison.state.frozen_state.digest()).read()

    def _is_flipped(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Return whether workers hold different weights, although a join made them equal: a bit
        has flipped. The vote of this step evicts that worker."""
        return not self.runtime.first_generation and self._differs("weights", rows)

    def _differs(self, key: str, rows: Sequence[dict[str, Any]]) -> bool:
        """Return whether workers with the same slices have other values."""
        size = self.replica.workers_per_replica
        return any(len({row[key] for row in rows[slot::size]}) > 1 for slot in range(size))

    def _refuse_unequal(self, step: int, first: int, rows: Sequence[dict[str, Any]]) -> None:
        """UsageError when ranks got other losses, or other gradients of the same slices.
        Collective when a joiner did: what the others hold is saved."""
        losses = {rank: row["loss"] for rank, row in enumerate(rows) if row["loss"] is not None}
        what = "loss" if len(set(losses.values())) > 1 else ""
        listed = ", ".join(f"{loss} on rank {rank}" for rank, loss in losses.items())
        if not what and self._differs("gradient", rows):
            what = "gradient"
            listed = ", ".join(
                f"hash {row['gradient'] % 2**64:016x} on rank {rank}"
                for rank, row in enumerate(rows)
            )
        if not what:
            return
        unequal = (
            f"the {what} of micro-batch {first} "
            f"of step {step + 1} is not the same on all workers: {listed}"
        )
        if self.runtime.first_generation:
            raise _nondeterministic(unequal)
        self._save(step)
        raise UsageError(
            unequal,
            "a worker has joined, with everything that a checkpoint holds, "
            "and computed it like the others",
            f"{BELONGS}; rehearse=False skips the comparison",
        )

    def _compare_with_saved(
        self, step: int, saved: FirstMicroBatch, differences: Sequence[str]
    ) -> None:
        """CheckpointError when the step begins otherwise than in the run that saved this state.
        With `differences` of code or machine, which explain it, a warning."""
        assert self._rehearsed is not None
        if not (difference := describe_difference(saved, self._rehearsed)):
            return
        what = (
            f"step {step + 1} began otherwise "
            f"when the checkpoint of step {step} was saved: {difference}"
        )
        if differences:
            if self.runtime.shows_progress():
                log.warning("%s (%s)", what, "; ".join(differences))
            return
        raise CheckpointError(
            f"{what}; something that decides the loss is not in the checkpoint",
            "its first micro-batch was computed again with the state of the checkpoint; "
            "code and machine are the same: data of equal length may have changed, "
            "or an attribute, a variable or a draw from before the loop",
            f"{BELONGS}; to continue with other bits: "
            "rehearse=False, elastic.rehearse=false in a recipe",
        )


def _nondeterministic(what: str) -> UsageError:
    return UsageError(
        what,
        "the first step of a start runs micro-batch 0 twice "
        "on every worker, to compare loss and gradient",
        "data and random numbers of a micro-batch must follow from its step and number alone: "
        "no DataLoader or iterator consumed in the loop, no prefetched batch, "
        "no unseeded data set, no rank in a seed, only deterministic kernels (docs/loop.md); "
        "no variable or attribute that the loop changes: "
        "update it after the loop, or keep one for each micro-batch with session.per_micro_batch; "
        "Session(rehearse=False) skips the comparison, elastic.rehearse=false in a recipe",
    )
