"""A worker of `train`, `run` or `launch`. Imports torch."""

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from lockstep import log
from lockstep.cli.report import write_at_end
from lockstep.cli.restart_all import supervise
from lockstep.cli.script import arguments_of, run_file
from lockstep.cli.start import RunRequest, workers_per_replica
from lockstep.config.saved_run import from_json, to_json
from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.membership import RunEnded
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.run_folder import folder_error, may_be_folder_error, wait_until_usable
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import RunFolderUnavailableError, UsageError
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.numerics import seed_unseeded_generators
from lockstep.runtime.session_start import SessionStart
from lockstep.runtime.signals import STOP_EXIT_CODES, HostDrained, Stopped
from lockstep.runtime.sources import load_function
from lockstep.runtime.status_board import read_status
from lockstep.runtime.worker_env import WorkerEnv, read_worker_env
from lockstep.tasks.evaluate import evaluate_at_end
from lockstep.train import train
from lockstep.training.profiler import ProfiledSteps
from lockstep.training.setup import lock_run_folder, resolve_precision


def run_under_agent(request: RunRequest, worker_env: WorkerEnv) -> int:
    """Run a worker that an agent started; return its exit code."""
    drained: dict[str, bool] = {}

    def run() -> int:
        wait_until_usable(worker_env)
        try:
            return run_worker(request)
        except HostDrained:
            drained["drained"] = True
            return 0
        except Stopped as stopped:
            return int(str(stopped))
        except RunEnded as ended:
            return ended.exit_code
        except Exception as error:
            if may_be_folder_error(error) and (why := folder_error(worker_env)):
                what, where = (
                    f"the run folder cannot be used: {why}",
                    f"detected as {type(error).__name__}: {error}",
                )
                raise RunFolderUnavailableError(
                    what, where, "mount it again; a new worker waits for it"
                ) from error
            raise

    def report_fields() -> dict[str, int | bool]:
        try:
            status = read_status(Path(worker_env.state) / f"{worker_env.slot}.board")
            joined = status.pid == os.getpid()  # else it is the board of the slot's previous worker
        except OSError:
            joined = False
        return {"step": max(-1, status.step - 1) if joined else -1, "joined": joined, **drained}

    return worker_main(run, report_fields)


def run_worker(request: RunRequest) -> int:
    """Run the script, the function or the built-in loop in this worker; return its exit code."""
    if request.is_whole_script:
        return run_script(request)
    if request.script:
        return run_function(request.script, request.folder, request.flags)
    try:
        return train_run(request)
    except (
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
    ) as error:  # a restart cannot fix it
        hint = "move the existing file aside, or give another folder with --out"
        raise UsageError(
            f"{error.filename}: {error.strerror}", f"the run folder {request.folder}", hint
        ) from error


def run_script(request: RunRequest) -> int:
    """Run the whole script in this worker, or in a child process with torchrun's variables."""
    script, worker_env = Path(request.script), read_worker_env(os.environ)
    start = (
        SessionStart.of_worker(worker_env, request.restart)
        if worker_env and request.follows_session
        else None
    )
    if request.restart == "all" and worker_env:
        return supervise(script, [*request.script_words, *request.values], worker_env, start)
    if start is None:
        return run_file(script, request.values, request.module)
    os.environ.update(start.environ())
    try:
        return run_file(script, request.values, request.module)
    finally:
        start.check()  # the script may have caught the SystemExit of its Session


def run_function(spelled: str, folder: Path, flags: dict[str, str]) -> int:
    """Call a user's FILE.py:FUNCTION with flags as keyword arguments."""
    function = load_function(spelled)
    seed_unseeded_generators()  # before the function creates its data and its model
    function(**arguments_of(function, spelled, flags, folder))
    return 0


def train_run(request: RunRequest) -> int:
    """Collective. Train with the built-in loop; return the exit code."""
    folder, run = request.folder, request.open(request.resume).run
    values = {
        key: value
        for key, value in asdict(run.elastic).items()
        if key not in ("verify_every", "rehearse")
    }
    limits = ElasticLimits(**values, replica_size=workers_per_replica(run))
    with (
        ElasticRuntime.join(
            threads=run.compute.num_threads, timeout_s=run.parallel.timeout_s, limits=limits
        ) as runtime,
        ExitStack() as stack,
    ):
        if runtime.membership is None:  # else the agent has created it
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        log.set_up_logging(
            rank=runtime.slot_or_rank,
            file=folder / "logs" / f"{runtime.world.host}-{runtime.slot_or_rank}.log",
        )
        resolved = from_json(
            run_on_rank0(
                runtime,
                lambda: to_json(
                    resolve_precision(request.open(request.resume), runtime.world.device)
                ),
            )
        )
        if not runtime.is_joining:
            run_on_rank0(
                runtime,
                lambda: stack.enter_context(
                    lock_run_folder(folder, resolved, alone=runtime.membership is None)
                ),
            )
        profile = ProfiledSteps.parse(request.profile) if request.profile else None
        stopped_by = train(resolved, folder, runtime, resume=request.resume, profile=profile)
        if not stopped_by:
            with runtime.during("evaluating"):
                runtime.retry_across_generations(
                    lambda: evaluate_at_end(folder, resolved.run, runtime)
                )
        if runtime.membership is None:
            runtime.report_goodput(folder)
            if runtime.world.leader:
                write_at_end(folder)
        runtime.set_exit_code(STOP_EXIT_CODES[stopped_by])
        return runtime.exit_code
