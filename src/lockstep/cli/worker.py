"""A worker of `train`, `run` or `launch`. Imports torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.cli.report import write_at_end
from lockstep.cli.restart_all import supervise
from lockstep.cli.script import call_with_flags, run_file
from lockstep.cli.start import RunRequest
from lockstep.elastic.membership import RunEnded
from lockstep.elastic.run_folder import folder_error, may_be_folder_error, wait_until_usable
from lockstep.errors import RunFolderUnavailableError, UsageError
from lockstep.log import log
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.numerics import seed_unseeded_generators
from lockstep.runtime.session_start import SessionStart
from lockstep.runtime.signals import HostDrained, Stopped
from lockstep.runtime.sources import load_function
from lockstep.runtime.status_board import Status, read_status
from lockstep.runtime.worker_env import WorkerEnv, read_worker_env


def run_under_agent(request: RunRequest, worker_env: WorkerEnv) -> int:
    """Run a worker that an agent started; return its exit code."""
    drained: dict[str, bool] = {}

    def run() -> int:
        wait_until_usable(worker_env)
        try:
            code = run_worker(request)
            if request.is_whole_script and request.restart == "one" and worker_env.slot == 0:
                warn_if_untrained(request.script, worker_env)
            return code
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
        status = own_status(worker_env)
        step = max(-1, status.step - 1) if status else -1
        return {"step": step, "joined": status is not None, **drained}

    return worker_main(run, report_fields)


def own_status(worker_env: WorkerEnv) -> Status | None:
    """Return the status of this worker; None: it has not joined, and the board is missing or that
    of the slot's previous worker."""
    try:
        status = read_status(Path(worker_env.state) / f"{worker_env.slot}.board")
    except OSError:
        return None
    return status if status.pid == os.getpid() else None


def warn_if_untrained(script: str, worker_env: WorkerEnv) -> None:
    if own_status(worker_env) is None:
        log.warning(
            "%s ended without opening a Session: nothing was trained. Call its function at the "
            "end of the file, or start it with lockstep train %s:FUNCTION",
            script,
            script,
        )


def run_worker(request: RunRequest) -> int:
    """Run the script, the function or the built-in loop in this worker; return its exit code."""
    if request.is_whole_script:
        return run_script(request)
    if request.script:
        return run_function(request.script, request.folder, request.flags, request.overrides)
    try:
        return train_run(request)
    except (
        FileExistsError,
        NotADirectoryError,
        IsADirectoryError,
    ) as error:  # a restart cannot fix it
        raise UsageError(
            f"{error.filename}: {error.strerror}",
            f"the run folder {request.folder}",
            "move the existing file aside, or give another folder with --out",
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


def run_function(
    spelled: str, folder: Path, flags: dict[str, str], overrides: Sequence[str] = ()
) -> int:
    """Call a user's FILE.py:FUNCTION with flags as keyword arguments."""
    function = load_function(spelled)
    seed_unseeded_generators()  # before the function creates its data and its model
    call_with_flags(function, spelled, flags, folder, overrides)
    return 0


def train_run(request: RunRequest) -> int:
    """Collective. Train by the script of the run's task; return the exit code."""
    from lockstep.recipes.script import train_as_worker  # needs the packages for text

    folder = request.folder
    code = train_as_worker(
        folder, lambda: request.open(request.resume), resume=request.resume, script=None
    )
    rank_info = read_rank_info(os.environ)
    if read_worker_env(os.environ) is None and (rank_info is None or rank_info.rank == 0):
        write_at_end(folder)
    return code
