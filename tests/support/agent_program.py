"""Run an agent with the settings in argv[1] (JSON), in the current folder: test_agent.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep import log
from lockstep.agent.agent import AgentConfig, run_agent
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.restart_policy import RestartPolicy
from lockstep.agent.slots import AgentTimeouts
from lockstep.errors import LockstepError
from lockstep.runtime.worker_env import WorkerEnv

settings = json.loads(sys.argv[1])
assert "torch" not in sys.modules
log.set_up_logging()
program = WorkerProgram(
    (settings["worker"], "first"),
    (settings["worker"], "restarted"),
    entry="agent_workers:main",
    preload=tuple(settings["preload"]),
    script=settings["script"],
)
slots = settings["slots"]
config = AgentConfig(
    WorkerEnv("", "", "here", 0, slots, slots, 1, 8, "127.0.0.1"),
    lives_on=settings["lives_on"],
    command=settings["command"],
    timeouts=AgentTimeouts(**settings["timeouts"]),
    policy=RestartPolicy(**settings["policy"]),
)
try:
    sys.exit(run_agent(program, Path("run"), config))
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
