"""What an agent decides: what follows from the end of a worker, whom it ends and when, and which hosts there are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.agent.agent import Limits, Over, pressure
from lockstep.agent.hosts import Host, Hosts, code_of_all, parse_hosts, read_hosts, ssh_command, start_all
from lockstep.agent.lock import tidy
from lockstep.agent.restart_policy import RULES, Next, Past, Rules, after, only_here, pause
from lockstep.cli.main import main
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.exit_report import Account, End, kind
from lockstep.runtime.worker_env import note_sitter, sitter

TRACE = 'Traceback (most recent call last):\n  File "x.py"\nValueError: fish\n'


def end(code: int | None = 0, sent: tuple[int, ...] = (), **account: Any) -> End:
    """The end of slot 1; with an account when one is described."""
    said = Account(**({"code": code or 0, "at_s": 1.0} | account)) if account else None
    return End(1, 4711, code, 2.0, sent, said, "logs/here-1.log", title="slot")


NOTHING = Past()


def follows(
    one: End, past: Past = NOTHING, lived_s: float = 1.0, step: int = -1, stopping: bool = False, place: str = ""
) -> tuple[Next, Past]:
    return after(one, past, lived_s=lived_s, step=step, stopping=stopping, rules=RULES, place=place)


KILLED, STOPPED = end(-signal.SIGKILL), end(-signal.SIGKILL, sent=(signal.SIGKILL,))
LOST, FENCED = end(76, lost_peers=True, text="PeersLostError: gone"), end(77, lost_peers=True, text="FencedError: left out")
RAISED, UNKNOWN, BROKE_OFF, SILENT = end(1, text=TRACE, trace=TRACE, step=7), end(None), end(0), end(9)
CRASHED_AT_ITS_EXIT = End(1, 4711, -signal.SIGSEGV, 2.0, (), Account(0, 1.0, finished=True))
ENDS = [KILLED, STOPPED, LOST, FENCED, RAISED, UNKNOWN, BROKE_OFF, SILENT]


# What follows from an end.


@pytest.mark.parametrize("one", ENDS, ids=lambda one: f"{one.code}-{kind(one).replace(' ', '-')}")
def test_whoever_ends_in_the_middle_gets_a_successor_at_once_the_first_time(one: End) -> None:
    decided, past = follows(one)
    assert (decided.what, decided.wait_s, past.restarts) == ("restart", 0.0, 1)
    assert decided.why.endswith("; a new one starts at once")


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (end(0, finished=True), "it left with exit code 0"),
        (end(75, finished=True), "it left with exit code 75"),
        (end(130, finished=True), "it left with exit code 130"),
        (end(75), "it ended with exit code 75, without a word"),
        (end(0, finished=True, drained=True), "it left with exit code 0: its host is taken away"),
        (end(None, finished=True), "it left with exit code 0"),
        (CRASHED_AT_ITS_EXIT, "it left with exit code 0"),
    ],
)
def test_whoever_was_done_or_asked_to_stop_gets_none(one: End, why: str) -> None:
    assert follows(one)[0].what == "done"
    assert follows(one)[0].why == why


@pytest.mark.parametrize("code", [2, 3, 4])
@pytest.mark.parametrize("told", [True, False])
def test_what_no_repetition_mends_ends_the_run_at_once(code: int, told: bool) -> None:
    one = end(code, text="DataError: torn\n  a.txt\n  mend it") if told else end(code)
    decided, _ = follows(one)
    assert (decided.what, decided.code) == ("end", code)
    assert decided.text.startswith("DataError: torn\n" if told else f"LockstepError: slot 1 (pid 4711) ended with exit code {code}")


@given(st.lists(st.sampled_from([KILLED, STOPPED, LOST, FENCED, UNKNOWN]), max_size=50))
def test_what_others_did_to_a_worker_never_ends_the_run(ends: list[End]) -> None:
    past = Past()
    for one in ends:
        decided, past = follows(one, past)
        assert decided.what == "restart"


@given(st.lists(st.sampled_from(ENDS), max_size=20), st.sampled_from([RAISED, BROKE_OFF, SILENT]))
def test_errors_of_its_own_end_the_run_as_soon_as_there_are_three_without_progress(ends: list[End], own: End) -> None:
    past, crashes = Past(step=100), 0
    for one in [*ends, own, own, own]:
        decided, past = follows(one, past)
        crashes += one in (RAISED, BROKE_OFF, SILENT)
        assert (decided.what == "end") == (crashes == RULES.crashes), (one, past)
        if crashes == RULES.crashes:
            assert decided.code == (1 if one.code == 0 else one.code)
            assert decided.text.startswith(TRACE if one is RAISED else "LockstepError: slot 1 (pid 4711)")
            assert "number 3 in a row" in decided.text
            return


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL])
@pytest.mark.parametrize("step", [-1, 11])
def test_a_crash_at_the_same_step_three_times_ends_the_run_with_the_last_words_first(number: signal.Signals, step: int) -> None:
    one, past = replace(end(-number), tail="heap corruption"), NOTHING
    for _ in range(2):
        decided, past = follows(one, past, step=step)
        assert decided.what == "restart"
    decided, past = follows(one, past, step=step)
    where = "at step 11" if step > 0 else "before its first step"
    assert (decided.what, decided.code) == ("end", 128 + number)
    first, last = decided.text.index("| heap corruption"), decided.text.index(f"number 3 in a row to end {where} by {number.name}")
    assert decided.text.startswith(f"LockstepError: slot 1 (pid 4711) was ended by {number.name}\n") and first < last
    assert follows(one, Past(crashes=2, step=5), step=9)[0].what == "restart", "it got further"
    assert follows(replace(one, sent=(number,)), Past(crashes=2), step=-1)[0].what == "restart", "its agent has sent it"


def test_a_kill_counts_only_at_the_very_same_place_again_and_again() -> None:
    past, places = NOTHING, [*["backward phase of step 12"] * 5, "forward phase of step 12", *["backward phase of step 12"] * 6]
    for number, place in enumerate(places):
        decided, past = follows(KILLED, past, step=11, place=place)
        assert (decided.what == "end") == (number == 11)
    assert decided.code == 137 and "number 6 in a row that SIGKILL has ended in the backward phase of step 12" in decided.text
    other = Past(step=11, kills=5, place="backward phase of step 12")
    assert follows(LOST, other, step=11, place=other.place)[1].kills == 0, "in a row"
    assert follows(STOPPED, other, step=11, place=other.place)[0].what == "restart", "its agent has sent it"


@given(st.lists(st.tuples(st.sampled_from([KILLED, RAISED]), st.integers(0, 50), st.booleans()), max_size=60))
def test_a_higher_step_forgives_everything_and_a_long_life_the_pauses(history: list[tuple[End, int, bool]]) -> None:
    past = Past()
    for one, step, long in history:
        before = past
        if one is RAISED:
            one = end(1, text=TRACE, step=step)
        decided, past = follows(one, past, lived_s=RULES.forget_s if long else 1.0, step=step)
        if step > before.step:
            assert past.crashes == (one.code == 1)
        else:
            assert past.crashes == before.crashes + (one.code == 1)
        if step > before.step or long:
            assert past.restarts == 1 and (decided.what == "end" or decided.wait_s == 0)
        assert past.step == max(before.step, step)
        if decided.what == "end":
            return


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(10, 100))
def test_pauses_double_up_to_the_longest(restarts: int, pause_s: float, longest_s: float) -> None:
    rules = Rules(pause_s=pause_s, longest_s=longest_s)
    now, then = pause(restarts, rules), pause(restarts + 1, rules)
    assert 0 <= now <= then <= longest_s
    assert now == 0 if restarts == 0 else then in (2 * now, longest_s)


@given(st.sampled_from([*ENDS, end(4, text="DivergedError"), end(75, finished=True)]))
def test_nobody_is_started_once_the_run_stops(one: End) -> None:
    decided, past = follows(one, Past(2, 2, 3), stopping=True)
    assert decided.what == "done" and past == Past(2, 2, 3)


@pytest.mark.parametrize(
    ("code", "at_work", "alone"),
    [
        (2, {"ada"}, True),  # a start that does not fit the run that ada has under way
        (3, {"ada", "bob"}, True),
        (2, {"ada", "here"}, False),
        (2, set(), False),  # nobody is at work: all would wait for this host
        (4, {"ada"}, False),
        (1, {"ada"}, False),
    ],
)
def test_a_host_that_does_not_fit_the_run_of_others_ends_alone(code: int, at_work: set[str], alone: bool) -> None:
    assert only_here(code, at_work, "here") == alone


# Whom an agent ends.


def pressed(at_s: float, sent: list[int] | None = None, **when: Any) -> int:
    given: dict[str, Any] = {"doomed": None, "over": None, "asked_s": None} | when
    return pressure(at_s, sent or [], **given, limits=Limits())[0]


def test_workers_of_a_run_that_has_ended_leave_are_asked_and_are_killed() -> None:
    failed, done = Over(4, "", 100.0), Over(0, "", 100.0)
    assert pressed(1000.0) == 0
    assert [pressed(at_s, over=failed) for at_s in (100.0, 101.9, 102.0, 103.9, 104.0)] == [0, 0, 15, 15, 9]
    assert [pressed(at_s, over=done) for at_s in (104.0, 399.9, 400.0, 402.0)] == [0, 0, 15, 9]  # a user's own words after the training
    assert pressed(103.0, [signal.SIGTERM], over=failed) == 0
    assert pressed(104.0, [signal.SIGTERM], over=failed) == signal.SIGKILL
    assert pressed(200.0, [signal.SIGTERM, signal.SIGKILL], over=failed) == 0


def test_workers_that_were_asked_to_stop_have_time_to_save() -> None:
    assert [pressed(at_s, asked_s=100.0) for at_s in (100.0, 399.0, 400.0)] == [0, 0, 9]
    assert pressed(102.0, asked_s=1.0, over=Over(75, "", 100.0)) == signal.SIGTERM  # the run's end counts


def test_a_doomed_worker_is_killed_when_its_time_has_come_whatever_else_is_due() -> None:
    assert [pressed(at_s, doomed=(100.0, "out")) for at_s in (99.0, 100.0)] == [0, 9]
    assert pressed(102.5, doomed=(100.0, "out"), over=Over(4, "", 100.0)) == signal.SIGKILL


@given(st.lists(st.floats(0, 20), min_size=1), st.none() | st.floats(0, 10), st.none() | st.floats(0, 10), st.none() | st.floats(0, 10))
def test_nobody_is_sent_a_signal_twice_and_a_run_that_ended_is_gone_in_five_seconds(
    times: list[float], over_s: float | None, asked_s: float | None, doomed_s: float | None
) -> None:
    sent: list[int] = []
    for at_s in [*sorted(times), 30.0]:
        over = None if over_s is None else Over(4, "", over_s)
        number = pressed(at_s, sent, over=over, asked_s=asked_s, doomed=None if doomed_s is None else (doomed_s, "out"))
        assert number not in sent
        sent += [number] if number else []
        if over_s is not None and at_s > over_s + 5:
            assert signal.SIGKILL in sent


# Hosts.

TWO = {"host": [{"name": "ada", "address": "10.0.0.1", "workers": 2}, {"name": "bob", "workers": 3}]}


def test_hosts_are_found_by_their_names() -> None:
    hosts = parse_hosts(TWO, "hosts.toml")
    assert hosts == Hosts([Host("ada", 2, "10.0.0.1"), Host("bob", 3)]) and hosts.workers == 5
    assert [host.reached_at for host in hosts.host] == ["10.0.0.1", "bob"] and hosts.host[0].resolve() == "10.0.0.1"
    assert hosts.find("bob", "--host") == Host("bob", 3)
    with pytest.raises(UsageError, match=r"no host is called 'eve'\n  --host\n  give --host one of ada, bob"):
        hosts.find("eve", "--host")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "host: Field required"),
        ("host = []", "at least 1"),
        ("ssh = 'often'\n[[host]]\nname='a'\nworkers=1", "ssh: "),
        ("[[host]]\nname = 'a'", "host 1 workers: Field required"),
        ("[[host]]\nworkers = 2", "host 1 name: Field required"),
        ("[[host]]\nname = 'a'\nworkers = 0", "host 1 workers: .*greater than or equal to 1"),
        ("[[host]]\nname = 'a'\nworkers = true", "host 1 workers: .*valid integer"),
        ("[[host]]\nname = 'a'\nworkers = '2'", "host 1 workers: .*valid integer"),
        ("[[host]]\nname = '../a'\nworkers = 2", "host 1 name: "),
        ("[[host]]\nname = 'a'\naddress = '-oProxyCommand=x'\nworkers = 2", "host 1 address: "),
        ("[[host]]\nname = 'a'\nadress = 'x'\nworkers = 2", "host 1 adress: unknown key"),
        ("[[host]]\nname = 'a'\nworkers = 2\n" * 2, "more than one host is called a"),
        ("[[host]", "is no hosts file"),
    ],
)
def test_a_file_of_hosts_that_does_not_fit_is_refused_in_three_parts(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_hosts(path)
    assert caught.value.where.endswith(str(path)) and caught.value.hint
    with pytest.raises(ConfigError, match="there is no hosts file"):
        read_hosts(tmp_path / "missing.toml")


def test_an_address_that_other_machines_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **named: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ConfigError, match=r"ada is 127\.0\.1\.1 on"):
        Host("ada", 1).resolve()
    assert Host("ada", 1, "127.0.1.1").resolve() == "127.0.1.1"  # somebody meant it


def test_all_hosts_are_started_and_signals_reach_them(tmp_path: Path) -> None:
    """With a stand-in for ssh that runs its last word here, as sshd does there."""
    (tmp_path / "ssh").write_text('#!/bin/sh\neval "exec sh -c \\"\\$$#\\""\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "a folder").mkdir()
    program = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(sys.argv[1] + "-" + os.environ["LOCKSTEP_TEST"], "w").close()
time.sleep(60)
"""
    driver = f"""
import os
from pathlib import Path
from lockstep.agent.hosts import *
hosts = [Host("ada", 1), Host("bob", 1)]
commands = [ssh_command(host, [{sys.executable!r}, "-c", {program!r}, host.name], Path("a folder").resolve(), os.environ) for host in hosts]
raise SystemExit(start_all(commands))
"""
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOCKSTEP_TEST": "it's passed on"}
    with subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, env=environ) as process:
        try:
            while not all((tmp_path / "a folder" / f"{name}-it's passed on").exists() for name in ("ada", "bob")):
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 75
        finally:
            process.kill()


def test_a_command_for_ssh_is_one_word_after_the_address() -> None:
    *words, line = ssh_command(
        Host("ada", 1, "10.0.0.1"), ["lockstep", "launch", "a b"], Path("/shared/my runs"), {"LOCKSTEP_X": "1", "Y": "2"}
    )
    assert words == ["ssh", "-o", "BatchMode=yes", "10.0.0.1"]
    assert line.startswith("cd '/shared/my runs' && ") and "exec env LOCKSTEP_X=1 lockstep launch 'a b' " in line and "Y=2" not in line


@pytest.mark.parametrize(
    ("codes", "of_all"),
    [
        ((0, 3, 4), 3),
        ((0, 0), 0),
        ((255, 75, 75), 75),
        ((75, 255), 75),
        ((255, 0), 0),
        ((255, 255), 255),
    ],
)
def test_exit_codes_of_hosts_the_first_that_is_not_0_and_not_that_of_ssh(codes: tuple[int, ...], of_all: int) -> None:
    assert code_of_all(codes) == of_all
    assert start_all([[sys.executable, "-c", f"raise SystemExit({code})"] for code in codes]) == of_all


HOSTS = '[[host]]\nname = "ada"\naddress = "127.0.0.1"\nworkers = 2\n\n[[host]]\nname = "bob"\nworkers = 2\n'


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `launch` would start: commands for ssh, or how many workers the agent of this machine waits for."""
    found: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.agent.hosts.start_all", lambda commands: found.extend(commands) or 0)
    monkeypatch.setattr("lockstep.cli.main.look_after", lambda *_, **values: found.append(values["least"]) or 0)
    Path("hosts.toml").write_text(HOSTS)
    Path("by-ssh.toml").write_text(f"ssh = true\n{HOSTS}")
    return found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stop run --workers 2", "--workers beside --stop"),
        ("--stop run --with-evaluator", "--with-evaluator beside --stop"),
        ("--stop run --steps 5", "--steps beside --stop"),
        ("run.toml --stop run", "run.toml beside --stop"),
        ("--hosts hosts.toml --ssh --host ada", "--ssh and --host ada"),
        ("--hosts hosts.toml --ssh --max 0", "at least 1 and at most 0 workers"),
        ("--hosts by-ssh.toml --min 5", "training begins with 5 workers, and there will be 4"),
        ("--workers 2 --min 3", "training begins with 3 workers, and there will be 2"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_in_three_parts(
    launched: list[Any], capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    assert main(["launch", *words.split()]) == 2
    what, where, hint = capsys.readouterr().err.splitlines()[-3:]
    assert says in what and where.strip() and hint.strip() and not launched


def test_a_host_that_is_started_by_ssh_finds_itself_and_all_bounds(launched: list[Any]) -> None:
    assert main(["launch", "--hosts", "by-ssh.toml", "--min", "2", "--max", "3"]) == 0
    assert [command[-1].partition(" --host ")[2].split()[0] for command in launched] == ["ada", "bob"]
    assert all("--min 2 --max 3 " in command[-1] for command in launched)
    assert main(["launch", "--hosts", "by-ssh.toml", "--min", "2", "--host", "ada"]) == 0
    assert launched[2:] == [2]


def test_nothing_is_left_of_workers_that_are_gone_and_all_of_those_that_live(tmp_path: Path) -> None:
    kept, left = ["agent.lock"], ["agent.command", "0.end", "0.board", "1.json", ".0.end.6967c83e", ".1.board.4711"]
    for name in [*kept, *left]:
        (tmp_path / name).write_text('{"pid": 1, "started": -1}')
    note_sitter(tmp_path, 2, sitter(os.getpid()))
    tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *left, "2.json"])
    (tmp_path / "2.json").unlink()
    tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == kept
