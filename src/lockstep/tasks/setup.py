"""Build what the loop needs from the task: model, warm-up, step timer, best steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.folder import committed_steps
from lockstep.config.schema import ResolvedRun, RunConfig
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.files import read_json
from lockstep.layout import Layout, choose_layout
from lockstep.log import log
from lockstep.parallel.activation_checkpoint import checkpoint_activations
from lockstep.parallel.parallelize import LocalModel, parallelize
from lockstep.parallel.plans import plan_of
from lockstep.record.backends import load_backend
from lockstep.record.metrics import iter_steps
from lockstep.record.step_timer import StepTimer, peak_flops
from lockstep.runtime.device import peak_memory_bytes
from lockstep.runtime.torch_private import set_recompile_limit
from lockstep.tasks.evaluate import BEST, EVALUATIONS, best_of
from lockstep.tasks.layout_limits import min_parameters
from lockstep.tasks.memory_estimate import explain_out_of_memory, refuse_too_large
from lockstep.tasks.open import Task, open_task
from lockstep.training.initial_values import deferred
from lockstep.training.optim import adamw_share
from lockstep.training.profiler import measure_matmul_flops


@contextmanager
def task_that_fits(run: RunConfig, folder: Path, runtime: ElasticRuntime) -> Iterator[Task]:
    """Collective. Yield the task; refuse a model too large for this device before preparing data.

    Out-of-memory errors inside become an OutOfMemoryError that names a layout that fits.
    """
    if run.track.backend:
        load_backend(
            run.track.backend
        )  # a wrong one is refused here, too: rank 0 opens it after the data is prepared
    axes = run.layout
    layout = Layout(1, axes.shard, axes.tensor, axes.pipeline)
    frozen = run.task != "translate" and run.lora.rank > 0
    refuse_too_large(
        min_parameters(run), frozen, run.memory, layout, runtime.world.device, run.optim
    )
    task = open_task(run, folder, runtime)
    model = task.meta_model()
    limits, device = plan_of(model).layout_limits(run.data_parallel_limit), runtime.world.device
    if not frozen:  # now with the embedding
        parameters = sum(p.numel() for p in model.parameters())
        refuse_too_large(
            parameters, frozen, run.memory, layout, device, run.optim, adamw_share(model, run.optim)
        )
    with explain_out_of_memory(
        model, layout, limits, device, lambda: folder / "oom" / f"rank-{runtime.world.rank}.txt"
    ):
        yield task


def build_model(
    resolved: ResolvedRun, task: Task, runtime: ElasticRuntime, fingerprints: Mapping[str, str]
) -> LocalModel:
    """Collective. Build the part of a new model that this worker holds. Parameters that checkpoints
    contain are NaN: load a state, or call `draw_initial_values`.

    fingerprints  of the run, to join workers that train already
    UsageError, on all ranks, when the layout does not suit the model.
    """
    run, model, axes = resolved.run, task.meta_model(), resolved.run.layout
    if run.memory.weights == "bf16":
        model.bfloat16()
    asked = Layout(0, axes.shard, axes.tensor, axes.pipeline)
    if asked.workers_per_replica > 1:
        if runtime.is_joining:
            # Without a rank a worker does not know which part of the model it holds.
            runtime.join_running(fingerprints)
        layout = choose_layout(
            asked,
            runtime.world.size,
            plan_of(model).layout_limits(run.data_parallel_limit),
            "[layout] of the run",
        )
        log.info(
            "%s: %s",
            layout,
            "each replica spans several workers" if layout.replicate > 1 else "one replica",
        )
    else:
        layout = replace(asked, replicate=runtime.world.size or 1)
    return runtime.board.during("preparing")(
        parallelize
    )(  # reads the weights of llama.init_from: minutes for a large model
        model,
        layout,
        layout.coordinates(max(0, runtime.world.rank)),
        deferred(
            task.init_param, {name for name, _ in model.named_parameters() if task.is_saved(name)}
        ),
        runtime.world.device,
        prepare_blocks=partial(_prepare_blocks, run=run),
        prefetch_units=run.fsdp.prefetch_units,
        reshard_after_forward=run.fsdp.reshard_after_forward,
        chunks_per_stage=axes.pipeline_chunks,
        verify=runtime.first_generation,
    )


def _prepare_blocks(blocks: list[nn.Module], run: RunConfig) -> None:
    """Checkpoint activations of the blocks and compile them, before FSDP wraps them.

    Each block is compiled alone, in every layout: a graph of the whole model would have other bits
    than the blocks of a sharded one, and FSDP gathers between blocks. Equal blocks share a graph
    for each shape of micro-batches.
    """
    checkpoint_activations(blocks, run.memory.activation_checkpoint)
    if run.compute.compile:
        set_recompile_limit(2 * run.batch.buckets * len(blocks))
        for block in blocks:
            block.compile(dynamic=False)


def warm_up(model: nn.Module, task: Task, run: RunConfig, runtime: ElasticRuntime) -> None:
    """Run one discarded pass, so that other workers need not wait for compilation."""
    with torch.autocast(
        runtime.world.device.type, torch.bfloat16, enabled=run.compute.precision == "bf16"
    ):
        task.loss(model, task.loader.micro_batch(0, 0)).backward()
    model.zero_grad(set_to_none=True)


def make_step_timer(task: Task, run: RunConfig, runtime: ElasticRuntime) -> StepTimer:
    """Return the step timer, with the peak FLOP/s if known or asked for (`track.mfu`)."""
    cuda = runtime.world.device.type == "cuda"
    peak = (
        peak_flops(torch.cuda.get_device_name(runtime.world.device), run.compute.precision)
        if cuda
        else None
    )
    if peak is None and run.track.mfu:
        peak = measure_matmul_flops(runtime.world.device, run.compute.precision)
        log.info(
            "the peak of this device is not known; its matrix products reach %.3g TFLOP/s now",
            peak / 1e12,
        )
    memory = partial(peak_memory_bytes, runtime.world.device)
    return StepTimer(flops_per_token=task.flops_per_token, peak_flops=peak, memory=memory)


def best_steps(folder: Path, *validated: int) -> list[int]:
    """Return the steps that retention keeps: the one in best.json, the best evaluated one, and
    `validated`, that of the lowest loss in the loop.

    Without either, every checkpoint stays.
    """
    path, best = folder / BEST, None
    try:
        best = best_of(list(iter_steps(folder / EVALUATIONS)))
        return sorted({*validated, *([best["step"]] if best else []), int(read_json(path)["step"])})
    except FileNotFoundError:
        return [*validated, best["step"]] if best else [*validated]
    except (OSError, ValueError, KeyError, TypeError) as error:
        steps = [best["step"]] if best else committed_steps(folder / "checkpoints")
        stays = (
            f"step {best['step']}, the best one of {EVALUATIONS}, is kept"
            if best
            else "no checkpoint is deleted until it is removed"
        )
        log.warning("%s cannot be read (%s): %s", path, error, stays)
        return [*validated, *steps]
