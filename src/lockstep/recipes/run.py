"""A run of `lockstep train`, as its script has it: the values of its run file, and its Session."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.config.resolve import with_precision
from lockstep.config.rules import DATA_PATHS, bit_deciding_values, shared_values
from lockstep.config.saved_run import to_json
from lockstep.config.schema import OptimOptions, ResolvedRun, RunConfig
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError
from lockstep.log import log
from lockstep.parallel.plans import plan_of
from lockstep.planner.memory_estimate import StateSize, explain_out_of_memory, refuse_too_large
from lockstep.record.backends import load_backend
from lockstep.runtime.numerics import choose_precision
from lockstep.session import Session
from lockstep.tasks.layout_limits import smallest_model
from lockstep.tasks.open import Task, open_task
from lockstep.training.model_flops import known_peak
from lockstep.training.replica_group import ReplicaOptions
from lockstep.training.rollback import Rollback
from lockstep.training.session_checks import profiled_steps

# Their keys with the name of an argument are this argument.
SESSION_SECTIONS = ("batch", "checkpoint", "elastic", "layout", "parallel")  # of Session
SESSION_ARGUMENTS = {*signature(Session).parameters, *ReplicaOptions.__annotations__}
PREPARE_SECTIONS = ("compute", "fsdp", "layout", "memory")  # of Session.prepare


class RecipeRun:
    """The values, the folder and the workers of a run.

    resume  "auto", "never", "required", or a step: see Session
    """

    def __init__(
        self, resolved: ResolvedRun, folder: Path, runtime: ElasticRuntime, *, resume: str = "auto"
    ) -> None:
        self.resolved = resolved
        self.folder = folder
        self.runtime = runtime
        self.resume = resume
        self.task: Task | None = None
        self._exits = ExitStack()

    @property
    def config(self) -> RunConfig:
        """The values by section: config.optim.clip_norm is the key optim.clip_norm."""
        return self.resolved.run

    def optim_after(self, step: int) -> OptimOptions:
        """Return the section [optim] for the update after `step` steps: --override changes it."""
        return self.resolved.optim_after(step)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Collective. Open the Session of the run, with its values."""
        config = self.config
        arguments = named_values(config, SESSION_SECTIONS, SESSION_ARGUMENTS)
        if config.diloco.learners:  # a pass of a learner would be an update
            del arguments["rehearse"]
        with (
            self._exits,
            Session(
                self.folder,
                runtime=self.runtime,
                values=self,
                save_every=config.checkpoint.every_steps,
                on_save_error=config.checkpoint.on_error,
                seed=config.seed,
                resume=self.resume,
                threads=config.compute.num_threads,
                track=config.track.backends,
                progress=config.track.every_s,
                on_divergence=self._on_divergence(),
                mfu=self._flops_per_token(),
                reduce_once_per_step=config.fsdp.reduce == "per_step",
                **arguments,
            ) as session,
        ):
            yield session

    def prepare(
        self, session: Session, model: nn.Module, *optimizers: torch.optim.Optimizer
    ) -> Any:
        """Return what session.prepare returns, with the sections [compute], [memory] and [fsdp]."""
        config = self.config
        if config.memory.weights == "bf16":
            model.bfloat16()
        prepared = session.prepare(
            model,
            *optimizers,
            init=self.task,
            **named_values(config, PREPARE_SECTIONS, signature(Session.prepare).parameters),
        )
        if self.runtime.is_joining and session.layout.workers_per_replica == 1:
            self._warm_up(prepared[0])
        return prepared

    def _warm_up(self, model: nn.Module) -> None:
        """Run one discarded pass before joining: the others need not wait for the compiler."""
        assert self.task is not None
        self.task.loss(model, self.task.loader.micro_batch(0, 0)).backward()
        model.zero_grad(set_to_none=True)

    def open_task(self) -> Task:
        """Collective. Prepare the data, on rank 0 and once; refuse a model that is too large for
        this device before and after. DataError, UsageError, OutOfMemoryError."""
        config = self.config
        profiled_steps()  # wrong ones are refused before data is prepared
        if config.track.backend:
            load_backend(config.track.backend)
        device = self.runtime.world.device
        layout = replace(config.layout.axes, replicate=1)

        def size_of(model: nn.Module) -> StateSize:
            size = StateSize.of(model, config.optim, config.memory, device)
            refuse_too_large(size, layout, device)
            return size

        if smallest := smallest_model(config):
            size_of(smallest)
        self.task = open_task(config, self.folder, self.runtime)
        model = self.task.meta_model()
        size = size_of(model)
        limits = plan_of(model).layout_limits(config.data_parallel_limit)
        file = self.folder / "oom" / f"rank-{self.runtime.world.rank}.txt"
        self._exits.enter_context(explain_out_of_memory(size, layout, limits, device, lambda: file))
        return self.task

    def _on_divergence(self) -> Literal["stop", "rollback"] | Rollback:
        divergence = self.config.divergence
        if self.config.on_divergence == "rollback":
            return Rollback(**vars(divergence))
        # A run that stops may skip what it is given.
        return Rollback(0, 0.0, divergence.skip) if divergence.skip else "stop"

    def _flops_per_token(self) -> float | bool:
        """Return what Session(mfu=...) takes: where the peak is known, or track.mfu asks for it."""
        is_bf16 = self.config.compute.precision == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        shows = self.config.track.mfu or known_peak(self.runtime.world.device, dtype)
        return self.task.flops_per_token if self.task and shows else False

    # Values that the Session records and compares (RunValues).

    def shared(self) -> dict[str, str]:
        shared = shared_values(self.config).items()
        overrides = [asdict(override) for override in self.resolved.overrides]
        return {
            **self._fingerprints,
            **{f"run {key}": text for key, text in shared if key not in DATA_PATHS},
            "run overrides": json.dumps(overrides),
        }

    def saved(self) -> dict[str, Any]:
        fingerprints = self._fingerprints | bit_deciding_values(self.config)
        # The words of a script are among these values, so they are not compared as flags.
        return {"run": to_json(self.resolved), "fingerprints": fingerprints, "flags": {}}

    def shown(self) -> dict[str, Any]:
        values: dict[str, Any] = to_json(self.resolved)["values"]
        return values

    def check(self, facts: Mapping[str, Any], step: int) -> None:
        refuse_other_overrides(facts, self.resolved, step)
        if self.task:
            warn_of_other_layout(facts, self.config, self.task.meta_model())

    @property
    def _fingerprints(self) -> dict[str, str]:
        """Facts of the data and the initial weights, equal in all starts."""
        return dict(self.task.fingerprints) if self.task else {}


def named_values(
    config: RunConfig, sections: Sequence[str], names: Container[str]
) -> dict[str, Any]:
    """Return the values of these sections whose keys are among `names`."""
    return {
        key: value
        for section in sections
        for key, value in vars(getattr(config, section)).items()
        if key in names
    }


def resolve_precision(resolved: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Replace `compute.precision = auto` by a choice for this device, which run.json records."""
    if resolved.run.compute.precision != "auto":
        return resolved
    precision, reason = choose_precision(device)
    log.info("compute.precision = %s: %s", precision, reason)
    return with_precision(resolved, precision, f"chosen: {reason}")


def refuse_other_overrides(facts: Mapping[str, Any], resolved: ResolvedRun, step: int) -> None:
    """CheckpointError when the checkpoint of `step` was trained with other overrides."""
    saved = facts["run"].get("overrides", []) if "run" in facts else []
    before = [override for override in saved if override["step"] < step]
    now = [asdict(override) for override in resolved.overrides if override.step < step]
    if "run" in facts and before != now:
        raise CheckpointError(
            f"the checkpoint of step {step} was trained with the overrides {before}, and the run "
            f"has {now}",
            "--override, as run.json and the checkpoint have it",
            "put back the run.json of this run, or give another folder with --out",
        )


def warn_of_other_layout(facts: Mapping[str, Any], run: RunConfig, model: nn.Module) -> None:
    """Warn when the checkpoint with these facts was saved in a layout with other bits."""
    # Adapters have the same masks in every layout.
    has_dropout = run.task == "translate" and run.model.dropout > 0
    is_tied = getattr(model, "output", None) is None
    decides_bits = {
        "tensor": True,
        "pipeline": has_dropout or is_tied,
        "pipeline_chunks": has_dropout,
    }
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
