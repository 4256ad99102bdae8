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
from lockstep.parallel.parallelize import LocalModel
from lockstep.training import published_run
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
    own: tuple[StoredTensors, dict[str, Any]] | None = None
    readers, loading = (
        ranks_that_read(runtime),
        runtime.board.during("preparing"),
    )  # as long as the disk requires
    reads = runtime.world.rank in readers

    def select() -> tuple[list[int], str, bool]:
        """For rank 0: return the steps to try, the newest first, the reason, and whether the later
        ones are set aside."""
        if runtime.membership and (why := folder_error(runtime.membership.worker_env)):
            raise RunFolderUnavailableError(
                f"the run folder cannot be used: {why}", str(store.folder), "mount it again"
            )
        published_run.refresh(store.folder.parent)
        store.preflight()
        steps = store.steps()
        chosen, reason = choose_resume_step(how, steps)
        return (
            [] if chosen is None else [chosen] if how.isdecimal() else steps[::-1],
            reason,
            how == "never" or how.isdecimal(),
        )

    def read(step: int) -> list[str]:
        """Verify this rank's share of a checkpoint, and keep it; return its problems."""
        nonlocal own
        if not reads:
            own = StoredTensors({}), {}
            return []
        stored, facts, problems = store.read_share(
            step, (readers.index(runtime.world.rank), len(readers))
        )
        if stored is None and not problems:
            raise missing_checkpoint(step, store.steps(), str(store.folder))
        own = (stored, facts) if stored is not None else None
        return problems

    steps, reason, rewinds = run_on_rank0(runtime, loading(select))
    if not runtime.has_own_folder:
        store.require_folder()
    damaged: dict[int, list[str]] = {}
    step = None
    for candidate in steps:
        if not (
            problems := {
                problem
                for found in gather_results(runtime, loading(partial(read, candidate)))
                for problem in found
            }
        ):
            step = candidate
            break
        damaged[candidate], own = sorted(problems), None

    def settle() -> None:
        """For rank 0: set aside what is not resumed."""
        store.set_damaged_aside(damaged, step)
        log.info(reason if step == next(iter(steps), None) else f"resuming from step {step}")

    run_on_rank0(runtime, settle)
    if rewinds:
        run_in_run_folder(runtime, lambda: store.set_aside_after(step or 0))
    if step is None:
        return None
    store.set_damaged_aside({}, step)
    assert own is not None
    needed = (
        (local_model.slices, local_model.layout.workers_per_replica) if local_model else (None, 1)
    )
    facts = own[1] if len(readers) == runtime.world.size else run_on_rank0(runtime, lambda: own[1])
    return Checkpoint(step, SharedTensors(runtime, own[0], *needed), facts)


def ranks_that_read(runtime: ElasticRuntime) -> list[int]:
    """Return the ranks whose run folder has the checkpoints that rank 0 sees."""
    hosts = [id.partition("/")[0] for id in runtime.world.members]
    return (
        [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        if runtime.has_own_folder
        else [*range(runtime.world.size)]
    )
