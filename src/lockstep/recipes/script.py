"""Start a script of `lockstep train`: in a worker of it, or by itself under `lockstep run`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from lockstep.config.resolve import find_run_file, parse_flags
from lockstep.config.saved_run import from_json, open_with_overrides, read_run, to_json, write_run
from lockstep.config.schema import ResolvedRun, RunConfig
from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.files import try_lock
from lockstep.log import log, set_up_logging
from lockstep.recipes.run import RecipeRun, named_values, resolve_precision
from lockstep.record import events
from lockstep.runtime.signals import STOP_EXIT_CODES, Stopped
from lockstep.runtime.worker_env import read_worker_env

Script = Callable[[RecipeRun], None]
LANGUAGE_MODEL = "language_model"
SCRIPTS = {"translate": "translate", "pretrain": LANGUAGE_MODEL, "sft": LANGUAGE_MODEL}  # by task


def script_of(config: RunConfig) -> Script:
    """Return the script of a run."""
    name = "diloco" if config.diloco.learners else SCRIPTS[config.task]
    script: Script = import_module(f"lockstep.recipes.{name}").main
    return script


def train(
    resolved: ResolvedRun,
    folder: Path,
    runtime: ElasticRuntime,
    *,
    resume: str = "auto",
    script: Script | None = None,
) -> str:
    """Collective. Train the run in `folder` to its last step; resume it first. Return the name of
    the signal that stopped it, or "" after the last step.

    resume  "auto", "never", "required", or a step: see Session
    script  None: that of the run's task
    Errors: DataError, CheckpointError, DivergedError, PeersLostError; all processes raise the same
    one. OutOfMemoryError on the processes that lack memory.
    """
    try:
        (script or script_of(resolved.run))(RecipeRun(resolved, folder, runtime, resume=resume))
    except Stopped as stopped:
        return stopped.name
    return ""


def train_as_worker(
    folder: Path, open_values: Callable[[], ResolvedRun], *, resume: str, script: Script | None
) -> int:
    """Collective. Join the workers of the run, and train it; return the exit code.

    open_values  returns the values of the run in `folder`
    """
    config = open_values().run
    limits = named_values(config, ["elastic"], ElasticLimits.__annotations__)
    with (
        ElasticRuntime.join(
            threads=config.compute.num_threads,
            timeout_s=config.parallel.timeout_s,
            limits=ElasticLimits(**limits, replica_size=config.layout.axes.workers_per_replica),
        ) as runtime,
        ExitStack() as stack,
    ):
        if runtime.is_static:  # else the agent has created it
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        name = f"{runtime.world.host}-{runtime.membership.slot}.log"
        set_up_logging(rank=runtime.membership.slot, file=folder / "logs" / name)
        device = runtime.world.device
        values = run_on_rank0(runtime, lambda: to_json(resolve_precision(open_values(), device)))
        resolved = from_json(values)
        if not runtime.is_joining:
            lock = lock_run_folder(folder, resolved, alone=runtime.is_static)
            run_on_rank0(runtime, lambda: stack.enter_context(lock))
        stopped_by = train(resolved, folder, runtime, resume=resume, script=script)
        if runtime.is_static:
            runtime.report_goodput(folder)
        runtime.set_exit_code(STOP_EXIT_CODES[stopped_by])
        return runtime.exit_code


def start(script: Script, file: str) -> None:
    """Run a script with the values of the command line: `lockstep run FILE [RUN.toml] --key VALUE`.

    file  of the script. The run folder is runs/NAME of it, or --out
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs") / Path(file).stem)
    parser.add_argument("--override", action="append", default=[])
    options, words = parser.parse_known_args()
    run_file = None
    if words and words[0].endswith(".toml"):
        run_file = find_run_file(Path(words.pop(0)))
    flags = parse_flags(words)
    refuse_options_of_commands(flags, Path(file).name)
    worker_env = read_worker_env(os.environ)
    folder = Path(worker_env.folder) if worker_env else options.out
    code = train_as_worker(
        folder,
        lambda: open_with_overrides(folder, run_file, flags, "auto", options.override),
        resume="auto",
        script=script,
    )
    if code:
        raise SystemExit(code)


def refuse_options_of_commands(flags: Mapping[str, str], name: str) -> None:
    """UsageError for options of `lockstep run` or `lockstep train` among the values of a script."""
    where = f"lockstep run {name}"
    if given := [option for option in ("workers", "track", "profile") if option in flags]:
        raise UsageError(
            f"--{given[0]} is no value of the run",
            where,
            f"write it before the script: lockstep run --{given[0]} {flags[given[0]]} {name}",
        )
    if "resume" in flags:
        raise UsageError(
            "--resume is an option of lockstep train",
            where,
            "leave it out: the newest checkpoint is resumed; move newer ones away to go back",
        )


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
            raise UsageError(
                f"another training is already running in {folder}",
                f"it holds {folder}/run.lock",
                "wait for it, stop it, or give another --out",
            )
        earlier_run = read_run(folder) if resolved.overrides else None
        known_overrides = earlier_run.overrides if earlier_run else ()
        write_run(folder, resolved)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}",
            "given with --out",
            "give a folder that this user can write, on a disk with space",
        ) from None
    for override in resolved.overrides:
        if override not in known_overrides:
            events.append_event(folder, "override", step=override.step, values=override.values)
            values = ", ".join(f"{key} = {item}" for key, item in override.values.items())
            log.info("from step %d on: %s", override.step + 1, values)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
