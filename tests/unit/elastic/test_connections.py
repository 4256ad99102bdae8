"""Rate limit of log lines about refused connections."""

from __future__ import annotations

from lockstep.elastic.connections import MAX_REFUSAL_KEYS, LogLimiter


def test_first_event_is_logged_and_later_ones_counted() -> None:
    limiter = LogLimiter(10.0)
    assert [limiter.due("a", now_s) for now_s in (0.0, 0.1, 5.0, 9.9)] == [1, 0, 0, 0]
    assert limiter.due("b", 5.0) == 1
    assert limiter.due("a", 10.0) == 4
    assert limiter.due("a", 25.0) == 1


def test_number_of_keys_is_limited() -> None:
    limiter = LogLimiter(10.0)
    assert sum(bool(limiter.due(number, 0.0)) for number in range(10 * MAX_REFUSAL_KEYS)) == MAX_REFUSAL_KEYS + 1
    assert limiter.due("the last", 10.0) == 9 * MAX_REFUSAL_KEYS
