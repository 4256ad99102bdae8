"""Choose the checkpoint to resume from and load it, on all workers together."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from lockstep.checkpoint.policy import choose_resume_step, missing_checkpoint
from lockstep.checkpoint.shards import StoredTensors
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import gather_results, run_on_rank0
from lockstep.elastic.run_folder import folder_error
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import RunFolderUnavailableError
from lockstep.parallel.parallelize import LocalModel
from lockstep.training.shared_tensors import SharedTensors

log = logging.getLogger("lockstep")


def load_checkpoint(runtime: ElasticRuntime, store: CheckpointStore, how: str, local_model: LocalModel | None) -> Checkpoint | None:
    """Collective. Return this worker's part of a checkpoint; None for a new run.

    Each rank reads and verifies a share of the files, and keeps it in memory. They send it to each
    other while the state is loaded: `tensors` is a SharedTensors.
    how  see Checkpointer.resume
    """
    own: tuple[StoredTensors, dict[str, Any]] | None = None
    share, loading = (runtime.world.rank, runtime.world.size), runtime.board.during("preparing")  # as long as the disk requires

    def select() -> tuple[list[int], str]:
        """For rank 0: return the steps to try, the newest first, and the reason."""
        if runtime.membership and (why := folder_error(runtime.membership.worker_env)):
            raise RunFolderUnavailableError(f"the run folder cannot be used: {why}", str(store.folder), "mount it again")
        store.preflight()
        steps = store.steps()
        chosen, reason = choose_resume_step(how, steps)
        return [] if chosen is None else [chosen] if how.isdecimal() else steps[::-1], reason

    def read(step: int) -> list[str]:
        """Verify this rank's share of a checkpoint, and keep it; return its problems."""
        nonlocal own
        stored, facts, problems = store.read_share(step, share)
        if stored is None and not problems:
            raise missing_checkpoint(step, store.steps(), str(store.folder))
        own = (stored, facts) if stored is not None else None
        return problems

    steps, reason = run_on_rank0(runtime, loading(select))
    store.require_folder()
    damaged: dict[int, list[str]] = {}
    step = None
    for candidate in steps:
        if not (problems := {problem for found in gather_results(runtime, loading(partial(read, candidate))) for problem in found}):
            step = candidate
            break
        damaged[candidate], own = sorted(problems), None

    def settle() -> None:
        """For rank 0: set aside what is not resumed."""
        store.set_damaged_aside(damaged, step)
        if how == "never" or how.isdecimal():
            store.set_aside_after(step or 0)
        log.info(reason if step == next(iter(steps), None) else f"resuming from step {step}")

    run_on_rank0(runtime, settle)
    if step is None:
        return None
    store.set_damaged_aside({}, step)
    assert own is not None
    needed = (local_model.slices, local_model.layout.workers_per_replica) if local_model else (None, 1)
    return Checkpoint(step, SharedTensors(runtime, own[0], *needed), own[1])
