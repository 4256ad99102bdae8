"""Restart policy: what follows from a worker's exit."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.agent.restart_policy import (
    PLAIN_SCRIPT_POLICY,
    RestartDecision,
    RestartDecisions,
    RestartPolicy,
    SlotHistory,
    decide_first_exit,
    decide_restart,
    fails_at_end,
    fails_only_here,
    restart_delay,
    start_error,
)
from lockstep.runtime.exit_report import ExitReport, WorkerExit

TRACE = 'Traceback (most recent call last):\n  File "x.py"\nValueError: fish\n'


def make_exit(code: int | None = 0, sent: tuple[int, ...] = (), **report: Any) -> WorkerExit:
    """The exit of slot 1; with a report if its fields are given."""
    report = ExitReport(**({"code": code or 0, "at_s": 1.0} | report)) if report else None
    return WorkerExit(1, 4711, code, 2.0, sent, report, "logs/here-1.log", title="slot")


EMPTY = SlotHistory()
DEFAULT_POLICY = RestartPolicy()


def decide(
    worker_exit: WorkerExit,
    history: SlotHistory = EMPTY,
    lived_s: float = 1.0,
    step: int = -1,
    stopping: bool = False,
    phase: str = "",
) -> tuple[RestartDecision, SlotHistory]:
    return decide_restart(
        worker_exit,
        history,
        lived_s=lived_s,
        step=step,
        stopping=stopping,
        policy=DEFAULT_POLICY,
        phase=phase,
    )


KILLED, STOPPED = make_exit(-signal.SIGKILL), make_exit(-signal.SIGKILL, sent=(signal.SIGKILL,))
LOST, FENCED = (
    make_exit(76, lost_peers=True, text="PeersLostError: gone"),
    make_exit(77, lost_peers=True, text="FencedError: left out"),
)
RAISED, UNKNOWN, BROKE_OFF, SILENT = (
    make_exit(1, text=TRACE, trace=TRACE, step=7),
    make_exit(None),
    make_exit(0),
    make_exit(9),
)
CRASHED_AT_ITS_EXIT = WorkerExit(
    1, 4711, -signal.SIGSEGV, 2.0, (), ExitReport(0, 1.0, finished=True)
)
ENDS = [KILLED, STOPPED, LOST, FENCED, RAISED, UNKNOWN, BROKE_OFF, SILENT]


@pytest.mark.parametrize(
    "worker_exit",
    ENDS,
    ids=lambda worker_exit: f"{worker_exit.code}-{worker_exit.kind.replace(' ', '-')}",
)
def test_the_first_failure_is_restarted_at_once(worker_exit: WorkerExit) -> None:
    decision, history = decide(worker_exit)
    assert (decision.action, decision.delay_s, history.restarts) == ("restart", 0.0, 1)
    assert decision.reason.endswith("; restarting now")


@pytest.mark.parametrize(
    ("worker_exit", "reason"),
    [
        (make_exit(0, finished=True), "exited with code 0"),
        (make_exit(75, finished=True), "exited with code 75"),
        (make_exit(130, finished=True), "exited with code 130"),
        (make_exit(75), "exited with code 75 and left no error report"),
        (make_exit(0, finished=True, drained=True), "exited with code 0: its host is drained"),
        (make_exit(None, finished=True), "exited with code 0"),
        (CRASHED_AT_ITS_EXIT, "exited with code 0"),
    ],
)
def test_a_worker_that_was_done_or_stopped_is_not_restarted(
    worker_exit: WorkerExit, reason: str
) -> None:
    assert decide(worker_exit)[0].action == "done"
    assert decide(worker_exit)[0].reason == reason


@pytest.mark.parametrize("code", [2, 3, 4])
@pytest.mark.parametrize("reported", [True, False])
def test_errors_that_no_retry_can_fix_end_the_run_at_once(code: int, reported: bool) -> None:
    worker_exit = (
        make_exit(code, text="DataError: torn\n  a.txt\n  fix it") if reported else make_exit(code)
    )
    decision, _ = decide(worker_exit)
    assert (decision.action, decision.code) == ("end", code)
    assert decision.text.startswith(
        "DataError: torn\n"
        if reported
        else f"LockstepError: slot 1 (pid 4711) exited with code {code}"
    )


@given(st.lists(st.sampled_from([KILLED, STOPPED, LOST, FENCED, UNKNOWN]), max_size=50))
def test_external_causes_never_end_the_run(exits: list[WorkerExit]) -> None:
    history = SlotHistory()
    for worker_exit in exits:
        decision, history = decide(worker_exit, history)
        assert decision.action == "restart"


@given(st.lists(st.sampled_from(ENDS), max_size=20), st.sampled_from([RAISED, BROKE_OFF, SILENT]))
def test_three_own_errors_without_progress_end_the_run(
    exits: list[WorkerExit], own: WorkerExit
) -> None:
    history, crashes = SlotHistory(step=100), 0
    for worker_exit in [*exits, own, own, own]:
        decision, history = decide(worker_exit, history)
        crashes += worker_exit in (RAISED, BROKE_OFF, SILENT)
        assert (decision.action == "end") == (crashes == DEFAULT_POLICY.max_crashes), (
            worker_exit,
            history,
        )
        if crashes == DEFAULT_POLICY.max_crashes:
            assert decision.code == (1 if worker_exit.code == 0 else worker_exit.code)
            assert decision.text.startswith(
                TRACE if worker_exit is RAISED else "LockstepError: slot 1 (pid 4711)"
            )
            assert "number 3 in a row" in decision.text
            return


@pytest.mark.parametrize(
    "number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL]
)
@pytest.mark.parametrize("step", [-1, 11])
def test_three_crashes_at_the_same_step_end_the_run_and_print_the_log_tail_first(
    number: signal.Signals, step: int
) -> None:
    worker_exit, history = replace(make_exit(-number), tail="heap corruption"), EMPTY
    for _ in range(2):
        decision, history = decide(worker_exit, history, step=step)
        assert decision.action == "restart"
    decision, history = decide(worker_exit, history, step=step)
    where = "in step 12" if step > 0 else "before its first step"
    assert (decision.action, decision.code) == ("end", 128 + number)
    first, last = (
        decision.text.index("| heap corruption"),
        decision.text.index(f"number 3 in a row to fail {where} by {number.name}"),
    )
    assert (
        decision.text.startswith(f"LockstepError: slot 1 (pid 4711) was killed by {number.name}\n")
        and first < last
    )
    assert decide(worker_exit, SlotHistory(crashes=2, step=5), step=9)[0].action == "restart", (
        "it made progress"
    )
    assert (
        decide(replace(worker_exit, sent=(number,)), SlotHistory(crashes=2), step=-1)[0].action
        == "restart"
    ), "its agent sent it"


def test_sigkills_count_only_in_the_same_phase_of_the_same_step() -> None:
    history, phases = (
        EMPTY,
        [
            *["backward phase of step 12"] * 5,
            "forward phase of step 12",
            *["backward phase of step 12"] * 6,
        ],
    )
    for number, phase in enumerate(phases):
        decision, history = decide(KILLED, history, step=11, phase=phase)
        assert (decision.action == "end") == (number == 11)
    assert (
        decision.code == 137
        and "number 6 in a row killed by SIGKILL in the backward phase of step 12" in decision.text
    )
    other = SlotHistory(step=11, kills=5, phase="backward phase of step 12")
    assert decide(LOST, other, step=11, phase=other.phase)[1].kills == 0, "in a row"
    assert decide(STOPPED, other, step=11, phase=other.phase)[0].action == "restart", (
        "its agent sent it"
    )


@given(
    st.lists(
        st.tuples(st.sampled_from([KILLED, RAISED]), st.integers(0, 50), st.booleans()), max_size=60
    )
)
def test_progress_resets_everything_and_a_long_life_resets_the_delay(
    exits: list[tuple[WorkerExit, int, bool]],
) -> None:
    history = SlotHistory()
    for worker_exit, step, long in exits:
        before = history
        if worker_exit is RAISED:
            worker_exit = make_exit(1, text=TRACE, step=step)
        decision, history = decide(
            worker_exit, history, lived_s=DEFAULT_POLICY.reset_after_s if long else 1.0, step=step
        )
        if step > before.step:
            assert history.crashes == (worker_exit.code == 1)
        else:
            assert history.crashes == before.crashes + (worker_exit.code == 1)
        if step > before.step or long:
            assert history.restarts == 1 and (decision.action == "end" or decision.delay_s == 0)
        assert history.step == max(before.step, step)
        if decision.action == "end":
            return


def test_errors_of_a_plain_script_count_only_if_each_worker_lived_briefly() -> None:
    def actions(*lives_s: float, policy: RestartPolicy = PLAIN_SCRIPT_POLICY) -> list[str]:
        history, actions = EMPTY, list[str]()
        for lived_s in lives_s:
            decision, history = decide_restart(
                make_exit(1, text=TRACE),
                history,
                lived_s=lived_s,
                step=-1,
                stopping=False,
                policy=policy,
            )
            actions.append(decision.action)
        return actions

    assert actions(1.0, 1.0, 1.0) == ["restart", "restart", "end"]
    assert actions(3600.0, 3600.0, 3600.0, 3600.0) == ["restart"] * 4
    assert actions(1.0, 3600.0, 1.0, 1.0) == ["restart", "restart", "restart", "end"]
    assert actions(3600.0, 3600.0, 3600.0, policy=DEFAULT_POLICY) == [
        "restart",
        "restart",
        "end",
    ], "the steps of a run are known"


def test_a_plain_script_that_always_fails_is_named() -> None:
    policy, history = replace(PLAIN_SCRIPT_POLICY, script="tr.py"), EMPTY
    for _ in range(3):
        decision, history = decide_restart(
            make_exit(1, text=TRACE), history, lived_s=1.0, step=-1, stopping=False, policy=policy
        )
    assert (
        decision.action == "end"
        and "LockstepError: tr.py failed on 3 starts in a row (slot 1, exit code 1)"
        in decision.text
    )
    assert "first step" not in decision.text and "checkpoint" not in decision.text


RAISED_AT_START = make_exit(1, text=TRACE, trace=TRACE, step=0)


def decide_at_start(
    errors: dict[int, str], workers: int, worker_exit: WorkerExit = RAISED_AT_START
) -> RestartDecision:
    return decide_first_exit(decide(worker_exit)[0], worker_exit, errors, workers)


def test_one_error_of_all_workers_at_the_start_ends_the_run() -> None:
    decision = decide_at_start({0: TRACE, 1: TRACE}, 2)
    assert (decision.action, decision.code) == ("end", 1) and decision.text.startswith(TRACE)
    assert "all 2 workers failed with this error before the first step" in decision.text
    assert decide_at_start({1: TRACE}, 1).action == "end"


def test_a_restart_at_the_start_waits_for_the_errors_of_the_other_workers() -> None:
    assert (decide_at_start({1: TRACE}, 2).action, decide_at_start({1: TRACE}, 2).delay_s) == (
        "restart",
        1.0,
    )
    for errors in ({0: "", 1: TRACE}, {0: "another error", 1: TRACE}, {0: TRACE, 1: ""}):
        assert (
            decide_at_start(errors, 2).delay_s == 0.0
            and decide_at_start(errors, 2).action == "restart"
        )


def test_an_agent_remembers_earlier_exits_and_logs_one_error_once() -> None:
    decisions = RestartDecisions(DEFAULT_POLICY, workers=2)
    first = decide_again(decisions, RAISED_AT_START)
    assert (first.action, first.delay_s) == ("restart", 1.0)
    assert decisions.describe(RAISED_AT_START, first).endswith(
        "ValueError: fish; restarting in 1 s"
    )
    second = decide_again(decisions, RAISED_AT_START)
    assert second.delay_s == 0.5, "the first worker of the other slot has not failed"
    assert decisions.describe(RAISED_AT_START, second).endswith(
        "the same error; restarting in 0.5 s"
    )
    assert decide_again(decisions, RAISED_AT_START).action == "end", "the third in a row"
    assert (
        decide_again(RestartDecisions(DEFAULT_POLICY, workers=1), RAISED_AT_START).action == "end"
    )
    assert decide_again(RestartDecisions(DEFAULT_POLICY, 0), RAISED_AT_START).delay_s == 0.0


def decide_again(decisions: RestartDecisions, worker_exit: WorkerExit) -> RestartDecision:
    return decisions.decide(worker_exit, lived_s=1.0, step=-1, phase="", stopping=False)


def test_an_error_in_the_program_before_a_worker_joined_ends_the_run_at_once() -> None:
    decision, _ = decide(make_exit(1, text=TRACE, joined=False, program_error=True), lived_s=100.0)
    assert (decision.action, decision.code, decision.at_start) == ("end", 1, True)
    assert (
        "slot 1 (pid 4711) failed before it joined the run, and would fail again: ValueError: fish\n"
        in decision.text
    )
    for worker_exit in (
        make_exit(1, text=TRACE, joined=False),
        make_exit(1, text=TRACE, program_error=True),
    ):
        assert decide(worker_exit)[0].action == "restart"
    assert fails_only_here(1, {"ada"}, "here", at_start=True) and not fails_only_here(
        1, {"here"}, "here", at_start=True
    )


def test_only_an_early_error_of_the_program_is_an_error_at_the_start() -> None:
    assert start_error(RAISED_AT_START, 1.0, DEFAULT_POLICY) == TRACE
    assert not start_error(RAISED_AT_START, 61.0, DEFAULT_POLICY)
    assert not start_error(RAISED_AT_START, 1.0, replace(PLAIN_SCRIPT_POLICY, script="tr.py"))
    assert not any(start_error(worker_exit, 1.0, DEFAULT_POLICY) for worker_exit in ENDS)


@pytest.mark.parametrize(
    ("worker_exit", "fails"),
    [
        (make_exit(1, text=TRACE), True),
        (make_exit(3, text=""), True),
        (SILENT, True),
        (make_exit(0, finished=True), False),
        (CRASHED_AT_ITS_EXIT, False),
        *[(worker_exit, False) for worker_exit in (KILLED, STOPPED, LOST, BROKE_OFF)],
    ],
)
def test_own_errors_after_the_end_of_the_run_count(worker_exit: WorkerExit, fails: bool) -> None:
    assert fails_at_end(worker_exit, [worker_exit.pid]) == fails


@pytest.mark.parametrize(("code", "fails"), [(1, False), (2, True), (3, True), (4, True)])
def test_an_error_that_no_restart_fixes_counts_though_others_ended_the_run(
    code: int, fails: bool
) -> None:
    assert fails_at_end(make_exit(code, text=TRACE), ()) == fails


@pytest.mark.parametrize("worker_exit", [*ENDS, make_exit(2, text="UsageError: no")], ids=str)
def test_a_fixed_group_ends_with_the_first_failure(worker_exit: WorkerExit) -> None:
    policy = RestartPolicy(restart=False)
    decision, _ = decide_restart(
        worker_exit, EMPTY, lived_s=1.0, step=-1, stopping=False, policy=policy
    )
    assert decision.action == "end" and decision.code
    done = make_exit(0, finished=True)
    assert (
        decide_restart(done, EMPTY, lived_s=1.0, step=-1, stopping=False, policy=policy)[0].action
        == "done"
    )


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(10, 100))
def test_delays_double_up_to_the_maximum(restarts: int, initial_s: float, max_s: float) -> None:
    policy = RestartPolicy(initial_delay_s=initial_s, max_delay_s=max_s)
    delay, next_delay = restart_delay(restarts, policy), restart_delay(restarts + 1, policy)
    assert 0 <= delay <= next_delay <= max_s
    assert delay == 0 if restarts == 0 else next_delay in (2 * delay, max_s)


@given(st.sampled_from([*ENDS, make_exit(4, text="DivergedError"), make_exit(75, finished=True)]))
def test_no_worker_is_restarted_once_the_run_stops(worker_exit: WorkerExit) -> None:
    decision, history = decide(worker_exit, SlotHistory(2, 2, 3), stopping=True)
    assert decision.action == "done" and history == SlotHistory(2, 2, 3)


@pytest.mark.parametrize(
    ("code", "active_hosts", "alone"),
    [
        (2, {"ada"}, True),  # a config that differs from the run that ada is training
        (3, {"ada", "bob"}, True),
        (2, {"ada", "here"}, False),
        (2, set(), False),  # no host is training: all would wait for this one
        (4, {"ada"}, False),
        (1, {"ada"}, False),
    ],
)
def test_a_host_whose_config_differs_from_the_running_one_fails_alone(
    code: int, active_hosts: set[str], alone: bool
) -> None:
    assert fails_only_here(code, active_hosts, "here") == alone
