"""Choose the checkpoint to resume from and load it, on all workers together."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lockstep.checkpoint.policy import choose_resume_step, missing_checkpoint
from lockstep.checkpoint.shards import StoredTensors
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import gather_results, run_in_run_folder, run_on_rank0
from lockstep.elastic.run_folder import folder_error
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import RunFolderUnavailableError
from lockstep.object_store.storage import STORE_FILE
from lockstep.parallel.parallelize import LocalModel
from lockstep.training.shared_tensors import SharedTensors

log = logging.getLogger("lockstep")


def load_checkpoint(
    runtime: ElasticRuntime, store: CheckpointStore, how: str, local_model: LocalModel | None
) -> Checkpoint | None:
    """Collective. Return this worker's part of a checkpoint; None for a new run.

    Each rank reads and verifies a share of the files, and keeps it in memory. They send it to each
    other while the state is loaded: `tensors` is a SharedTensors. Where the hosts share no disk,
    the ranks on the host of rank 0 read it.
    how  see Checkpointer.resume
    """
    readers = ranks_that_read(runtime)
    share = ShareReader(store, runtime.world.rank, readers)
    loading = runtime.board.during("preparing")  # as long as the disk requires
    steps, reason = run_on_rank0(runtime, loading(partial(select, runtime, store, how)))
    store.require_folder()
    damaged: dict[int, list[str]] = {}
    step = None
    for candidate in steps:
        found = gather_results(runtime, loading(partial(share.read, candidate)))
        problems = {problem for of_rank in found for problem in of_rank}
        if not problems:
            step = candidate
            break
        damaged[candidate] = sorted(problems)

    def settle() -> None:
        """For rank 0: set aside what is not resumed."""
        store.set_damaged_aside(damaged, step)
        log.info(reason if step == next(iter(steps), None) else f"resuming from step {step}")

    run_on_rank0(runtime, settle)
    if how == "never" or how.isdecimal():
        run_in_run_folder(runtime, lambda: store.set_aside_after(step or 0))
    if step is None:
        return None
    store.set_damaged_aside({}, step)
    facts = share.facts
    if len(readers) < runtime.world.size:
        facts = run_on_rank0(runtime, lambda: share.facts)
    slices, replica_size = None, 1
    if local_model:
        slices, replica_size = local_model.slices, local_model.layout.workers_per_replica
    return Checkpoint(step, SharedTensors(runtime, share.tensors, slices, replica_size), facts)


def select(runtime: ElasticRuntime, store: CheckpointStore, how: str) -> tuple[list[int], str]:
    """For rank 0: return the steps to try, the newest first, and the reason."""
    if runtime.membership and (why := folder_error(runtime.membership.worker_env)):
        raise RunFolderUnavailableError(
            f"the run folder cannot be used: {why}", str(store.folder), "mount it again"
        )
    run = store.folder.parent
    if (run / STORE_FILE).exists():
        # Only a run in an object store loads the code for it.
        from lockstep.remote.working_copy import refresh_copy

        refresh_copy(run, keep=["run.json"])  # which this start has written
    store.preflight()
    steps = store.steps()
    chosen, reason = choose_resume_step(how, steps)
    if chosen is None or how.isdecimal():
        return [] if chosen is None else [chosen], reason
    return steps[::-1], reason


class ShareReader:
    """Reads and verifies this rank's share of a checkpoint, and keeps it. readers: ranks that
    read"""

    def __init__(self, store: CheckpointStore, rank: int, readers: list[int]) -> None:
        self.store = store
        self.rank = rank
        self.readers = readers
        self.tensors = StoredTensors({})
        self.facts: dict[str, Any] = {}

    def read(self, step: int) -> list[str]:
        """Return the problems of the share."""
        if self.rank not in self.readers:
            return []
        self.tensors = StoredTensors({})  # free the memory of a damaged one
        share = self.readers.index(self.rank), len(self.readers)
        stored, facts, problems = self.store.read_share(step, share)
        if stored is not None:
            self.tensors, self.facts = stored, facts
        elif not problems:
            raise missing_checkpoint(step, self.store.steps(), str(self.store.folder))
        return problems


def ranks_that_read(runtime: ElasticRuntime) -> list[int]:
    """Return the ranks whose run folder has the checkpoints that rank 0 sees."""
    hosts = [id.partition("/")[0] for id in runtime.world.members]
    return (
        [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        if runtime.has_own_folder
        else [*range(runtime.world.size)]
    )
