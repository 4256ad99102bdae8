"""What must hold in every history, at every moment, and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.simulation.surroundings import State
from support.simulation.worker import Main, Worker

from lockstep.elastic.generation_log import Record

STARTED_S = 8.0  # by then all have started when nothing befell them
SEEN_S = 1.5  # two beats, a message and an answer of the disk

if TYPE_CHECKING:
    from support.simulation.cluster import Cluster


class Violation(AssertionError):
    """A promise that did not hold."""


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


class Promises:
    """They see everything: `cluster` is the truth, of which no worker knows more than a part."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.made: dict[int, State] = {}  # step -> what it made of the weights, whoever committed it first
        self.began_s: list[float] = []  # when each generation was published
        self.committed_s: dict[int, float] = {}  # generation -> when it last committed a step

    def publish(self, record: Record) -> None:
        """The log has a new record."""
        log, workers, number = self.cluster.folder.log, self.cluster.workers, record.number
        self.began_s.append(self.cluster.clock.now_s)
        ids, limits = [one.id for one in record.members], self.cluster.limits
        check(number == len(log), f"generation {number} follows generation {len(log) - 1}")
        check(number <= 5 * (2 + len(self.cluster.history.faults)), f"generation {number} after {self.cluster.history.faults}")
        check(len(set(ids)) == len(ids), f"generation {number} has a member twice: {ids}")
        begin_anew = limits.unit > 1 and not ids and number > 1  # no replica is whole
        check(begin_anew or limits.least <= len(ids) <= limits.most, f"generation {number} has {len(ids)} members")
        check(len(ids) % limits.unit == 0, f"generation {number} has {len(ids)} members, replicas of {limits.unit}")
        before = {one.id for one in log[-2].members} if number > 1 else set()
        if ids:
            stay = [workers[id] for id in ids if id in before]
            self._begins_where_they_are(record, stay)
            at_work = any(one.main.state for one in stay)
            unchecked = [id for id in ids if id not in before and not workers[id].protocol.facts]
            check(not (at_work and unchecked), f"generation {number} lets in {unchecked}, of whom nothing is known")
        check({one.id for one in record.out} == before - set(ids), f"generation {number} names {record.out}, not {before - set(ids)}")
        order = [one.id for one in log[-2].members] if number > 1 else []
        for first in range(0, len(order), limits.unit):
            replica = [workers[id] for id in order[first : first + limits.unit]]
            kept = [one for one in replica if one.me.id in ids]
            check(kept in ([], replica), f"generation {number} keeps a part of the replica {[one.me.id for one in replica]}")
            well = all(self._was_well(one) for one in replica)
            check(bool(kept) or not well, f"generation {number} goes on without {[one.me.id for one in replica]}, well: {record.out}")
        self._larger_side_goes_on(record, log[-2] if number > 1 else None)
        self._lets_in_who_is_there(record, before)

    def _was_well(self, one: Worker) -> bool:
        """Whether nothing has befallen it in the generation before."""
        return one.alive and not one.main.drains and not any(it.since(self.began_s[-2]) for it in (one.trouble, one.host.trouble))

    def _cut_s(self) -> float | None:
        """Since when the network is cut in two, where nothing else happens but workers that were killed before."""
        faults, now_s = self.cluster.history.faults, self.cluster.clock.now_s
        cuts = [fault for fault in faults if fault.kind == "cut"]
        if len(cuts) != 1 or cuts[0].at_s < STARTED_S or cuts[0].at_s + (cuts[0].lasts_s or now_s) < now_s:
            return None
        alone = all(fault.kind == "kill" and fault.at_s < cuts[0].at_s for fault in faults if fault not in cuts)
        return cuts[0].at_s if alone else None

    def _lets_in_who_is_there(self, record: Record, before: set[str]) -> None:
        """Nobody is let in who has long been out of reach."""
        workers, network = self.cluster.workers, self.cluster.network
        proposer, since_s = self.cluster.stores[record.token], self.cluster.clock.now_s - SEEN_S
        cut_s = self._cut_s()
        for one in [workers[it.id] for it in record.members if it.id not in before] if cut_s else []:
            away = not network.joined(one.host, proposer.host) and cut_s < since_s
            check(not away, f"generation {record.number} lets in {one.me.id}, which {proposer.me.id} does not reach")

    def _larger_side_goes_on(self, record: Record, before: Record | None) -> None:
        """Where a network is cut in two the larger side goes on, or of equal ones the leader's, if they are enough."""
        if before is None or not before.members or self.cluster.limits.unit > 1 or not self._cut_s():
            return
        there = [one.id for one in before.members if self.cluster.workers[one.id].alive]
        stay = [id for id in there if record.rank_of(id) is not None]
        larger = 2 * len(stay) + (there[:1] == stay[:1]) > len(there)
        enough = len(there) - len(stay) >= self.cluster.limits.least
        check(larger or not enough, f"of the sides of {there} the smaller one went on: {stay}")

    def _begins_where_they_are(self, record: Record, stay: list[Worker]) -> None:
        """Who stays has left the generation before, for good; the new one begins at the largest step that one of them has committed; each
        of the others is there, or one behind and has voted, or has no state."""
        right = max((one.main.state[0] if one.main.state else -1 for one in stay), default=0)
        check(record.step == right, f"generation {record.number} begins at {record.step}, its survivors are at {right}")
        for one in stay:
            main, left = one.main, one.main.left
            check(main.group is None and left is not None, f"{one.me.id} is in generation {record.number} and has not left the one before")
            check(left is not None and left.number == record.number - 1, f"{one.me.id} has left {left}, not {record.number - 1}")
            behind = record.step - main.state[0] if main.state else 0
            check(behind == 0 or (behind == 1 and main.ready is not None), f"{one.me.id} is {behind} steps behind")

    def form(self, main: Main, record: Record) -> None:
        """A worker is to form the group of a generation: the one of that number, and it is in no other."""
        log = self.cluster.folder.log
        check(record == log[record.number - 1], f"two generations {record.number}: {record.token} and {log[record.number - 1].token}")
        check(main.group is None, f"{main.worker.me.id} is to form generation {record.number} within another")

    def begin(self, main: Main, record: Record) -> None:
        """The group has formed, and what all agreed on is committed."""
        steps = main.state[0] if main.state else record.step
        check(steps == record.step, f"{main.worker.me.id} has {steps} steps, generation {record.number} begins at {record.step}")

    def equal(self, record: Record, states: set[State]) -> State:
        """All members' states are one."""
        check(len(states) == 1, f"the members of generation {record.number} hold {states}")
        (state,) = states
        return state

    def commit(self, main: Main, record: Record, state: State) -> None:
        """A worker commits a step: the next one, with what everybody else made of it. One that is followed by another generation commits no
        more than what all had agreed on; and since it is fenced nothing of that outlives it (`accept`)."""
        me, (step, content), log = main.worker.me.id, state, self.cluster.folder.log
        check(main.state is not None and step == main.state[0] + 1, f"{me} goes from {main.state} to {state}")
        check(main.worker.alive and main.group is not None, f"{me} is in no group and commits step {step}")
        check(self.made.setdefault(step, state) == state, f"step {step} is committed twice: {self.made[step][1]}, {content}")
        if len(log) > record.number:
            survive = {one.id for one in record.members} & {one.id for one in log[record.number].members}
            allowed = not survive or step <= log[record.number].step + 1
            check(allowed, f"{me} commits step {step} in {record.number}; {record.number + 1} began at {log[record.number].step}")
        self.committed_s[record.number] = self.cluster.clock.now_s

    def accept(self, number: int, state: State) -> None:
        """A checkpoint counts: of the newest generation, with what everybody made of its step."""
        newest = len(self.cluster.folder.log)
        check(number == newest, f"a checkpoint of generation {number} counts, the newest is {newest}")
        check(self.made[state[0]] == state, f"the checkpoint of step {state[0]} is not what was committed")

    def at_rest(self) -> None:
        """Nothing happened that must cost anybody its place: then there is one generation."""
        log = self.cluster.folder.log
        check(len(log) == 1, f"nothing happened, and there are {len(log)} generations: {[one.reason for one in log]}")

    def missing(self) -> str:
        """What is missing until all who can be are members of the newest generation, which trains; "" when nothing is."""
        cluster, newest = self.cluster, self.cluster.folder.newest
        living = cluster.living
        if len(living) < cluster.chairs or any(one.main.drains for one in living):
            return "workers are about to start, or to leave"
        if max((len(self._friends(one, living)) for one in living), default=0) < cluster.limits.least:
            return ""  # too few reach each other
        if newest is None or not newest.members:
            return "nobody is in a generation"
        if behind := [one.me.id for one in living if one.protocol.number != newest.number]:
            return f"{behind} do not know of generation {newest.number}"
        members = [one for one in living if newest.rank_of(one.me.id) is not None]
        if len(members) < len(newest.members):
            return f"members of generation {newest.number} are gone"
        if any(one.main.group is None or one.main.group.record.token != newest.token for one in members):
            return f"generation {newest.number} is not at work"
        if self.committed_s.get(newest.number, -1.0) < max(cluster.clock.now_s - 1, cluster.calm_s):
            return f"generation {newest.number} commits nothing"
        able = [one for one in living if one not in members and all(cluster.network.joined(one.host, other.host) for other in members)]
        if len(able) >= cluster.limits.unit and len(members) + cluster.limits.unit <= cluster.limits.most:
            return f"{[one.me.id for one in able]} stand by though there is room"
        return ""

    def _friends(self, first: Worker, living: list[Worker]) -> list[Worker]:
        """Some that all reach each other, `first` among them."""
        friends = [first]
        for one in living:
            if one is not first and all(self.cluster.network.joined(one.host, other.host) for other in friends):
                friends.append(one)
        return friends
