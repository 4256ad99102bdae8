"""An agent and its workers, as real processes: kills of each of them, the log of generations, signals, and that nothing is left behind.

The workers are small and know nothing of torch, but for one test in which the zygote has imported what it does in a real run.
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

from lockstep.agent.event_log import Journal
from lockstep.agent.forkserver import Work
from lockstep.agent.worker_pool import Nursery
from lockstep.elastic.generation_log import Arbiter, End, Member, Out, Record, new_token
from lockstep.runtime.worker_env import Seat, state_folder

SRC = Path(__file__).parents[2] / "src"
AGENT = """
import json, os, sys
from pathlib import Path
from lockstep import log
from lockstep.errors import LockstepError
from lockstep.agent.agent import Limits, run_agent
from lockstep.agent.restart_policy import Rules
from lockstep.agent.forkserver import Work
told = json.loads(sys.argv[1])
assert "torch" not in sys.modules
log.set_up()
try:
    sys.exit(run_agent(
        Work(("first",), ("again",), entry="work:main", warm=tuple(told["warm"]), script=told["script"]), Path("run"),
        host="here", address="127.0.0.1", slots=told["slots"], expected=told["slots"], least=1, most=8, lives_on=told["lives_on"],
        environ=os.environ, command=told["command"], limits=Limits(**told["limits"]), rules=Rules(**told["rules"]),
    ))
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
HEAD = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from lockstep.errors import *
from lockstep.runtime.subprocesses import worker_main
from lockstep.runtime.worker_env import find_seat
from lockstep.runtime.signals import Signals, exit_code

about = {}

def main(argv):
    global slot, words
    slot, words = find_seat(os.environ).slot, argv
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
    with Signals() as signals:
        ready()
        until(lambda: signals.received)
    Path(f"saved-{slot}").touch()
    return exit_code(signals.received)

def deaf():
    with Signals() as signals:
        ready()
        time.sleep(60)

work = polite
"""


class Started:
    """An agent under test, in a folder of its own."""

    def __init__(self, folder: Path, body: str, **told: Any) -> None:
        self.folder, self.run = folder, folder / "run"
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "work.py").write_text(HEAD + textwrap.dedent(body))
        values = {"slots": 2, "lives_on": False, "limits": {}, "rules": {}, "warm": ["work"], "script": "", "command": {}} | told
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
        """Wait until a worker in each slot, and none of `but`, says that it is ready; their numbers."""
        files = [self.folder / f"ready-{slot}" for slot in range(slots)]

        def all_ready() -> bool:
            return all(file.exists() and int(file.read_text()) not in but for file in files)

        wait_for(lambda: all_ready() or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return [int(file.read_text()) for file in files]

    def successor(self, slot: int, of: int) -> int:
        """Wait for the worker that comes after `of` in its slot; its number."""
        file = self.folder / f"ready-{slot}"
        wait_for(lambda: int(file.read_text()) != of or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()
        return int(file.read_text())

    def ended(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def stopped(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """As ended, after this signal."""
        self.process.send_signal(number)
        return self.ended()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The lines of events.jsonl of one kind."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def zygote(self) -> int:
        """The zygote's number."""
        (found,) = [pid for pid in children(self.process.pid) if Path(f"/proc/{pid}/comm").read_text() == "lockstep-zygote\n"]
        return found


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Started]]:
    """Starts agents; what lives in the test's folder at the end should not, and is ended by its number."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    started: list[Started] = []

    def start_one(body: str = "", **told: Any) -> Started:
        started.append(Started(tmp_path, body, **told))
        return started[-1]

    yield start_one
    left = [] if any(one.process.returncode in (None, -signal.SIGKILL) for one in started[-1:]) else in_folder(tmp_path)
    for pid in in_folder(tmp_path):
        os.kill(pid, signal.SIGKILL)
    for one in started:
        one.process.communicate()
    assert not left, "processes are left"


def wait_for(done: Callable[[], bool], timeout_s: float = 60) -> float:
    """Wait until `done()`; how long it took."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() < begun + timeout_s, "waited in vain"
        time.sleep(0.005)
    return time.monotonic() - begun


def state_of(pid: int) -> str:
    """R, S, T, Z ... of a process; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def in_folder(folder: Path) -> list[int]:
    """All processes that live in `folder`, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder) and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def three_parts(text: str, begin: str) -> bool:
    """Whether an error with these first words, and two indented lines under it, stands in `text`."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if begin in line), None)
    return first is not None and len(lines) > first + 2 and all(line.startswith("  ") for line in lines[first + 1 : first + 3])


# Somebody is killed.


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_worker_gets_a_successor_at_once_and_the_others_do_not_notice(start: Callable[..., Started], lives_on: bool) -> None:
    one = start(lives_on=lives_on)
    first, second = one.ready()
    os.kill(second, signal.SIGKILL)
    third = one.successor(1, second)
    assert alive(first) and alive(third) and not alive(second)
    assert one.stopped()[0] == 75
    assert (one.folder / "saved-0").exists() and (one.folder / "saved-1").exists()
    assert next(event["why"] for event in one.events("worker ended")) == "ended by SIGKILL; a new one starts at once"
    assert [event["pid"] for event in one.events("worker started")] == [first, second, third]
    assert list(state_folder(one.run, "here").iterdir()) == [state_folder(one.run, "here") / "agent.lock"]


def test_a_successor_gets_the_words_of_one_and_the_first_worker_the_first(start: Callable[..., Started]) -> None:
    one = start("def work():\n    print(*words)\n    return polite()", slots=1)
    (first,) = one.ready(1)
    os.kill(first, signal.SIGKILL)
    one.successor(0, first)
    assert one.stopped()[1] == "first\nagain\n"


def test_workers_of_launch_train_on_without_their_agent_and_the_next_one_takes_them_over(start: Callable[..., Started]) -> None:
    one = start(lives_on=True)
    pids = one.ready()
    zygote = one.zygote()
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not alive(zygote))
    time.sleep(0.3)
    assert all(map(alive, pids))
    begun = time.monotonic()
    two = start(lives_on=True)
    wait_for(lambda: len(two.events("worker taken over")) == 2, timeout_s=2)
    assert time.monotonic() - begun < 2
    os.kill(pids[1], signal.SIGKILL)
    new = two.successor(1, pids[1])
    assert two.ready() == [pids[0], new] and len(two.events("worker started")) == 3
    assert two.stopped()[0] == 75  # by the words of one that is no child
    assert next(event["why"] for event in two.events("worker ended")) == "it ended without a word; a new one starts at once"


def test_an_end_that_was_written_while_there_was_no_agent_counts(start: Callable[..., Started]) -> None:
    one = start(lives_on=True)
    one.ready()
    one.process.kill()
    one.process.wait()
    publish(one, end=End(4, "the loss is a fish"))
    code, _, err = start(lives_on=True, limits={"leave_s": 0.2}).ended()
    assert (code, err.splitlines()[-1]) == (4, "the loss is a fish")


def test_workers_of_train_end_with_their_agent(start: Callable[..., Started]) -> None:
    one = start("work = deaf", slots=3)
    pids = one.ready(3)
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not any(map(alive, pids)), timeout_s=2)
    assert start().ready()  # and the same command goes on


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("lives_on", [False, True])
def test_an_agent_killed_while_it_starts_leaves_no_worker_of_whom_nobody_knows(
    start: Callable[..., Started], turn: int, lives_on: bool
) -> None:
    one = start("work = deaf", slots=4, lives_on=lives_on)
    wait_for(lambda: len(in_folder(one.folder)) > 1 + turn)
    one.process.kill()
    one.process.wait()
    time.sleep(0.1)
    wait_for(lambda: set(in_folder(one.folder)) <= noted(one), timeout_s=5)
    assert lives_on or not in_folder(one.folder)


def noted(one: Started) -> set[int]:
    """The workers that an agent wrote down."""
    return {json.loads(path.read_text())["pid"] for path in state_folder(one.run, "here").glob("*.json")}


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_killed_zygote_takes_nobody_along_and_another_one_forks_the_next_worker(start: Callable[..., Started], lives_on: bool) -> None:
    one = start(lives_on=lives_on)
    pids = one.ready()
    zygote = one.zygote()
    os.kill(zygote, signal.SIGKILL)
    os.kill(pids[0], signal.SIGKILL)
    new = one.successor(0, pids[0])
    assert alive(pids[1]) and one.zygote() != zygote
    assert [event["why"] for event in one.events("worker started") if event["pid"] == new] == ["forked by the zygote"]
    assert one.stopped()[0] == 75


def test_a_zygote_that_ends_when_it_is_asked_is_replaced_and_the_worker_waits_for_the_next_one(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    nursery = Nursery(Work((), entry="work:main", warm=()), environ, Journal(tmp_path, "here"), import_s=60.0, fork_s=5.0)
    try:
        wait_for(lambda: nursery.hear() or (nursery.zygote is not None and nursery.zygote.ready))
        assert nursery.zygote
        ended = nursery.zygote.process
        ended.kill()
        ended.wait()
        nursery.expect(Seat(str(tmp_path), str(tmp_path), "here", 0, 1, 1, 1, 1, "127.0.0.1"), 1, 2, again=False)
        nursery.bring(nursery.expected[0])  # before anybody has heard that it is gone
        assert nursery.zygote and nursery.zygote.process.pid != ended.pid
        assert not nursery.expected[0].cold and not nursery.expected[0].pid
    finally:
        nursery.close()


def test_a_stopped_zygote_is_given_up_and_the_worker_starts_without_it(start: Callable[..., Started]) -> None:
    one = start(limits={"fork_s": 0.2})
    pids = one.ready()
    os.kill(one.zygote(), signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    one.successor(0, pids[0])
    assert one.events("worker started")[-1]["why"] == "as a new program"
    assert one.stopped()[0] == 75


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "left 1 threads"),
        ("raise ValueError('fish')", "ValueError: fish"),
    ],
)
def test_where_no_zygote_can_be_workers_start_as_new_programs(
    start: Callable[..., Started], tmp_path: Path, script: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{script}\ndef train(): pass")
    one = start(script="mine.py:train", lives_on=True)
    pids = one.ready()
    os.kill(pids[0], signal.SIGKILL)
    one.successor(0, pids[0])
    assert {event["why"] for event in one.events("worker started")} == {"as a new program"}
    code, _, err = one.stopped()
    assert code == 75 and says in err


def test_the_real_zygote_has_one_thread_and_everything_that_a_worker_needs(start: Callable[..., Started]) -> None:
    body = """
    from lockstep.agent.forkserver import WARM
    known = set(sys.modules)
    def work():
        missing = set(WARM) - known
        assert not missing, missing
        import torch
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter])
        parameter.sum().backward()
        optimizer.step()
        return polite()
    """
    one = start(body, warm=["torch", "torch._dynamo", "lockstep.cli.main", "lockstep.train", "work"])
    pids = one.ready()
    assert len(list(Path(f"/proc/{one.zygote()}/task").iterdir())) == 1
    os.kill(pids[1], signal.SIGKILL)
    assert wait_for(lambda: (one.folder / "ready-1").read_text() != str(pids[1])) < 1.0  # 28 ms on a quiet machine
    assert one.stopped()[0] == 75
    assert {event["why"] for event in one.events("worker started")} == {"forked by the zygote"}


# A worker fails by itself.


def test_an_error_of_its_own_at_the_same_step_three_times_ends_the_run_with_its_traceback_first(start: Callable[..., Started]) -> None:
    body = """
    def work():
        if slot == 1:
            about["step"] = 7
            raise ValueError("the loss is a fish")
        return deaf()
    """
    one = start(body, limits={"leave_s": 0.2}, rules={"pause_s": 0.05})
    code, _, err = one.ended()
    assert code == 1 and len(one.events("worker started")) == 4
    told = err[err.index("Traceback") :]
    assert "ValueError: the loss is a fish\n" in told and "in a row to end at step 7" in told
    assert three_parts(told, "LockstepError: slot 1 (pid ")
    record = Arbiter(one.run / "generations").newest()
    assert record and record.end and record.end.code == 1 and record.end.text == told.rstrip("\n")
    log = (one.run / "logs/here-1.log").read_text()
    assert (log.count("Traceback"), log.count("the same error again")) == (1, 2)


ENDS_ITSELF = """
from lockstep.runtime.status_board import Board
def work():
    if not slot:
        return polite()
    print("about to go", flush=True)
    board = Board(Path(os.environ["LOCKSTEP_STATE"]) / f"{slot}.board")
    PLACE
    os.kill(os.getpid(), signal.SIGNAL)
"""


@pytest.mark.parametrize(
    ("name", "place", "count", "where"),
    [
        pytest.param("SIGSEGV", 'board.enter("forward", 12)', 3, "to end at step 11 by SIGSEGV", id="a crash"),
        pytest.param("SIGABRT", "", 3, "to end before its first step by SIGABRT", id="a crash before the first step"),
        pytest.param("SIGKILL", 'board.enter("backward", 12)', 6, "SIGKILL has ended in the backward phase of step 12", id="no memory"),
    ],
)
def test_a_signal_that_ends_it_at_the_same_step_again_and_again_ends_the_run(
    start: Callable[..., Started], name: str, place: str, count: int, where: str
) -> None:
    one = start(ENDS_ITSELF.replace("PLACE", place).replace("SIGNAL", name), rules={"pause_s": 0.01})
    code, _, err = one.ended()
    assert code == 128 + signal.Signals[name] and len(one.events("worker started")) == 1 + count
    first, last = err.rindex(f"was ended by {name}\n"), err.rindex(where)
    assert "  | about to go\n" in err[first:last] and three_parts(err, where)


def test_kills_before_the_first_step_never_end_the_run(start: Callable[..., Started]) -> None:
    one = start(
        ENDS_ITSELF.replace("PLACE", 'board.enter("joining")').replace("SIGNAL", "SIGKILL"), rules={"pause_s": 0.01, "longest_s": 0.02}
    )
    wait_for(lambda: len(one.events("worker ended")) >= 20)
    assert one.stopped()[0] == 75


def test_errors_at_higher_and_higher_steps_are_forgiven(start: Callable[..., Started]) -> None:
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
    assert start(body, slots=1).ended()[0] == 0


@pytest.mark.parametrize(("error", "code"), [("UsageError", 2), ("CheckpointError", 3), ("DivergedError", 4)])
def test_what_no_repetition_mends_ends_the_run_at_once_with_its_words(start: Callable[..., Started], error: str, code: int) -> None:
    body = f"""
    def work():
        if slot:
            raise {error}("it does not fit", "a.txt", "mend it")
        return polite()
    """
    one = start(body, limits={"leave_s": 0.2})
    assert one.ended() == (code, "", f"{error}: it does not fit\n  a.txt\n  mend it\n")
    record = Arbiter(one.run / "generations").newest()
    assert record and record.end and record.end.code == code


def test_an_exit_with_0_in_the_middle_is_a_failure(start: Callable[..., Started]) -> None:
    one = start("def work():\n    sys.exit(0)", slots=1, rules={"pause_s": 0.01})
    code, _, err = one.ended()
    assert code == 1 and "broke off with exit code 0" in err and len(one.events("worker started")) == 3


def test_a_worker_that_lost_its_peers_starts_anew_and_the_pauses_grow(start: Callable[..., Started]) -> None:
    body = """
    def work():
        turns = Path("turns")
        turn = len(turns.read_text()) if turns.exists() else 0
        turns.write_text("x" * (turn + 1))
        if turn < 4:
            raise FencedError("left out") if turn % 2 else PeersLostError("gone")
        return 0
    """
    one = start(body, slots=1, rules={"pause_s": 0.02})
    assert one.ended()[0] == 0
    pauses = [event["why"].partition("; ")[2] for event in one.events("worker ended")][:-1]
    assert pauses == [f"a new one starts {when}" for when in ("at once", "in 0.02 s", "in 0.04 s", "in 0.08 s")]


def test_a_worker_that_failed_and_does_not_end_is_ended(start: Callable[..., Started]) -> None:
    body = """
    def work():
        if not Path("turn").exists():
            Path("turn").touch()
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("fish")
        return 0
    """
    assert start(body, slots=1, limits={"told_s": 0.2}).ended()[0] == 0


def test_a_drained_worker_gets_no_successor(start: Callable[..., Started]) -> None:
    one = start("def work():\n    about['drained'] = True\n    return 0")
    assert one.ended()[0] == 0 and len(one.events("worker started")) == 2
    assert one.events("worker ended")[0]["why"] == "it left with exit code 0: its host is taken away"


# What the log of generations says.


def publish(one: Started, members: tuple[Member, ...] = (), out: tuple[Out, ...] = (), end: End | None = None) -> None:
    """The next generation."""
    log = Arbiter(one.run / "generations")
    newest = log.newest()
    record = Record(newest.number + 1 if newest else 1, new_token(), members, "", 3, "for the test", out, end)
    assert log.propose(record) == record


def test_a_stopped_worker_that_the_generation_goes_on_without_is_killed_and_started_anew(start: Callable[..., Started]) -> None:
    one = start()
    pids = one.ready()
    members = tuple(Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids))
    other = Member("there/0/a", "there", 0, pids[0], "127.0.0.1:1")
    publish(one, (*members, other))
    os.kill(pids[1], signal.SIGSTOP)
    wait_for(lambda: state_of(pids[1]) == "T")
    publish(one, members[:1], (Out("here/1/a", "silent for 3 s"), Out("there/0/a", "silent for 3 s")))
    one.successor(1, pids[1])
    assert alive(pids[0])
    assert one.stopped()[0] == 75
    assert one.events("SIGKILL sent")[0]["why"] == "generation 2 goes on without it: silent for 3 s"


def test_a_record_with_an_end_is_the_end_of_all_within_five_seconds(start: Callable[..., Started]) -> None:
    one = start("work = deaf")
    pids = one.ready()
    os.kill(pids[1], signal.SIGSTOP)
    publish(one, end=End(4, "DivergedError: the loss is a fish"))
    begun = time.monotonic()
    assert one.ended() == (4, "", "DivergedError: the loss is a fish\n")
    assert time.monotonic() - begun < 5 and not any(map(alive, pids))


def test_a_host_that_does_not_fit_leaves_the_run_of_others_alone(start: Callable[..., Started]) -> None:
    one = start(
        "def work():\n    ready()\n    until(Path('go').exists)\n    raise UsageError('threads=2', 'run.toml', 'make it 1')", slots=1
    )
    one.ready(1)
    publish(one, (Member("there/0/a", "there", 0, os.getpid(), "127.0.0.1:1"),))
    (one.folder / "go").touch()
    assert one.ended()[0] == 2
    newest = Arbiter(one.run / "generations").newest()
    assert newest and newest.number == 1


def test_an_end_before_this_start_is_over(start: Callable[..., Started]) -> None:
    one = start(limits={"leave_s": 0.2})
    one.ready()
    publish(one, end=End(75))
    assert one.ended()[0] == 75
    for slot in range(2):
        (one.folder / f"ready-{slot}").unlink()
    two = start()
    two.ready()
    assert two.stopped()[0] == 75


def test_an_agent_that_was_stopped_obeys_what_happened_meanwhile(start: Callable[..., Started]) -> None:
    one = start(lives_on=True)
    pids = one.ready()
    publish(one, tuple(Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids)))
    one.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(one.process.pid) == "T")
    publish(one, out=(Out("here/1/a", "silent"),))
    publish(one)
    one.process.send_signal(signal.SIGCONT)
    one.successor(1, pids[1])
    assert alive(pids[0])
    assert one.stopped()[0] == 75


# Signals.


@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on(start: Callable[..., Started], lives_on: bool, number: int, code: int) -> None:
    one = start(lives_on=lives_on)
    one.ready()
    assert one.stopped(number) == (code, "", "")
    assert (one.folder / "saved-0").exists() and (one.folder / "saved-1").exists()


def test_who_is_killed_while_the_run_stops_gets_no_successor_and_the_others_code_counts(start: Callable[..., Started]) -> None:
    one = start("def work():\n    return deaf() if slot else polite()")
    pids = one.ready()
    one.process.send_signal(signal.SIGTERM)
    wait_for((one.folder / "saved-0").exists)
    os.kill(pids[1], signal.SIGKILL)
    assert one.ended() == (75, "", "")


def test_a_second_interrupt_ends_at_once_with_130(start: Callable[..., Started]) -> None:
    one = start("work = deaf", lives_on=True)
    pids = one.ready()
    one.process.send_signal(signal.SIGINT)
    wait_for(lambda: bool(one.events("signal passed on")))
    begun = time.monotonic()
    code, _, err = one.stopped(signal.SIGINT)
    assert code == 130 and "at once" in err
    assert time.monotonic() - begun < 2 and not any(map(alive, pids))


def test_workers_that_do_not_stop_in_time_are_ended_and_named(start: Callable[..., Started]) -> None:
    one = start("work = deaf", limits={"grace_s": 0.3})
    one.ready()
    code, _, err = one.stopped()
    assert code == 128 + signal.SIGTERM
    assert "slots 0 and 1 did not stop within 0.3 s of SIGTERM" in err


def test_a_signal_before_a_worker_has_started(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import time\nopen('importing', 'w').close()\ntime.sleep(60)")
    one = start(script="mine.py:train")
    wait_for((tmp_path / "importing").exists)
    code, _, err = one.stopped()
    assert code == 128 + signal.SIGTERM and "SIGTERM came before a worker had started" in err


def test_workers_that_have_nothing_to_hand_over_end_when_their_host_is_taken_away(start: Callable[..., Started]) -> None:
    one = start("def work():\n    ready()\n    time.sleep(60)", lives_on=True)
    one.ready()
    assert one.stopped(signal.SIGUSR1) == (0, "", "")
    assert {event["why"] for event in one.events("worker ended")} == {"it left with exit code 0: its host is taken away"}
    assert len(one.events("worker started")) == 2


# One agent, and nothing left.


def test_a_second_agent_is_refused_and_told_who_is_there(start: Callable[..., Started]) -> None:
    one = start()
    one.ready()
    code, _, err = start().ended()
    assert code == 2 and three_parts(err, f"another training is at work in run: the agent of here, pid {one.process.pid}")
    assert one.stopped()[0] == 75


def test_workers_of_launch_are_not_mixed_with_other_starts(start: Callable[..., Started]) -> None:
    one = start(lives_on=True, command={"--steps": "80"})
    pids = one.ready()
    one.process.kill()
    one.process.wait()
    code, _, err = start().ended()
    assert code == 2 and three_parts(err, "workers of `lockstep launch` train in run")
    code, _, err = start(lives_on=True, slots=1).ended()
    assert code == 2 and three_parts(err, "2 workers train in run on this host, and 1 are asked for")
    code, _, err = start(lives_on=True, command={"--steps": "40"}).ended()
    assert code == 2 and three_parts(err, "another command train in run: --steps is 80 for them and 40 here")
    code, _, err = start(lives_on=True, slots=3, command={"--steps": "80"}).ended()
    assert code == 2 and three_parts(err, "another command train in run: --workers is 2 for them and 3 here")
    assert all(map(alive, pids))
    two = start(lives_on=True, command={"--steps": "80"})
    wait_for(lambda: len(two.events("worker taken over")) == 2)
    assert two.stopped()[0] == 75
    assert {path.name for path in state_folder(one.run, "here").iterdir()} == {"agent.lock"}


def test_what_an_earlier_agent_left_in_the_state_folder_is_ignored(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    state = state_folder(tmp_path / "run", "here")
    (state / "0.json").write_text(json.dumps({"pid": os.getpid(), "started": 1, "begun_at_byte": 0}))  # another one had this number
    (state / "7.json").write_text(json.dumps({"pid": 2**22 + 1, "started": 1, "begun_at_byte": 0}))
    (state / "1.end").write_text('{"code": 0, "at_s": 1.0, "finished": true}\n')
    (state / "agent.lock").write_text("torn {")
    one = start("def work():\n    if slot:\n        ready()\n        time.sleep(60)\n    return polite()")
    pids = one.ready()
    os.kill(pids[1], signal.SIGKILL)
    one.successor(1, pids[1])  # the old words were not taken for its own
    one.stopped()


def test_restarts_leave_no_zombie_no_descriptor_and_nothing_that_a_worker_started(start: Callable[..., Started]) -> None:
    body = """
    def work():
        subprocess.Popen(["sleep", "60"])
        subprocess.Popen(["sh", "-c", "sleep 0.3 & exec true"], start_new_session=True)  # outlives the worker for a moment
        return polite()
    """
    one = start(body)
    pids = one.ready()
    descriptors = len(os.listdir(f"/proc/{one.process.pid}/fd"))
    for _ in range(4):
        os.kill(pids[1], signal.SIGKILL)
        pids[1] = one.successor(1, pids[1])
    wait_for(lambda: len(children(one.process.pid)) == 3, timeout_s=5)  # two workers and the zygote
    assert set(map(state_of, children(one.process.pid))) <= {"S", "R"}
    assert len(os.listdir(f"/proc/{one.process.pid}/fd")) == descriptors
    assert one.stopped()[0] == 75
    wait_for(lambda: not in_folder(one.folder), timeout_s=5)


def test_a_worker_starts_though_its_log_cannot_be_written_meanwhile(start: Callable[..., Started]) -> None:
    one = start("def work():\n    print('words of', slot)\n    return polite()")
    pids = one.ready()
    for name in ("logs", "events.jsonl"):
        (one.run / name).rename(one.run / f"{name}.away")
    (one.run / "logs").touch()
    (one.run / "events.jsonl").mkdir()
    os.kill(pids[1], signal.SIGKILL)
    one.successor(1, pids[1])
    code, _, err = one.stopped()
    assert code == 75 and "the output of slot 1 goes to the terminal" in err and "words of 1" in err
    assert err.count("events.jsonl cannot be written") == 1


def test_slot_0_has_the_terminal_and_the_others_their_logs(start: Callable[..., Started]) -> None:
    one = start("def work():\n    print('out', slot)\n    print('err', slot, file=sys.stderr)\n    return 0")
    assert one.ended() == (0, "out 0\n", "err 0\n")
    assert (one.run / "logs/here-1.log").read_text() == "out 1\nerr 1\n"


@pytest.mark.parametrize("name", ["run", "run/logs"])
def test_a_folder_that_cannot_be_had_is_refused_before_anything_starts(start: Callable[..., Started], tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    one = start()
    code, _, err = one.ended()
    assert code == 2 and three_parts(err, "UsageError: ") and not one.events("worker started")


def test_the_token_is_made_once_and_for_its_owner_alone(start: Callable[..., Started]) -> None:
    tokens = set()
    for _ in range(2):
        one = start("def work(): return 0")
        assert one.ended()[0] == 0
        assert (one.run / "token").stat().st_mode & 0o777 == 0o600
        tokens.add((one.run / "token").read_text())
    assert len(tokens) == 1 and len(tokens.pop()) >= 32


def test_a_worker_sees_its_seat_and_none_of_its_agents_descriptors(start: Callable[..., Started]) -> None:
    body = """
    import json
    def work():
        seat = find_seat(os.environ)
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in ("0", "3", "4", "5", "6", "7") if os.path.exists(f"/proc/self/fd/{fd}")]
        print(json.dumps([seat.slot, seat.slots, seat.expected, seat.host, seat.after, seat.agent == os.getppid(), seat.drain, links]))
        assert os.getpgrp() == os.getsid(0) == os.getpid()
        return 0
    """
    code, out, err = start(body, slots=1).ended()
    assert (code, err) == (0, "")
    assert json.loads(out) == [0, 1, 1, "here", 0, True, False, ["/dev/null"]]


def test_the_name_of_this_machine_is_not_asked_for(start: Callable[..., Started]) -> None:
    one = start("def work(): return 0")
    one.ended()
    assert not list((one.run / "logs").glob(f"{socket.gethostname()}-*"))
