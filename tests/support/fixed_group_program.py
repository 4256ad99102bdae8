"""Run a fixed group with the settings in argv[1] (JSON): test_fixed_group.py."""

from __future__ import annotations

import json
import sys

from lockstep.agent.agent import run_fixed_group
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.slots import AgentTimeouts
from lockstep.errors import LockstepError

settings = json.loads(sys.argv[1])
assert "torch" not in sys.modules
try:
    program = WorkerProgram(
        (settings["worker"],), entry="fixed_workers:main", preload=("fixed_workers",)
    )
    sys.exit(run_fixed_group(program, settings["workers"], AgentTimeouts(**settings["timeouts"])))
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
