"""Start workers: forked by the forkserver, or spawned if no forkserver can run.

Each requested worker appears later, blocked at its gate. A killed forkserver is restarted, one that
hangs or fails to fork is bypassed. If none can run (the user's module starts threads), all workers
are spawned.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.agent.event_log import EventLog
from lockstep.agent.forkserver import ONE_THREAD, Forkserver, WorkerProgram, WorkerSpec, spawn
from lockstep.runtime.processes import now_s
from lockstep.runtime.worker_env import WorkerEnv

log = logging.getLogger("lockstep")
RETRY_S = 1.0  # after a worker could not be started at all
MAX_FAILED_STARTS = 2  # forkservers in a row that exited before they were ready
# glibc returns large blocks to the kernel at every free, and each step allocates the same ones again:
# keeping them saves page faults (mallopt(3)). Settings of the user take precedence.
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
# torch.cuda.is_available() in a module that the forkserver imports must not initialize CUDA: no fork could use it.
CUDA_SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass
class PendingWorker:
    """A requested worker. Once it has a `pid`, it is blocked at its gate: a byte lets it run.

    out, err, gate  its file descriptors
    gate_writer     the agent's end of the gate; if it is closed, the worker exits
    requested_s     when the forkserver was asked for it; None: it was not
    use_spawn       bypass the forkserver
    """

    slot: int
    spec: WorkerSpec
    out: int
    err: int
    gate: int
    gate_writer: int
    requested_s: float | None = None
    use_spawn: bool = False
    retry_at_s: float = 0.0
    pid: int = 0

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.out, self.err, self.gate

    @property
    def method(self) -> str:
        return "spawned" if self.use_spawn else "forked by the forkserver"

    def close(self) -> None:
        """Close the worker's descriptors, not the gate's writer, which keeps it blocked."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class WorkerPool:
    """The workers that one agent is starting, and its forkserver.

    import_s, fork_s  time limits for a forkserver to become ready, and for one fork
    """

    def __init__(self, program: WorkerProgram, environ: Mapping[str, str], events: EventLog, *, import_s: float, fork_s: float) -> None:
        self.program, self.events, self.import_s, self.fork_s = program, events, import_s, fork_s
        self.environ = {**MALLOC_SETTINGS, **CUDA_SETTINGS, **ONE_THREAD, **environ, "PYTHONUNBUFFERED": "1"}
        self.pending: dict[int, PendingWorker] = {}
        self.forkserver: Forkserver | None = None
        self.forkserver_started_s = self.last_reply_s = 0.0
        self.failed_starts = 0
        self.start_forkserver()

    def request(self, worker_env: WorkerEnv, out: int, err: int, *, restarted: bool) -> None:
        argv = self.program.restart_argv if restarted and self.program.restart_argv is not None else self.program.argv
        spec = WorkerSpec(self.program.entry, argv, worker_env.environ(), worker_env.agent_pid)
        self.pending[worker_env.slot] = PendingWorker(worker_env.slot, spec, os.dup(out), os.dup(err), *os.pipe())

    def poll(self) -> list[PendingWorker]:
        """Make progress without blocking, and return the workers that have started."""
        self.receive_replies()
        self.check_timeouts()
        for worker in self.pending.values():
            if not worker.pid and worker.requested_s is None and now_s() >= worker.retry_at_s:
                self.start(worker)
        started = [worker for worker in self.pending.values() if worker.pid]
        for worker in started:
            del self.pending[worker.slot]
            worker.close()
        return started

    def cancel(self) -> None:
        for worker in self.pending.values():
            worker.close()
            os.close(worker.gate_writer)
        self.pending = {}

    def close(self) -> None:
        """Kill the forkserver. Workers keep running."""
        self.cancel()
        if self.forkserver:
            self.forkserver.kill()

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when `poll` has something to do."""
        return [self.forkserver.socket.fileno()] if self.forkserver else []

    def pids(self) -> set[int]:
        return {self.forkserver.process.pid} if self.forkserver else set()

    # -- one worker -----------------------------------------------------------------------------------------------------------

    def start(self, worker: PendingWorker) -> None:
        """Fork or spawn a worker. A forkserver that still imports is faster than spawning."""
        worker.use_spawn = worker.use_spawn or self.forkserver is None
        try:
            if worker.use_spawn:
                worker.pid = spawn(worker.spec, self.environ, worker.descriptors)
            elif self.forkserver and self.forkserver.ready:
                self.forkserver.request(worker.slot, worker.spec, worker.descriptors)
                worker.requested_s = now_s()
        except ConnectionError:
            self.restart_forkserver("it exited")
        except OSError as error:
            self.events.warn(f"cannot {'spawn' if worker.use_spawn else 'fork'} a worker for slot {worker.slot}", error)
            worker.retry_at_s, worker.use_spawn = now_s() + (RETRY_S if worker.use_spawn else 0.0), True

    # -- the forkserver -------------------------------------------------------------------------------------------------------

    def start_forkserver(self) -> None:
        try:
            self.forkserver, self.forkserver_started_s = Forkserver(self.program, self.environ), now_s()
        except OSError as error:
            self.disable_forkserver(str(error))

    def receive_replies(self) -> None:
        replies = self.forkserver.replies() if self.forkserver else []
        if replies is None:
            self.restart_forkserver("it exited")
        self.last_reply_s = now_s() if replies else self.last_reply_s
        for reply in replies or []:
            if "ready" in reply and self.forkserver:
                self.forkserver.ready, self.failed_starts = True, 0
            elif "unusable" in reply:
                self.disable_forkserver(reply["unusable"])
            elif worker := self.pending.get(reply["slot"]):
                worker.pid = reply.get("pid", 0)
                worker.use_spawn = "error" in reply
                worker.requested_s = None

    def check_timeouts(self) -> None:
        """Replace a forkserver that hangs, and spawn the workers that wait for it."""
        limit_s = now_s() - self.fork_s
        waiting = [(worker, worker.requested_s) for worker in self.pending.values() if worker.requested_s is not None]
        late = [worker for worker, requested_s in waiting if max(requested_s, self.last_reply_s) < limit_s]
        slow_import = self.forkserver and not self.forkserver.ready and now_s() > self.forkserver_started_s + self.import_s
        for worker in self.pending.values() if slow_import else late:
            worker.use_spawn = True
        if late or slow_import:
            limit = f"was not ready within {self.import_s:g} s" if slow_import else f"did not fork within {self.fork_s:g} s"
            self.restart_forkserver(f"it {limit}")

    def restart_forkserver(self, reason: str) -> None:
        """Replace a forkserver that exited or hangs; disable it after repeated failures."""
        if self.forkserver:
            self.failed_starts = 0 if self.forkserver.ready else self.failed_starts + 1
            self.forkserver.kill()
            self.forkserver = None
        self.events.add("forkserver ended", reason)
        for worker in self.pending.values():  # it may have forked one without a reply, which exits when its gate closes
            if worker.requested_s is not None:
                os.close(worker.gate)
                os.close(worker.gate_writer)
                worker.gate, worker.gate_writer = os.pipe()
                worker.requested_s = None
        if self.failed_starts < MAX_FAILED_STARTS:
            self.start_forkserver()
        else:
            self.disable_forkserver(f"{reason}, {MAX_FAILED_STARTS} times before it was ready")

    def disable_forkserver(self, reason: str) -> None:
        if self.forkserver:
            self.forkserver.kill()
            self.forkserver = None
        self.events.add("no forkserver", reason)
        log.info("workers are spawned without a forkserver, each imports everything: %s", reason)
