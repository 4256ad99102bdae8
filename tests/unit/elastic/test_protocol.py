"""Membership, played: every promise holds in random histories of faults, and each way to break the protocol is found out by some of them.

    LOCKSTEP_HISTORIES=10000 LOCKSTEP_SEED=1 pytest -s tests/unit/elastic/test_protocol.py -k random

plays more of them, or others, than the test run has time for. One that fails is shrunk by hypothesis and told event by event.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from support.simulation.cluster import HOSTS, SEATS, SETTLE_S, Fault, History, play
from support.simulation.promises import Violation
from support.simulation.surroundings import Folder, State

from lockstep.elastic import protocol as real
from lockstep.elastic.generation_log import End, Member, Out, Record
from lockstep.elastic.protocol import (
    Connect,
    Cut,
    Effect,
    Joiner,
    Leave,
    Limits,
    Look,
    Prepare,
    Propose,
    Protocol,
    Report,
    Say,
    Send,
    View,
)

HISTORIES = int(os.environ.get("LOCKSTEP_HISTORIES", "500"))
SEED = int(os.environ.get("LOCKSTEP_SEED", "0"))
THEMES = {
    "everything": SEATS + HOSTS,
    "nothing": ("dawdle",),
    "processes": ("kill", "stop", "dawdle"),
    "hosts": ("power", "agent", "kill"),
    "no agents": ("agent", "stop"),
    "network": ("cut", "drop", "part"),
    "one link": ("part", "kill"),
    "two sides": ("cut",),
    "slowness": ("lag", "crawl", "reset"),
    "disk": ("slow disk", "bad disk", "kill"),
    "wishes": ("evict", "drain", "kill"),
}
MANY, FEW = (0, 1, 2, 4, 8, 16, 24), (1, 2, 4)


ALL = ("everything", *THEMES)
# Two propose at once only where the one that waits does not see what the other has written.
THEMES["stops and a slow disk"] = ("stop", "slow disk")


def some_history(chance: random.Random, themes: Sequence[str] = ALL, hosts: int = 1, faults: Sequence[int] = MANY) -> History:
    """From `hosts` to four hosts with one or two workers each; faults of a theme within 5, 20 or 40 s, some of them for good."""
    hosts, slots = chance.randint(hosts, 4), chance.randint(1, 2)
    most = chance.choice([hosts * slots, chance.randint(1, hosts * slots)])
    least = chance.choice([1, chance.randint(1, most)])
    kinds, within = THEMES[chance.choice(themes)], chance.choice([50, 200, 400])
    happen = []
    for _ in range(chance.choice(faults)):
        whom = frozenset(chance.randint(0, 7) for _ in range(chance.randint(1, 3)))
        lasts = chance.choice([chance.randint(1, 20), chance.randint(1, 150), None])
        happen.append(Fault(chance.choice(kinds), chance.randint(0, within) / 10, whom, lasts and lasts / 10))
    return History(chance.randint(0, 2**32 - 1), hosts, slots, least, most, tuple(happen))


def kill_then_cut(chance: random.Random) -> History:
    """A worker is killed, and within the second in which the others form a generation without it the network is cut."""
    history, cut_s = some_history(chance, hosts=2), chance.randint(80, 120) / 10
    kill = Fault("kill", cut_s - chance.choice([0.1, 0.2, 0.3, 0.5, 0.8]), frozenset({chance.randint(0, 7)}), None)
    cut = Fault("cut", cut_s, frozenset(chance.randint(0, 3) for _ in range(chance.randint(1, 2))), chance.choice([None, 5.0, 10.0]))
    return replace(history, faults=(kill, cut))


# Shrunk by hypothesis; each had broken a promise.
FOUND = {
    "the smaller side won": History(0, 3, 2, 1, 6, (Fault("cut", 8.0, frozenset({0}), None),)),
    "a joiner beyond the cut was let in, and won with those who had no state": History(
        0, 3, 2, 1, 3, (Fault("cut", 8.0, frozenset({0}), None),)
    ),
}


@pytest.mark.parametrize("history", FOUND.values(), ids=FOUND)
def test_what_was_found_once_holds(history: History) -> None:
    play(history)


def in_replicas(history: History) -> History:
    """The same with two workers of a host to a replica."""
    most = max(2, history.most // 2 * 2)
    return replace(history, slots=2, most=most, least=min(most, max(2, history.least // 2 * 2)), unit=2)


@pytest.mark.parametrize("number", range(max(20, HISTORIES // 10)))
def test_replicas_of_two_are_whole_or_dead(number: int) -> None:
    play(in_replicas(some_history(random.Random(f"{SEED} {number}"))))


@pytest.mark.parametrize("number", range(max(20, HISTORIES // 10)))
def test_the_larger_side_goes_on_though_its_generation_is_new(number: int) -> None:
    play(kill_then_cut(random.Random(f"{SEED} {number}")))


@pytest.mark.timeout(300 + HISTORIES)
def test_every_promise_holds_in_random_histories() -> None:
    count: Counter[str] = Counter()
    settled_s: list[float] = []
    began_s = time.perf_counter()

    @seed(SEED)
    @settings(max_examples=HISTORIES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False).map(some_history))
    def every_promise_holds(history: History) -> None:
        cluster = play(history)
        count.update({"histories": 1, "events": cluster.clock.count, "faults": len(history.faults), "workers": len(cluster.workers)})
        count.update({"generations": len(cluster.folder.log), "steps": len(cluster.promises.made)})
        count.update(fault.kind for fault in history.faults)
        settled_s.append(cluster.settled_s)

    every_promise_holds()
    worst = sorted(settled_s)
    print(f"\nseed {SEED}: {', '.join(f'{number:,} {what}' for what, number in count.items())}")
    print(f"{time.perf_counter() - began_s:.0f} s; all at work after the last fault: median {worst[len(worst) // 2]:.1f} s, ", end="")
    print(f"99 of 100 within {worst[len(worst) * 99 // 100]:.1f} s, longest {worst[-1]:.1f} s, bound {SETTLE_S:g} s")


# Ways to break it. Each must be found out.


class TwoWinners(Folder):
    """A log in which everybody wins."""

    def propose(self, record: Record) -> Record:
        super().propose(record)
        return record


class Unfenced(Folder):
    """Checkpoints count whoever writes them."""

    def save(self, number: int, state: State) -> bool:
        self.checkpoint = max(self.checkpoint, state)
        return self.checkpoint == state


def hasty(view: View, limits: Limits, token: str) -> tuple[Record | None, str]:
    """Nobody waits for reports."""
    step = max((report.step for report in view.reports.values()), default=0)
    guessed = {one.id: Report(view.record.number, step) for one in view.record.members}
    return NEXT_GENERATION(replace(view, reports=guessed | dict(view.reports)), limits, token)


def backward(view: View, limits: Limits, token: str) -> tuple[Record | None, str]:
    """The smallest step counts, not the largest."""
    record, reason = NEXT_GENERATION(view, limits, token)
    steps = [view.reports[one.id].step for one in record.members if one.id in view.reports] if record else []
    return (replace(record, step=min(steps)) if record else None), reason


def too_few(view: View, limits: Limits, token: str) -> tuple[Record | None, str]:
    """`least` does not count."""
    return NEXT_GENERATION(view, replace(limits, least=1), token)


def all_friends(view: View, limits: Limits, token: str) -> tuple[Record | None, str]:
    """Members that do not reach each other stay together."""
    return NEXT_GENERATION(replace(view, reports={id: replace(one, lost=()) for id, one in view.reports.items()}), limits, token)


def all_welcome(joiners: Iterable[Joiner], stay: Sequence[Member], limits: Limits) -> list[Member]:
    """Joiners are let in though they do not reach everybody."""
    return [one.member for one in joiners][: max(0, limits.most - len(stay))]


def crowd(joiners: Iterable[Joiner], stay: Sequence[Member], limits: Limits) -> list[Member]:
    """`most` does not count."""
    return NEWCOMERS(joiners, stay, replace(limits, most=99))


class Deaf(Protocol):
    """It goes on when others say that the generation is over."""

    def heard(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        return [] if message["kind"] == "over" else super().heard(id, message, now_s)


class Forgetful(Protocol):
    """Who is dead for good is not told to the others."""

    def heard(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        return super().heard(id, {**message, "dead": {}}, now_s)


class Belated(Protocol):
    """A report of an earlier generation counts for this one."""

    def heard(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        late = message["kind"] in ("left", "over")
        return super().heard(id, {**message, "number": self.number} if late else message, now_s)


class Careless(Protocol):
    """Who says nothing of itself is let in."""

    def _take_joiner(self, joiner: Joiner, now_s: float) -> list[Effect]:
        self.joiners[joiner.member.id] = joiner
        return self._move_on(now_s)


class Returning(Protocol):
    """One that is left out asks to be let in again."""

    def _leave(self, why: str) -> list[Effect]:
        self.phase = "out"
        return []


class Blind(Protocol):
    """It never looks at the log."""

    def tick(self, now_s: float) -> list[Effect]:
        return [effect for effect in super().tick(now_s) if not isinstance(effect, Look)]


class Trusting(Protocol):
    """Silence means nothing."""

    def _is_silent(self, id: str) -> bool:
        return False


@dataclass
class Unforgiving(Protocol):
    """Who was silent once is gone for good."""

    grudge: frozenset[tuple[int, str]] = frozenset()

    def _is_silent(self, id: str) -> bool:
        self.grudge |= {(self.number, id)} if super()._is_silent(id) else set()
        return (self.number, id) in self.grudge


class Suspicious(Protocol):
    """It expects to hear of members that have nothing to tell it."""

    def _heeded(self) -> list[Member]:
        return list({one.id: one for one in (*super()._heeded(), *self.others)}.values())


class Mistaken(Protocol):
    """It takes over from those who show in the run folder that they live."""

    def looked(self, newest: Record | None, room: Sequence[Member], now_s: float, alive: Iterable[str] = ()) -> list[Effect]:
        return super().looked(newest, room, now_s)


class Discouraged(Protocol):
    """What the disk did not do once it is not asked for again."""

    def disk_failed(self, now_s: float) -> list[Effect]:
        return []


class Greedy(Protocol):
    """The smaller side of a cut network does not wait for the larger one."""

    @property
    def _outnumbered(self) -> bool:
        return False


class Hurried(Protocol):
    """The smaller side gives the larger one no time to find out whom it reaches."""

    def _brought(self, most: int) -> bool:
        return most == 0 and super()._brought(most)


class Hospitable(Protocol):
    """It lets in who may be out of reach."""

    def _welcome(self) -> list[Joiner]:
        return list(self.joiners.values())


class Incurious(Protocol):
    """When no group came to be, nobody finds out who does not reach whom."""

    @property
    def _fruitless(self) -> bool:
        return False


class Impatient(Protocol):
    """A start waits for nobody."""

    def __init__(self, me: Member, limits: Limits, *others: Any) -> None:
        super().__init__(me, replace(limits, expected=1), *others)


class Patient(Protocol):
    """A start waits for all, for ever."""

    def __init__(self, me: Member, limits: Limits, *others: Any) -> None:
        super().__init__(me, replace(limits, gather_s=math.inf), *others)


class Loyal(Protocol):
    """New workers wait for the old ones for ever."""

    def __init__(self, me: Member, limits: Limits, *others: Any) -> None:
        super().__init__(me, replace(limits, takeover_s=math.inf), *others)


NEXT_GENERATION, NEWCOMERS = real.next_generation, real.newcomers
BROKEN = {
    TwoWinners: "stops and a slow disk",
    Unfenced: "disk",
    hasty: "everything",
    backward: "processes",
    too_few: "processes",
    all_friends: "one link",
    all_welcome: "one link",
    crowd: "processes",
    Deaf: "processes",
    Forgetful: "wishes",
    Belated: "everything",
    Careless: "processes",
    Returning: "no agents",
    Blind: "nothing",
    Trusting: "network",
    Unforgiving: "slowness",
    Suspicious: "hosts",
    Mistaken: "network",
    Discouraged: "disk",
    Greedy: "two sides",
    Hurried: kill_then_cut,
    Hospitable: "two sides",
    Incurious: "one link",
    Impatient: "nothing",
    Patient: "hosts",
    Loyal: "hosts",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_what_is_broken_is_found_out(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of 300 histories."""
    how: dict[str, Any] = {}
    if not isinstance(broken, type):
        monkeypatch.setattr(real, "newcomers" if broken in (all_welcome, crowd) else "next_generation", broken)
    else:
        how["folder" if issubclass(broken, Folder) else "protocol"] = broken
    with pytest.raises(Violation):
        for number in range(300):
            chance, kind = random.Random(number), BROKEN[broken]
            play(some_history(chance, [kind], hosts=2, faults=FEW) if isinstance(kind, str) else kill_then_cut(chance), **how)


# What the histories do not play.


def protocol(slot: int = 0, **more: Any) -> Protocol:
    """Of worker a/SLOT; the first of those that begin, when it is 0."""
    return Protocol(member(slot), Limits(beat_s=0.5, silent_s=2.5, expected=2), lambda: "token", 0.0, **more)


def member(slot: int) -> Member:
    return Member(f"a/{slot}/x", "a", slot, slot, f"127.0.0.1:{slot + 1}")


def record(number: int, *slots: int, end: End | None = None) -> Record:
    return Record(number, "token", tuple(map(member, slots)), "a:9", 0, "", end=end)


def started(*slots: int, **more: Any) -> Protocol:
    """Worker a/0, in generation 1 with others, who are linked."""
    one = protocol(**more)
    one.ask(0.0, {"torch": "2.13"})
    one.looked(record(1, *slots), [], 0.0)
    for slot in slots[1:]:
        one.link_up(member(slot).id, 0.0)
    return one


def test_who_would_have_other_bits_is_refused() -> None:
    one = started(0)
    join = {"kind": "join", "number": 1, "member": vars(member(1)), "facts": {"torch": "2.11"}, "reaches": ["a/0/x"]}
    one.link_up("a/1/x", 1.0)
    (refusal,) = one.heard("a/1/x", join, 1.0)
    assert isinstance(refusal, Send) and refusal.message["kind"] == "refused" and "'2.11' there and '2.13' here" in refusal.message["why"]
    other = protocol(1)
    other.ask(0.0, {"torch": "2.11"})
    assert other.heard("a/0/x", refusal.message, 1.0) == [Leave(refusal.message["why"])]


def test_who_was_started_with_another_run_is_refused_with_what_differs() -> None:
    one = started(0)
    one.know({"torch": "2.13", "run steps": "80"}, 0.5)
    one.link_up("a/1/x", 1.0)
    join = {"kind": "join", "number": 1, "member": vars(member(1)), "facts": {"torch": "2.13", "run steps": "40"}, "reaches": ["a/0/x"]}
    (refusal,) = one.heard("a/1/x", join, 1.0)
    assert isinstance(refusal, Send)
    assert refusal.message["why"] == "it was started with another run: run steps is '40' there and '80' here (there: a/1, here: a/0)"
    (unset,) = one.heard("a/1/x", {**join, "facts": {"torch": "2.13", "run steps": "80", "--rows": "5"}}, 1.0)
    assert isinstance(unset, Send) and "--rows is '5' there and not set here" in unset.message["why"]


def test_who_stands_by_gets_ready_before_it_is_let_in() -> None:
    one, other = protocol(), protocol(1)
    one.ask(0.0, {})
    one.looked(record(1, 0), [], 0.0)
    other.ask(0.0, {})
    other.looked(record(1, 0), [member(0)], 0.0)
    one.link_up("a/1/x", 0.0)
    asks = [effect for effect in other.link_up("a/0/x", 0.0) if isinstance(effect, Send)]
    assert one.heard("a/1/x", asks[0].message, 0.5) == [] and one.joiners, "as long as nobody is at work it may still begin with them"
    (told,) = one.know({"torch": "2.13"}, 1.0)
    assert isinstance(told, Send) and told.message == {"kind": "prepare"} and one.waiting == 0
    assert other.heard("a/0/x", told.message, 1.0) == [Prepare()] and other.heard("a/0/x", told.message, 1.1) == []
    other.ask(5.0, {"torch": "2.13"}, joins=True)
    (joins,) = [effect for effect in other.looked(None, [], 5.0) if isinstance(effect, Send)]
    one.heard("a/1/x", joins.message, 5.0)
    assert one.waiting == 1


def test_nobody_joins_after_the_doors_are_closed() -> None:
    one = started(0)
    one.link_up("a/1/x", 1.0)
    one.heard("a/1/x", {"kind": "join", "number": 1, "member": vars(member(1)), "facts": {"torch": "2.13"}, "reaches": ["a/0/x"]}, 1.0)
    assert one.waiting == 1
    one.close_doors()
    assert one.waiting == 0


@pytest.mark.parametrize(("after", "leaves"), [(0, True), (2, False)])
def test_the_end_of_the_run_is_for_its_workers_and_not_for_those_who_start_it_again(after: int, leaves: bool) -> None:
    end = End(0, "done")
    assert started(0, 1, after=after).looked(record(2, end=end), [], 1.0)[-1] == Leave("the run has ended", end=end)
    new = protocol(after=after)
    new.ask(0.0, {})
    assert (Leave("the run has ended", end=end) in new.looked(record(2, end=end), [], 1.0)) is leaves


def test_who_was_stopped_does_not_blame_the_others() -> None:
    one = started(0, 1, 2)
    for tick in range(1, 10):
        one.tick(tick * 0.2)
    assert not any(isinstance(effect, Cut) for effect in one.tick(100.0))
    assert one.hub() == member(0) and not one.over


def test_the_group_is_formed_anew_with_the_same_members_when_nobody_is_to_blame() -> None:
    one = started(0, 1)
    cut, told = one.break_up("it does not move", 1.0)
    assert cut == Cut("it does not move") and isinstance(told, Send) and told.message["kind"] == "over"
    left = {"kind": "left", "number": 1, "step": 7, "leaving": False, "why": "cut", "lost": [], "dead": {}, "doubts": True}
    one.heard("a/1/x", left, 1.0)
    (proposal,) = one.left(Report(1, 7, why="cut"), 1.0)
    assert isinstance(proposal, Propose) and proposal.record.members == (member(0), member(1)) and proposal.record.step == 7


def test_of_a_group_that_does_not_move_those_go_on_who_reach_each_other() -> None:
    one = started(0, 1, 2)
    one.break_up("it does not move", 1.0)
    told = {"kind": "left", "number": 1, "step": 7, "leaving": False, "why": "cut", "dead": {}, "doubts": True}
    one.heard("a/1/x", {**told, "lost": ["a/2/x"]}, 1.0)
    one.heard("a/2/x", {**told, "lost": ["a/1/x"]}, 1.0)
    (proposal,) = one.left(Report(1, 7, why="cut"), 1.0)
    assert isinstance(proposal, Propose) and proposal.record.members == (member(0), member(1)) and proposal.record.step == 7
    other = protocol(1)
    other.ask(0.0, {})
    other.looked(record(1, 0, 1, 2), [], 0.0)
    other.link_up("a/0/x", 0.0)
    other.heard("a/0/x", {"kind": "over", "number": 1, "why": "it does not move", "dead": {}, "doubts": True}, 1.0)
    assert Connect(member(2)) in other.left(Report(1, 7, why="cut"), 1.0), "it finds out whom it reaches before it says so"


def test_the_last_one_that_wants_to_leave_stays_until_it_has_handed_over_its_state() -> None:
    reports = {"a/0/x": Report(1, 7, leaving=True)}
    alone, why = NEXT_GENERATION(View(record(1, 0), reports, {}, []), Limits(), "token")
    assert alone is None and why == "nobody would stay"
    joiner = Joiner(member(1), {}, frozenset({"a/0/x"}))
    both, _ = NEXT_GENERATION(View(record(1, 0), reports, {}, [joiner]), Limits(), "token")
    assert both and both.members == (member(0), member(1)) and both.step == 7


def test_a_reason_names_who_is_out_and_who_has_joined() -> None:
    view = View(record(3, 0, 1), {"a/0/x": Report(3, 5)}, {"a/1/x": "it has ended"}, [Joiner(member(2), {}, frozenset({"a/0/x"}))])
    found, reason = NEXT_GENERATION(view, Limits(), "token")
    assert found and found.out == (Out("a/1/x", "it has ended"),) and reason == "a/1: it has ended; a/2 joined"


# Stopping.


def below_least(stops: str = "") -> tuple[Protocol, list[Effect]]:
    """The hub of two when the other one has ended and `least` is 2, and what it does as soon as its main thread has left."""
    one = started(0, 1)
    one.limits = replace(one.limits, least=2)
    if stops:
        one.stop(stops, 0.5)
    one.link_down("a/1/x", 1.0)
    one.connect_failed("a/1/x", True, 1.0)
    return one, one.left(Report(1, 7, why="lost"), 1.0)


@pytest.mark.parametrize("before", [False, True])
def test_a_wish_to_stop_lifts_the_least_number_of_workers(before: bool) -> None:
    one, did = below_least("SIGTERM" if before else "")
    if not before:
        assert did == [Say("1 workers are there, training waits for 2")]
        did = one.stop("SIGTERM", 2.0)
    (proposal,) = did
    assert isinstance(proposal, Propose) and proposal.record.members == (member(0),) and proposal.record.step == 7
    assert proposal.record.end is None and one.stops == "SIGTERM"


@pytest.mark.parametrize("stops", ["", "SIGINT"])
def test_a_run_that_stops_still_takes_a_whole_replica(stops: str) -> None:
    limits = Limits(least=4, unit=2)
    view = View(record(1, 0, 1, 2, 3), {f"a/{slot}/x": Report(1, 7) for slot in (0, 1, 2)}, {"a/3/x": "it has ended"}, [])
    found, _ = NEXT_GENERATION(view, limits.to_stop if stops else limits, "token")
    assert (found and found.members) == ((member(0), member(1)) if stops else None)


def test_the_wish_reaches_the_hub_from_a_member_that_has_left() -> None:
    other = protocol(1)
    other.ask(0.0, {})
    other.looked(record(1, 0, 1, 2), [], 0.0)
    other.link_up("a/0/x", 0.0)
    other.heard("a/0/x", {"kind": "over", "number": 1, "why": "lost", "dead": {"a/2/x": "it has ended"}, "doubts": False}, 1.0)
    other.left(Report(1, 7, why="lost"), 1.0)
    (told,) = other.stop("SIGTERM", 2.0)
    assert isinstance(told, Send) and told.id == "a/0/x" and told.message["kind"] == "left" and told.message["stops"] == "SIGTERM"
    hub = started(0, 1, 2)
    hub.limits = replace(hub.limits, least=3)
    hub.dead["a/2/x"] = "it has ended"
    hub.left(Report(1, 7, why="lost"), 1.0)
    (proposal,) = [effect for effect in hub.heard("a/1/x", told.message, 2.0) if isinstance(effect, Propose)]
    assert proposal.record.members == (member(0), member(1)) and proposal.record.step == 7


def test_the_wish_of_one_that_stands_by_reaches_the_members() -> None:
    other = protocol(1)
    other.ask(0.0, {})
    other.looked(record(1, 0), [], 0.0)
    other.link_up("a/0/x", 0.0)
    (told,) = other.stop("SIGTERM", 1.0)
    assert isinstance(told, Send) and told.message["kind"] == "join"
    hub = started(0)
    hub.link_up("a/1/x", 1.0)
    hub.heard("a/1/x", told.message, 1.0)
    assert hub.stops == "SIGTERM" and hub.phase == "in" and not hub.over, "the vote of the next step has it"


@pytest.mark.parametrize(("stops", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_run_that_is_stopped_before_it_begins_ends_without_a_generation(stops: str, code: int) -> None:
    one = protocol()
    one.ask(0.0, {})
    one.looked(None, [], 0.1)
    (proposal,) = one.stop(stops, 1.0)
    assert isinstance(proposal, Propose) and proposal.record.members == () and proposal.record.number == 1
    assert proposal.record.end and proposal.record.end.code == code
    assert one.stop(stops, 1.1) == [], "it is on its way"
    assert one.proposed(proposal.record, 1.2)[-1] == Leave("the run has ended", end=proposal.record.end)


def test_a_start_says_for_how_many_it_waits_and_only_when_that_changes() -> None:
    one = protocol()
    one.limits = replace(one.limits, expected=3, least=2)
    one.ask(0.0, {})
    one.looked(None, [], 0.0)
    said = [(tick, effect.text) for tick in range(100) for effect in one.tick(tick * 0.2) if isinstance(effect, Say)]
    assert [text for _, text in said] == ["1 worker is there (a/0); training begins with 2"] and said[0][0] >= 12
    one.link_up("a/1/x", 20.0)
    join = {"kind": "join", "number": 0, "member": vars(member(1)), "facts": {}, "reaches": []}
    (effect,) = [effect for effect in one.heard("a/1/x", join, 20.0) if isinstance(effect, Say)]
    assert effect.text == "2 workers are there (a/0, a/1), 3 are expected; training begins without the others after 30 s"
