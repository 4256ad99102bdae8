"""What is said now and then."""

from __future__ import annotations

from lockstep.elastic.log_limiter import MOST, Seldom


def test_each_thing_is_said_the_first_time_and_then_with_how_often_it_was() -> None:
    one = Seldom(10.0)
    assert [one.due("a", now_s) for now_s in (0.0, 0.1, 5.0, 9.9)] == [1, 0, 0, 0]
    assert one.due("b", 5.0) == 1
    assert one.due("a", 10.0) == 4
    assert one.due("a", 25.0) == 1


def test_a_stranger_who_varies_what_it_says_fills_neither_the_log_nor_the_memory() -> None:
    one = Seldom(10.0)
    assert sum(bool(one.due(number, 0.0)) for number in range(10 * MOST)) == MOST + 1
    assert one.due("the last", 10.0) == 9 * MOST
