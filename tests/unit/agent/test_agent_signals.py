"""The agent: which signal is due for a worker, and when."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lockstep.agent.slots import AgentTimeouts, RunEnd, Worker, signal_due
from lockstep.runtime.worker_env import ProcessIdentity


def due(
    at_s: float,
    sent: Sequence[int] = (),
    *,
    kill_at: tuple[float, str] | None = None,
    run_end: RunEnd | None = None,
    asked_s: float | None = None,
) -> int:
    worker = Worker(0, ProcessIdentity(4711, 1), -1, True, 0.0, list(sent), kill_at=kill_at)
    return signal_due(worker, at_s, run_end=run_end, asked_s=asked_s, timeouts=AgentTimeouts())[0]


def test_after_the_run_ended_workers_get_sigterm_then_sigkill() -> None:
    failed, done = RunEnd(4, "", 100.0), RunEnd(0, "", 100.0)
    assert due(1000.0) == 0
    assert [due(at_s, run_end=failed) for at_s in (100.0, 101.9, 102.0, 103.9, 104.0)] == [
        0,
        0,
        15,
        15,
        9,
    ]
    assert [due(at_s, run_end=done) for at_s in (104.0, 399.9, 400.0, 402.0)] == [
        0,
        0,
        15,
        9,
    ]  # a user's own code after the training
    assert due(103.0, [signal.SIGTERM], run_end=failed) == 0
    assert due(104.0, [signal.SIGTERM], run_end=failed) == signal.SIGKILL
    assert due(200.0, [signal.SIGTERM, signal.SIGKILL], run_end=failed) == 0


def test_stopping_workers_have_time_to_save() -> None:
    assert [due(at_s, asked_s=100.0) for at_s in (100.0, 399.0, 400.0)] == [0, 0, 9]
    assert (
        due(102.0, asked_s=1.0, run_end=RunEnd(75, "", 100.0)) == signal.SIGTERM
    )  # the run's end counts


def test_a_scheduled_kill_wins_over_other_signals() -> None:
    assert [due(at_s, kill_at=(100.0, "removed")) for at_s in (99.0, 100.0)] == [0, 9]
    assert due(102.5, kill_at=(100.0, "removed"), run_end=RunEnd(4, "", 100.0)) == signal.SIGKILL


@given(
    st.lists(st.floats(0, 20), min_size=1),
    st.none() | st.floats(0, 10),
    st.none() | st.floats(0, 10),
    st.none() | st.floats(0, 10),
)
def test_no_signal_is_sent_twice_and_a_failed_run_is_gone_within_five_seconds(
    times: list[float], ended_s: float | None, asked_s: float | None, kill_s: float | None
) -> None:
    sent: list[int] = []
    for at_s in [*sorted(times), 30.0]:
        run_end = None if ended_s is None else RunEnd(4, "", ended_s)
        number = due(
            at_s,
            sent,
            run_end=run_end,
            asked_s=asked_s,
            kill_at=None if kill_s is None else (kill_s, "removed"),
        )
        assert number not in sent
        sent += [number] if number else []
        if ended_s is not None and at_s > ended_s + 5:
            assert signal.SIGKILL in sent
