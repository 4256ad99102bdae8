"""The evaluator beside the workers: a process of its own, started anew when it dies, and never in their way.

It is `lockstep evaluate RUN --follow`, which waits for checkpoints, writes its scores into the run and leaves when the run is finished. It
runs at the lowest priority, talks to no worker, and ends with its agent (prctl(2), PR_SET_PDEATHSIG); the next agent starts another one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.agent.event_log import Journal
from lockstep.agent.forkserver import end_with
from lockstep.files import write_json
from lockstep.runtime.subprocesses import now_s, open_output
from lockstep.runtime.worker_env import look

PAUSE_S = 1.0  # before the second one in a row; each pause is twice the one before
LONGEST_S = 60.0
NICE = 19
SLOT = "evaluator"  # in logs and events


class Companion:
    """The evaluator of one agent. `turn` now and then keeps it alive."""

    def __init__(self, folder: Path, host: str, environ: Mapping[str, str], journal: Journal) -> None:
        self.folder, self.host, self.journal = folder, host, journal
        self.environ = {name: value for name, value in environ.items() if not name.startswith("LOCKSTEP_SEAT")}
        self.process: subprocess.Popen[bytes] | None = None
        self.due_s: float | None = 0.0
        self.pause_s = PAUSE_S
        self.note = folder / "evaluators" / f"{host}.json"

    def turn(self) -> None:
        """Start it when its time has come; note its end."""
        if self.process is not None and (code := self.process.poll()) is not None:
            self._ended(code)
        # Before there is a checkpoint there is nothing to evaluate, and no run.json to read.
        if self.due_s is not None and now_s() >= self.due_s and (self.folder / "run.json").exists():
            self._start()

    def pids(self) -> set[int]:
        """Children of this process that are for the companion to wait for."""
        return {self.process.pid} if self.process else set()

    @property
    def at_work(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """End it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
            self.process.kill()
            self.process.wait()
        with suppress(OSError):
            self.note.unlink(missing_ok=True)

    def _start(self) -> None:
        agent = os.getpid()

        def begin() -> None:
            os.nice(NICE)
            end_with(agent)

        try:
            output, _ = open_output(self.folder, 1, f"{self.host}-{SLOT}", make=False)
            assert output is not None
            with output:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "lockstep", "evaluate", str(self.folder), "--follow"],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=begin,  # noqa: PLW1509  the agent has one thread
                )
            self.note.parent.mkdir(exist_ok=True)
            write_json(self.note, {"role": SLOT, "host": self.host, **self._identity(self.process.pid)})
        except (OSError, subprocess.SubprocessError) as error:
            self.journal.warn("the evaluator cannot be started", error)
            self._later()
            return
        self.due_s = None
        self.journal.note("evaluator started", "the run has one", pid=self.process.pid)

    @staticmethod
    def _identity(pid: int) -> dict[str, int | str]:
        """By what others of its machine can tell whether it still runs."""
        return {"machine": socket.gethostname(), "pid": pid, "started": look(pid)[1]}

    def _ended(self, code: int) -> None:
        pid = self.process.pid if self.process else 0
        self.process = None
        if code == 0:
            self.journal.note("evaluator ended", "the run is finished", pid=pid)
            return
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self.journal.note("evaluator ended", f"{name}; a new one starts in {self.pause_s:g} s", pid=pid)
        self._later()

    def _later(self) -> None:
        self.due_s = now_s() + self.pause_s
        self.pause_s = min(LONGEST_S, 2 * self.pause_s)
