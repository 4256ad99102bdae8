"""The evaluator process beside the workers, restarted when it dies.

It runs `lockstep evaluate RUN --follow`, which waits for checkpoints, writes their scores into the
run and exits when the run is finished. It has the lowest priority and is killed with its agent.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from lockstep.agent.slots import EventLog
from lockstep.files import write_json
from lockstep.runtime.processes import die_with_parent, now_s, open_worker_log
from lockstep.runtime.worker_env import WORKER_ENV, process_stat

INITIAL_DELAY_S = 1.0  # before the first restart; doubles with each further one
MAX_DELAY_S = 60.0
NICE = 19
ROLE = "evaluator"  # in logs and events


class EvaluatorProcess:
    """The evaluator of one agent, if it is `enabled`; `poll` starts and restarts it."""

    def __init__(
        self, environ: Mapping[str, str], events: EventLog, *, enabled: bool = True
    ) -> None:
        self.folder = events.folder
        self.events = events
        self.environ = {name: value for name, value in environ.items() if name != WORKER_ENV}
        self.process: subprocess.Popen[bytes] | None = None
        self.start_at_s = 0.0 if enabled else None
        self.delay_s = INITIAL_DELAY_S
        self.record_path = events.folder / "evaluators" / f"{events.host}.json"

    def poll(self) -> None:
        if self.process and (code := self.process.poll()) is not None:
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"{cause}; restarting in {self.delay_s:g} s" if code else "the run is finished"
            self.events.add("evaluator ended", reason, pid=self.process.pid)
            self.process = None
            if code:
                self._schedule_restart()
        # Without a checkpoint there is nothing to evaluate, and no run.json to read.
        if (
            self.start_at_s is not None
            and now_s() >= self.start_at_s
            and (self.folder / "run.json").exists()
        ):
            self._start()

    def pids(self) -> set[int]:
        return {self.process.pid} if self.process else set()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        if self.process and self.is_running:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            self.process.kill()
            self.process.wait()
        with suppress(OSError):
            self.record_path.unlink(missing_ok=True)

    def _start(self) -> None:
        agent = os.getpid()

        def in_child() -> None:
            os.nice(NICE)
            die_with_parent(agent)

        try:
            with open_worker_log(self.folder, 1, f"{self.events.host}-{ROLE}") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "lockstep", "evaluate", str(self.folder), "--follow"],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=in_child,  # noqa: PLW1509  the agent has one thread
                )
        except (OSError, subprocess.SubprocessError) as error:
            self.events.warn("cannot start the evaluator", error)
            self._schedule_restart()
            return
        self.start_at_s = None
        self.events.add("evaluator started", "the run has one", pid=self.process.pid)
        try:
            self.record_path.parent.mkdir(exist_ok=True)
            identity = {
                "machine": socket.gethostname(),
                "pid": self.process.pid,
                "started": process_stat(self.process.pid)[1],
            }
            write_json(self.record_path, {"role": ROLE, "host": self.events.host, **identity})
        except OSError as error:
            self.events.warn("cannot record the evaluator's process", error)

    def _schedule_restart(self) -> None:
        self.start_at_s = now_s() + self.delay_s
        self.delay_s = min(MAX_DELAY_S, 2 * self.delay_s)
