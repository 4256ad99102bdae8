"""Choose the checkpoint to resume from and load it, on all workers together."""

from __future__ import annotations

import logging
from functools import partial

from lockstep.checkpoint.policy import choose_resume_step
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import gather_results, run_on_all, run_on_rank0
from lockstep.elastic.run_folder import folder_error
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import RunFolderUnavailableError
from lockstep.parallel.parallelize import LocalModel

log = logging.getLogger("lockstep")


def load_checkpoint(runtime: ElasticRuntime, store: CheckpointStore, how: str, local_model: LocalModel | None) -> Checkpoint | None:
    """Collective. Return this worker's part of a checkpoint; None for a new run.

    how  see Checkpointer.resume
    """
    checkpoint: Checkpoint | None = None

    def select() -> int | None:
        """Return the step to resume from. On rank 0, which loads an unsharded checkpoint."""
        nonlocal checkpoint
        if runtime.membership and (why := folder_error(runtime.membership.worker_env)):
            raise RunFolderUnavailableError(f"the run folder cannot be used: {why}", str(store.folder), "mount it again")
        store.preflight()
        chosen, reason = choose_resume_step(how, store.steps())
        step = chosen
        if chosen is not None and not local_model:
            checkpoint = store.load(chosen) if how.isdecimal() else store.load_newest()
            step = checkpoint.step if checkpoint else None
        if how == "never" or how.isdecimal():
            store.set_aside_after(chosen or 0)
        log.info(reason if step == chosen else f"resuming from step {step}")
        return step

    loading = runtime.board.during("preparing")  # takes as long as the disk and the size of the state require
    step = run_on_rank0(runtime, loading(select))
    store.require_folder()
    if step is not None and local_model and not how.isdecimal():
        step = newest_whole_step(runtime, store)
    if step is None:
        return None
    load = partial(store.load_slices, step, local_model.slices) if local_model else partial(store.load, step)
    return run_on_all(runtime, loading(lambda: checkpoint or load()))


def newest_whole_step(runtime: ElasticRuntime, store: CheckpointStore) -> int | None:
    """Collective. Return the newest whole step. Each process verifies a share of the files."""
    damaged: dict[int, list[str]] = {}
    share, whole, verifying = (runtime.world.rank, runtime.world.size), None, runtime.board.during("preparing")
    for step in reversed(run_on_rank0(runtime, store.steps)):
        problems_per_rank = gather_results(runtime, verifying(partial(store.verify, step, share)))
        problems = [problem for rank_problems in problems_per_rank for problem in rank_problems]
        if not problems:
            whole = step
            break
        damaged[step] = sorted(set(problems))
    run_on_rank0(runtime, lambda: store.set_damaged_aside(damaged, whole))
    return whole
