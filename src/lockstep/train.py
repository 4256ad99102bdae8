"""The training loop. What it uses is built in tasks/setup.py and training/setup.py.

A step: each replica takes its share of the K micro-batches; gradients are summed in the order of
one fixed tree during the backward pass; the sum of the losses is divided once by the tokens of the
step; all processes vote; then the step is committed.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

from lockstep.config.schema import ResolvedRun
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.log import log
from lockstep.parallel.grad_norm import divide_and_clip
from lockstep.parallel.parallelize import LocalModel
from lockstep.record.progress import ProgressDisplay
from lockstep.record.tracker import BackgroundTracker
from lockstep.runtime.numerics import make_deterministic
from lockstep.runtime.signals import StopSignals
from lockstep.tasks.open import Task
from lockstep.tasks.setup import best_steps, build_model, make_step_timer, task_that_fits, warm_up
from lockstep.tasks.validation import Validation
from lockstep.training import setup as training_setup
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.diloco import Learners, outer_optimizer
from lockstep.training.initial_values import draw_initial_values
from lockstep.training.nonfinite import refuse_nonfinite_norm
from lockstep.training.optim import (
    learning_rate,
    make_optimizers,
    set_learning_rate,
    update_average,
)
from lockstep.training.owner_update import apply_owner_rule
from lockstep.training.profiler import ProfiledSteps, compile_summary, profiling
from lockstep.training.time_account import account_facts, account_step


def train(
    resolved: ResolvedRun,
    folder: Path,
    runtime: ElasticRuntime,
    *,
    resume: str = "auto",
    profile: ProfiledSteps | None = None,
) -> str:
    """Collective. Train the run in `folder` to its last step; resume it first. Return the name of
    the signal that stopped it, or "" after the last step.

    resume   "auto", "never", "required", or a step: see Checkpointer.resume
    profile  the steps to trace
    Errors: DataError, CheckpointError, DivergedError, PeersLostError; all processes raise the same
    one. OutOfMemoryError on the processes that lack memory.
    """
    with task_that_fits(resolved.run, folder, runtime) as task:
        return train_task(task, resolved, folder, runtime, resume=resume, profile=profile)


def build(
    task: Task, resolved: ResolvedRun, folder: Path, runtime: ElasticRuntime, resume: str
) -> tuple[LocalModel, list[torch.optim.Optimizer], Checkpointer, int]:
    """Collective. Build model, optimizers and checkpointer, and resume; return them and the
    step."""
    run, saving = resolved.run, resolved.run.checkpoint
    log.info(make_deterministic(runtime.world.device))
    fingerprints = training_setup.run_fingerprints(resolved, task.fingerprints)
    model = build_model(resolved, task, runtime, fingerprints)
    optimizers = (
        [outer_optimizer(model, run.diloco)]
        if run.diloco.learners
        else make_optimizers(model, run.optim, run.memory)
    )
    for optimizer in optimizers:
        apply_owner_rule(optimizer, model, runtime)
    checkpointer = Checkpointer(
        folder / "checkpoints",
        runtime,
        model,
        optimizers,
        every_steps=saving.every_steps,
        keep=saving.keep,
        on_error=saving.on_error,
        saved=task.is_saved,
    )
    if runtime.is_joining and model.layout.workers_per_replica == 1:
        warm_up(model.module, task, run, runtime)
    first_step = training_setup.resume_run(
        checkpointer, resolved, folder, resume, fingerprints, task.fingerprints
    )
    if not checkpointer.loaded:
        runtime.board.during("preparing")(draw_initial_values)(
            model, task.init_param, task.is_saved, runtime
        )
    training_setup.warn_of_other_layout(checkpointer.facts, run, task.meta_model())
    return model, optimizers, checkpointer, first_step


def train_task(  # over 60 lines: the whole loop in one place
    task: Task,
    resolved: ResolvedRun,
    folder: Path,
    runtime: ElasticRuntime,
    *,
    resume: str,
    profile: ProfiledSteps | None,
) -> str:
    """Collective. Build what the loop needs, resume, and run the loop."""
    run = resolved.run
    model, optimizers, checkpointer, first_step = build(task, resolved, folder, runtime, resume)
    validation = Validation(run, task, folder, runtime, checkpointer.facts.get("validation"))
    tracker = training_setup.make_tracker(resolved, folder, runtime, first_step)
    progress = ProgressDisplay(
        run.steps, first_step, runtime.shows_progress, log_every=run.track.log_every
    )
    step, stop_signal, is_last = first_step, "", first_step >= run.steps or validation.stops
    with (
        StopSignals() as signals,
        tracker,
        BackgroundTracker(tracker) as metrics,
        progress,
        checkpointer,
        training_setup.make_replica_group(
            run, task.loader, model, checkpointer, signals, metrics
        ) as replicas,
        profiling(profile, folder, runtime) as profiler,
    ):
        timer = make_step_timer(task, run, runtime)
        learners = (
            Learners(resolved, model, runtime, task.loader, task.loss, timer, replicas.replica)
            if run.diloco.learners
            else None
        )
        while not is_last:
            for k in replicas.micro_batches(step):
                if learners:
                    replicas.backward(learners.train(step, k))
                    continue
                with timer.timing("data"):
                    batch = task.loader.micro_batch(step, k)
                with torch.autocast(
                    runtime.world.device.type,
                    torch.bfloat16,
                    enabled=run.compute.precision == "bf16",
                ):
                    loss = task.loss(replicas, batch)
                replicas.backward(loss)
            timer.add("communication", replicas.replica.exposed_s())

            steps, decision = range(step + 1, step + 1 + replicas.commit_steps), replicas.decision
            tokens = sum(
                task.loader.tokens_in_step(number - 1, replicas.trained(number - 1))
                for number in steps
            )
            divisor, clip_norm = (
                (run.diloco.learners, 0.0) if learners else (tokens, run.optim.clip_norm)
            )
            norm = float(
                divide_and_clip(
                    model.parameters(),
                    divisor=divisor,
                    clip_norm=clip_norm,
                    grad_norm_squared=replicas.grad_norm_squared,
                )
            )
            if learners:
                learners.refuse_nonfinite(decision)
            refuse_nonfinite_norm(decision, step, norm)

            rate = learning_rate(steps[-1], resolved.optim_after(steps[-1] - 1))
            for optimizer in optimizers:
                set_learning_rate(optimizer, run.diloco.outer_learning_rate if learners else rate)
                optimizer.step()
            step = steps[-1]  # committed
            if run.optim.ema_decay:
                update_average(optimizers, run.optim.ema_decay ** len(steps), step)

            values = {
                "loss": decision.loss / tokens,
                "norm": norm,
                "epoch": task.loader.order.epoch(step),
                "learning_rate": rate,
            }
            values |= {"workers": runtime.world.size, **timer.step(tokens, runtime.world.size)}
            if validation.due(step):
                with timer.timing("overhead"):
                    values |= validation.evaluate(replicas, optimizers, step)
                progress.print_line(validation.describe(step, values))
            account_step(runtime.ledger, values)
            values |= {
                "generation": runtime.world.generation,
                **runtime.ledger.metrics(time.monotonic()),
            }
            for number, shares in training_setup.metrics_of_steps(steps, values):
                metrics.step(number, shares)
            progress.step(step, values, steps=len(steps))
            profiler.step(step)
            if run.compute.compile and steps[0] == first_step + 1:
                log.info(compile_summary())

            stop_signal = decision.stop
            is_last = bool(
                stop_signal or decision.save_failed or step == run.steps or validation.stops
            )
            is_best = step == (best := validation.history.best_step)
            if checkpointer.due(step) or is_last or is_best:
                with timer.timing("saving"), runtime.during("saving"):
                    facts = account_facts(runtime.ledger) | validation.facts
                    # The metrics are flushed first, so that no checkpoint is ahead of them.
                    checkpointer.save(
                        step,
                        facts,
                        first=metrics.sync,
                        protect=partial(best_steps, folder, best),
                        waits=is_last or is_best,
                    )
    return stop_signal
