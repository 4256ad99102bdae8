"""Start the workers of one agent with its forkserver.

Each requested worker starts once the forkserver is ready, blocked at its gate. A forkserver that
exited or hangs is replaced; by one that imports nothing, if none can fork after the imports (the
user's module starts threads).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.agent.forkserver import ONE_THREAD, Forkserver, WorkerProgram, WorkerSpec
from lockstep.agent.slots import AgentTimeouts, EventLog
from lockstep.log import ANNOUNCE_S, log
from lockstep.runtime.processes import now_s
from lockstep.runtime.worker_env import WorkerEnv

RETRY_S = 1.0  # after a worker could not be started at all
MAX_FAILURES = 2  # forkservers in a row that exited before they were ready, or hung
# glibc returns large blocks to the kernel at every free, and each step allocates the same ones
# again: keeping them saves page faults (mallopt(3)). Settings of the user take precedence.
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
# torch.cuda.is_available() in a module that the forkserver imports must not initialize CUDA: no
# fork could use it.
CUDA_SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass
class PendingWorker:
    """A requested worker. Once it has a `pid`, it is blocked at its gate: a byte lets it run."""

    slot: int
    spec: WorkerSpec
    out: int  # its stdout
    err: int
    pid: int = 0
    gate_writer: int = -1  # the agent's end of the gate; if it is closed, the worker exits
    method: str = ""  # how it was started

    def close(self) -> None:
        """Close the worker's descriptors, not the gate's writer, which keeps it blocked."""
        os.close(self.out)
        os.close(self.err)


class WorkerPool:
    """The workers that one agent is starting, and its forkserver."""

    def __init__(
        self,
        program: WorkerProgram,
        environ: Mapping[str, str],
        events: EventLog,
        timeouts: AgentTimeouts,
    ) -> None:
        self.program = program
        self.events = events
        self.timeouts = timeouts
        self.environ = {
            **MALLOC_SETTINGS,
            **CUDA_SETTINGS,
            **ONE_THREAD,
            **environ,
            "PYTHONUNBUFFERED": "1",
        }
        self.pending: dict[int, PendingWorker] = {}
        self.forkserver: Forkserver | None = None
        self.imports = True  # in the forkserver
        self.announced = False  # that they take long
        self.failures = 0
        self.retry_at_s = 0.0
        self.start_forkserver()

    def request(self, worker_env: WorkerEnv, out: int, err: int, *, restarted: bool) -> None:
        program = self.program
        argv = (program.restart_argv if restarted else None) or program.argv
        spec = WorkerSpec(program.entry, argv, worker_env.environ(), worker_env.agent_pid)
        self.pending[worker_env.slot] = PendingWorker(
            worker_env.slot, spec, os.dup(out), os.dup(err)
        )

    def poll(self) -> list[PendingWorker]:
        """Watch the forkserver, and return the workers that have started."""
        if now_s() >= self.retry_at_s:
            self.watch_forkserver()
            for worker in self.pending.values():
                self.start(worker)
        started = [worker for worker in self.pending.values() if worker.pid]
        for worker in started:
            del self.pending[worker.slot]
            worker.close()
        return started

    def cancel(self) -> None:
        for worker in self.pending.values():
            worker.close()
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

    def start(self, worker: PendingWorker) -> None:
        if not self.forkserver or not self.forkserver.ready:
            return
        try:
            gate, gate_writer = os.pipe()
            try:
                worker.pid = self.forkserver.fork(
                    worker.spec, (worker.out, worker.err, gate), self.timeouts.fork_s
                )
                worker.gate_writer = gate_writer
                worker.method = "forked by the forkserver" if self.imports else "spawned"
                self.failures = 0
            except OSError:
                os.close(gate_writer)  # it may have forked one without a reply, which exits now
                raise
            finally:
                os.close(gate)
        except TimeoutError:
            self.replace_forkserver(
                f"it did not fork within {self.timeouts.fork_s:g} s", failed=True
            )
        except ConnectionError:
            self.replace_forkserver("it exited", failed=False)
        except OSError as error:
            self.retry_later(f"cannot start a worker for slot {worker.slot}", error)

    def retry_later(self, what: str, error: OSError) -> None:
        self.events.warn(what, error)
        self.retry_at_s = now_s() + RETRY_S

    # -- the forkserver ----------------------------------------------------------------------------

    def start_forkserver(self) -> None:
        try:
            self.forkserver = Forkserver(self.program, self.environ, imports=self.imports)
        except OSError as error:
            self.forkserver = None
            self.retry_later("cannot start the forkserver", error)

    def watch_forkserver(self) -> None:
        """Replace a forkserver that exited, cannot fork, or is not ready in time."""
        if self.forkserver is None:
            return self.start_forkserver()
        try:
            message = self.forkserver.receive()
        except TimeoutError:
            if self.forkserver.ready:
                return
            waited_s = now_s() - self.forkserver.started_s
            if waited_s > ANNOUNCE_S and self.imports and not self.announced:
                self.announced = True
                log.info(
                    "importing torch%s", f" and {self.program.script}" * bool(self.program.script)
                )
            if waited_s > self.timeouts.import_s:
                self.replace_forkserver(
                    f"it was not ready within {self.timeouts.import_s:g} s", failed=True
                )
        except ConnectionError:
            self.replace_forkserver("it exited", failed=not self.forkserver.ready)
        else:
            if "unusable" in message:
                self.forkserver.kill()
                self.stop_imports(message["unusable"])
                self.start_forkserver()

    def replace_forkserver(self, reason: str, *, failed: bool) -> None:
        """Replace a forkserver that exited or hangs; after several failures, by one without
        imports."""
        assert self.forkserver is not None
        self.forkserver.kill()
        self.events.add("forkserver ended", reason)
        self.failures += failed
        if self.failures >= MAX_FAILURES and self.imports:
            self.stop_imports(f"{reason}, {self.failures} times before it started a worker")
        self.retry_at_s = now_s() + (RETRY_S if self.failures > MAX_FAILURES else 0.0)
        self.start_forkserver()

    def stop_imports(self, reason: str) -> None:
        self.imports = False
        self.events.add("no forkserver", reason)
        log.info("workers are spawned without a forkserver, each imports everything: %s", reason)
