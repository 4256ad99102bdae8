"""Build what the loop needs from the run: folder lock, checkpointer, replica group, state."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config.resolve import with_precision
from lockstep.config.rules import DATA_PATHS, bit_deciding_values, shared_values
from lockstep.config.saved_run import read_run, to_json, write_run
from lockstep.config.schema import ResolvedRun, RunConfig
from lockstep.data.pairs.loader import PairLoader
from lockstep.data.text.packing import RowLoader
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import try_lock
from lockstep.parallel.parallelize import LocalModel
from lockstep.record import events
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.device import default_bucket_bytes
from lockstep.runtime.numerics import choose_precision
from lockstep.runtime.signals import StopSignals
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.rollback import Rollback
from lockstep.training.time_account import resume_account

log = logging.getLogger("lockstep")


def resolve_precision(resolved: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Replace `compute.precision = auto` by a choice for this device, which run.json records."""
    if resolved.run.compute.precision != "auto":
        return resolved
    precision, reason = choose_precision(device)
    log.info("compute.precision = %s: %s", precision, reason)
    return with_precision(resolved, precision, f"chosen: {reason}")


@contextmanager
def lock_run_folder(folder: Path, resolved: ResolvedRun, *, alone: bool = True) -> Iterator[None]:
    """Lock `folder` and write its run.json. For rank 0. UsageError when it is locked or read-only.

    alone  take the lock; False under an agent, where the generation log excludes another training
    """
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder / "run.lock") if alone else None
        if alone and lock is None:
            what = f"another training is already running in {folder}"
            raise UsageError(
                what, f"it holds {folder}/run.lock", "wait for it, stop it, or give another --out"
            )
        earlier_run = read_run(folder) if resolved.overrides else None
        known_overrides = earlier_run.overrides if earlier_run else ()
        write_run(folder, resolved)
    except OSError as error:
        what, hint = (
            f"{folder} cannot be written: {error.strerror}",
            "give a folder that this user can write, on a disk with space",
        )
        raise UsageError(what, "given with --out", hint) from None
    for override in resolved.overrides:
        if override not in known_overrides:
            events.append_event(folder, "override", step=override.step, values=override.values)
            log.info(
                "from step %d on: %s",
                override.step + 1,
                ", ".join(f"{key} = {item}" for key, item in override.values.items()),
            )
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def run_fingerprints(resolved: ResolvedRun, task_fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Return the values that must be equal on all workers: task, configuration, overrides."""
    fingerprints = dict(task_fingerprints)
    fingerprints |= {
        f"run {key}": text
        for key, text in shared_values(resolved.run).items()
        if key not in DATA_PATHS
    }
    return fingerprints | {
        "run overrides": json.dumps([asdict(override) for override in resolved.overrides])
    }


def make_tracker(
    resolved: ResolvedRun, folder: Path, runtime: ElasticRuntime, first_step: int
) -> Tracker:
    track = resolved.run.track
    return Tracker(
        folder,
        leader=runtime.is_leader,
        from_step=first_step,
        run=to_json(resolved)["values"],
        tensorboard=track.tensorboard,
        wandb=track.wandb,
        project=track.project,
        backend=track.backend,
    )


def make_replica_group(
    run: RunConfig,
    loader: PairLoader | RowLoader,
    model: LocalModel,
    checkpointer: Checkpointer,
    signals: StopSignals,
    tracker: BackgroundTracker,
) -> ReplicaGroup:
    runtime = checkpointer.runtime
    return ReplicaGroup(
        runtime,
        model,
        checkpointer,
        micro_batches=run.leaves,
        seed=run.seed,
        reduce=run.parallel.reduce,
        balance=run.layout.balance,
        wire=run.parallel.wire,
        bucket_bytes=run.parallel.bucket_bytes or default_bucket_bytes(runtime.world.device),
        signals=signals,
        tracker=tracker,
        verify_every=run.elastic.verify_every,
        reduce_once_per_step=run.fsdp.reduce == "per_step",
        commit_steps=run.diloco.every if run.diloco.learners else 0,
        rollback=Rollback(run, loader, checkpointer),
        # A leaf of DiLoCo trains its learner, so a rehearsal would be an update.
        rehearse=run.elastic.rehearse and run.diloco.learners == 0,
        on_nonfinite="ignore",  # refuse_nonfinite_norm uses the norm, which the loop computes in any case
    )


def resume_run(
    checkpointer: Checkpointer,
    resolved: ResolvedRun,
    folder: Path,
    how: str,
    fingerprints: Mapping[str, str],
    task: Mapping[str, str],
) -> int:
    """Collective. Load the checkpoint that `how` names and the run's ledger; return its step.

    fingerprints  the result of run_fingerprints
    task          the fingerprints of the task, which the facts of each checkpoint hold
    """
    saved_facts = {
        "run": to_json(resolved),
        "fingerprints": dict(task) | bit_deciding_values(resolved.run),
    }
    first_step = checkpointer.resume(how, fingerprints, saved_facts)
    refuse_other_overrides(checkpointer.facts, resolved, first_step)
    resume_account(checkpointer.runtime, checkpointer.facts, first_step, folder)
    return first_step


def refuse_other_overrides(facts: Mapping[str, Any], resolved: ResolvedRun, step: int) -> None:
    """CheckpointError when the checkpoint of `step` was trained with other overrides."""
    saved = facts["run"].get("overrides", []) if "run" in facts else []
    before = [override for override in saved if override["step"] < step]
    now = [asdict(override) for override in resolved.overrides if override.step < step]
    if "run" in facts and before != now:
        raise CheckpointError(
            f"the checkpoint of step {step} was trained with the overrides {before}, and the run has {now}",
            "--override, as run.json and the checkpoint have it",
            "put back the run.json of this run, or give another folder with --out",
        )


def warn_of_other_layout(facts: Mapping[str, Any], run: RunConfig, model: nn.Module) -> None:
    """Warn when the checkpoint with these facts was saved in a layout with other bits."""
    dropout = (
        run.task == "translate" and run.model.dropout > 0
    )  # that of adapters has the same masks in every layout
    is_tied = getattr(model, "output", None) is None
    decides_bits = {"tensor": True, "pipeline": dropout or is_tied, "pipeline_chunks": dropout}
    saved_layout = facts["run"]["values"].get("layout", {}) if "run" in facts else {}
    for axis, saved in saved_layout.items():
        now = getattr(run.layout, axis, saved)
        if decides_bits.get(axis) and saved != now:
            log.warning(
                "layout.%s is %s, it was %s: from here on other bits, equal to rounding",
                axis,
                now,
                saved,
            )


def metrics_of_steps(steps: range, values: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, its metrics) of the steps that were committed together: an equal share of
    tokens and seconds; those of a validation only with the last one."""
    for step in steps[:-1]:
        yield (
            step,
            {
                name: value
                for name, value in share_of(values, len(steps)).items()
                if not name.startswith("validation_")
            },
        )
    yield steps[-1], share_of(values, len(steps))


def share_of(values: dict[str, Any], steps: int) -> dict[str, Any]:
    return {
        name: value / steps if steps > 1 and name.endswith(("tokens", "seconds")) else value
        for name, value in values.items()
    }
