"""The hang verdict: injected hangs as values, the right culprit in each, and none where a run is only slow."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.elastic.hang import Limits, Seen, Verdict, innermost, judge, stack_of
from lockstep.runtime.status_board import PHASES, Doing, Phase

MODEL = """\
/home/me/run/train.py:12 in <module>: main()
/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1775 in _call_impl: return forward_call(*args, **kwargs)
/home/me/run/model.py:83 in forward: time.sleep(600)"""
QUEUE = """\
/home/me/run/train.py:20 in main: batch = next(batches)
/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1284 in _get_data: success, data = self._try_get_data()
/usr/lib/python3.11/multiprocessing/queues.py:113 in get: if not self._poll(timeout):"""


def doing(phase: Phase, age_s: float = 11.8, *, step: int = 118, collective: int = 40, size: int = 0, step_s: float = 0.5) -> Doing:
    return Doing(4709, 7, step, phase, False, collective, size, age_s, age_s, step_s)


def four() -> list[Seen]:
    """Ranks 0 and 1 on host a, 2 and 3 on host b, all in the reduction of step 118 for 11.8 s."""
    hosts = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    return [
        Seen(f"{host}/{slot}/x", host, slot, rank, replace(doing("reducing"), pid=4709 + rank), 0.1, "S")
        for rank, (host, slot) in enumerate(hosts)
    ]


def with_rank(rank: int, **changes: object) -> list[Seen]:
    """The four, one of them changed."""
    members = four()
    pid = members[rank].doing.pid
    members[rank] = replace(members[rank], **changes)  # type: ignore[arg-type]
    members[rank] = replace(members[rank], doing=replace(members[rank].doing, pid=pid))
    return members


def culprit_ranks(members: list[Seen], verdict: Verdict | None) -> list[int]:
    assert verdict is not None
    return [one.rank for one in members if one.id in verdict.culprits]


def test_the_paragraph_reads_like_a_persons() -> None:
    verdict = judge(with_rank(2, doing=doing("forward", 12.3, collective=39), stack=MODEL))
    assert verdict == Verdict(
        ("b/0/x",),
        "rank 2 (host b, slot 0, pid 4711) has been in the forward pass of step 118 for 12 s, at model.py:83 in forward: "
        "`time.sleep(600)`; ranks 0, 1 and 3 have waited for it in the reduction of step 118 for 12 s. "
        "It is ended, and the run goes on without it.",
        "evict",
    )


def test_data_may_be_prepared_for_hours_but_not_by_a_stopped_process() -> None:
    hours = [replace(one, doing=replace(doing("joining", 7200.0), pid=one.doing.pid)) for one in four()]
    hours[0] = replace(hours[0], doing=replace(hours[0].doing, phase="preparing"))
    assert judge(hours) is None and judge(hours[:1]) is None
    hours[0] = replace(hours[0], state="T", silent_s=11.0)
    verdict = judge(hours)
    assert (
        culprit_ranks(hours, verdict) == [0]
        and verdict
        and "is stopped" in verdict.paragraph
        and "preparing the run's data" in verdict.paragraph
    )


HANGS: dict[str, tuple[list[Seen], list[int], str, list[str]]] = {
    "sleep": (
        with_rank(2, doing=doing("backward", 12, collective=39), stack=MODEL),
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711) has been in the backward pass of step 118 for 12 s, at model.py:83",
            "ranks 0, 1 and 3 have waited",
        ],
    ),
    "SIGSTOP": (
        with_rank(1, state="T", silent_s=11.0),  # in the same collective as all others
        [1],
        "evict",
        ["rank 1 (host a, slot 1, pid 4710) is stopped", "in the reduction of step 118", "ranks 0, 2 and 3 have waited for it"],
    ),
    "dead data worker": (
        with_rank(0, doing=doing("data", 13, collective=39), stack=QUEUE),
        [0],
        "evict",
        ["rank 0 (host a", "has been fetching the data of step 118 for 13 s, at train.py:20 in main: `batch = next(batches)`"],
    ),
    "skipped collective": (
        with_rank(3, doing=doing("voting", 12, collective=40)),
        [3],
        "evict",
        [
            "not for the same thing",
            "rank 3 (host b, slot 1, pid 4712) has waited in the vote of step 118 (collective 40",
            "ranks 0, 1 and 2",
        ],
    ),
    "collective of another step": (
        with_rank(3, doing=doing("voting", 12, step=117, collective=39)),
        [3],
        "evict",
        ["the vote of step 117 (collective 39", "the reduction of step 118 (collective 40"],
    ),
    "mismatched shape": (
        [replace(one, doing=replace(one.doing, collective_bytes=2**20 if one.rank == 2 else 2**21)) for one in four()],
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711) has waited",
            "7, 1.0 MiB)",
            "ranks 0, 1 and 3 (hosts a and b) have waited",
            "7, 2.0 MiB)",
            "of the same size",
        ],
    ),
    "exited": (
        with_rank(2, doing=doing("updating", 12, step=117, collective=39), state="Z", silent_s=12),
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711) has exited, 12 s after it was last seen in the update of step 117; ranks 0, 1",
            "It is left out, and",
        ],
    ),
    "host cut off": (
        [replace(one, state="", silent_s=12.0) if one.host == "b" else one for one in four()],
        [2, 3],
        "evict",
        [
            "ranks 2 and 3 (host b) have not answered for 12 s, and nothing else on the host has",
            "ranks 0 and 1 have waited for them",
            "They are left out, and",
        ],
    ),
    "cut link": (
        four(),
        [],
        "regroup",
        [
            "all 4 ranks have been in the reduction of step 118 (collective 40 of generation 7)",
            "the network between a and b that does not move",
        ],
    ),
    "evaluation without an end": (
        with_rank(0, doing=doing("evaluating", 1900, step=117, collective=39)),
        [0],
        "evict",
        ["rank 0 (host a, slot 0, pid 4709) has been evaluating step 117 for 32 min", "ranks 1, 2 and 3 have waited for it"],
    ),
    "spinning with Python's lock": (
        with_rank(2, doing=doing("backward", 12, collective=39), state="R", silent_s=12),
        [2],
        "evict",
        ["for 12 s, alive but without an answer for 12 s (something holds Python's lock)"],
    ),
    "a disk that does not answer one": (
        with_rank(2, doing=doing("data", 12, collective=39), state="D", silent_s=12),
        [2],
        "evict",
        ["(waiting for a disk or a device)"],
    ),
    "two at once": (
        [replace(one, doing=doing("forward", 12, collective=39)) if one.rank in (1, 2) else one for one in four()],
        [1, 2],
        "evict",
        ["ranks 1 and 2 (hosts a and b) have been in the forward pass of step 118 for 12 s; ranks 0 and 3 have waited for them"],
    ),
    "two in different places": (
        [replace(one, doing=doing("data" if one.rank else "forward", 12, collective=39)) if one.rank in (0, 3) else one for one in four()],
        [0, 3],
        "evict",
        ["rank 0 (host a, slot 0", "forward pass of step 118 for 12 s; rank 3 (host b, slot 1", "ranks 1 and 2 have waited for them"],
    ),
    "one that nobody else is with": (four()[:1], [], "regroup", ["in the reduction of step 118 for 12 s, in which nobody else is"]),
    "all in the same hole": (
        [replace(one, doing=doing("data", 12, collective=39), stack=QUEUE) for one in four()],
        [],
        "tell",
        ["none of the 4 ranks moves", "such as a disk: ranks 0, 1, 2 and 3 (hosts a and b) have been fetching", "They are given 5 min."],
    ),
    "all in the same hole, for too long": (
        [replace(one, doing=doing("data", 301, collective=39)) for one in four()],
        [0, 1, 2, 3],
        "evict",
        ["They are ended, and the run goes on with others in place of them."],
    ),
    "one process in all": (
        [replace(four()[0], doing=doing("forward", 12), stack=MODEL)],
        [0],
        "evict",
        ["rank 0 (host a", "others in place of it"],
    ),
    "two that cannot agree who is wrong": (
        with_rank(1, doing=doing("voting"))[:2],
        [],
        "regroup",
        ["not for the same thing", "formed anew"],
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_an_injected_hang_gets_the_right_verdict(name: str) -> None:
    members, culprits, action, words = HANGS[name]
    verdict = judge(members)
    assert verdict is not None
    assert (culprit_ranks(members, verdict), verdict.action) == (culprits, action), verdict.paragraph
    for part in words:
        assert part in verdict.paragraph


SLOW: dict[str, list[Seen]] = {
    "all move": [replace(one, doing=doing("forward", 9.9)) for one in four()],
    "the last one still computes": with_rank(1, doing=doing("backward", 9.0, collective=39)),
    "a long checkpoint on the leader": with_rank(0, doing=doing("saving", 500, step=117, collective=39)),
    "a long evaluation on one rank": with_rank(2, doing=doing("evaluating", 1700, step=117, collective=39)),
    "one compiles": with_rank(2, doing=doing("compiling", 90, collective=39), state="R", silent_s=40),  # with Python's lock
    "a first batch": [replace(one, doing=replace(one.doing, first_step=True, moved_s=50, since_s=50)) for one in four()],
    "slow steps": [replace(one, doing=doing("reducing", 40, step_s=5)) for one in four()],
    "the slowest one's steps count": with_rank(3, doing=doing("backward", 40, collective=39, step_s=5)),
    "stopped for a moment, in a long checkpoint": with_rank(0, doing=doing("saving", 500, step=117), state="T", silent_s=4),
    "no answer for a moment": with_rank(0, doing=doing("saving", 500, step=117), state="", silent_s=4),
    "below the least number of replicas": [replace(one, doing=doing("waiting for others", 4000)) for one in four()],
    "one stands by": [*with_rank(1, doing=doing("backward", 1))[:3], replace(four()[3], doing=doing("idle", 9000))],
    "nobody": [],
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_is_no_hang(name: str) -> None:
    assert judge(SLOW[name]) is None


def test_the_action_is_the_configured_one() -> None:
    members = with_rank(2, doing=doing("forward", 12))
    for then, end in (("end", "The run is ended."), ("tell", "Nothing is done about it.")):
        for case in (members, four(), HANGS["all in the same hole"][0], HANGS["mismatched shape"][0]):
            verdict = judge(case, Limits(then=then))  # type: ignore[arg-type]
            assert verdict and verdict.action == then and verdict.paragraph.endswith(end)


def test_one_that_waits_apart_from_all_others_who_gather_is_named() -> None:
    gathering = [replace(one, doing=doing("waiting for others", 30)) if one.rank else one for one in four()]
    verdict = judge(gathering)
    assert verdict and verdict.culprits == ("a/0/x",)


@st.composite
def histories(draw: st.DrawFn) -> list[Seen]:
    count = draw(st.integers(1, 6))
    ages = st.sampled_from([0.0, 5.0, 9.9, 12.0, 70.0, 700.0, 4000.0])
    return [
        Seen(
            f"h{rank % 2}/{rank}/x",
            f"h{rank % 2}",
            rank // 2,
            rank,
            Doing(
                100 + rank,
                draw(st.sampled_from([7, 8])),
                draw(st.sampled_from([117, 118])),
                draw(st.sampled_from(PHASES)),
                draw(st.booleans()),
                draw(st.sampled_from([39, 40])),
                draw(st.sampled_from([0, 64])),
                age := draw(ages),
                age,
                draw(st.sampled_from([0.0, 0.5, 2.0])),
            ),
            draw(st.sampled_from([0.0, 4.0, 12.0])),
            draw(st.sampled_from(["", "R", "S", "D", "T", "Z"])),
            draw(st.sampled_from(["", MODEL, QUEUE, "garbage"])),
        )
        for rank in range(count)
    ]


@settings(deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_neither_the_order_of_the_members_nor_their_ranks_change_the_culprit(members: list[Seen], rng: random.Random) -> None:
    ranks = [one.rank for one in members]
    rng.shuffle(ranks)
    shuffled = [replace(one, rank=rank) for one, rank in zip(members, ranks, strict=True)]
    rng.shuffle(shuffled)
    first, second = judge(members), judge(shuffled)
    assert (first is None) == (second is None)
    if first and second:
        assert (set(first.culprits), first.action) == (set(second.culprits), second.action)


@settings(deadline=None)
@given(histories())
def test_a_verdict_is_sound(members: list[Seen]) -> None:
    verdict = judge(members)
    if all(one.doing.moved_s < 10 for one in members):
        assert verdict is None
    if verdict is None:
        return
    of = {one.id: one for one in members}
    assert all(of[id].doing.moved_s > 10 and of[id].doing.phase != "idle" for id in verdict.culprits)
    assert bool(verdict.culprits) == (verdict.action == "evict")
    assert verdict.paragraph[-1] == "." and "  " not in verdict.paragraph
    assert all(f"rank {of[id].rank}" in verdict.paragraph or f" {of[id].rank}" in verdict.paragraph for id in verdict.culprits)


@settings(deadline=None)
@given(histories(), st.floats(0, 1000))
def test_a_hang_does_not_go_away_by_itself(members: list[Seen], seconds: float) -> None:
    """As long as nobody moves and nobody answers, whoever was a culprit stays one."""
    later = [replace(one, doing=one.doing.after(seconds), silent_s=one.silent_s + seconds) for one in members]
    first, second = judge(members), judge(later)
    assert not first or second is not None


# Stacks.


def wait_here(ready: threading.Event, done: threading.Event) -> None:
    ready.set()
    done.wait()  # the line that is looked for


def test_the_stack_of_a_thread_ends_where_it_waits() -> None:
    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(ready, done))
    thread.start()
    try:
        ready.wait()
        time.sleep(0.05)
        stack = stack_of(thread.ident)
    finally:
        done.set()
        thread.join()
    assert "threading.py" in stack.splitlines()[-1]
    line = innermost(stack)
    assert line.startswith("test_hang.py:") and line.endswith(" in wait_here: `done.wait()  # the line that is looked for`")
    assert stack_of(thread.ident) == "", "it has ended"


def test_the_main_threads_stack_is_the_default_and_has_an_end() -> None:
    assert "in test_the_main_threads_stack_is_the_default" in stack_of()

    def deep(n: int) -> str:
        return deep(n - 1) if n else stack_of(frames=5)

    assert len(deep(100).splitlines()) == 5 and "in deep" in deep(100)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (MODEL, "model.py:83 in forward: `time.sleep(600)`"),
        (QUEUE, "train.py:20 in main: `batch = next(batches)`"),
        (QUEUE.splitlines()[-1], "queues.py:113 in get: `if not self._poll(timeout):`"),
        ("<string>:3 in f: ", "<string>:3 in f"),
        ("", ""),
        ("garbage\nand more", ""),
    ],
)
def test_the_innermost_line_is_the_users_where_there_is_one(stack: str, line: str) -> None:
    assert innermost(stack) == line
