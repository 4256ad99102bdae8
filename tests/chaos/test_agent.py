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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from support.processes import SRC, SUPPORT, children, is_alive, processes_in, state_of
from support.waiting import wait_until

from lockstep.agent.forkserver import (
    PRELOAD,
    WorkerPool,
    WorkerProgram,
    _early,
    start_early,
    start_forkserver,
)
from lockstep.agent.slots import AgentTimeouts, EventLog
from lockstep.elastic.generation_log import (
    Generation,
    GenerationLog,
    Member,
    Removed,
    RunResult,
    new_token,
)
from lockstep.runtime.worker_env import WorkerEnv, state_folder

PROGRAM = SUPPORT / "agent_program.py"


class AgentRun:
    """An agent under test, in its own folder."""

    def __init__(self, folder: Path, worker: str, **settings: Any) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "tmp").mkdir(exist_ok=True)
        values = {
            "worker": worker,
            "slots": 2,
            "lives_on": False,
            "timeouts": {},
            "policy": {},
            "script": "",
            "command": {},
        }
        values |= {"preload": ["agent_workers"], **settings}
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")
        }
        temporary = str(folder / "tmp")
        environ |= {
            "PYTHONPATH": f"{SRC}:{SUPPORT}:{folder}",
            "TMPDIR": temporary,
            "LOCKSTEP_TMP": temporary,
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(values)],
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

        wait_until(lambda: all_ready() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return [int(file.read_text()) for file in files]

    def restarted(self, slot: int, pid: int) -> int:
        """Wait until the worker that replaces `pid` is ready; return its pid."""
        file = self.folder / f"ready-{slot}"
        wait_until(lambda: int(file.read_text()) != pid or self.process.poll() is not None)
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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def forkserver(self) -> int:
        """Return the pid of the forkserver."""
        (pid,) = [
            pid
            for pid in children(self.process.pid)
            if Path(f"/proc/{pid}/comm").read_text() == "lockstep-forker\n"
        ]
        return pid


Start = Callable[..., AgentRun]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start agents. At the end of the test, kill and report the processes left in its folder."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    started: list[AgentRun] = []

    def start_agent(worker: str = "polite", **settings: Any) -> AgentRun:
        """worker: name of a function in tests/support/agent_workers.py"""
        started.append(AgentRun(tmp_path, worker, **settings))
        return started[-1]

    yield start_agent
    left = (
        []
        if any(agent.process.returncode in (None, -signal.SIGKILL) for agent in started[-1:])
        else processes_in(tmp_path)
    )
    for pid in processes_in(tmp_path):
        kill(pid)
    for agent in started:
        agent.process.communicate()
    assert not left, "processes are left"


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def members_of(pids: list[int]) -> list[Member]:
    return [
        Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids)
    ]


def three_parts(text: str, first_words: str) -> bool:
    """Return whether `text` contains a line with `first_words` followed by two indented lines."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if first_words in line), None)
    return (
        first is not None
        and len(lines) > first + 2
        and all(line.startswith("  ") for line in lines[first + 1 : first + 3])
    )


# Kills.


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_worker_is_restarted_at_once_and_others_keep_running(
    start: Start, lives_on: bool
) -> None:
    agent = start(lives_on=lives_on)
    first, second = agent.ready()
    kill(second)
    third = agent.restarted(1, second)
    assert is_alive(first) and is_alive(third) and not is_alive(second)
    assert agent.stop()[0] == 75
    assert (agent.folder / "saved-0").exists() and (agent.folder / "saved-1").exists()
    assert (
        next(event["why"] for event in agent.events("worker ended"))
        == "killed by SIGKILL; restarting now"
    )
    assert [event["pid"] for event in agent.events("worker started")] == [first, second, third]
    assert list(state_folder(agent.run, "here").iterdir()) == [
        state_folder(agent.run, "here") / "agent.lock"
    ]


def test_a_restarted_worker_gets_its_own_arguments(start: Start) -> None:
    agent = start("print_words", slots=1)
    (first,) = agent.ready(1)
    kill(first)
    agent.restarted(0, first)
    assert agent.stop()[1] == "first\nrestarted\n"


def test_workers_of_launch_survive_their_agent_and_the_next_one_adopts_them(start: Start) -> None:
    agent = start(lives_on=True)
    pids = agent.ready()
    forkserver = agent.forkserver()
    agent.kill()
    wait_until(lambda: not is_alive(forkserver))
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    next_agent = start(lives_on=True)
    wait_until(lambda: len(next_agent.events("worker taken over")) == 2)
    kill(pids[1])
    new = next_agent.restarted(1, pids[1])
    assert next_agent.ready() == [pids[0], new] and len(next_agent.events("worker started")) == 3
    assert next_agent.stop()[0] == 75  # from the report of a worker that is not a child
    assert (
        next(event["why"] for event in next_agent.events("worker ended"))
        == "exited without an error report, exit code unknown; restarting now"
    )


def test_a_result_recorded_while_no_agent_ran_ends_the_run(start: Start) -> None:
    agent = start(lives_on=True)
    agent.ready()
    agent.kill()
    publish(agent, end=RunResult(4, "the loss is a fish"))
    code, _, err = start(lives_on=True, timeouts={"exit_s": 0.2}).wait()
    assert (code, err.splitlines()[-1]) == (4, "the loss is a fish")


def test_workers_of_train_exit_with_their_agent(start: Start) -> None:
    agent = start("deaf", slots=3)
    pids = agent.ready(3)
    agent.kill()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=2)
    assert start().ready()  # and the same command resumes


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("lives_on", [False, True])
def test_an_agent_killed_while_starting_leaves_no_unrecorded_worker(
    start: Start, turn: int, lives_on: bool
) -> None:
    agent = start("deaf", slots=4, lives_on=lives_on)
    wait_until(lambda: len(processes_in(agent.folder)) > 1 + turn)
    agent.kill()
    time.sleep(0.1)
    wait_until(lambda: set(processes_in(agent.folder)) <= recorded(agent), timeout_s=5)
    assert lives_on or not processes_in(agent.folder)


def recorded(agent: AgentRun) -> set[int]:
    """Return the pids of the workers that an agent has recorded."""
    return {
        json.loads(path.read_text())["pid"]
        for path in state_folder(agent.run, "here").glob("*.json")
    }


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_forkserver_is_replaced_and_its_workers_survive(
    start: Start, lives_on: bool
) -> None:
    agent = start(lives_on=lives_on)
    pids = agent.ready()
    forkserver = agent.forkserver()
    kill(forkserver)
    kill(pids[0])
    new = agent.restarted(0, pids[0])
    assert is_alive(pids[1]) and agent.forkserver() != forkserver
    assert [event["why"] for event in agent.events("worker started") if event["pid"] == new] == [
        "forked by the forkserver"
    ]
    assert agent.stop()[0] == 75


@pytest.mark.parametrize("change", ["", "LOCKSTEP_TRACK"])
def test_an_early_forkserver_serves_if_its_environment_is_the_same(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = WorkerProgram((), preload=())
    start_early(program)
    (early,) = _early
    if change:
        monkeypatch.setenv(change, "tensorboard")
    used = start_forkserver(program, imports=True)
    try:
        assert (used is early) == (not change)
        assert early.process.poll() == (-signal.SIGKILL if change else None)
        assert not _early
    finally:
        used.kill()


def test_a_request_to_a_dead_forkserver_waits_for_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SRC))
    pool = WorkerPool(
        WorkerProgram((), entry="agent_workers:main", preload=()),
        EventLog(tmp_path, "here"),
        AgentTimeouts(import_s=60.0, fork_s=5.0),
    )
    try:
        wait_until(lambda: pool.poll() or (pool.forkserver is not None and pool.forkserver.ready))
        assert pool.forkserver
        process = pool.forkserver.process
        process.kill()
        process.wait()
        pool.request(
            WorkerEnv(str(tmp_path), str(tmp_path), "here", 0, 1, 1, 1, 1, "127.0.0.1"),
            1,
            2,
            restarted=False,
        )
        pool.start(pool.pending[0])  # before the pool has noticed the exit
        assert pool.forkserver and pool.forkserver.process.pid != process.pid
        assert pool.imports and not pool.pending[0].pid
    finally:
        pool.close()


def test_a_hanging_forkserver_is_replaced(start: Start) -> None:
    agent = start(timeouts={"fork_s": 0.2})
    pids = agent.ready()
    forkserver = agent.forkserver()
    os.kill(forkserver, signal.SIGSTOP)
    kill(pids[0])
    agent.restarted(0, pids[0])
    assert agent.events("forkserver ended")[-1]["why"] == "it did not fork within 0.2 s"
    assert not is_alive(forkserver)
    assert agent.stop()[0] == 75


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "left 1 threads",
        ),
        ("raise ValueError('fish')", "ValueError: fish"),
        (  # what torch does after fork() in a process that has initialized CUDA
            "import os, torch; os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, '_is_in_bad_fork', lambda: True))",
            "mine.py:train initialized CUDA",
        ),
    ],
)
def test_workers_are_spawned_if_no_forkserver_can_run(
    start: Start, tmp_path: Path, script: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{script}\ndef train(): pass")
    agent = start(script="mine.py:train", lives_on=True)
    pids = agent.ready()
    kill(pids[0])
    agent.restarted(0, pids[0])
    assert {event["why"] for event in agent.events("worker started")} == {"spawned"}
    code, _, err = agent.stop()
    assert code == 75 and message in err


def test_a_module_that_asks_for_gpus_at_import_does_not_initialize_cuda(
    start: Start, tmp_path: Path
) -> None:
    asks = "assert torch.cuda._nvml_based_avail(), 'torch.cuda.is_available() would initialize CUDA'; torch.cuda.is_available()"
    (tmp_path / "mine.py").write_text(f"import torch; {asks}\ndef train(): pass")
    agent = start(script="mine.py:train")
    agent.ready()
    assert {event["why"] for event in agent.events("worker started")} == {
        "forked by the forkserver"
    }
    assert agent.stop()[0] == 75


def test_the_real_forkserver_has_one_thread_and_preloads_all_that_a_worker_needs(
    start: Start,
) -> None:
    agent = start("train_one_step", preload=[*PRELOAD, "agent_workers"])
    pids = agent.ready()
    assert len(list(Path(f"/proc/{agent.forkserver()}/task").iterdir())) == 1
    kill(pids[1])
    assert (
        wait_until(lambda: (agent.folder / "ready-1").read_text() != str(pids[1])) < 1.0
    )  # 28 ms on a quiet machine
    assert agent.stop()[0] == 75
    assert {event["why"] for event in agent.events("worker started")} == {
        "forked by the forkserver"
    }


# Failures of a worker.


def test_three_own_errors_at_the_same_step_end_the_run_and_print_the_traceback_first(
    start: Start,
) -> None:
    agent = start("slot_1_raises", timeouts={"exit_s": 0.2}, policy={"initial_delay_s": 0.05})
    code, _, err = agent.wait()
    assert code == 1 and len(agent.events("worker started")) == 4
    shown = err[err.index("Traceback") :]
    assert "ValueError: the loss is a fish\n" in shown and "in a row to fail in step 8" in shown
    assert three_parts(shown, "LockstepError: slot 1 (pid ")
    record = GenerationLog(agent.run / "generations").newest()
    assert record.end and record.end.code == 1 and record.end.text == shown.rstrip("\n")
    log = (agent.run / "logs/here-1.log").read_text()
    assert (log.count("Traceback"), log.count("the same error again")) == (1, 2)


def test_one_error_of_all_workers_at_the_start_ends_the_run_after_one_attempt(start: Start) -> None:
    agent = start("fail_at_the_start")
    code, _, err = agent.wait()
    assert code == 1 and len(agent.events("worker started")) == 2
    assert (
        err.count("Traceback") == 1
        and "all 2 workers failed with this error before the first step" in err
    )


@pytest.mark.parametrize(
    ("worker", "code", "message"),
    [("raise_after_the_end", 1, "ValueError: too late"), ("exit_3_after_the_end", 3, "code 3")],
)
def test_an_error_after_the_end_of_the_run_gives_the_exit_code(
    start: Start, worker: str, code: int, message: str
) -> None:
    agent = start(worker)
    result = agent.wait()
    assert result[0] == code and message in result[2] and len(agent.events("worker started")) == 2
    record = GenerationLog(agent.run / "generations").newest()
    assert record.end == RunResult(0)


@pytest.mark.parametrize(
    ("worker", "name", "count", "where"),
    [
        ("crash_in_step_12", "SIGSEGV", 3, "to fail in step 12 by SIGSEGV"),
        ("abort_before_the_first_step", "SIGABRT", 3, "to fail before its first step by SIGABRT"),
        ("killed_in_step_12", "SIGKILL", 6, "killed by SIGKILL in the backward phase of step 12"),
    ],
)
def test_repeated_crashes_or_kills_at_the_same_step_end_the_run(
    start: Start, worker: str, name: str, count: int, where: str
) -> None:
    agent = start(worker, policy={"initial_delay_s": 0.01})
    code, _, err = agent.wait()
    assert code == 128 + signal.Signals[name] and len(agent.events("worker started")) == 1 + count
    first, last = err.rindex(f"was killed by {name}\n"), err.rindex(where)
    assert "  | about to go\n" in err[first:last] and three_parts(err, where)


def test_kills_before_the_first_step_never_end_the_run(start: Start) -> None:
    agent = start("killed_while_joining", policy={"initial_delay_s": 0.01, "max_delay_s": 0.02})
    wait_until(lambda: len(agent.events("worker ended")) >= 20)
    assert agent.stop()[0] == 75


def test_errors_with_progress_in_between_do_not_end_the_run(start: Start) -> None:
    assert start("fail_with_progress", slots=1).wait()[0] == 0


@pytest.mark.parametrize(
    ("worker", "error", "code"),
    [
        ("usage_error", "UsageError", 2),
        ("checkpoint_error", "CheckpointError", 3),
        ("diverged_error", "DivergedError", 4),
    ],
)
def test_errors_that_no_retry_can_fix_end_the_run_at_once(
    start: Start, worker: str, error: str, code: int
) -> None:
    agent = start(worker, timeouts={"exit_s": 0.2})
    assert agent.wait() == (code, "", f"{error}: it does not fit\n  a.txt\n  fix it\n")
    record = GenerationLog(agent.run / "generations").newest()
    assert record.end and record.end.code == code


def test_an_early_exit_with_code_0_is_a_failure(start: Start) -> None:
    agent = start("exit_early", slots=1, policy={"initial_delay_s": 0.01})
    code, _, err = agent.wait()
    assert code == 1 and "exited early (code 0)" in err and len(agent.events("worker started")) == 3


def test_a_worker_that_lost_its_peers_is_restarted_with_growing_delays(start: Start) -> None:
    agent = start("lose_peers_four_times", slots=1, policy={"initial_delay_s": 0.02})
    assert agent.wait()[0] == 0
    delays = [event["why"].partition("; ")[2] for event in agent.events("worker ended")][:-1]
    assert delays == [
        f"restarting {when}" for when in ("now", "in 0.02 s", "in 0.04 s", "in 0.08 s")
    ]


def test_a_worker_that_failed_and_does_not_exit_is_killed(start: Start) -> None:
    assert start("fail_and_hang_once", slots=1, timeouts={"failed_exit_s": 0.2}).wait()[0] == 0


def test_a_drained_worker_is_not_restarted(start: Start) -> None:
    agent = start("drained")
    assert agent.wait()[0] == 0 and len(agent.events("worker started")) == 2
    assert agent.events("worker ended")[0]["why"] == "exited with code 0: its host is drained"


# The generation log.


def publish(
    agent: AgentRun,
    members: Sequence[Member] = (),
    out: tuple[Removed, ...] = (),
    end: RunResult | None = None,
) -> None:
    """Write the next generation."""
    log = GenerationLog(agent.run / "generations")
    newest = log.newest()
    record = Generation(
        newest.number + 1, new_token(), tuple(members), "", 3, "for the test", out, end
    )
    assert log.propose(record) == record


def test_a_stopped_worker_left_out_of_a_generation_is_killed_and_restarted(start: Start) -> None:
    agent = start()
    pids = agent.ready()
    members = members_of(pids)
    other = Member("there/0/a", "there", 0, pids[0], "127.0.0.1:1")
    publish(agent, (*members, other))
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: state_of(pids[1]) == "T")
    publish(
        agent,
        members[:1],
        (Removed("here/1/a", "silent for 3 s"), Removed("there/0/a", "silent for 3 s")),
    )
    agent.restarted(1, pids[1])
    assert is_alive(pids[0])
    assert agent.stop()[0] == 75
    assert agent.events("SIGKILL sent")[0]["why"] == "removed from generation 2: silent for 3 s"


def test_a_removed_worker_that_exits_has_time_for_its_exit_report(start: Start) -> None:
    agent = start("slot_1_raises_when_told")
    pids = agent.ready()
    members = members_of(pids)
    publish(agent, members)
    publish(agent, members[:1], (Removed("here/1/a", "exited"),))
    time.sleep(0.5)
    (agent.folder / "go").touch()
    agent.restarted(1, pids[1])
    assert agent.stop()[0] == 75
    assert agent.events("worker ended")[0][
        "why"
    ] == "ValueError: bad luck; restarting now" and not agent.events("SIGKILL sent")


def test_a_generation_with_a_result_ends_all_workers_within_five_seconds(start: Start) -> None:
    agent = start("deaf")
    pids = agent.ready()
    os.kill(pids[1], signal.SIGSTOP)
    publish(agent, end=RunResult(4, "DivergedError: the loss is a fish"))
    start_s = time.monotonic()
    assert agent.wait() == (4, "", "DivergedError: the loss is a fish\n")
    assert time.monotonic() - start_s < 5 and not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("code", "hint"), [(75, "\n  the same command resumes from the newest checkpoint"), (0, "")]
)
def test_a_host_that_never_trained_says_why_it_exits(start: Start, code: int, hint: str) -> None:
    agent = start(timeouts={"exit_s": 0.1, "grace_s": 0.1})
    agent.ready()
    publish(agent, (Member("there/0/a", "there", 0, os.getpid(), "127.0.0.1:1"),))
    publish(agent, end=RunResult(code))
    where = "generation 2: for the test"
    what = f"the run ended with exit code {code} while the workers of here were starting or waiting: they trained no step"
    assert agent.wait() == (code, "", f"{what}\n  {where}{hint}\n")


def test_a_host_with_another_config_does_not_end_the_run_of_others(start: Start) -> None:
    agent = start("refuse_its_config", slots=1)
    agent.ready(1)
    publish(agent, (Member("there/0/a", "there", 0, os.getpid(), "127.0.0.1:1"),))
    (agent.folder / "go").touch()
    assert agent.wait()[0] == 2
    newest = GenerationLog(agent.run / "generations").newest()
    assert newest.number == 1


def test_a_result_before_this_start_is_ignored(start: Start) -> None:
    agent = start(timeouts={"exit_s": 0.2})
    agent.ready()
    publish(agent, end=RunResult(75))
    assert agent.wait()[0] == 75
    for slot in range(2):
        (agent.folder / f"ready-{slot}").unlink()
    next_agent = start()
    next_agent.ready()
    assert next_agent.stop()[0] == 75


def test_an_agent_that_was_suspended_catches_up(start: Start) -> None:
    agent = start(lives_on=True)
    pids = agent.ready()
    publish(agent, members_of(pids))
    agent.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(agent.process.pid) == "T")
    publish(agent, out=(Removed("here/1/a", "silent"),))
    publish(agent)
    agent.process.send_signal(signal.SIGCONT)
    agent.restarted(1, pids[1])
    assert is_alive(pids[0])
    assert agent.stop()[0] == 75


# Signals.


@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_is_forwarded(start: Start, lives_on: bool, number: int, code: int) -> None:
    agent = start(lives_on=lives_on)
    agent.ready()
    assert agent.stop(number) == (code, "", "")
    assert (agent.folder / "saved-0").exists() and (agent.folder / "saved-1").exists()


def test_a_worker_killed_while_the_run_stops_is_not_restarted(start: Start) -> None:
    agent = start("slot_0_polite")
    pids = agent.ready()
    agent.process.send_signal(signal.SIGTERM)
    wait_until((agent.folder / "saved-0").exists)
    kill(pids[1])
    assert agent.wait() == (75, "", "")


def test_a_second_sigint_kills_all_workers_and_exits_with_130(start: Start) -> None:
    agent = start("deaf", lives_on=True)
    pids = agent.ready()
    agent.process.send_signal(signal.SIGINT)
    wait_until(lambda: bool(agent.events("signal passed on")))
    start_s = time.monotonic()
    code, _, err = agent.stop(signal.SIGINT)
    assert code == 130 and "killed all workers" in err
    assert time.monotonic() - start_s < 10 and not any(map(is_alive, pids))


def test_workers_that_do_not_stop_in_time_are_killed_and_named(start: Start) -> None:
    agent = start("deaf", timeouts={"grace_s": 0.3})
    agent.ready()
    code, _, err = agent.stop()
    assert code == 128 + signal.SIGTERM
    assert "slots 0 and 1 did not stop within 0.3 s of SIGTERM" in err


def test_a_signal_before_a_worker_has_started(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)")
    agent = start(script="mine.py:train")
    wait_until((tmp_path / "importing").exists)
    code, _, err = agent.stop()
    assert code == 128 + signal.SIGTERM and "received SIGTERM before any worker had started" in err


def test_workers_without_state_exit_when_their_host_is_drained(start: Start) -> None:
    agent = start("without_handlers", lives_on=True)
    agent.ready()
    assert agent.stop(signal.SIGUSR1) == (0, "", "")
    assert {event["why"] for event in agent.events("worker ended")} == {
        "exited with code 0: its host is drained"
    }
    assert len(agent.events("worker started")) == 2


# One agent per host, and leftovers.


def test_a_second_agent_is_refused_and_names_the_first(start: Start) -> None:
    agent = start()
    agent.ready()
    code, _, err = start().wait()
    assert code == 2 and three_parts(
        err,
        f"another training is already running in run: the agent of here, pid {agent.process.pid}",
    )
    assert agent.stop()[0] == 75


def test_running_workers_of_launch_are_only_adopted_by_the_same_command(start: Start) -> None:
    agent = start(lives_on=True, command={"--steps": "80"})
    pids = agent.ready()
    agent.kill()
    code, _, err = start().wait()
    assert code == 2 and three_parts(err, "workers of `lockstep launch` are training in run")
    code, _, err = start(lives_on=True, slots=1).wait()
    assert code == 2 and three_parts(
        err, "2 workers are training in run on this host, but 1 were requested"
    )
    code, _, err = start(lives_on=True, command={"--steps": "40"}).wait()
    assert code == 2 and three_parts(
        err, "another command are training in run: --steps is 80 for them and 40 here"
    )
    code, _, err = start(lives_on=True, slots=3, command={"--steps": "80"}).wait()
    assert code == 2 and three_parts(
        err, "another command are training in run: --workers is 2 for them and 3 here"
    )
    assert all(map(is_alive, pids))
    next_agent = start(lives_on=True, command={"--steps": "80"})
    wait_until(lambda: len(next_agent.events("worker taken over")) == 2)
    assert next_agent.stop()[0] == 75
    assert {path.name for path in state_folder(agent.run, "here").iterdir()} == {"agent.lock"}


@pytest.mark.parametrize("content", ["", '{"pid": 1, "lives_'])
def test_workers_keep_training_when_the_record_of_their_agent_is_damaged(
    start: Start, content: str
) -> None:
    agent = start(lives_on=True)
    pids = agent.ready()
    agent.kill()
    for path in state_folder(agent.run, "here").glob("agent.*"):
        path.write_text(content)
    next_agent = start(lives_on=True)
    wait_until(lambda: next_agent.process.poll() is not None or not all(map(is_alive, pids)))
    assert all(map(is_alive, pids))
    code, _, err = next_agent.wait()
    assert code == 3 and three_parts(
        err, f"workers are training in run (pid {pids[0]}, {pids[1]}), and it is unknown"
    )
    for pid in pids:
        kill(pid)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_stale_files_in_the_state_folder_are_ignored(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    state = state_folder(tmp_path / "run", "here")
    (state / "0.json").write_text(
        json.dumps({"pid": os.getpid(), "started": 1, "log_offset": 0})
    )  # another process had this pid
    (state / "7.json").write_text(json.dumps({"pid": 2**22 + 1, "started": 1, "log_offset": 0}))
    (state / "1.exit_report").write_text('{"code": 0, "at_s": 1.0, "finished": true}\n')
    (state / "agent.lock").write_text("torn {")
    agent = start("slot_1_without_handlers")
    pids = agent.ready()
    kill(pids[1])
    assert agent.restarted(1, pids[1]), "the old report was ignored"
    agent.stop()


def test_restarts_leak_no_zombies_descriptors_or_child_processes(start: Start) -> None:
    agent = start("leave_child_processes")
    pids = agent.ready()
    descriptors = len(os.listdir(f"/proc/{agent.process.pid}/fd"))
    for _ in range(4):
        kill(pids[1])
        pids[1] = agent.restarted(1, pids[1])
    wait_until(
        lambda: len(children(agent.process.pid)) == 3, timeout_s=5
    )  # two workers and the forkserver
    assert set(map(state_of, children(agent.process.pid))) <= {"S", "R"}
    assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) == descriptors
    assert agent.stop()[0] == 75
    wait_until(lambda: not processes_in(agent.folder), timeout_s=5)


def test_a_worker_starts_while_its_log_cannot_be_written(start: Start) -> None:
    agent = start("print_slot_and_wait")
    pids = agent.ready()
    for name in ("logs", "events.jsonl"):
        (agent.run / name).rename(agent.run / f"{name}.away")
    (agent.run / "logs").touch()
    (agent.run / "events.jsonl").mkdir()
    kill(pids[1])
    agent.restarted(1, pids[1])
    code, _, err = agent.stop()
    assert code == 75 and "slot 1 writes to the terminal" in err and "words of 1" in err
    assert err.count("/events.jsonl: its lines are lost") == 1


def test_slot_0_writes_to_the_terminal_and_others_to_their_logs(start: Start) -> None:
    agent = start("print_slot")
    assert agent.wait() == (0, "out 0\n", "err 0\n")
    assert (agent.run / "logs/here-1.log").read_text() == "out 1\nerr 1\n"


def test_the_terminal_shows_what_rank_0_prints_in_another_slot(start: Start) -> None:
    agent = start("slot_1_prints_when_told")
    pids = agent.ready()
    members = members_of(pids)
    publish(agent, members)
    kill(pids[0])
    replacement = Member("here/0/b", "here", 0, agent.restarted(0, pids[0]), "127.0.0.1:1")
    publish(agent, (members[1], replacement), (Removed("here/0/a", "exited"),))
    (agent.folder / "go").touch()
    wait_until((agent.folder / "printed").exists)
    assert agent.stop() == (75, "step 30 loss 0.5\n", ANY)


@pytest.mark.parametrize("name", ["run", "run/logs"])
def test_an_unusable_folder_is_refused_before_anything_starts(
    start: Start, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    agent = start()
    code, _, err = agent.wait()
    assert code == 2 and three_parts(err, "UsageError: ") and not agent.events("worker started")


def test_the_token_is_created_once_and_only_its_owner_can_read_it(start: Start) -> None:
    tokens = set()
    for _ in range(2):
        agent = start("finish")
        assert agent.wait()[0] == 0
        assert (agent.run / "token").stat().st_mode & 0o777 == 0o600
        tokens.add((agent.run / "token").read_text())
    assert len(tokens) == 1 and len(tokens.pop()) >= 32


def test_a_worker_gets_its_environment_and_no_descriptors_of_its_agent(start: Start) -> None:
    code, out, err = start("print_environment", slots=1).wait()
    assert (code, err) == (0, "")
    assert json.loads(out) == [0, 1, 1, "here", 0, True, False, ["/dev/null"]]


def test_the_machines_own_name_is_not_used(start: Start) -> None:
    agent = start("finish")
    agent.wait()
    assert not list((agent.run / "logs").glob(f"{socket.gethostname()}-*"))
