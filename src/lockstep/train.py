"""The training loop, on one page; what it needs is made above it.

A step: every replica takes its share of the K micro-batches, gradients are summed in the order of one fixed tree while the backward pass
runs, the loss is a sum divided once by the step's tokens, all processes agree that the step is sound, and only then is it committed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.folder import committed_steps
from lockstep.config import schema as config
from lockstep.config.schema import DATA_PATHS, Resolved, Run, bits_as_text, read_run, shared_values, to_json, with_precision, write_run
from lockstep.elastic.consensus import Verdict, lead
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, DivergedError, UsageError
from lockstep.files import read_json, try_lock
from lockstep.layout import Layout, choose
from lockstep.parallel.activation_checkpoint import recompute
from lockstep.parallel.grad_norm import divide_and_clip
from lockstep.parallel.memory_estimate import refuse_too_large, told_what_fits
from lockstep.parallel.parallelize import Held, hold
from lockstep.parallel.plans import plan_of
from lockstep.record import events
from lockstep.record.goodput import Ledger
from lockstep.record.metrics import stream
from lockstep.record.progress import Progress
from lockstep.record.step_timer import Meter, peak_flops, peak_resident_bytes
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.numerics import choose_precision, make_deterministic
from lockstep.runtime.signals import Signals
from lockstep.tasks.evaluate import BEST, LINES, best_of
from lockstep.tasks.layout_limits import least_parameters
from lockstep.tasks.open import open_task
from lockstep.tasks.task import Task
from lockstep.training.checkpointer import Keeper
from lockstep.training.optim import adamw, learning_rate, set_learning_rate
from lockstep.training.profiler import Steps, graphs_made, product_flops, profiling
from lockstep.training.replica_group import Team

log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Outcome:
    """How a training ended: after how many committed steps, and by which signal ("" when it reached the last step)."""

    step: int
    stopped_by: str


def train(resolved: Resolved, folder: Path, world: World, *, resume: str = "auto", profile: Steps | None = None) -> Outcome:
    """Collective. Train the run in `folder` to its last step, from where it was; look closely at the steps of `profile`.

    Errors: DataError, CheckpointError, DivergedError, PeersLostError; all processes raise the same one. OutOfMemoryError on those it hits.
    """
    run, axes = resolved.run, resolved.run.layout
    layout = Layout(1, axes.shard, axes.tensor, axes.pipeline)
    refuse_too_large(least_parameters(run), run.task != "translate" and run.lora.rank > 0, run.memory, layout, world.device)
    task = open_task(run, folder, world)
    model = task.meta()
    with told_what_fits(model, layout, plan_of(model).bounds(resolved.run.batch.micro_batches), world.device):
        return train_task(task, resolved, folder, world, resume=resume, profile=profile)


def train_task(task: Task, resolved: Resolved, folder: Path, world: World, *, resume: str, profile: Steps | None) -> Outcome:
    """Collective. The loop, and what it needs."""
    run = resolved.run
    log.info(make_deterministic(world.device))
    equal = dict(task.fingerprints) | {f"run {key}": text for key, text in shared_values(run).items() if key not in DATA_PATHS}
    equal |= {"run overrides": json.dumps([asdict(one) for one in resolved.overrides])}
    held = hold_model(run, task, world, equal)
    optimizer = adamw(held, run.optim, run.memory)
    keeper = Keeper(
        folder / "checkpoints",
        world,
        held,
        optimizer,
        every_steps=run.save.every_steps,
        keep=run.save.keep,
        on_error=run.save.on_error,
        saved=task.saved,
    )
    if world.joining and held.layout.unit == 1:
        warm_up(held.module, task, run, world)
    about = {"run": to_json(resolved), "fingerprints": dict(task.fingerprints) | bits_as_text(run)}
    first = keeper.resume(resume, equal, about)
    refuse_other_overrides(keeper.facts, resolved, first)
    warn_of_other_layout(keeper.facts, run.layout)
    go_on_counting(world, keeper.facts, first, folder)
    tracker = Tracker(
        folder,
        leader=world.leads,
        from_step=first,
        run=to_json(resolved)["values"],
        tensorboard=run.track.tensorboard,
        wandb=run.track.wandb,
        project=run.track.project,
    )
    progress = Progress(run.steps, first, world.shows, log_every=run.track.log_every)
    step, stop = first, ""
    with (
        Signals() as signals,
        tracker,
        BackgroundTracker(tracker) as record,
        progress,
        keeper,
        gather_team(run, world, held, keeper, signals, record) as team,
        profiling(profile, folder, world) as profiler,
    ):
        meter = meter_for(task, run, world)
        while step < run.steps and not stop:
            for k in team.micro_batches(step):
                with meter.timing("data"):
                    batch = task.micro_batch(step, k)
                with torch.autocast(world.device.type, torch.bfloat16, enabled=run.compute.precision == "bf16"):
                    loss = task.loss(team, batch)
                team.backward(loss)
            meter.add("communication", team.exposed_s())

            tokens = task.tokens(step)
            norm = divide_and_clip(held.parameters(), divisor=tokens, clip_norm=run.optim.clip_norm, squares=team.squares)
            verdict = refuse_to_diverge(team.verdict, step, norm_here := float(norm))

            set_learning_rate(optimizer, learning_rate(step + 1, resolved.optim_after(step)))
            optimizer.step()
            step += 1  # committed

            values = {"loss": verdict.loss / tokens, "norm": norm_here, "epoch": task.epoch(step)}
            values |= {"learning_rate": optimizer.param_groups[0]["lr"], "workers": world.size, **meter.step(tokens, world.size)}
            book(world.ledger, values)
            values |= {"generation": world.generation, **world.ledger.curves(time.monotonic())}
            record.step(step, values)
            progress.step(step, values)
            profiler.step(step)
            if run.compute.compile and step == first + 1:
                log.info(graphs_made())
            stop = verdict.stop
            last = bool(stop or verdict.save_failed or step == run.steps)
            if keeper.due(step) or last:
                with meter.timing("saving"), world.during("saving"):
                    now = {"time": world.ledger.to_json(time.monotonic(), time.time())}
                    # The metrics are on the disk first, so that no checkpoint is ahead of them.
                    keeper.save(step, now, first=record.sync, protect=partial(best_steps, folder), waits=last)
            if verdict.save_failed:
                break
    return Outcome(step, stop)


def best_steps(folder: Path) -> list[int]:
    """Return the steps that retention keeps: the one in best.json, and the best of the evaluations.

    When best.json is damaged the evaluations alone decide; when they name no step either, every checkpoint stays.
    """
    path, best = folder / BEST, None
    try:
        best = best_of(list(stream(folder / LINES)))
        return sorted({*([best["step"]] if best else []), int(read_json(path)["step"])})
    except FileNotFoundError:
        return [best["step"]] if best else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        steps = [best["step"]] if best else committed_steps(folder / "checkpoints")
        stays = f"step {best['step']}, the best one of {LINES}, is kept" if best else "no checkpoint is deleted until it is removed"
        log.warning("%s cannot be read (%s): %s", path, error, stays)
        return steps


def warm_up(model: torch.nn.Module, task: Task, run: Run, world: World) -> None:
    """One forward and backward pass that leaves nothing behind, so that nobody waits for what a first one costs (compiling, memory)."""
    with torch.autocast(world.device.type, torch.bfloat16, enabled=run.compute.precision == "bf16"):
        task.loss(model, task.micro_batch(0, 0)).backward()
    model.zero_grad(set_to_none=True)


def hold_model(run: Run, task: Task, world: World, facts: Mapping[str, str]) -> Held:
    """Collective. This worker's part of a new model. UsageError, on all alike, when the layout does not suit the model."""
    model, axes = task.meta(), run.layout
    if run.memory.weights == "bf16":
        model.bfloat16()
    asked = Layout(0, axes.shard, axes.tensor, axes.pipeline)
    if asked.unit > 1:
        if world.joining:
            world.enter(facts)  # who does not know its place cannot know what to hold
        layout = choose(asked, world.size, plan_of(model).bounds(run.batch.micro_batches), "[layout] of the run")
        log.info("%s: %s", layout, "each replica is several workers" if layout.replicate > 1 else "one replica")
    else:
        layout = replace(asked, replicate=world.size or 1)
    held = world.board.during("preparing")(hold)(  # reads the weights of llama.start, for minutes where they are many
        model,
        layout,
        layout.spot(max(0, world.rank)),
        task.first_value,
        world.device,
        inside=partial(prepare_blocks, run=run, layout=layout) if run.memory.recompute != "none" or by_block(run, layout) else None,
        units_ahead=run.shard.units_ahead,
        free_after_forward=run.shard.free_after_forward,
        parts_of_stages=axes.parts,
    )
    if run.compute.compile and not by_block(run, layout):
        compiled([held.module], run)
    return held


def by_block(run: Run, layout: Layout) -> bool:
    """Whether each block is compiled for itself: where what is gathered between them stays outside, and where they are many and alike."""
    return run.compute.compile and (layout.unit > 1 or run.task != "translate")


def prepare_blocks(blocks: list[torch.nn.Module], run: Run, layout: Layout) -> None:
    """What is done to the blocks of a model before anything wraps them."""
    recompute(blocks, run.memory.recompute)
    if by_block(run, layout):
        compiled(blocks, run)


def gather_team(run: Run, world: World, model: Held, keeper: Keeper, signals: Signals, tracker: BackgroundTracker) -> Team:
    """All replicas of the model, as the run wants them to train."""
    return Team(
        world,
        model,
        keeper,
        micro_batches=run.batch.micro_batches,
        seed=run.seed,
        reduce=run.parallel.reduce,
        bucket_bytes=run.parallel.bucket_bytes,
        signals=signals,
        tracker=tracker,
        verify_every=run.heal.verify_every,
        together=run.shard.reduce == "together",
        rehearse=False,  # the data of a task follow from the step
        on_nonfinite="ignore",  # refuse_to_diverge looks at the norm, which the loop computes in any case
    )


def compiled(modules: list[torch.nn.Module], run: Run) -> None:
    """Have torch compile them, in place: one graph for each shape of micro-batches, which serves all blocks of a kind.

    See by_block for what is compiled at once.
    """
    torch._dynamo.config.cache_size_limit = 2 * run.batch.shapes * len(modules)
    for module in modules:
        module.compile(dynamic=False)


def meter_for(task: Task, run: Run, world: World) -> Meter:
    """The clock of the loop, with the device's peak where it is known."""
    cuda = world.device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(world.device), run.compute.precision) if cuda else None
    if peak is None and run.track.mfu:
        peak = product_flops(world.device, run.compute.precision)
        log.info("the peak of this device is not known; its matrix products reach %.3g TFLOP/s now", peak / 1e12)
    memory = (lambda: torch.cuda.max_memory_allocated(world.device)) if cuda else peak_resident_bytes
    return Meter(flops_per_token=task.flops_per_token, peak_flops=peak, memory=memory)


def go_on_counting(world: World, facts: dict[str, Any], first: int, folder: Path) -> None:
    """Collective, but for a joiner, who has the sums of the others. Count the time of the run from where its checkpoint has it, or from its
    first start: what was trained behind `first` is lost, this start is a start, and in between nobody ran."""
    if not world.fresh:
        return
    held, lost_s = lead(world, lambda: (facts.get("time") or first_start(folder), seconds_behind(folder / "metrics.jsonl", first)))
    if held is None:
        return
    now_s = time.monotonic()
    starting_s = world.ledger.summary(now_s)["wall_s"]
    world.ledger = Ledger.from_json(held, now_s, wall_clock_s=time.time())
    world.ledger.move("down", "starting", math.inf if world.generation == 1 else starting_s, now_s)
    world.ledger.move("down", "lost", lost_s, now_s)


def first_start(folder: Path) -> dict[str, Any] | None:
    """An empty ledger from the first line of the run's diary on; None where there is none."""
    diary = events.read(folder)
    return {"wall_clock_s": datetime.fromisoformat(diary[0]["time"]).timestamp(), "seconds": {}} if diary else None


def seconds_behind(metrics: Path, step: int) -> float:
    """Of the steps after `step` that were done before."""
    return math.fsum(line.get("seconds", 0.0) for line in stream(metrics, after=step))


def book(ledger: Ledger, values: dict[str, Any]) -> None:
    """Count what a step waited for the wire and for data as that, no longer as training."""
    ledger.move("training", "communication", values.get("communication_seconds", 0.0), time.monotonic())
    ledger.move("training", "data", values.get("data_seconds", 0.0), time.monotonic())


def warn_of_other_layout(facts: dict[str, Any], layout: config.Layout) -> None:
    """Warn when the checkpoint with these facts was saved in a layout with other bits."""
    before = facts["run"]["values"].get("layout", {}) if "run" in facts else {}
    for axis, size in before.items():
        if axis in ("tensor", "pipeline", "parts") and size != getattr(layout, axis):
            log.warning("layout.%s is %s, it was %s: from here on other bits, equal to rounding", axis, getattr(layout, axis), size)


def refuse_other_overrides(facts: Mapping[str, Any], resolved: Resolved, step: int) -> None:
    """CheckpointError when the checkpoint of `step` was trained with another schedule than run.json says: `facts` are the checkpoint's."""
    saved = facts["run"].get("overrides", []) if "run" in facts else []
    before, now = [one for one in saved if one["step"] < step], [asdict(one) for one in resolved.overrides if one.step < step]
    if "run" in facts and before != now:
        raise CheckpointError(
            f"the checkpoint of step {step} was trained with the overrides {before}, and the run has {now}",
            "--override, as run.json and the checkpoint have it",
            "put back the run.json of this run, or give another folder with --out",
        )


def refuse_to_diverge(verdict: Verdict, step: int, norm: float) -> Verdict:
    """The verdict. DivergedError, on all processes alike, when the agreed loss or the norm is not finite: the update is not made.

    norm  of a gradient that has the same bits on all of them
    """
    if not (verdict.finite and math.isfinite(norm)):
        raise DivergedError(
            f"loss {verdict.loss} and gradient norm {norm} in step {step + 1}",
            "agreed by all processes before the update, which was not made",
            "lower optim.learning_rate, lengthen optim.warmup_steps, or set optim.clip_norm; the checkpoints before are whole",
        )
    return verdict


def settle(resolved: Resolved, device: torch.device) -> Resolved:
    """The run with what it leaves to the device decided, once: the choice decides bits, so it is written into the run."""
    if resolved.run.compute.precision != "auto":
        return resolved
    precision, reason = choose_precision(device)
    log.info("compute.precision = %s: %s", precision, reason)
    return with_precision(resolved, precision, f"chosen: {reason}")


@contextmanager
def claim(folder: Path, resolved: Resolved, *, alone: bool = True) -> Iterator[None]:
    """Hold `folder` for this training alone, with its run.json written. For rank 0.

    alone  nothing but the lock keeps another training away; otherwise the log of generations does
    UsageError when another training holds it, or when it cannot be written.
    """
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = try_lock(folder / "run.lock") if alone else None
        if alone and lock is None:
            raise UsageError(
                f"another training is at work in {folder}", f"it holds {folder}/run.lock", "wait for it, end it, or give another --out"
            )
        begun = read_run(folder) if resolved.overrides else None
        known = begun.overrides if begun else ()
        write_run(folder, resolved)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}",
            "given with --out",
            "give a folder that this user can write, on a disk with space",
        ) from None
    for one in resolved.overrides:
        if one not in known:
            events.note(folder, "override", step=one.step, values=one.values)
            log.info("from step %d on: %s", one.step + 1, ", ".join(f"{key} = {item}" for key, item in one.values.items()))
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
