"""Hang verdicts: the right culprit of each injected hang, and none where a run is only slow."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.elastic.hang import HangVerdict, MemberSnapshot, diagnose, innermost, stack_of
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.runtime.status_board import PHASES, Phase, Status

MODEL = """\
/home/me/run/train.py:12 in <module>: main()
/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:1775 in _call_impl: return forward_call(*args, **kwargs)
/home/me/run/model.py:83 in forward: time.sleep(600)"""
QUEUE = """\
/home/me/run/train.py:20 in main: batch = next(batches)
/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py:1284 in _get_data: success, data = self._try_get_data()
/usr/lib/python3.11/multiprocessing/queues.py:113 in get: if not self._poll(timeout):"""


def in_phase(
    phase: Phase,
    age_s: float = 11.8,
    *,
    step: int = 118,
    collective: int = 40,
    size: int = 0,
    step_s: float = 0.5,
) -> Status:
    return Status(4709, 7, step, phase, False, collective, size, age_s, age_s, step_s)


def four() -> list[MemberSnapshot]:
    """Ranks 0 and 1 on host a, 2 and 3 on host b, all in the reduction of step 118 for 11.8 s."""
    hosts = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    return [
        MemberSnapshot(
            f"{host}/{slot}/x",
            host,
            slot,
            rank,
            replace(in_phase("reducing"), pid=4709 + rank),
            0.1,
            "S",
        )
        for rank, (host, slot) in enumerate(hosts)
    ]


def with_rank(rank: int, **changes: object) -> list[MemberSnapshot]:
    """The four members with one of them changed."""
    members = four()
    pid = members[rank].status.pid
    members[rank] = replace(members[rank], **changes)  # type: ignore[arg-type]
    members[rank] = replace(members[rank], status=replace(members[rank].status, pid=pid))
    return members


def culprit_ranks(members: list[MemberSnapshot], verdict: HangVerdict | None) -> list[int]:
    assert verdict is not None
    return [member.rank for member in members if member.id in verdict.culprits]


def test_full_paragraph() -> None:
    verdict = diagnose(with_rank(2, status=in_phase("forward", 12.3, collective=39), stack=MODEL))
    assert verdict == HangVerdict(
        ("b/0/x",),
        "rank 2 (host b, slot 0, pid 4711): in the forward pass of step 118 for 12 s, at model.py:83 in forward: "
        "`time.sleep(600)`; ranks 0, 1 and 3: waiting in the reduction of step 118 for 12 s. "
        "The run continues without rank 2.",
        "evict",
    )


def test_preparing_data_has_no_limit_unless_the_process_is_stopped() -> None:
    hours = [
        replace(member, status=replace(in_phase("joining", 7200.0), pid=member.status.pid))
        for member in four()
    ]
    hours[0] = replace(hours[0], status=replace(hours[0].status, phase="preparing"))
    assert diagnose(hours) is None and diagnose(hours[:1]) is None
    hours[0] = replace(hours[0], state="T", silent_s=11.0)
    verdict = diagnose(hours)
    assert (
        culprit_ranks(hours, verdict) == [0]
        and verdict
        and "stopped" in verdict.paragraph
        and "preparing the run's data" in verdict.paragraph
    )


HANGS: dict[str, tuple[list[MemberSnapshot], list[int], str, list[str]]] = {
    "sleep": (
        with_rank(2, status=in_phase("backward", 12, collective=39), stack=MODEL),
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711): in the backward pass of step 118 for 12 s, at model.py:83",
            "ranks 0, 1 and 3: waiting",
        ],
    ),
    "SIGSTOP": (
        with_rank(1, state="T", silent_s=11.0),  # in the same collective as the others
        [1],
        "evict",
        [
            "rank 1 (host a, slot 1, pid 4710): stopped",
            "in the reduction of step 118",
            "ranks 0, 2 and 3: waiting",
        ],
    ),
    "dead data worker": (
        with_rank(0, status=in_phase("data", 13, collective=39), stack=QUEUE),
        [0],
        "evict",
        [
            "rank 0 (host a",
            "fetching the data of step 118 for 13 s, at train.py:20 in main: `batch = next(batches)`",
        ],
    ),
    "skipped collective": (
        with_rank(3, status=in_phase("voting", 12, collective=40)),
        [3],
        "evict",
        [
            "mismatched collectives",
            "rank 3 (host b, slot 1, pid 4712): in the vote of step 118 (collective 40",
            "ranks 0, 1 and 2",
        ],
    ),
    "collective of another step": (
        with_rank(3, status=in_phase("voting", 12, step=117, collective=39)),
        [3],
        "evict",
        ["the vote of step 117 (collective 39", "the reduction of step 118 (collective 40"],
    ),
    "mismatched shape": (
        [
            replace(
                member,
                status=replace(
                    member.status, collective_bytes=2**20 if member.rank == 2 else 2**21
                ),
            )
            for member in four()
        ],
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711): in the",
            "7, 1.0 MiB)",
            "ranks 0, 1 and 3 (host a and b): in the",
            "7, 2.0 MiB)",
            "of the same size",
        ],
    ),
    "exited": (
        with_rank(
            2, status=in_phase("updating", 12, step=117, collective=39), state="Z", silent_s=12
        ),
        [2],
        "evict",
        [
            "rank 2 (host b, slot 0, pid 4711): exited, last seen in the update of step 117 for 12 s; ranks 0, 1",
            "The run continues without rank 2.",
        ],
    ),
    "host cut off": (
        [
            replace(member, state="", silent_s=12.0) if member.host == "b" else member
            for member in four()
        ],
        [2, 3],
        "evict",
        [
            "ranks 2 and 3 (host b): no heartbeat for 12 s, nor of any other process of the host",
            "ranks 0 and 1: waiting",
            "The run continues without ranks 2 and 3.",
        ],
    ),
    "cut link": (
        four(),
        [],
        "regroup",
        [
            "ranks 0, 1, 2 and 3 (host a and b): in the reduction of step 118 (collective 40 of generation 7)",
            "look at the network of a and b",
        ],
    ),
    "endless evaluation": (
        with_rank(0, status=in_phase("evaluating", 1900, step=117, collective=39)),
        [0],
        "evict",
        [
            "rank 0 (host a, slot 0, pid 4709): evaluating step 117 for 32 min",
            "ranks 1, 2 and 3: waiting",
        ],
    ),
    "spinning with the GIL held": (
        with_rank(2, status=in_phase("backward", 12, collective=39), state="R", silent_s=12),
        [2],
        "evict",
        ["for 12 s, alive but without a heartbeat for 12 s (a thread holds the GIL)"],
    ),
    "blocked disk of one rank": (
        with_rank(2, status=in_phase("data", 12, collective=39), state="D", silent_s=12),
        [2],
        "evict",
        ["(blocked in I/O)"],
    ),
    "two at once": (
        [
            replace(member, status=in_phase("forward", 12, collective=39))
            if member.rank in (1, 2)
            else member
            for member in four()
        ],
        [1, 2],
        "evict",
        [
            "ranks 1 and 2 (host a and b): in the forward pass of step 118 for 12 s; ranks 0 and 3: waiting"
        ],
    ),
    "two in different places": (
        [
            replace(
                member, status=in_phase("data" if member.rank else "forward", 12, collective=39)
            )
            if member.rank in (0, 3)
            else member
            for member in four()
        ],
        [0, 3],
        "evict",
        [
            "rank 0 (host a, slot 0",
            "forward pass of step 118 for 12 s; rank 3 (host b, slot 1",
            "ranks 1 and 2: waiting",
        ],
    ),
    "alone in a collective": (
        four()[:1],
        [],
        "regroup",
        [
            "in the reduction of step 118 (collective 40 of generation 7) for 12 s; no other rank is missing"
        ],
    ),
    "all with a shared cause": (
        [
            replace(member, status=in_phase("data", 12, collective=39), stack=QUEUE)
            for member in four()
        ],
        [],
        "warn",
        [
            "none of the 4 ranks makes progress",
            "such as a disk: ranks 0, 1, 2 and 3 (host a and b): fetching",
            "They have 5 min to recover.",
        ],
    ),
    "all with a shared cause, for too long": (
        [replace(member, status=in_phase("data", 301, collective=39)) for member in four()],
        [0, 1, 2, 3],
        "evict",
        ["The run continues without ranks 0, 1, 2 and 3."],
    ),
    "a single process": (
        [replace(four()[0], status=in_phase("forward", 12), stack=MODEL)],
        [0],
        "evict",
        ["rank 0 (host a", "The run continues without rank 0."],
    ),
    "two without a majority": (
        with_rank(1, status=in_phase("voting"))[:2],
        [],
        "regroup",
        ["mismatched collectives", "form a new group"],
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_injected_hang_gets_the_right_verdict(name: str) -> None:
    members, culprits, action, words = HANGS[name]
    verdict = diagnose(members)
    assert verdict is not None
    assert (culprit_ranks(members, verdict), verdict.action) == (culprits, action), (
        verdict.paragraph
    )
    for part in words:
        assert part in verdict.paragraph


SLOW: dict[str, list[MemberSnapshot]] = {
    "all move": [replace(member, status=in_phase("forward", 9.9)) for member in four()],
    "the last rank still computes": with_rank(1, status=in_phase("backward", 9.0, collective=39)),
    "a long checkpoint on the leader": with_rank(
        0, status=in_phase("saving", 500, step=117, collective=39)
    ),
    "a long evaluation on one rank": with_rank(
        2, status=in_phase("evaluating", 1700, step=117, collective=39)
    ),
    "one compiles": with_rank(
        2, status=in_phase("compiling", 90, collective=39), state="R", silent_s=40
    ),  # with the GIL held
    "a first batch": [
        replace(member, status=replace(member.status, first_step=True, moved_s=50, since_s=50))
        for member in four()
    ],
    "slow steps": [replace(member, status=in_phase("reducing", 40, step_s=5)) for member in four()],
    "the steps of the slowest rank count": with_rank(
        3, status=in_phase("backward", 40, collective=39, step_s=5)
    ),
    "stopped for a moment, in a long checkpoint": with_rank(
        0, status=in_phase("saving", 500, step=117), state="T", silent_s=4
    ),
    "no answer for a moment": with_rank(
        0, status=in_phase("saving", 500, step=117), state="", silent_s=4
    ),
    "no member": [],
}


@pytest.mark.parametrize("name", SLOW)
def test_slow_is_no_hang(name: str) -> None:
    assert diagnose(SLOW[name]) is None


def test_configured_action_is_taken() -> None:
    members = with_rank(2, status=in_phase("forward", 12))
    for action, end in (("abort", "The run is aborted."), ("warn", "No action is taken.")):
        for case in (
            members,
            four(),
            HANGS["all with a shared cause"][0],
            HANGS["mismatched shape"][0],
        ):
            verdict = diagnose(case, ElasticLimits(on_hang=action))  # type: ignore[arg-type]
            assert verdict and verdict.action == action and verdict.paragraph.endswith(end)


@st.composite
def histories(draw: st.DrawFn) -> list[MemberSnapshot]:
    count = draw(st.integers(1, 6))
    ages = st.sampled_from([0.0, 5.0, 9.9, 12.0, 70.0, 700.0, 4000.0])
    return [
        MemberSnapshot(
            f"h{rank % 2}/{rank}/x",
            f"h{rank % 2}",
            rank // 2,
            rank,
            Status(
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
def test_culprit_depends_on_neither_order_nor_ranks(
    members: list[MemberSnapshot], rng: random.Random
) -> None:
    ranks = [member.rank for member in members]
    rng.shuffle(ranks)
    shuffled = [replace(member, rank=rank) for member, rank in zip(members, ranks, strict=True)]
    rng.shuffle(shuffled)
    first, second = diagnose(members), diagnose(shuffled)
    assert (first is None) == (second is None)
    if first and second:
        assert (set(first.culprits), first.action) == (set(second.culprits), second.action)


@settings(deadline=None)
@given(histories())
def test_verdict_is_sound(members: list[MemberSnapshot]) -> None:
    verdict = diagnose(members)
    if all(member.status.moved_s < 10 for member in members):
        assert verdict is None
    if verdict is None:
        return
    of = {member.id: member for member in members}
    assert all(of[id].status.moved_s > 10 for id in verdict.culprits)
    assert bool(verdict.culprits) == (verdict.action == "evict")
    assert verdict.paragraph[-1] == "." and "  " not in verdict.paragraph
    assert all(
        f"rank {of[id].rank}" in verdict.paragraph or f" {of[id].rank}" in verdict.paragraph
        for id in verdict.culprits
    )


@settings(deadline=None)
@given(histories(), st.floats(0, 1000))
def test_hang_does_not_go_away_by_itself(members: list[MemberSnapshot], seconds: float) -> None:
    """Without progress or heartbeats, a detected hang stays one."""
    later = [
        replace(member, status=member.status.after(seconds), silent_s=member.silent_s + seconds)
        for member in members
    ]
    first, second = diagnose(members), diagnose(later)
    assert not first or second is not None


# Stacks.


def wait_here(ready: threading.Event, done: threading.Event) -> None:
    ready.set()
    done.wait()  # the expected line


def test_stack_of_a_thread_ends_where_it_waits() -> None:
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
    assert line.startswith("test_hang.py:") and line.endswith(
        " in wait_here: `done.wait()  # the expected line`"
    )
    assert stack_of(thread.ident) == "", "the thread has exited"


def test_stack_of_the_main_thread_is_the_default_and_limited() -> None:
    assert "in test_stack_of_the_main_thread_is_the_default" in stack_of()

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
def test_innermost_line_prefers_the_users_code(stack: str, line: str) -> None:
    assert innermost(stack) == line
