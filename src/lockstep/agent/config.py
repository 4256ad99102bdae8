"""Settings of an agent."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.agent.restart_policy import RestartPolicy

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class AgentTimeouts:
    """How long an agent waits, in seconds."""

    poll_s: float = 0.1  # between two reads of the generation log
    grace_s: float = (
        300.0  # from a stop signal until SIGKILL, and from the end of a completed run until SIGTERM
    )
    exit_s: float = (
        2.0  # from the end of a failed run until SIGTERM, and from SIGTERM until SIGKILL
    )
    failed_exit_s: float = (
        10.0  # from a worker's failure report until SIGKILL, if the process does not exit
    )
    import_s: float = 120.0  # for the forkserver to import everything
    fork_s: float = 5.0  # for the forkserver to fork one worker
    stop_reply_s: float = (
        5.0  # for workers of other hosts to accept a stop request, when no local worker is left
    )
    final_eval_s: float = 600.0  # for the evaluator to score the last checkpoint of a completed run


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent. Fields without a comment are those of WorkerEnv."""

    host: str
    address: str
    slots: int
    expected_workers: int
    min_workers: int
    max_workers: int
    lives_on: bool  # workers outlive the agent and SIGUSR1 drains this host; else they exit with it
    environ: Mapping[str, str]  # for the workers, extended by the agent's variables
    flags: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, str] = field(
        default_factory=dict
    )  # settings by name; running workers are adopted if they have the same
    evaluator: bool = False  # run an evaluator process beside the workers
    master_port: int = 0
    timeouts: AgentTimeouts = AgentTimeouts()
    policy: RestartPolicy = RestartPolicy()

    @classmethod
    def for_this_machine(cls, workers: int, **settings: Any) -> AgentConfig:
        """Return the settings of an agent without other hosts, whose workers exit with it."""
        sizes = dict.fromkeys(("slots", "expected_workers", "min_workers", "max_workers"), workers)
        values: dict[str, Any] = {
            "host": socket.gethostname(),
            "address": LOOPBACK,
            "lives_on": False,
            "environ": os.environ,
        }
        return cls(**(values | sizes | settings))
