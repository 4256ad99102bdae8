"""Invariants that must hold in every history, at every moment and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.simulation.environment import State
from support.simulation.worker import MainThread, Worker

from lockstep.elastic.generation_log import Generation

STARTED_S = 8.0  # by then all workers have started, without faults
SEEN_S = 1.5  # two heartbeats, a message and a disk request

if TYPE_CHECKING:
    from support.simulation.cluster import Cluster


class Violation(AssertionError):
    """An invariant did not hold."""


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


class Invariants:
    """Global checks: unlike any worker, they see the whole cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.committed: dict[int, State] = {}  # step -> state of its first commit
        self.published_s: list[float] = []  # publication times of the generations
        self.committed_s: dict[int, float] = {}  # generation -> time of its last commit

    def publish(self, generation: Generation, proposer: str) -> None:
        """Check a new generation in the log."""
        log, workers, number = self.cluster.folder.log, self.cluster.workers, generation.number
        self.published_s.append(self.cluster.clock.now_s)
        ids, limits = [member.id for member in generation.members], self.cluster.limits
        check(number == len(log), f"generation {number} follows generation {len(log) - 1}")
        check(
            number <= 5 * (2 + len(self.cluster.history.faults)),
            f"generation {number} after {self.cluster.history.faults}",
        )
        check(
            not ids or proposer in ids,
            f"generation {number}: {proposer}, which holds its store, is none of its members {ids}",
        )
        check(len(set(ids)) == len(ids), f"generation {number} has a member twice: {ids}")
        restart = limits.replica_size > 1 and not ids and number > 1  # no replica is whole
        check(
            restart or limits.min_workers <= len(ids) <= limits.max_workers,
            f"generation {number} has {len(ids)} members",
        )
        check(
            len(ids) % limits.replica_size == 0,
            f"generation {number} has {len(ids)} members, replicas of {limits.replica_size}",
        )
        before = {member.id for member in log[-2].members} if number > 1 else set()
        if ids:
            stay = [workers[id] for id in ids if id in before]
            self._starts_at_their_step(generation, stay)
            at_work = any(worker.main.state for worker in stay)
            unchecked = [
                id for id in ids if id not in before and not workers[id].protocol.fingerprint
            ]
            check(
                not (at_work and unchecked),
                f"generation {number} lets in {unchecked}, without a checked fingerprint",
            )
        check(
            {removed.id for removed in generation.out} == before - set(ids),
            f"generation {number} names {generation.out}, not {before - set(ids)}",
        )
        for first in range(0, len(ids) * limits.one_host, limits.replica_size):
            replica_hosts = {
                member.host for member in generation.members[first : first + limits.replica_size]
            }
            check(len(replica_hosts) == 1, f"generation {number} has a replica on {replica_hosts}")
        order = [member.id for member in log[-2].members] if number > 1 else []
        for first in range(0, len(order), limits.replica_size):
            replica = [workers[id] for id in order[first : first + limits.replica_size]]
            kept = [worker for worker in replica if worker.me.id in ids]
            check(
                kept in ([], replica),
                f"generation {number} splits the replica {[worker.me.id for worker in replica]}",
            )
            well = all(self._had_no_fault(worker) for worker in replica)
            check(
                bool(kept) or not well,
                f"generation {number} removed {[worker.me.id for worker in replica]}, which had no fault: {generation.out}",
            )
        self._larger_side_continues(generation, log[-2] if number > 1 else None)
        self._joiners_are_reachable(generation, before)

    def _had_no_fault(self, worker: Worker) -> bool:
        """Whether a worker had no fault in the previous generation."""
        return (
            worker.alive
            and not worker.main.drains
            and not any(
                trouble.since(self.published_s[-2])
                for trouble in (worker.trouble, worker.host.trouble)
            )
        )

    def _cut_s(self) -> float | None:
        """Return when the network was cut in two, if that and earlier kills are the only faults."""
        faults, now_s = self.cluster.history.faults, self.cluster.clock.now_s
        cuts = [fault for fault in faults if fault.kind == "cut"]
        if (
            len(cuts) != 1
            or cuts[0].at_s < STARTED_S
            or cuts[0].at_s + (cuts[0].duration_s or now_s) < now_s
        ):
            return None
        alone = all(
            fault.kind == "kill" and fault.at_s < cuts[0].at_s
            for fault in faults
            if fault not in cuts
        )
        return cuts[0].at_s if alone else None

    def _joiners_are_reachable(self, generation: Generation, before: set[str]) -> None:
        """No admitted joiner has been unreachable for long."""
        workers, network = self.cluster.workers, self.cluster.network
        proposer, since_s = self.cluster.stores[generation.token], self.cluster.clock.now_s - SEEN_S
        cut_s = self._cut_s()
        for worker in (
            [workers[member.id] for member in generation.members if member.id not in before]
            if cut_s
            else []
        ):
            away = not network.both_ways_open(worker.host, proposer.host) and cut_s < since_s
            check(
                not away,
                f"generation {generation.number} lets in {worker.me.id}, which {proposer.me.id} does not reach",
            )

    def _larger_side_continues(self, generation: Generation, before: Generation | None) -> None:
        """Of a cut network the larger side continues, or of halves the leader's, if enough."""
        if (
            before is None
            or not before.members
            or self.cluster.limits.replica_size > 1
            or not self._cut_s()
        ):
            return
        alive = [member.id for member in before.members if self.cluster.workers[member.id].alive]
        stay = [id for id in alive if generation.rank_of(id) is not None]
        larger = 2 * len(stay) + (alive[:1] == stay[:1]) > len(alive)
        enough = len(alive) - len(stay) >= self.cluster.limits.min_workers
        check(larger or not enough, f"of the sides of {alive} the smaller one continued: {stay}")

    def _starts_at_their_step(self, generation: Generation, stay: list[Worker]) -> None:
        """Staying members have left the old generation; the new one starts at their largest step.

        Each of the others is at that step, or one behind and has voted, or has no state.
        """
        right = max(
            (worker.main.state[0] if worker.main.state else -1 for worker in stay), default=0
        )
        check(
            generation.step == right,
            f"generation {generation.number} starts at {generation.step}, its survivors are at {right}",
        )
        for worker in stay:
            main, left = worker.main, worker.main.left
            check(
                main.group is None and left is not None,
                f"{worker.me.id} is in generation {generation.number} and has not left the one before",
            )
            check(
                left is not None and left.number == generation.number - 1,
                f"{worker.me.id} has left {left}, not {generation.number - 1}",
            )
            behind = generation.step - main.state[0] if main.state else 0
            check(
                behind == 0 or (behind == 1 and main.ready is not None),
                f"{worker.me.id} is {behind} steps behind",
            )

    def form(self, main: MainThread, generation: Generation) -> None:
        """A worker forms the group of the generation of that number, and is in no other group."""
        log = self.cluster.folder.log
        check(
            generation == log[generation.number - 1],
            f"two generations {generation.number}: {generation.token} and {log[generation.number - 1].token}",
        )
        check(
            main.group is None,
            f"{main.worker.me.id} forms generation {generation.number} within another",
        )

    def formed(self, main: MainThread, generation: Generation) -> None:
        """The group has formed, and every agreed step is committed."""
        steps = main.state[0] if main.state else generation.step
        check(
            steps == generation.step,
            f"{main.worker.me.id} has {steps} steps, generation {generation.number} starts at {generation.step}",
        )

    def equal(self, generation: Generation, states: set[State]) -> State:
        """All members have the same state; return it."""
        check(len(states) == 1, f"the members of generation {generation.number} hold {states}")
        (state,) = states
        return state

    def commit(self, main: MainThread, generation: Generation, state: State) -> None:
        """A worker commits the next step, with the same result as every other worker.

        After a newer generation exists it commits at most the step agreed on before; since it is
        fenced, no checkpoint of it counts (`accept`).
        """
        me, (step, content), log = main.worker.me.id, state, self.cluster.folder.log
        check(
            main.state is not None and step == main.state[0] + 1,
            f"{me} commits {state} after {main.state}",
        )
        check(
            main.worker.alive and main.group is not None,
            f"{me} is in no group and commits step {step}",
        )
        check(
            self.committed.setdefault(step, state) == state,
            f"step {step} is committed twice: {self.committed[step][1]}, {content}",
        )
        if len(log) > generation.number:
            survive = {member.id for member in generation.members} & {
                member.id for member in log[generation.number].members
            }
            allowed = not survive or step <= log[generation.number].step + 1
            check(
                allowed,
                f"{me} commits step {step} in {generation.number}; the next started at {log[generation.number].step}",
            )
        self.committed_s[generation.number] = self.cluster.clock.now_s

    def accept(self, number: int, state: State) -> None:
        """A counted checkpoint is of the newest generation and of a committed state."""
        newest = len(self.cluster.folder.log)
        check(
            number == newest, f"a checkpoint of generation {number} counts, the newest is {newest}"
        )
        check(
            self.committed[state[0]] == state,
            f"the checkpoint of step {state[0]} is not what was committed",
        )

    def at_rest(self) -> None:
        """Harmless faults alone lead to no second generation."""
        log = self.cluster.folder.log
        check(
            len(log) == 1,
            f"{len(log)} generations after harmless faults: {[generation.reason for generation in log]}",
        )

    def missing(self) -> str:
        """Return why not every worker that can train does; "" if the cluster is well."""
        cluster, newest = self.cluster, self.cluster.folder.newest
        living = cluster.living
        if len(living) < cluster.target_size or any(worker.main.drains for worker in living):
            return "workers are starting or leaving"
        if (
            max((len(self._friends(worker, living)) for worker in living), default=0)
            < cluster.limits.min_workers
        ):
            return ""  # too few workers reach each other
        if not newest.members:
            return "no worker is in a generation"
        if behind := [worker.me.id for worker in living if worker.protocol.number != newest.number]:
            return f"{behind} do not know of generation {newest.number}"
        members = [worker for worker in living if newest.rank_of(worker.me.id) is not None]
        if len(members) < len(newest.members):
            return f"members of generation {newest.number} are gone"
        if any(
            worker.main.group is None or worker.main.group.generation.token != newest.token
            for worker in members
        ):
            return f"the group of generation {newest.number} is not complete"
        if self.committed_s.get(newest.number, -1.0) < max(
            cluster.clock.now_s - 1, cluster.last_fault_end_s
        ):
            return f"generation {newest.number} commits nothing"
        reach = cluster.network.both_ways_open
        able = [
            worker
            for worker in living
            if worker not in members and all(reach(worker.host, other.host) for other in members)
        ]
        largest = max((len(self._friends(worker, able)) for worker in able), default=0)
        if (
            largest >= cluster.limits.replica_size
            and len(members) + cluster.limits.replica_size <= cluster.limits.max_workers
        ):
            return f"{[worker.me.id for worker in able]} are on standby although there is room"
        return ""

    def _friends(self, first: Worker, living: list[Worker]) -> list[Worker]:
        """Return workers that all reach each other, including `first`."""
        friends = [first]
        for worker in living:
            may_share = not self.cluster.limits.one_host or worker.host is first.host
            if (
                worker is not first
                and may_share
                and all(
                    self.cluster.network.both_ways_open(worker.host, other.host)
                    for other in friends
                )
            ):
                friends.append(worker)
        return friends
