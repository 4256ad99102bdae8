"""Rounds of messages in which rows are combined and gathered, and the decisions of votes that are combined like this."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import run_ranks

from lockstep.elastic.collectives import all_gather_json, combine_rows, vote_on_step
from lockstep.elastic.consensus import (
    SIGNALS,
    StepDecision,
    Vote,
    find_divergent_ranks,
    row_to_decision,
    vote_to_row,
)
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CollectiveMismatchError, PeersLostError, UsageError
from lockstep.runtime import process_group
from lockstep.runtime.process_group import Round, gather_rounds, reduce_rounds
from lockstep.runtime.work import WorkWaiter

HUGE = 1.7e308
SIZES = [*range(1, 65), 4096]


def count_all_votes(votes: Sequence[Vote], replica_size: int) -> StepDecision | str:
    """Return the decision of someone who sees all votes, or the error."""
    losses = [known(vote.losses) for vote in votes]
    counts = [vote.count for vote, own in zip(votes, losses, strict=True) if own]
    given_counts = [count for count in counts if count is not None]
    if given_counts and len(given_counts) < len(counts):
        return "some workers gave counts and others none"
    if given_counts and sum(given_counts) < 1:
        return "the counts of a step add up to 0"
    if len(numbers := {number for vote in votes for number in vote.samples}) > 1:
        return f"the micro-batches of a step have {min(numbers)} to {max(numbers)} samples, and their losses are means"
    all_losses = [loss for own in losses for loss in own]
    finite = all(map(math.isfinite, all_losses))
    digests = tuple(vote.digest for vote in votes)
    differ = any(len(set(digests[position::replica_size])) > 1 for position in range(replica_size))
    return StepDecision(
        loss=math.fsum(all_losses) if finite else math.nan,
        losses=tuple(map(one_of, zip(*(vote.losses for vote in votes), strict=True))),
        trained=sum(vote.trained for vote in votes[:replica_size]) % 2**64,
        count=sum(given_counts),
        finite=finite,
        gradient_finite=all(vote.gradient_finite for vote in votes),
        stop=max((vote.stop_signal for vote in votes), key=SIGNALS.index)
        or ("SIGUSR1" if all(vote.leaving for vote in votes) else ""),
        save_failed=any(vote.save_failed for vote in votes),
        regroup=any(vote.joiners_waiting or vote.leaving for vote in votes),
        divergent_ranks=find_divergent_ranks(digests, replica_size) if differ else (),
        digests=digests if differ else (),
        micro_batch_us=least_times([vote.micro_batch_us for vote in votes], replica_size),
        exchange_us=min(vote.exchange_us for vote in votes),
    )


def known(losses: Sequence[float | None]) -> list[float]:
    return [loss for loss in losses if loss is not None]


def one_of(losses: Sequence[float | None]) -> float | None:
    """Return the loss of a micro-batch, which at most one vote has."""
    return next(iter(known(losses)), None)


def spread(shares: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Return the losses of each vote by micro-batch: of the first one the first share, and so on."""
    ends = list(accumulate(map(len, shares), initial=0))
    return [
        [None] * start + [*share] + [None] * (ends[-1] - start - len(share))
        for start, share in zip(ends, shares, strict=False)
    ]


def least_times(times: list[int | None], replica_size: int) -> tuple[int, ...]:
    replicas = [
        [time for time in times[first : first + replica_size] if time is not None]
        for first in range(0, len(times), replica_size)
    ]
    return tuple(map(min, replicas)) if all(replicas) else ()


def random_votes(size: int, replica_size: int, seed: int) -> list[Vote]:
    """Return votes of `size` ranks; by seed with flags, differences, mixed counts, losses not finite."""
    chance = random.Random(seed)
    digests = [chance.getrandbits(64) for _ in range(replica_size)]
    unusual, mixed, not_finite = [0.0, 0.1, 1.0][seed % 3], 0.3 * (seed % 5 == 2), seed % 4 == 1
    counted, many, leaving = (chance.random() < p for p in (0.5, 0.5, 0.1))

    def loss() -> float:
        if not_finite and chance.random() < 0.5:
            return chance.choice([math.nan, math.inf, -math.inf])
        return chance.uniform(-1, 1) * 2.0 ** chance.choice([0, 0, 3, -1060, -40, 60, 1000])

    shares = [[loss() for _ in range(chance.randrange(4 if many else 2))] for _ in range(size)]
    losses = spread(shares)

    def vote(rank: int) -> Vote:
        flag = [chance.random() < unusual for _ in range(5)]
        has_count = counted != (chance.random() < mixed)
        return Vote(
            losses[rank],
            count=chance.randrange(3) if has_count else None,
            samples=[]
            if has_count
            else chance.choices([7, 8] if seed % 7 == 5 else [7], k=chance.randrange(3)),
            stop_signal=chance.choice(SIGNALS) if flag[0] else "",
            save_failed=flag[1],
            joiners_waiting=flag[2],
            leaving=flag[3] or leaving,
            digest=digests[rank % replica_size]
            ^ (flag[4] and chance.random() < 0.5) << chance.randrange(64),
            trained=digests[rank % replica_size],
            gradient_finite=random.Random(1000 * seed + rank).random() >= unusual,
            micro_batch_us=None if flag[4] else 1000 + (37 * rank + seed) % 91,
            exchange_us=(53 * rank + seed) % 97,
        )

    return [vote(rank) for rank in range(size)]


def exchange_rounds(rounds_of_rank: list[Iterator[Round]]) -> tuple[list[int], list[int]]:
    """Run all ranks and deliver their messages; return rounds and messages sent of each rank."""
    size = len(rounds_of_rank)
    mail: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    expected: list[list[process_group.Message]] = [[] for _ in range(size)]
    rounds, messages, ready = [0] * size, [0] * size, deque(range(size))
    running = set(range(size))
    while ready:
        rank = ready.popleft()
        while rank in running and all(mail[source, rank] for _, source in expected[rank]):
            for buffer, source in expected[rank]:
                received = mail[source, rank].popleft()
                assert received.shape == buffer.shape
                buffer.copy_(received)
            if (current := next(rounds_of_rank[rank], None)) is None:
                running.discard(rank)
                break
            sent, expected[rank] = current
            rounds[rank] += 1
            messages[rank] += len(sent)
            for part, to in sent:
                mail[rank, to].append(part.clone())
                ready.append(to)
    assert not running and not any(mail.values()), (
        "a rank waits for a message, or did not receive one"
    )
    return rounds, messages


def combined_rows(
    votes: list[Vote], replica_size: int
) -> tuple[list[torch.Tensor], list[int], list[int]]:
    replicas = len(votes) // replica_size
    rows = [
        torch.tensor(vote_to_row(vote, rank, replica_size, replicas))
        for rank, vote in enumerate(votes)
    ]
    counts = exchange_rounds(
        [reduce_rounds(row, rank, len(rows), combine_rows) for rank, row in enumerate(rows)]
    )
    return rows, *counts


def decide(row: torch.Tensor, votes: Sequence[Vote], replica_size: int) -> StepDecision | str:
    try:
        return row_to_decision(
            row.tolist(),
            replica_size,
            max(1, len(votes) // replica_size),
            lambda: [vote.digest for vote in votes],
        )
    except UsageError as error:
        return error.what


@pytest.mark.parametrize("size", SIZES)
def test_a_vote_takes_at_most_2_rounds_more_than_log2_and_decides_as_all_votes_do(
    size: int,
) -> None:
    seen = set()
    for seed in range(12 if size <= 64 else 2):
        replica_size = random.Random(seed).choice([n for n in (1, 2, 3, 4, 8) if size % n == 0])
        votes = random_votes(size, replica_size, seed)
        expected = count_all_votes(votes, replica_size)
        rows, rounds, messages = combined_rows(votes, replica_size)
        whole_rounds = size.bit_length() - 1
        assert max(rounds) == whole_rounds + 2 * (size != 1 << whole_rounds)
        assert max(messages) <= whole_rounds + 1
        assert all(torch.equal(row, rows[0]) for row in rows) and len(
            rows[0]
        ) == 14 + 2 * replica_size + size // replica_size + len(votes[0].losses)
        decision = decide(rows[0], votes, replica_size)
        assert repr(decision) == repr(expected)  # NaN is not equal to itself
        seen.add(
            decision
            if isinstance(decision, str)
            else "divergent"
            if decision.divergent_ranks
            else decision.finite
        )
    assert (
        not 8 <= size <= 64
        or {True, False, "divergent", "some workers gave counts and others none"} <= seen
    )


@given(st.lists(st.floats(), max_size=40), st.integers(1, 5), st.randoms())
def test_the_loss_is_rounded_once_as_by_fsum_for_every_split(
    losses: list[float], size: int, chance: random.Random
) -> None:
    cuts = [0, *sorted(chance.choices(range(len(losses) + 1), k=size - 1)), len(losses)]
    shuffled = chance.sample(losses, len(losses))
    votes = [Vote(own) for own in spread([shuffled[a:b] for a, b in pairwise(cuts)])]
    rows, _, _ = combined_rows(votes, 1)
    finite = all(map(math.isfinite, losses))
    try:
        expected = math.fsum(losses) if finite else math.nan
    except OverflowError:  # fsum refuses partial sums out of range, too
        return
    decision = decide(rows[0], votes, 1)
    assert isinstance(decision, StepDecision) and decision.finite == finite
    assert repr(decision.loss) == repr(expected)
    assert repr(decision.losses) == repr(tuple(loss + 0.0 for loss in shuffled))  # 0.0 for -0.0


@pytest.mark.parametrize(
    "losses",
    [
        [5e-324] * 3,
        [-5e-324],
        [2.0**53, 1.0, -1.0, 2.0**-1000],
        [HUGE, 5e-324, -HUGE],
        [-HUGE, 1.0],
        [1.0, 1e-16, 1e-16],
        [],
    ],
)
def test_the_loss_of_extreme_values_is_that_of_fsum(losses: list[float]) -> None:
    votes = [Vote(own) for own in spread([[loss] for loss in losses])] or [Vote([])]
    rows, _, _ = combined_rows(votes, 1)
    decision = decide(rows[0], votes, 1)
    assert isinstance(decision, StepDecision) and repr(decision.loss) == repr(math.fsum(losses))


@pytest.mark.parametrize("sign", [1, -1])
def test_finite_losses_whose_sum_no_float_holds_are_not_finite(sign: int) -> None:
    votes = [Vote([sign * HUGE, None]), Vote([None, sign * HUGE])]
    rows, _, _ = combined_rows(votes, 1)
    decision = decide(rows[0], votes, 1)
    assert (
        isinstance(decision, StepDecision)
        and not decision.finite
        and decision.loss == sign * math.inf
    )


@pytest.mark.parametrize("size", range(1, 65))
def test_gathering_takes_log2_rounds_of_one_message_each(size: int) -> None:
    order = [[(rank + number) % size for number in range(size)] for rank in range(size)]
    starts = [[0, *accumulate(1 + number % 3 for number in order[rank])] for rank in range(size)]
    buffers = [torch.full((ends[-1],), -1) for ends in starts]
    for rank, buffer in enumerate(buffers):
        buffer[: starts[rank][1]] = rank
    rounds, messages = exchange_rounds(
        [gather_rounds(*own) for own in zip(buffers, starts, range(size), strict=True)]
    )
    assert set(rounds) == set(messages) == {(size - 1).bit_length()}
    for rank, buffer in enumerate(buffers):
        assert buffer.tolist() == [number for number in order[rank] for _ in range(1 + number % 3)]


def test_4096_ranks_gather_in_12_rounds() -> None:
    assert sum(1 for _ in gather_rounds(torch.zeros(4096), range(4097), 17)) == 12


def vote_and_gather(runtime: ElasticRuntime, case: int) -> list[Any]:
    """Return the decision or error, the bytes of its messages and of its rows, and the number of
    messages of a gathering."""
    world, sent = runtime.world, []
    isend = dist.isend
    process_group.dist.isend = lambda tensor, **where: (
        sent.append(tensor.nbytes) or isend(tensor, **where)
    )
    replica_size = 2 if case % 2 == world.size % 2 == 0 else 1
    votes = random_votes(world.size, replica_size, case)
    try:
        decision: Any = repr(vote_on_step(runtime, votes[world.rank], replica_size=replica_size))
    except UsageError as error:
        decision = error.what
    vote_bytes = list(sent)
    sent.clear()
    values = all_gather_json(runtime, {"rank": world.rank, "text": "é" * 1000 * world.rank})
    process_group.dist.isend = isend
    expected = count_all_votes(votes, replica_size)
    assert decision == (expected if isinstance(expected, str) else repr(expected))
    assert values == [{"rank": rank, "text": "é" * 1000 * rank} for rank in range(world.size)]
    row = vote_to_row(votes[0], 0, replica_size, world.size // replica_size)
    rows = list(takewhile(lambda number: number == 8 * len(row), vote_bytes))
    return [json.dumps(decision), vote_bytes, rows, len(sent)]


def vote_often(runtime: ElasticRuntime) -> list[list[Any]]:
    return [vote_and_gather(runtime, case) for case in range(30)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_real_ranks_vote_and_gather_with_few_messages(size: int) -> None:
    results = run_ranks(vote_often, size)
    for of_ranks in zip(*results, strict=True):
        assert len({decision for decision, *_ in of_ranks}) == 1
        assert {gathered for *_, gathered in of_ranks} == {2 * (size - 1).bit_length()}
        for decision, sent, rows, _ in of_ranks:
            assert len(rows) <= size.bit_length() and (rows or size == 1)
            assert ("divergent_ranks=()" in decision or "StepDecision" not in decision) == (
                rows == sent
            ) or size == 1


def compare_weights(runtime: ElasticRuntime) -> list[Any]:
    return all_gather_json(runtime, runtime.world.rank)


def share_scores(runtime: ElasticRuntime) -> list[Any]:
    return all_gather_json(runtime, runtime.world.rank)


def vote_on(runtime: ElasticRuntime, step: int) -> StepDecision:
    return vote_on_step(runtime, Vote([1.0], step=step))


def pair_wrongly(runtime: ElasticRuntime) -> list[str]:
    """Enter another gather, and then a vote on another step, on the last rank; return the errors."""
    is_last, errors = runtime.world.rank == runtime.world.size - 1, []
    gather = share_scores if is_last else compare_weights
    works: list[Callable[[], Any]] = [
        lambda: gather(runtime),
        lambda: vote_on(runtime, 7 + is_last),
    ]
    for work in works:
        with pytest.raises(CollectiveMismatchError) as error:
            work()
        errors.append(error.value.what)
    return [*errors, str(compare_weights(runtime))]


def test_ranks_in_different_collectives_are_refused_by_name() -> None:
    results = run_ranks(pair_wrongly, 3)
    assert all(result == results[0] for result in results)
    gathers, votes, gathered = results[0]
    named = r"rank 0 in \S+\.compare_weights, line \d+; .*rank \d in \S+\.share_scores, line \d+"
    assert re.fullmatch(f"ranks are in different collectives: {named}", gathers), gathers
    assert votes == "ranks vote on different steps: 8 to 9" and gathered == "[0, 1, 2]"


def vote_without_rank_1(runtime: ElasticRuntime) -> str:
    """Vote on rank 0 only, in a generation that ends meanwhile; return the error."""
    error = ""
    if runtime.world.rank == 0:
        start_s = time.monotonic()
        runtime.group._waits = WorkWaiter(
            lambda: "rank 1 left" if time.monotonic() > start_s + 0.5 else ""
        )
        try:
            vote_on_step(runtime, Vote([1.0]))
        except PeersLostError as lost:
            error = lost.what
    dist.barrier()
    return error


def test_a_vote_is_abandoned_when_the_generation_ends() -> None:
    assert run_ranks(vote_without_rank_1, 2) == ["rank 1 left", ""]
