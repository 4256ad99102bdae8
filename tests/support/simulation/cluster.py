"""Hosts with workers, and what befalls them: a history of faults, played event by event in one process, without waiting.

The protocol is the real one (lockstep/elastic/protocol.py). What surrounds it is at least as unkind as the real thing:

    clocks   each worker has its own, off by anything and wrong by up to 1%
    links    keep their order; what is cut off waits, and is lost with the link when that breaks
    a kill   is told to the peers by the kernel; a host that loses power tells nobody
    a stop   holds both threads of a worker; its kernel goes on accepting
    disk     takes a random time, does what it was asked though the worker may have died, and may report a failure of what it did
    groups   form when all are there and reach each other; their collectives reach some and not the others (worker.py)
    agents   start a worker anew, and kill those that the newest generation goes on without

`play` raises Violation when a promise (promises.py) does not hold; all is decided by the history and its seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from support.simulation.promises import STARTED_S, Promises, Violation, check
from support.simulation.surroundings import Clock, Folder, Host, Network, State
from support.simulation.worker import FORM_S, Group, Worker

from lockstep.elastic.generation_log import Record
from lockstep.elastic.protocol import Limits, Look, Protocol, Send

LIMITS = Limits(beat_s=0.5, silent_s=2.5, look_s=0.25, gather_s=4.0, takeover_s=6.0)
# When nothing more happens all are members and train after, at most: a start (2 s), the wait for an old generation that does not answer,
# the wait for all to come, and three times the wait for one that is silent and for a group that does not form.
SETTLE_S = 2 + LIMITS.takeover_s + LIMITS.gather_s + 3 * (LIMITS.silent_s + FORM_S)
STAY_S = 2.0  # so long all must be well
STAY_APART_S = LIMITS.takeover_s + LIMITS.gather_s + 4  # so long when some can never reach the others: they must not disturb them

SEATS = ("kill", "stop", "reset", "dawdle", "evict", "drain")  # what befalls workers
HOSTS = ("power", "cut", "drop", "part", "lag", "crawl", "slow disk", "bad disk", "agent")  # what befalls hosts
LASTING = ("power", "cut", "part", "drain")  # what may be for good
HARMLESS = ("reset", "dawdle", "lag", "slow disk", "bad disk", "agent")  # what must not cost anybody its place


@dataclass(frozen=True)
class Fault:
    """What happens, when, to which seats or hosts (modulo how many there are), and for how long (None: for good).

    kill, stop    SIGKILL; SIGSTOP and SIGCONT
    reset         all connections break; dawdle: the main thread is slow to leave a group
    evict, drain  the vote names it, as its state differs; its host is about to be taken away
    power, agent  the host is off; its agent is dead
    cut, drop     no way between these hosts and all others; or only none from these to the others
    part          no way between two hosts that others still reach
    lag, crawl    messages from and to these hosts take longer, by less or by more than makes one silent
    slow disk, bad disk   an answer takes seconds; or is that it has failed
    """

    kind: str
    at_s: float
    whom: frozenset[int]
    lasts_s: float | None


@dataclass(frozen=True)
class History:
    """A cluster and what befalls it; `seed` decides all that is left to chance. `unit`: workers of a replica."""

    seed: int
    hosts: int
    slots: int
    least: int
    most: int
    faults: tuple[Fault, ...]
    unit: int = 1


class Cluster:
    """All there is."""

    def __init__(self, history: History, protocol: type[Protocol] = Protocol, folder: type[Folder] = Folder) -> None:
        self.history, self.protocol, self.folder = history, protocol, folder()
        self.clock = Clock(history.seed)
        self.network = Network(self.clock)
        self.promises = Promises(self)
        self.limits = replace(LIMITS, expected=history.hosts * history.slots, least=history.least, most=history.most, unit=history.unit)
        self.hosts = [Host("abcdefgh"[index], [None] * history.slots) for index in range(history.hosts)]
        self.workers: dict[str, Worker] = {}  # id -> every worker that ever was
        self.groups: dict[str, Group] = {}  # token -> group
        self.stores: dict[str, Worker] = {}  # token -> who proposed it, and has the store over which its group forms
        self.drained: set[tuple[str, int]] = set()  # (host, slot)
        self.calm_s = self.settled_s = 0.0
        self.story: list[str] = []
        self.tokens = 0
        for host in self.hosts:
            self.clock.at(self.clock.between(0, 2), lambda host=host: self.agent(host))  # type: ignore[misc]
        for fault in history.faults:
            self._plan(fault)

    def play(self) -> None:
        """Until all is well, and stays so for a while, after the last fault."""
        apart = any(fault.lasts_s is None and fault.kind in ("cut", "part") for fault in self.history.faults)
        well_s, next_s = None, self.calm_s
        while True:
            self.clock.step()
            if self.clock.now_s < next_s:
                continue
            next_s, missing = self.clock.now_s + 0.25, self.promises.missing()
            if missing:
                well_s = None
                check(self.clock.now_s < self.calm_s + SETTLE_S, f"{SETTLE_S:g} s after the last fault: {missing}")
            elif well_s is None:
                well_s = self.clock.now_s
            elif self.clock.now_s > well_s + (STAY_APART_S if apart else STAY_S):
                break
        self.settled_s = well_s - self.calm_s
        if all(fault.kind in HARMLESS and fault.at_s >= STARTED_S for fault in self.history.faults):
            self.promises.at_rest()

    def note(self, who: str, what: object) -> None:
        """For whoever reads the story of a violation."""
        if not isinstance(what, Look) and not (isinstance(what, Send) and what.message["kind"] == "beat"):
            self.story.append(f"{self.clock.now_s:7.3f} {who:8} {what}")

    def token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:04d}"

    # -- what workers share -------------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Worker]:
        return [one for host in self.hosts for one in host.seats if one and one.alive]

    @property
    def chairs(self) -> int:
        """How many workers there would be if all had started."""
        return sum((host.name, slot) not in self.drained for host in self.hosts if host.on for slot in range(self.history.slots))

    def agent(self, host: Host) -> None:
        """It kills the workers that the newest generation goes on without, and fills empty seats."""
        self.clock.after(self.clock.between(0.2, 0.5), lambda: self.agent(host))
        if not host.on or host.ills["agent"]:
            return
        newest = self.folder.newest
        for out in newest.out if newest and not host.ills["bad disk"] else ():
            if self.workers[out.id].host is host:
                self.workers[out.id].end()
        for slot, worker in enumerate(host.seats):
            if (worker is None or not worker.alive) and (host.name, slot) not in self.drained:
                host.seats[slot] = worker = Worker(self, host, slot, len(self.workers) + 1)
                self.workers[worker.me.id] = worker

    def gather(self, group: Group) -> None:
        """The group forms when all are there and reach each other and the store."""
        there, store = group.workers, self.stores[group.record.token]
        if group.formed or group.lost or len(there) < len(group.record.members) or not store.alive:
            return
        if all(self.network.joined(one.host, other.host) for one in there for other in (*there, store)):
            group.formed = True
            for one in there:
                one.main.after(self.clock.between(0.01, 0.1), one.main.begin)
        else:
            self.clock.after(0.2, lambda: self.gather(group))

    def propose(self, worker: Worker, record: Record) -> Record:
        """The record of that number that wins."""
        self.stores[record.token] = worker
        known = len(self.folder.log)
        winner = self.folder.propose(record)
        if len(self.folder.log) > known:
            self.note("----", f"{record.number} {[one.id for one in record.members]} step {record.step}: {record.reason}")
            self.promises.publish(record)
        return winner

    def save(self, number: int, state: State) -> None:
        """A checkpoint, by a member of generation `number`."""
        if self.folder.save(number, state):
            self.promises.accept(number, state)

    # -- faults -------------------------------------------------------------------------------------------------------------

    def _plan(self, fault: Fault) -> None:
        lasts_s = fault.lasts_s if fault.lasts_s is not None or fault.kind in LASTING else 3.0
        self.calm_s = max(self.calm_s, fault.at_s + (lasts_s or 0))
        self.clock.at(fault.at_s, lambda: self._befall(fault, True))
        if lasts_s is not None:
            self.clock.at(fault.at_s + lasts_s, lambda: self._befall(fault, False))

    def _befall(self, fault: Fault, begins: bool) -> None:
        self.note("****", f"{fault.kind} {sorted(fault.whom)} {'begins' if begins else 'ends'}")
        if fault.kind in SEATS:
            for index in sorted({index % (self.history.hosts * self.history.slots) for index in fault.whom}):
                self._befall_seat(fault.kind, self.hosts[index // self.history.slots], index % self.history.slots, begins)
        else:
            self._befall_hosts(fault.kind, [self.hosts[index] for index in sorted({it % len(self.hosts) for it in fault.whom})], begins)

    def _befall_seat(self, kind: str, host: Host, slot: int, begins: bool) -> None:
        worker, place = host.seats[slot], (host.name, slot)
        if kind == "drain":
            (self.drained.add if begins else self.drained.discard)(place)
        if worker is None or not worker.alive:
            return
        if kind not in HARMLESS:
            worker.trouble.change(begins, self.clock.now_s)
        match kind, begins:
            case "kill", True:
                worker.end()
            case "stop", True:
                worker.stopped = True
            case "stop", False:
                worker.resume()
            case "reset", True:
                worker.reset()
            case "dawdle", _:
                worker.main.slow = begins
            case "drain", True:
                worker.main.drains = True
                self.clock.after(5, worker.end)
            case "evict", _:
                for one in self.living:
                    one.main.evicts = worker.me.id if begins else ""

    def _befall_hosts(self, kind: str, hosts: Sequence[Host], begins: bool) -> None:
        match kind:
            case "cut" | "drop" | "part":
                others = [host for host in self.hosts if host not in hosts]
                pairs = [(hosts[0], hosts[-1])] if kind == "part" else [(one, other) for one in hosts for other in others]
                for one, other in [(one, other) for one, other in pairs if one is not other]:
                    for way in [(one.name, other.name), (other.name, one.name)][: 1 if kind == "drop" else 2]:
                        (self.network.block if begins else self.network.unblock)(way)
                    one.trouble.change(begins, self.clock.now_s)
                    other.trouble.change(begins, self.clock.now_s)
            case _:
                for host in hosts:
                    host.ills[kind] += 1 if begins else -1
                for host in hosts if kind == "power" else self.hosts if kind == "crawl" else ():
                    host.trouble.change(begins, self.clock.now_s)
                for worker in [worker for host in hosts for worker in host.seats if worker and not host.on]:
                    worker.end(quietly=True)


def play(history: History, protocol: type[Protocol] = Protocol, folder: type[Folder] = Folder) -> Cluster:
    """A history, played to its end. Violation, with its story, when a promise does not hold."""
    cluster = Cluster(history, protocol, folder)
    try:
        cluster.play()
    except Violation as violation:
        violation.add_note("\n".join(cluster.story[-200:]))
        raise
    return cluster
