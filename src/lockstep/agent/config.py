"""What an agent is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.agent.restart_policy import RestartPolicy


@dataclass(frozen=True)
class AgentTimeouts:
    """How long an agent waits, in seconds.

    poll_s         between two reads of the generation log
    grace_s        from a stop signal until SIGKILL (a step and a checkpoint), and from the end of a
                   completed run until SIGTERM
    exit_s         from the end of a failed run until SIGTERM to workers that have not exited, and
                   from SIGTERM until SIGKILL
    failed_exit_s  from a worker's failure report until SIGKILL, if the process does not exit
    import_s       for the forkserver to import everything
    fork_s         for the forkserver to fork one worker
    stop_reply_s   for workers of other hosts to accept a stop request, when no local worker is left
    final_eval_s   for the evaluator to score the last checkpoint of a completed run
    """

    poll_s: float = 0.1
    grace_s: float = 300.0
    exit_s: float = 2.0
    failed_exit_s: float = 10.0
    import_s: float = 120.0
    fork_s: float = 5.0
    stop_reply_s: float = 5.0
    final_eval_s: float = 600.0


@dataclass(frozen=True)
class AgentConfig:
    """What an agent is started with.

    host, address     name of this host, unique in the run; where its servers listen
    slots             workers of this host
    expected_workers  on all hosts, that the first generation waits for
    min_workers       below which training waits
    max_workers       that train at once; others wait to join
    lives_on          workers outlive the agent and SIGUSR1 drains this host; else they exit with it
    environ           for the workers, extended by the agent's variables
    flags             of a user's own loop, equal on all workers
    command           the workers' settings, by name; running workers are adopted if they are equal
    evaluator         run an evaluator process beside the workers
    master_port       of a static group (agent/static_group.py); 0: the workers form generations
    """

    host: str
    address: str
    slots: int
    expected_workers: int
    min_workers: int
    max_workers: int
    lives_on: bool
    environ: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, str] = field(default_factory=dict)
    evaluator: bool = False
    master_port: int = 0
    timeouts: AgentTimeouts = AgentTimeouts()
    policy: RestartPolicy = RestartPolicy()
