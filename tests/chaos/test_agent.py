"""An agent and its workers as real processes: kills, the generation log, signals, and leftovers.

The workers are small and do not import torch, except in one test whose forkserver preloads what it
preloads in a real run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.agent.event_log import EventLog
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.worker_pool import WorkerPool
from lockstep.elastic.generation_log import Generation, GenerationLog, Member, Removed, RunResult, new_token
from lockstep.runtime.worker_env import WorkerEnv, state_folder

SRC = Path(__file__).parents[2] / "src"
AGENT = """
import json, os, sys
from pathlib import Path
from lockstep import log
from lockstep.errors import LockstepError
from lockstep.agent.agent import AgentConfig, AgentTimeouts, run_agent
from lockstep.agent.restart_policy import RestartPolicy
from lockstep.agent.forkserver import WorkerProgram
settings = json.loads(sys.argv[1])
assert "torch" not in sys.modules
log.set_up_logging()
try:
    program = WorkerProgram(
        ("first",), ("restarted",), entry="work:main", preload=tuple(settings["preload"]), script=settings["script"],
    )
    config = AgentConfig(
        host="here", address="127.0.0.1", slots=settings["slots"], expected_workers=settings["slots"], min_workers=1, max_workers=8,
        lives_on=settings["lives_on"], environ=os.environ, command=settings["command"],
        timeouts=AgentTimeouts(**settings["timeouts"]), policy=RestartPolicy(**settings["policy"]),
    )
    sys.exit(run_agent(program, Path("run"), config))
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
HEAD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from lockstep.errors import *
from lockstep.runtime.subprocesses import worker_main
from lockstep.runtime.worker_env import read_worker_env
from lockstep.runtime.signals import StopSignals, stop_exit_code

about = {}

def main(argv):
    global slot, words
    slot, words = read_worker_env(os.environ).slot, argv
    return worker_main(work, lambda: about)

def until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def ready():
    Path(f"ready-{slot}.tmp").write_text(str(os.getpid()))
    os.rename(f"ready-{slot}.tmp", f"ready-{slot}")

def polite():
    with StopSignals() as signals:
        ready()
        until(lambda: signals.received)
    Path(f"saved-{slot}").touch()
    return stop_exit_code(signals.received)

def deaf():
    with StopSignals() as signals:
        ready()
        time.sleep(60)

work = polite
"""


class AgentRun:
    """An agent under test, in its own folder."""

    def __init__(self, folder: Path, body: str, **settings: Any) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "work.py").write_text(HEAD + textwrap.dedent(body))
        values = {"slots": 2, "lives_on": False, "timeouts": {}, "policy": {}, "preload": ["work"], "script": "", "command": {}} | settings
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        temporary = str(folder / "tmp")
        environ |= {"PYTHONPATH": f"{SRC}:{folder}", "TMPDIR": temporary, "LOCKSTEP_TMP": temporary, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, json.dumps(values)],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready(self, slots: int = 2, but: tuple[int, ...] = ()) -> list[int]:
        """Wait until a worker in each slot, other than those in `but`, is ready; return their pids."""
        files = [self.folder / f"ready-{slot}" for slot in range(slots)]

        def all_ready() -> bool:
            return all(file.exists() and int(file.read_text()) not in but for file in files)

        wait_for(lambda: all_ready() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return [int(file.read_text()) for file in files]

    def restarted(self, slot: int, pid: int) -> int:
        """Wait until the worker that replaces `pid` is ready; return its pid."""
        file = self.folder / f"ready-{slot}"
        wait_for(lambda: int(file.read_text()) != pid or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return int(file.read_text())

    def wait(self) -> tuple[int, str, str]:
        """Wait for the agent; return (exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; then like `wait`."""
        self.process.send_signal(number)
        return self.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def forkserver(self) -> int:
        """Return the pid of the forkserver."""
        (found,) = [pid for pid in children(self.process.pid) if Path(f"/proc/{pid}/comm").read_text() == "lockstep-forker\n"]
        return found


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AgentRun]]:
    """Start agents. At the end of the test, kill and report the processes left in its folder."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    started: list[AgentRun] = []

    def start_agent(body: str = "", **settings: Any) -> AgentRun:
        started.append(AgentRun(tmp_path, body, **settings))
        return started[-1]

    yield start_agent
    left = [] if any(agent.process.returncode in (None, -signal.SIGKILL) for agent in started[-1:]) else in_folder(tmp_path)
    for pid in in_folder(tmp_path):
        os.kill(pid, signal.SIGKILL)
    for agent in started:
        agent.process.communicate()
    assert not left, "processes are left"


def wait_for(done: Callable[[], bool], timeout_s: float = 60) -> float:
    """Wait until `done()`; return the seconds."""
    began_s = time.monotonic()
    while not done():
        assert time.monotonic() < began_s + timeout_s, "timed out"
        time.sleep(0.005)
    return time.monotonic() - began_s


def state_of(pid: int) -> str:
    """Return the state of a process (R, S, T, Z, ...); "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def in_folder(folder: Path) -> list[int]:
    """Return the pids of all processes whose working directory is `folder`."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder) and alive(int(entry.name)):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def three_parts(text: str, first_words: str) -> bool:
    """Return whether `text` contains a line with `first_words` followed by two indented lines."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if first_words in line), None)
    return first is not None and len(lines) > first + 2 and all(line.startswith("  ") for line in lines[first + 1 : first + 3])


# Kills.


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_worker_is_restarted_at_once_and_others_keep_running(start: Callable[..., AgentRun], lives_on: bool) -> None:
    agent = start(lives_on=lives_on)
    first, second = agent.ready()
    os.kill(second, signal.SIGKILL)
    third = agent.restarted(1, second)
    assert alive(first) and alive(third) and not alive(second)
    assert agent.stop()[0] == 75
    assert (agent.folder / "saved-0").exists() and (agent.folder / "saved-1").exists()
    assert next(event["why"] for event in agent.events("worker ended")) == "killed by SIGKILL; restarting now"
    assert [event["pid"] for event in agent.events("worker started")] == [first, second, third]
    assert list(state_folder(agent.run, "here").iterdir()) == [state_folder(agent.run, "here") / "agent.lock"]


def test_a_restarted_worker_gets_its_own_arguments(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    print(*words)\n    return polite()", slots=1)
    (first,) = agent.ready(1)
    os.kill(first, signal.SIGKILL)
    agent.restarted(0, first)
    assert agent.stop()[1] == "first\nrestarted\n"


def test_workers_of_launch_survive_their_agent_and_the_next_one_adopts_them(start: Callable[..., AgentRun]) -> None:
    agent = start(lives_on=True)
    pids = agent.ready()
    forkserver = agent.forkserver()
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not alive(forkserver))
    time.sleep(0.3)
    assert all(map(alive, pids))
    began_s = time.monotonic()
    next_agent = start(lives_on=True)
    wait_for(lambda: len(next_agent.events("worker taken over")) == 2, timeout_s=2)
    assert time.monotonic() - began_s < 2
    os.kill(pids[1], signal.SIGKILL)
    new = next_agent.restarted(1, pids[1])
    assert next_agent.ready() == [pids[0], new] and len(next_agent.events("worker started")) == 3
    assert next_agent.stop()[0] == 75  # from the report of a worker that is not a child
    assert (
        next(event["why"] for event in next_agent.events("worker ended"))
        == "exited without an error report, exit code unknown; restarting now"
    )


def test_a_result_recorded_while_no_agent_ran_ends_the_run(start: Callable[..., AgentRun]) -> None:
    agent = start(lives_on=True)
    agent.ready()
    agent.process.kill()
    agent.process.wait()
    publish(agent, end=RunResult(4, "the loss is a fish"))
    code, _, err = start(lives_on=True, timeouts={"exit_s": 0.2}).wait()
    assert (code, err.splitlines()[-1]) == (4, "the loss is a fish")


def test_workers_of_train_exit_with_their_agent(start: Callable[..., AgentRun]) -> None:
    agent = start("work = deaf", slots=3)
    pids = agent.ready(3)
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not any(map(alive, pids)), timeout_s=2)
    assert start().ready()  # and the same command resumes


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("lives_on", [False, True])
def test_an_agent_killed_while_starting_leaves_no_unrecorded_worker(start: Callable[..., AgentRun], turn: int, lives_on: bool) -> None:
    agent = start("work = deaf", slots=4, lives_on=lives_on)
    wait_for(lambda: len(in_folder(agent.folder)) > 1 + turn)
    agent.process.kill()
    agent.process.wait()
    time.sleep(0.1)
    wait_for(lambda: set(in_folder(agent.folder)) <= recorded(agent), timeout_s=5)
    assert lives_on or not in_folder(agent.folder)


def recorded(agent: AgentRun) -> set[int]:
    """Return the pids of the workers that an agent has recorded."""
    return {json.loads(path.read_text())["pid"] for path in state_folder(agent.run, "here").glob("*.json")}


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_forkserver_is_replaced_and_its_workers_survive(start: Callable[..., AgentRun], lives_on: bool) -> None:
    agent = start(lives_on=lives_on)
    pids = agent.ready()
    forkserver = agent.forkserver()
    os.kill(forkserver, signal.SIGKILL)
    os.kill(pids[0], signal.SIGKILL)
    new = agent.restarted(0, pids[0])
    assert alive(pids[1]) and agent.forkserver() != forkserver
    assert [event["why"] for event in agent.events("worker started") if event["pid"] == new] == ["forked by the forkserver"]
    assert agent.stop()[0] == 75


def test_a_request_to_a_dead_forkserver_waits_for_its_replacement(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    pool = WorkerPool(WorkerProgram((), entry="work:main", preload=()), environ, EventLog(tmp_path, "here"), import_s=60.0, fork_s=5.0)
    try:
        wait_for(lambda: pool.receive_replies() or (pool.forkserver is not None and pool.forkserver.ready))
        assert pool.forkserver
        process = pool.forkserver.process
        process.kill()
        process.wait()
        pool.request(WorkerEnv(str(tmp_path), str(tmp_path), "here", 0, 1, 1, 1, 1, "127.0.0.1"), 1, 2, restarted=False)
        pool.start(pool.pending[0])  # before the pool has noticed the exit
        assert pool.forkserver and pool.forkserver.process.pid != process.pid
        assert not pool.pending[0].use_spawn and not pool.pending[0].pid
    finally:
        pool.close()


def test_a_hanging_forkserver_is_bypassed(start: Callable[..., AgentRun]) -> None:
    agent = start(timeouts={"fork_s": 0.2})
    pids = agent.ready()
    os.kill(agent.forkserver(), signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    agent.restarted(0, pids[0])
    assert agent.events("worker started")[-1]["why"] == "spawned"
    assert agent.stop()[0] == 75


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "left 1 threads"),
        ("raise ValueError('fish')", "ValueError: fish"),
    ],
)
def test_workers_are_spawned_if_no_forkserver_can_run(start: Callable[..., AgentRun], tmp_path: Path, script: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"{script}\ndef train(): pass")
    agent = start(script="mine.py:train", lives_on=True)
    pids = agent.ready()
    os.kill(pids[0], signal.SIGKILL)
    agent.restarted(0, pids[0])
    assert {event["why"] for event in agent.events("worker started")} == {"spawned"}
    code, _, err = agent.stop()
    assert code == 75 and message in err


def test_the_real_forkserver_has_one_thread_and_preloads_all_that_a_worker_needs(start: Callable[..., AgentRun]) -> None:
    body = """
    from lockstep.agent.forkserver import PRELOAD
    known = set(sys.modules)
    def work():
        missing = set(PRELOAD) - known
        assert not missing, missing
        import torch
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter])
        parameter.sum().backward()
        optimizer.step()
        return polite()
    """
    agent = start(body, preload=["torch", "torch._dynamo", "lockstep.cli.main", "lockstep.train", "work"])
    pids = agent.ready()
    assert len(list(Path(f"/proc/{agent.forkserver()}/task").iterdir())) == 1
    os.kill(pids[1], signal.SIGKILL)
    assert wait_for(lambda: (agent.folder / "ready-1").read_text() != str(pids[1])) < 1.0  # 28 ms on a quiet machine
    assert agent.stop()[0] == 75
    assert {event["why"] for event in agent.events("worker started")} == {"forked by the forkserver"}


# Failures of a worker.


def test_three_own_errors_at_the_same_step_end_the_run_and_print_the_traceback_first(start: Callable[..., AgentRun]) -> None:
    body = """
    def work():
        if slot == 1:
            about["step"] = 7
            raise ValueError("the loss is a fish")
        return deaf()
    """
    agent = start(body, timeouts={"exit_s": 0.2}, policy={"initial_delay_s": 0.05})
    code, _, err = agent.wait()
    assert code == 1 and len(agent.events("worker started")) == 4
    shown = err[err.index("Traceback") :]
    assert "ValueError: the loss is a fish\n" in shown and "in a row to fail at step 7" in shown
    assert three_parts(shown, "LockstepError: slot 1 (pid ")
    record = GenerationLog(agent.run / "generations").newest()
    assert record and record.end and record.end.code == 1 and record.end.text == shown.rstrip("\n")
    log = (agent.run / "logs/here-1.log").read_text()
    assert (log.count("Traceback"), log.count("the same error again")) == (1, 2)


KILLS_ITSELF = """
from lockstep.runtime.status_board import StatusBoard
def work():
    if not slot:
        return polite()
    print("about to go", flush=True)
    board = StatusBoard(Path(os.environ["LOCKSTEP_STATE"]) / f"{slot}.board")
    STATUS
    os.kill(os.getpid(), signal.SIGNAL)
"""


@pytest.mark.parametrize(
    ("name", "status", "count", "where"),
    [
        pytest.param("SIGSEGV", 'board.enter("forward", 12)', 3, "to fail at step 11 by SIGSEGV", id="a crash"),
        pytest.param("SIGABRT", "", 3, "to fail before its first step by SIGABRT", id="a crash before the first step"),
        pytest.param("SIGKILL", 'board.enter("backward", 12)', 6, "killed by SIGKILL in the backward phase of step 12", id="no memory"),
    ],
)
def test_repeated_crashes_or_kills_at_the_same_step_end_the_run(
    start: Callable[..., AgentRun], name: str, status: str, count: int, where: str
) -> None:
    agent = start(KILLS_ITSELF.replace("STATUS", status).replace("SIGNAL", name), policy={"initial_delay_s": 0.01})
    code, _, err = agent.wait()
    assert code == 128 + signal.Signals[name] and len(agent.events("worker started")) == 1 + count
    first, last = err.rindex(f"was killed by {name}\n"), err.rindex(where)
    assert "  | about to go\n" in err[first:last] and three_parts(err, where)


def test_kills_before_the_first_step_never_end_the_run(start: Callable[..., AgentRun]) -> None:
    agent = start(
        KILLS_ITSELF.replace("STATUS", 'board.enter("joining")').replace("SIGNAL", "SIGKILL"),
        policy={"initial_delay_s": 0.01, "max_delay_s": 0.02},
    )
    wait_for(lambda: len(agent.events("worker ended")) >= 20)
    assert agent.stop()[0] == 75


def test_errors_with_progress_in_between_do_not_end_the_run(start: Callable[..., AgentRun]) -> None:
    body = """
    def work():
        turns = Path("turns")
        turn = len(turns.read_text()) if turns.exists() else 0
        turns.write_text("x" * (turn + 1))
        about["step"] = turn
        if turn < 6:
            raise ValueError("bad luck")
        return 0
    """
    assert start(body, slots=1).wait()[0] == 0


@pytest.mark.parametrize(("error", "code"), [("UsageError", 2), ("CheckpointError", 3), ("DivergedError", 4)])
def test_errors_that_no_retry_can_fix_end_the_run_at_once(start: Callable[..., AgentRun], error: str, code: int) -> None:
    body = f"""
    def work():
        if slot:
            raise {error}("it does not fit", "a.txt", "fix it")
        return polite()
    """
    agent = start(body, timeouts={"exit_s": 0.2})
    assert agent.wait() == (code, "", f"{error}: it does not fit\n  a.txt\n  fix it\n")
    record = GenerationLog(agent.run / "generations").newest()
    assert record and record.end and record.end.code == code


def test_an_early_exit_with_code_0_is_a_failure(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    sys.exit(0)", slots=1, policy={"initial_delay_s": 0.01})
    code, _, err = agent.wait()
    assert code == 1 and "exited early (code 0)" in err and len(agent.events("worker started")) == 3


def test_a_worker_that_lost_its_peers_is_restarted_with_growing_delays(start: Callable[..., AgentRun]) -> None:
    body = """
    def work():
        turns = Path("turns")
        turn = len(turns.read_text()) if turns.exists() else 0
        turns.write_text("x" * (turn + 1))
        if turn < 4:
            raise FencedError("left out") if turn % 2 else PeersLostError("gone")
        return 0
    """
    agent = start(body, slots=1, policy={"initial_delay_s": 0.02})
    assert agent.wait()[0] == 0
    delays = [event["why"].partition("; ")[2] for event in agent.events("worker ended")][:-1]
    assert delays == [f"restarting {when}" for when in ("now", "in 0.02 s", "in 0.04 s", "in 0.08 s")]


def test_a_worker_that_failed_and_does_not_exit_is_killed(start: Callable[..., AgentRun]) -> None:
    body = """
    def work():
        if not Path("turn").exists():
            Path("turn").touch()
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("fish")
        return 0
    """
    assert start(body, slots=1, timeouts={"failed_exit_s": 0.2}).wait()[0] == 0


def test_a_drained_worker_is_not_restarted(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    about['drained'] = True\n    return 0")
    assert agent.wait()[0] == 0 and len(agent.events("worker started")) == 2
    assert agent.events("worker ended")[0]["why"] == "exited with code 0: its host is drained"


# The generation log.


def publish(agent: AgentRun, members: tuple[Member, ...] = (), out: tuple[Removed, ...] = (), end: RunResult | None = None) -> None:
    """Write the next generation."""
    log = GenerationLog(agent.run / "generations")
    newest = log.newest()
    record = Generation(newest.number + 1 if newest else 1, new_token(), members, "", 3, "for the test", out, end)
    assert log.propose(record) == record


def test_a_stopped_worker_left_out_of_a_generation_is_killed_and_restarted(start: Callable[..., AgentRun]) -> None:
    agent = start()
    pids = agent.ready()
    members = tuple(Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids))
    other = Member("there/0/a", "there", 0, pids[0], "127.0.0.1:1")
    publish(agent, (*members, other))
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: state_of(pids[1]) == "T")
    publish(agent, members[:1], (Removed("here/1/a", "silent for 3 s"), Removed("there/0/a", "silent for 3 s")))
    agent.restarted(1, pids[1])
    assert alive(pids[0])
    assert agent.stop()[0] == 75
    assert agent.events("SIGKILL sent")[0]["why"] == "removed from generation 2: silent for 3 s"


def test_a_generation_with_a_result_ends_all_workers_within_five_seconds(start: Callable[..., AgentRun]) -> None:
    agent = start("work = deaf")
    pids = agent.ready()
    os.kill(pids[1], signal.SIGSTOP)
    publish(agent, end=RunResult(4, "DivergedError: the loss is a fish"))
    began_s = time.monotonic()
    assert agent.wait() == (4, "", "DivergedError: the loss is a fish\n")
    assert time.monotonic() - began_s < 5 and not any(map(alive, pids))


def test_a_host_with_another_config_does_not_end_the_run_of_others(start: Callable[..., AgentRun]) -> None:
    agent = start(
        "def work():\n    ready()\n    until(Path('go').exists)\n    raise UsageError('threads=2', 'run.toml', 'make it 1')", slots=1
    )
    agent.ready(1)
    publish(agent, (Member("there/0/a", "there", 0, os.getpid(), "127.0.0.1:1"),))
    (agent.folder / "go").touch()
    assert agent.wait()[0] == 2
    newest = GenerationLog(agent.run / "generations").newest()
    assert newest and newest.number == 1


def test_a_result_before_this_start_is_ignored(start: Callable[..., AgentRun]) -> None:
    agent = start(timeouts={"exit_s": 0.2})
    agent.ready()
    publish(agent, end=RunResult(75))
    assert agent.wait()[0] == 75
    for slot in range(2):
        (agent.folder / f"ready-{slot}").unlink()
    next_agent = start()
    next_agent.ready()
    assert next_agent.stop()[0] == 75


def test_an_agent_that_was_suspended_catches_up(start: Callable[..., AgentRun]) -> None:
    agent = start(lives_on=True)
    pids = agent.ready()
    publish(agent, tuple(Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids)))
    agent.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(agent.process.pid) == "T")
    publish(agent, out=(Removed("here/1/a", "silent"),))
    publish(agent)
    agent.process.send_signal(signal.SIGCONT)
    agent.restarted(1, pids[1])
    assert alive(pids[0])
    assert agent.stop()[0] == 75


# Signals.


@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_is_forwarded(start: Callable[..., AgentRun], lives_on: bool, number: int, code: int) -> None:
    agent = start(lives_on=lives_on)
    agent.ready()
    assert agent.stop(number) == (code, "", "")
    assert (agent.folder / "saved-0").exists() and (agent.folder / "saved-1").exists()


def test_a_worker_killed_while_the_run_stops_is_not_restarted(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    return deaf() if slot else polite()")
    pids = agent.ready()
    agent.process.send_signal(signal.SIGTERM)
    wait_for((agent.folder / "saved-0").exists)
    os.kill(pids[1], signal.SIGKILL)
    assert agent.wait() == (75, "", "")


def test_a_second_sigint_kills_all_workers_and_exits_with_130(start: Callable[..., AgentRun]) -> None:
    agent = start("work = deaf", lives_on=True)
    pids = agent.ready()
    agent.process.send_signal(signal.SIGINT)
    wait_for(lambda: bool(agent.events("signal passed on")))
    began_s = time.monotonic()
    code, _, err = agent.stop(signal.SIGINT)
    assert code == 130 and "killed all workers" in err
    assert time.monotonic() - began_s < 2 and not any(map(alive, pids))


def test_workers_that_do_not_stop_in_time_are_killed_and_named(start: Callable[..., AgentRun]) -> None:
    agent = start("work = deaf", timeouts={"grace_s": 0.3})
    agent.ready()
    code, _, err = agent.stop()
    assert code == 128 + signal.SIGTERM
    assert "slots 0 and 1 did not stop within 0.3 s of SIGTERM" in err


def test_a_signal_before_a_worker_has_started(start: Callable[..., AgentRun], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)")
    agent = start(script="mine.py:train")
    wait_for((tmp_path / "importing").exists)
    code, _, err = agent.stop()
    assert code == 128 + signal.SIGTERM and "received SIGTERM before any worker had started" in err


def test_workers_without_state_exit_when_their_host_is_drained(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    ready()\n    time.sleep(60)", lives_on=True)
    agent.ready()
    assert agent.stop(signal.SIGUSR1) == (0, "", "")
    assert {event["why"] for event in agent.events("worker ended")} == {"exited with code 0: its host is drained"}
    assert len(agent.events("worker started")) == 2


# One agent per host, and leftovers.


def test_a_second_agent_is_refused_and_names_the_first(start: Callable[..., AgentRun]) -> None:
    agent = start()
    agent.ready()
    code, _, err = start().wait()
    assert code == 2 and three_parts(err, f"another training is already running in run: the agent of here, pid {agent.process.pid}")
    assert agent.stop()[0] == 75


def test_running_workers_of_launch_are_only_adopted_by_the_same_command(start: Callable[..., AgentRun]) -> None:
    agent = start(lives_on=True, command={"--steps": "80"})
    pids = agent.ready()
    agent.process.kill()
    agent.process.wait()
    code, _, err = start().wait()
    assert code == 2 and three_parts(err, "workers of `lockstep launch` are training in run")
    code, _, err = start(lives_on=True, slots=1).wait()
    assert code == 2 and three_parts(err, "2 workers are training in run on this host, but 1 were requested")
    code, _, err = start(lives_on=True, command={"--steps": "40"}).wait()
    assert code == 2 and three_parts(err, "another command are training in run: --steps is 80 for them and 40 here")
    code, _, err = start(lives_on=True, slots=3, command={"--steps": "80"}).wait()
    assert code == 2 and three_parts(err, "another command are training in run: --workers is 2 for them and 3 here")
    assert all(map(alive, pids))
    next_agent = start(lives_on=True, command={"--steps": "80"})
    wait_for(lambda: len(next_agent.events("worker taken over")) == 2)
    assert next_agent.stop()[0] == 75
    assert {path.name for path in state_folder(agent.run, "here").iterdir()} == {"agent.lock"}


def test_stale_files_in_the_state_folder_are_ignored(start: Callable[..., AgentRun], tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    state = state_folder(tmp_path / "run", "here")
    (state / "0.json").write_text(json.dumps({"pid": os.getpid(), "started": 1, "begun_at_byte": 0}))  # another process had this pid
    (state / "7.json").write_text(json.dumps({"pid": 2**22 + 1, "started": 1, "begun_at_byte": 0}))
    (state / "1.end").write_text('{"code": 0, "at_s": 1.0, "finished": true}\n')
    (state / "agent.lock").write_text("torn {")
    agent = start("def work():\n    if slot:\n        ready()\n        time.sleep(60)\n    return polite()")
    pids = agent.ready()
    os.kill(pids[1], signal.SIGKILL)
    agent.restarted(1, pids[1])  # the old report was ignored
    agent.stop()


def test_restarts_leak_no_zombies_descriptors_or_child_processes(start: Callable[..., AgentRun]) -> None:
    body = """
    def work():
        subprocess.Popen(["sleep", "60"])
        subprocess.Popen(["sh", "-c", "sleep 0.3 & exec true"], start_new_session=True)  # outlives the worker for a moment
        return polite()
    """
    agent = start(body)
    pids = agent.ready()
    descriptors = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    for _ in range(4):
        os.kill(pids[1], signal.SIGKILL)
        pids[1] = agent.restarted(1, pids[1])
    wait_for(lambda: len(children(agent.process.pid)) == 3, timeout_s=5)  # two workers and the forkserver
    assert set(map(state_of, children(agent.process.pid))) <= {"S", "R"}
    assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) == descriptors
    assert agent.stop()[0] == 75
    wait_for(lambda: not in_folder(agent.folder), timeout_s=5)


def test_a_worker_starts_while_its_log_cannot_be_written(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    print('words of', slot)\n    return polite()")
    pids = agent.ready()
    for name in ("logs", "events.jsonl"):
        (agent.run / name).rename(agent.run / f"{name}.away")
    (agent.run / "logs").touch()
    (agent.run / "events.jsonl").mkdir()
    os.kill(pids[1], signal.SIGKILL)
    agent.restarted(1, pids[1])
    code, _, err = agent.stop()
    assert code == 75 and "slot 1 writes to the terminal" in err and "words of 1" in err
    assert err.count("cannot write run/events.jsonl") == 1


def test_slot_0_writes_to_the_terminal_and_others_to_their_logs(start: Callable[..., AgentRun]) -> None:
    agent = start("def work():\n    print('out', slot)\n    print('err', slot, file=sys.stderr)\n    return 0")
    assert agent.wait() == (0, "out 0\n", "err 0\n")
    assert (agent.run / "logs/here-1.log").read_text() == "out 1\nerr 1\n"


@pytest.mark.parametrize("name", ["run", "run/logs"])
def test_an_unusable_folder_is_refused_before_anything_starts(start: Callable[..., AgentRun], tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    agent = start()
    code, _, err = agent.wait()
    assert code == 2 and three_parts(err, "UsageError: ") and not agent.events("worker started")


def test_the_token_is_created_once_and_only_its_owner_can_read_it(start: Callable[..., AgentRun]) -> None:
    tokens = set()
    for _ in range(2):
        agent = start("def work(): return 0")
        assert agent.wait()[0] == 0
        assert (agent.run / "token").stat().st_mode & 0o777 == 0o600
        tokens.add((agent.run / "token").read_text())
    assert len(tokens) == 1 and len(tokens.pop()) >= 32


def test_a_worker_gets_its_environment_and_no_descriptors_of_its_agent(start: Callable[..., AgentRun]) -> None:
    body = """
    import json
    def work():
        seat = read_worker_env(os.environ)
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in ("0", "3", "4", "5", "6", "7") if os.path.exists(f"/proc/self/fd/{fd}")]
        print(json.dumps([seat.slot, seat.slots, seat.expected_workers, seat.host,
            seat.after_generation, seat.agent_pid == os.getppid(), seat.drain, links]))
        assert os.getpgrp() == os.getsid(0) == os.getpid()
        return 0
    """
    code, out, err = start(body, slots=1).wait()
    assert (code, err) == (0, "")
    assert json.loads(out) == [0, 1, 1, "here", 0, True, False, ["/dev/null"]]


def test_the_machines_own_name_is_not_used(start: Callable[..., AgentRun]) -> None:
    agent = start("def work(): return 0")
    agent.wait()
    assert not list((agent.run / "logs").glob(f"{socket.gethostname()}-*"))
