"""Start the workers of this machine under an agent: how many, and with which layout."""

import os
from dataclasses import replace
from pathlib import Path

from lockstep.agent.agent import run_agent
from lockstep.agent.config import AgentConfig
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.restart_policy import PLAIN_SCRIPT_POLICY
from lockstep.cli.run_request import RunRequest
from lockstep.config.rules import shared_values
from lockstep.config.schema import RunConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout, choose_layout
from lockstep.log import log
from lockstep.runtime.environment import check_worker_count, default_worker_count, read_rank_info
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.worker_env import read_worker_env
from lockstep.tasks.layout_limits import layout_limits


def run_as_worker(request: RunRequest, workers: int | None) -> int | None:
    """Be a worker if a launcher started this process as one; return the exit code, or None."""
    if worker_env := read_worker_env(os.environ):
        from lockstep.cli.worker import run_under_agent  # loads torch: for workers only

        return run_under_agent(request, worker_env)
    rank_info, description = read_rank_info(os.environ)
    if rank_info is None:
        return None
    request.validate()
    refuse_other_worker_count(workers, rank_info.size, description)
    from lockstep.cli.worker import run_worker  # loads torch: for workers only

    return worker_main(lambda: run_worker(request))


def start_local_agent(request: RunRequest, run: RunConfig | None, workers: int, min_workers: int) -> int:
    """Be the agent of a run on this machine alone; return the exit code of the run."""
    config = AgentConfig.for_this_machine(workers, min_workers=min_workers, max_workers=max_workers(run, workers))
    return start_agent(request, run, config)


def start_agent(request: RunRequest, run: RunConfig | None, config: AgentConfig) -> int:
    """Be the agent of this machine; return the exit code of the run.
    config: where and with how many workers; this function adds the settings of the run."""
    check_worker_count(config.slots, config.host)
    # "auto" is resolved once, by the workers: the resolved precision is no part of the request.
    values = {key: text for key, text in shared_values(run).items() if key != "compute.precision"} if run else request.flags
    command = {"script": request.script} | {f"--{key}": text for key, text in values.items()}
    script = "" if request.is_whole_script else request.script
    # A restarted worker resumes from the newest checkpoint, regardless of --resume.
    program = WorkerProgram(request.command_words(request.resume), request.command_words("auto"), script=script)
    policy = replace(PLAIN_SCRIPT_POLICY, script=Path(request.script).name) if request.restart == "all" else config.policy
    config = replace(config, flags=request.flags if request.script else {}, command=command, policy=policy)
    return run_agent(program, request.folder, config)


def choose_worker_count(given: int | None, run: RunConfig | None) -> tuple[int, str]:
    """Return (workers of this machine, the reason). Log the reason unless the number was given."""
    if given is not None:
        return given, "--workers"
    workers, reason = default_worker_count()
    replica_size = workers_per_replica(run)
    if run and (replica_size > 1 or run.layout.replicate):
        workers, reason = replica_size * (run.layout.replicate or max(1, workers // replica_size)), "as many as the layout takes"
    log.info("%s: %s", f"{workers} workers" if workers > 1 else "1 worker", reason)
    return workers, reason


def workers_per_replica(run: RunConfig | None) -> int:
    return asked_layout(run).workers_per_replica if run else 1


def max_workers(run: RunConfig | None, workers: int) -> int:
    """Return the number of workers that a step has micro-batches for; `workers` for a user's loop."""
    return run.batch.micro_batches // run.layout.shard * workers_per_replica(run) if run else workers


def asked_layout(run: RunConfig) -> Layout:
    return Layout(run.layout.replicate, run.layout.shard, run.layout.tensor, run.layout.pipeline)


def refuse_layout(run: RunConfig | None, workers: int, where: str) -> None:
    """UsageError, with the nearest valid layouts, if the layout does not suit `workers` processes."""
    if run is None:
        return
    layout, most = asked_layout(run), run.batch.micro_batches
    if layout.workers_per_replica == 1 and not 1 <= workers <= most:
        what = f"{workers} workers for a step of {most} micro-batches"
        raise UsageError(what, f"{where}; batch.micro_batches", f"give 1 to {most} workers, or more micro-batches")
    choose_layout(layout, workers, layout_limits(run), f"{where}; [layout] of the run")


def refuse_other_worker_count(given: int | None, size: int, description: str) -> None:
    """UsageError if --workers differs from the number of workers that another launcher started."""
    if given not in (None, size):
        what = f"--workers {given} does not match the launch environment: {description}"
        raise UsageError(what, "command line and environment", f"remove --workers, or start {given} workers")
