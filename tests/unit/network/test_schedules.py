"""Every collective by every algorithm, played on integers; the engine's exchange is among them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.errors import UsageError
from lockstep.network.collectives import ALGORITHMS, COLLECTIVES, algorithms_for, cut, schedule_of
from lockstep.network.moves import Move, Schedule, rounds
from lockstep.network.tree_exchange import rounds_of_rank


def cases() -> Iterator[tuple[str, str, int, int]]:
    for collective in COLLECTIVES:
        for ranks in range(2, 18):
            yield from ((collective, algorithm, ranks, 1) for algorithm in algorithms_for(ranks, 1))
            hosts = [count for count in range(2, ranks) if ranks % count == 0]
            yield from ((collective, "hierarchical", ranks, count) for count in hosts)


def play(schedule: Schedule, buffers: list[list[int]]) -> None:
    """Play a schedule in place. All messages of a round are sent before any arrives."""
    length = len(buffers[0])
    for moves in rounds(schedule):
        sent = [(move, buffers[move.sender][move.slice_of(length)]) for move in moves]
        for move, values in sorted(sent, key=lambda pair: pair[0].adds):
            part, buffer = move.slice_of(length), buffers[move.receiver]
            buffer[part] = (
                [old + new for old, new in zip(buffer[part], values, strict=True)]
                if move.adds
                else values
            )


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("length", [1, 7, 64])
def test_every_algorithm_gives_the_result_of_the_collective(collective: str, length: int) -> None:
    for _, algorithm, ranks, per_host in (case for case in cases() if case[0] == collective):
        buffers = [[1000**rank % 9973 + i for i in range(length)] for rank in range(ranks)]
        parts = [Move(0, 0, *part, False).slice_of(length) for part in cut(ranks)]
        total = [sum(column) for column in zip(*buffers, strict=True)]
        gathered = [value for rank, part in enumerate(parts) for value in buffers[rank][part]]
        expected = {
            "broadcast": [(slice(None), buffers[0][:])] * ranks,
            "reduce": [(slice(None), total)],
            "all-reduce": [(slice(None), total)] * ranks,
            "all-gather": [(slice(None), gathered)] * ranks,
            "reduce-scatter": [(part, total[part]) for part in parts],
        }[collective]
        play(schedule_of(collective, algorithm, ranks, per_host), buffers)
        for rank, (part, values) in enumerate(expected):
            assert buffers[rank][part] == values, (algorithm, ranks, per_host, rank)


@pytest.mark.parametrize("ranks", [2, 3, 7, 10, 17])
def test_equal_parts_are_equal(ranks: int) -> None:
    slices = [Move(0, 0, *part, False).slice_of(1000 * ranks) for part in cut(ranks)]
    assert slices == [slice(1000 * rank, 1000 * rank + 1000) for rank in range(ranks)]


def test_no_rank_writes_what_it_sends_in_the_same_round() -> None:
    """Else the result over a network would depend on which message is faster."""
    for case in cases():
        for moves in rounds(schedule_of(*case)):
            assert not any(
                sent.sender == got.receiver and overlap(sent, got)
                for sent in moves
                for got in moves
            ), case


def overlap(left: Move, right: Move) -> bool:
    return max(left.start, right.start) < min(left.stop, right.stop)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 13, 17])
def test_halving_is_what_the_engine_sends(ranks: int) -> None:
    schedule = list(rounds(schedule_of("all-reduce", "halving", ranks)))
    for rank in range(ranks):
        reduce, gather = rounds_of_rank(rank, (1,) * ranks)
        turns = [
            ([m[1:] for m in turn.sends], [m[1:] for m in turn.receives])
            for turn in (*reduce, *gather)
        ]
        own = [
            (
                [m[1:4] for m in moves if m.sender == rank],
                [(m.sender, m.start, m.stop) for m in moves if m.receiver == rank],
            )
            for moves in schedule
        ]
        assert [turn for turn in own if turn != ([], [])] == turns


def test_hosts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"8 ranks do not fill hosts of 3\n.*\n.*1, 2, 4, 8"):
        schedule_of("all-reduce", "ring", 8, 3)
    for per_host in (1, 8):
        with pytest.raises(
            UsageError,
            match=r"no hierarchical broadcast of 8 ranks(.|\n)*naive, direct, tree, ring, halving",
        ):
            schedule_of("broadcast", "hierarchical", 8, per_host)
    assert algorithms_for(8, 4) == [*ALGORITHMS]
    assert algorithms_for(8, 8) == algorithms_for(8, 1) == [*ALGORITHMS[:-1]]
