"""Run a plain torchrun script: torchrun's environment, and one failure restarts all processes.

Each worker of the agent supervises the script as its child process. When a generation ends, every
supervisor terminates its child and starts it again in the next generation. There is no rendezvous
host: any host may be lost, and the remaining workers form the next generation (--min).
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from lockstep.elastic.collectives import all_gather_json, run_on_rank0
from lockstep.elastic.membership import Membership
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import LockstepError, PeersLostError
from lockstep.log import log
from lockstep.runtime.processes import die_with_parent, last_lines
from lockstep.runtime.session_start import SessionStart
from lockstep.runtime.signals import STOP_EXIT_CODES, HostDrained, StopSignals
from lockstep.runtime.sockets import reserve_port
from lockstep.runtime.worker_env import WorkerEnv

POLL_S = 0.05
EXIT_TIMEOUT_S = 10.0  # from SIGTERM until SIGKILL, for a script that has to restart
# A script that fails this soon before its generation ends failed because of another worker
PEER_FAILURE_S = 1.0
NO_LIMIT_S = 1e8  # for the wait until all scripts are done: a lost worker ends it at once


def supervise(
    file: Path, words: Sequence[str], worker_env: WorkerEnv, start: SessionStart | None = None
) -> int:
    """Run the script in each generation until it exits with 0 on all workers; return the exit code.

    words  of Python: FILE.py or -m MODULE, and the script's arguments
    start  if a Session in the script may ask for a start under an agent
    """
    environ = {name: text for name, text in os.environ.items() if not name.startswith("LOCKSTEP_")}
    environ |= start.environ() if start else {}
    os.environ["LOCKSTEP_DEVICE"] = "cpu"  # the GPU is the script's
    limits = ElasticLimits(rendezvous_timeout_s=60.0)
    with (
        StopSignals() as signals,
        ElasticRuntime.join(timeout_s=NO_LIMIT_S, limits=limits) as runtime,
    ):
        member = runtime.member
        facts = {"script": sha256(file.read_bytes()).hexdigest()[:12], **member.flags}
        runtime.board.enter("preparing")  # as long as the script takes
        runtime.set_stop_signal(lambda: signals.received)
        if runtime.is_joining:
            member.request_join(facts, is_joining=True)
            runtime.form_next()
        member.set_fingerprint(facts)
        supervisor = Supervisor(words, environ, runtime, member, signals, start)
        attempt = 0
        while True:
            with runtime.catch_peer_loss() as loss:
                attempt = max(all_gather_json(runtime, attempt))
                runtime.set_exit_code(supervisor.run_once(attempt))
                return runtime.exit_code
            attempt += 1
            runtime.leave_group(loss.why)
            runtime.form_next()
            runtime.board.enter("preparing")
            if runtime.shows_progress():
                log.warning(
                    "%s; restart %d of all workers, now %d", loss.why, attempt, runtime.world.size
                )


@dataclass
class Supervisor:
    """Runs the script as a child process, once in each generation."""

    words: Sequence[str]  # of Python
    environ: Mapping[str, str]
    runtime: ElasticRuntime
    membership: Membership
    signals: StopSignals
    start: SessionStart | None

    def run_once(self, attempt: int) -> int:
        """Collective. Run the script; return the exit code of the run: finished or stopped.

        PeersLostError when all workers have to restart. A script that fails ends this worker with
        the same exit code or signal, one with a Session that asks for another start with
        StartAgainError.
        """
        runtime, worker_env = self.runtime, self.membership.worker_env
        with reserve_port(worker_env.address) as reserved:
            address, port = run_on_rank0(runtime, lambda: reserved.getsockname()[:2])
            hosts = all_gather_json(runtime, worker_env.host)
            variables = torchrun_environ(runtime.world, hosts, attempt) | {
                "MASTER_ADDR": str(address),
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": Path(worker_env.folder).name,
            }
            log_size = os.fstat(2).st_size
            supervisor = os.getpid()
            process = subprocess.Popen(
                [sys.executable, *self.words],
                env={**self.environ, **variables},
                # It only makes system calls.
                preexec_fn=lambda: die_with_parent(supervisor),  # noqa: PLW1509
            )
            runtime.ledger.switch("training", time.monotonic())
            try:
                stopped = self.wait(process)
            finally:
                terminate(process)
        if stopped:
            return 128 + signal.Signals[stopped] if process.returncode else STOP_EXIT_CODES[stopped]
        if process.returncode:
            until_s = time.monotonic() + PEER_FAILURE_S
            while process.returncode > 0 and time.monotonic() < until_s:
                if why := runtime.generation_error():
                    raise PeersLostError(why)
                time.sleep(POLL_S)
            exit_like(process.returncode, runtime.world.rank, self.words, log_size)
        all_gather_json(runtime, "done")
        return 0

    def wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the script exits; return the name of the signal that stopped it, or "".
        PeersLostError if the generation ends first. HostDrained if only this host leaves.
        StartAgainError if a Session asks for another start."""
        membership = self.membership
        while True:
            exited = process.poll() is not None
            if self.start:
                self.start.check()
            if exited:
                return ""
            waiting = "other workers wait to join" if membership.joiner_count else ""
            if why := self.runtime.generation_error() or waiting:
                raise PeersLostError(why)
            if name := self.signals.received or membership.stop_signal:
                process.send_signal(signal.Signals[name])
                process.wait()  # the agent kills it after its timeout
                if membership.worker_env.drain and self.signals.received == "SIGUSR1":
                    raise HostDrained
                membership.request_stop(name)  # on the other hosts
                return name
            time.sleep(POLL_S)


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_like(code: int, rank: int, words: Sequence[str], log_size: int) -> None:
    """Exit as the script did: by the same signal, or an error with the same exit code."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    tail = ""
    if os.path.isfile("/proc/self/fd/2"):
        with open("/proc/self/fd/2", "rb") as output:
            tail = last_lines(output, log_size)
    if words[0] == "-m":
        name, command = words[1], words
    else:
        name = Path(words[0]).name
        command = [name, *words[1:]]
    what = f"{name} of rank {rank} exited with code {code}"
    error = LockstepError(what, shlex.join(command), tail or "its output is above")
    error.exit_code = code
    raise error


def torchrun_environ(world: World, hosts: Sequence[str], attempt: int) -> dict[str, str]:
    """Return torchrun's variables, except the run's name and the master; `hosts`: of each rank."""
    unique_hosts = list(dict.fromkeys(hosts))
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": unique_hosts.index(hosts[world.rank]),
        "GROUP_WORLD_SIZE": len(unique_hosts),
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": 3,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    if "OMP_NUM_THREADS" not in os.environ and world.local_size > 1:
        values["OMP_NUM_THREADS"] = 1
    return {name: str(value) for name, value in values.items()}
