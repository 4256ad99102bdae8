"""A script for torchrun, run unchanged: torchrun's environment, and all processes restarted together when one fails.

Each worker of the agent is a supervisor here: a member of the run's generations, with the script as its child process. When a generation
ends, since a member failed or its host is lost, every supervisor ends its child and starts it again in the next generation. There is no
rendezvous host: any host may be lost, and the workers that are left form the next generation (--min).
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from lockstep.elastic.consensus import all_gather_json, run_on_rank0
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.world import World
from lockstep.errors import LockstepError, PeersLostError
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.signals import StopSignals, stop_exit_code
from lockstep.runtime.subprocesses import PR_SET_PDEATHSIG, last_lines
from lockstep.runtime.worker_env import WorkerEnv
from lockstep.training.replica_group import HostDrained

log = logging.getLogger("lockstep")
POLL_S = 0.05
END_S = 10.0  # from SIGTERM to a script that has to restart until SIGKILL
SETTLE_S = 1.0  # from a failure until it counts as this worker's own
NO_LIMIT_S = 1e8  # for the wait until all scripts are done: a lost worker ends it at once


def supervise(file: Path, arguments: Sequence[str], seat: WorkerEnv) -> int:
    """Run the script in this worker's place in each generation, until it has ended well on all workers; the exit code."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("LOCKSTEP_")}
    os.environ["LOCKSTEP_DEVICE"] = "cpu"  # the GPU is the script's
    limits = ElasticLimits(rendezvous_timeout_s=60.0)
    with StopSignals() as signals, World.join(timeout_s=NO_LIMIT_S, limits=limits) as world:
        assert world.membership is not None
        facts = {"script": sha256(file.read_bytes()).hexdigest()[:12], **world.flags}
        world.board.enter("preparing")  # as long as the script takes
        world.membership.local_stop_signal = lambda: "" if is_drain(signals, seat) else signals.received
        if world.is_joining:
            world.membership.request_join(facts, is_joining=True)
            world.form_next()
        world.membership.set_fingerprint(facts)
        attempt = 0
        while True:
            try:
                attempt = max(all_gather_json(world, attempt))
                world.exit_code = run_once(file, arguments, environ, world, seat, signals, attempt)
                return world.exit_code
            except Exception as error:
                if not world.is_peer_loss(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None  # it holds the group
            attempt += 1
            world.leave_group(why)
            world.form_next()
            world.board.enter("preparing")
            if world.shows_progress():
                log.warning("%s; restart %d of all workers, now %d", why, attempt, world.size)


def run_once(
    file: Path, arguments: Sequence[str], environ: Mapping[str, str], world: World, seat: WorkerEnv, signals: StopSignals, attempt: int
) -> int:
    """Collective. One attempt; the exit code of the run, once the script has ended well or was stopped on all workers.

    PeersLostError when they have to restart together. A script that fails ends this worker in the same way: with its exit code, or by its
    signal.
    """
    with socket.socket() as reserved:  # bound and not listening: nobody is given the port, and the script can listen on it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((seat.address, 0))
        address, port = run_on_rank0(world, lambda: reserved.getsockname()[:2])
        hosts = all_gather_json(world, seat.host)
        place = torchrun_environ(world, hosts, str(address), int(port), attempt, Path(seat.folder).name)
        libc = ctypes.CDLL(None)
        log_size = os.fstat(2).st_size
        process = subprocess.Popen(
            [sys.executable, str(file), *arguments],
            env={**environ, **place},
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509  it calls nothing but the kernel
        )
        world.ledger.switch("training", time.monotonic())
        try:
            stopped = wait(process, world, seat, signals)
        finally:
            end(process)
    if stopped:
        return 128 + signal.Signals[stopped] if process.returncode else stop_exit_code(stopped)
    if process.returncode:
        until_s = time.monotonic() + SETTLE_S
        while process.returncode > 0 and time.monotonic() < until_s:  # it may have failed since another worker had
            if why := world.generation_error():
                raise PeersLostError(why)
            time.sleep(POLL_S)
        fail_like(process.returncode, f"{file.name} of rank {world.rank}", [file.name, *arguments], log_size)
    all_gather_json(world, "done")
    return 0


def wait(process: subprocess.Popen[bytes], world: World, seat: WorkerEnv, signals: StopSignals) -> str:
    """Wait for the end of the script; the signal on which it was to stop, or "". PeersLostError when the generation ends before it.

    HostDrained when only this host is to leave, and its script has ended.
    """
    assert world.membership is not None
    while process.poll() is None:
        if why := world.generation_error() or ("other workers wait to join" if world.membership.joiner_count else ""):
            raise PeersLostError(why)
        name = signals.received or world.membership.stop_signal
        if name:
            process.send_signal(signal.Signals[name])
            process.wait()  # the agent ends it when it takes too long
            if is_drain(signals, seat):
                raise HostDrained
            world.membership.request_stop(name)  # the other hosts hear of it
            return name
        time.sleep(POLL_S)
    return ""


def is_drain(signals: StopSignals, seat: WorkerEnv) -> bool:
    """Whether only this host is to leave."""
    return seat.drain and signals.received == "SIGUSR1"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a script that is still running: SIGTERM, and SIGKILL END_S later."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fail_like(code: int, who: str, command: Sequence[str], log_size: int) -> None:
    """End this worker as its script has ended: by the same signal, or with an error of the same exit code."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    tail = ""
    if os.path.isfile("/proc/self/fd/2"):
        with open("/proc/self/fd/2", "rb") as output:
            tail = last_lines(output, log_size)
    error = LockstepError(f"{who} exited with code {code}", shlex.join(command), tail or "its output is above")
    error.exit_code = code
    raise error


def torchrun_environ(world: World, hosts: Sequence[str], address: str, port: int, attempt: int, run: str) -> dict[str, str]:
    """The variables that torchrun sets for a process.

    hosts  of each rank
    """
    different = list(dict.fromkeys(hosts))
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": different.index(hosts[world.rank]),
        "GROUP_WORLD_SIZE": len(different),
        "ROLE_RANK": world.rank,
        "ROLE_WORLD_SIZE": world.size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": 3,
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_USE_AGENT_STORE": False,
    }
    threads = {} if "OMP_NUM_THREADS" in os.environ or world.local_size == 1 else {"OMP_NUM_THREADS": "1"}
    return {name: str(value) for name, value in values.items()} | threads
