"""Run a command as a static group on this host: `evaluate --workers` and `generate --tensor`.

The agent restarts no worker, and the first failure ends them all. Its files are in a temporary
folder. The workers get torchrun's variables and a port that is reserved here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.agent.agent import run_agent
from lockstep.agent.config import LOOPBACK, AgentConfig, AgentTimeouts
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.restart_policy import RestartPolicy
from lockstep.runtime.environment import check_worker_count
from lockstep.runtime.sockets import reserve_port

ENTRY = "lockstep.cli.main:main"
PRELOAD = ("torch", "lockstep.cli.main", "lockstep.elastic.runtime")
TIMEOUTS = AgentTimeouts(exit_s=5.0)  # time for the exit reports of the other workers


def run_static_group(
    arguments: Sequence[str], workers: int, *, entry: str = ENTRY, preload: tuple[str, ...] = PRELOAD, timeouts: AgentTimeouts = TIMEOUTS
) -> int:
    """Run `lockstep ARGUMENTS` in `workers` processes; print the first failure, return the exit code.

    entry, preload  as of WorkerProgram
    Call it from the main thread. UsageError before any worker is started.
    """
    check_worker_count(workers, "this machine")
    with TemporaryDirectory(prefix="lockstep-") as folder, reserve_port(LOOPBACK) as reserved:
        port, policy = reserved.getsockname()[1], RestartPolicy(restart=False)
        config = AgentConfig.for_this_machine(workers, master_port=port, timeouts=timeouts, policy=policy)
        return run_agent(WorkerProgram(tuple(arguments), entry=entry, preload=preload), Path(folder), config)
