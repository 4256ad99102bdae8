"""Discrete-event simulation: a cluster of workers under a history of faults, in one process.

The protocol is the real one (lockstep/elastic/protocol). Its environment is at least as hostile as
the real one:

    clocks   one per worker, with any offset and up to 1% drift
    links    keep their order; blocked messages wait until the link is open or breaks
    kill     the kernel tells the peers; a host without power does not
    stop     suspends both threads of a worker; its kernel still accepts connections
    disk     random latency; completes requests of dead workers; may report an error after success
    groups   form when all members reach each other; a collective may complete for some ranks only
    agents   restart workers, and kill the ones removed by the newest generation

`play` raises Violation when an invariant (invariants.py) does not hold. The history and its seed
determine everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from support.simulation.environment import Clock, Folder, Host, Network, State
from support.simulation.invariants import STARTED_S, Invariants, Violation, check
from support.simulation.worker import FORM_S, Group, Worker

from lockstep.elastic.generation_log import Generation
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.protocol.state import ReadLog, Send
from lockstep.elastic.protocol.transitions import Protocol

LIMITS = ElasticLimits(
    heartbeat_s=0.5,
    heartbeat_timeout_s=2.5,
    log_poll_s=0.25,
    rendezvous_timeout_s=4.0,
    takeover_s=6.0,
)
# After the last fault all workers train within: a start (2 s), the takeover of a generation that
# does not answer, a rendezvous, and three times a heartbeat timeout and a group that does not form.
SETTLE_S = (
    2 + LIMITS.takeover_s + LIMITS.rendezvous_timeout_s + 3 * (LIMITS.heartbeat_timeout_s + FORM_S)
)
STABLE_S = 2.0  # the cluster must stay well for this time
# The same if some workers can never reach the others: they must not disturb them.
STABLE_APART_S = LIMITS.takeover_s + LIMITS.rendezvous_timeout_s + 4

WORKER_FAULTS = ("kill", "stop", "reset", "slow leave", "evict", "drain")
HOST_FAULTS = (
    "power",
    "cut",
    "one-way cut",
    "cut pair",
    "slow network",
    "very slow network",
    "slow disk",
    "bad disk",
    "agent",
)
LASTING = ("power", "cut", "cut pair", "drain")  # may be permanent
HARMLESS = (
    "reset",
    "slow leave",
    "slow network",
    "slow disk",
    "bad disk",
    "agent",
)  # must not remove any worker


@dataclass(frozen=True)
class Fault:
    """A fault: kind, start, targets (indices of workers or hosts), duration (None: permanent).

    kill, stop         SIGKILL; SIGSTOP and SIGCONT
    reset              all connections of the worker break
    slow leave         its main thread is slow to leave a group
    evict, drain       the vote evicts it, as its state differs; its host will be taken away in 5 s
    power, agent       the host is off; its agent is dead
    cut, one-way cut   no route between these hosts and all others; or none from these to the others
    cut pair           no route between two hosts that others still reach
    slow network, very slow network   extra latency below, or above, the heartbeat timeout
    slow disk, bad disk   requests take seconds; or fail, also after success
    """

    kind: str
    at_s: float
    targets: frozenset[int]
    duration_s: float | None


@dataclass(frozen=True)
class History:
    """A cluster and its faults; `seed` determines everything random."""

    seed: int
    hosts: int
    slots: int
    min_workers: int
    max_workers: int
    faults: tuple[Fault, ...]
    replica_size: int = 1
    one_host: bool = False


class Cluster:
    """The whole simulation."""

    def __init__(
        self, history: History, protocol: type[Protocol] = Protocol, folder: type[Folder] = Folder
    ) -> None:
        self.history, self.protocol, self.folder = history, protocol, folder()
        self.clock = Clock(history.seed)
        self.network = Network(self.clock)
        self.invariants = Invariants(self)
        self.limits = replace(
            LIMITS,
            expected_workers=history.hosts * history.slots,
            min_workers=history.min_workers,
            max_workers=history.max_workers,
            replica_size=history.replica_size,
            one_host=history.one_host,
        )
        self.hosts = [
            Host("abcdefgh"[index], [None] * history.slots) for index in range(history.hosts)
        ]
        self.workers: dict[str, Worker] = {}  # id -> worker, dead ones included
        self.groups: dict[str, Group] = {}  # token -> group
        self.stores: dict[str, Worker] = {}  # token -> its proposer, which hosts the store
        self.drained: set[tuple[str, int]] = set()  # (host, slot)
        self.last_fault_end_s = self.settled_s = 0.0
        self.trace: list[str] = []
        self.tokens = 0
        for host in self.hosts:
            self.clock.at(self.clock.between(0, 2), lambda host=host: self.agent(host))  # type: ignore[misc]
        for fault in history.faults:
            self._plan(fault)

    def play(self) -> None:
        """Run until the cluster is well, and stays so, after the last fault."""
        apart = any(
            fault.duration_s is None and fault.kind in ("cut", "cut pair")
            for fault in self.history.faults
        )
        well_s, next_s = None, self.last_fault_end_s
        while True:
            self.clock.step()
            if self.clock.now_s < next_s:
                continue
            next_s, missing = self.clock.now_s + 0.25, self.invariants.missing()
            if missing:
                well_s = None
                check(
                    self.clock.now_s < self.last_fault_end_s + SETTLE_S,
                    f"{SETTLE_S:g} s after the last fault: {missing}",
                )
            elif well_s is None:
                well_s = self.clock.now_s
            elif self.clock.now_s > well_s + (STABLE_APART_S if apart else STABLE_S):
                break
        self.settled_s = well_s - self.last_fault_end_s
        if all(fault.kind in HARMLESS and fault.at_s >= STARTED_S for fault in self.history.faults):
            self.invariants.at_rest()

    def note(self, name: str, event: object) -> None:
        """Add a line to the trace of a violation."""
        if not isinstance(event, ReadLog) and not (
            isinstance(event, Send) and event.message["kind"] == "heartbeat"
        ):
            self.trace.append(f"{self.clock.now_s:7.3f} {name:8} {event}")

    def token(self) -> str:
        self.tokens += 1
        return f"{self.tokens:04d}"

    # -- shared by the workers ------------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Worker]:
        return [
            worker
            for host in self.hosts
            for worker in host.workers_by_slot
            if worker and worker.alive
        ]

    @property
    def target_size(self) -> int:
        """The number of workers after every slot has started."""
        return sum(
            (host.name, slot) not in self.drained
            for host in self.hosts
            if host.on
            for slot in range(self.history.slots)
        )

    def agent(self, host: Host) -> None:
        """Kill the workers that the newest generation removed, and start workers in empty slots."""
        self.clock.after(self.clock.between(0.2, 0.5), lambda: self.agent(host))
        if not host.on or host.active_faults["agent"]:
            return
        newest = self.folder.newest
        for removed in newest.out if not host.active_faults["bad disk"] else ():
            if self.workers[removed.id].host is host:
                self.workers[removed.id].end()
        for slot, worker in enumerate(host.workers_by_slot):
            if (worker is None or not worker.alive) and (host.name, slot) not in self.drained:
                host.workers_by_slot[slot] = worker = Worker(
                    self, host, slot, len(self.workers) + 1
                )
                self.workers[worker.me.id] = worker

    def try_to_form(self, group: Group) -> None:
        """Form the group if all members have arrived and reach each other and the store."""
        workers, store = group.workers, self.stores[group.generation.token]
        if (
            group.formed
            or group.lost
            or len(workers) < len(group.generation.members)
            or not store.alive
        ):
            return
        if all(
            self.network.both_ways_open(worker.host, other.host)
            for worker in workers
            for other in (*workers, store)
        ):
            group.formed = True
            for worker in workers:
                worker.main.after(self.clock.between(0.01, 0.1), worker.main.on_formed)
        else:
            self.clock.after(0.2, lambda: self.try_to_form(group))

    def propose(self, worker: Worker, generation: Generation) -> Generation:
        """Return the generation of that number that won."""
        self.stores[generation.token] = worker
        known = len(self.folder.log)
        winner = self.folder.propose(generation)
        if len(self.folder.log) > known:
            self.note(
                "----",
                f"{generation.number} {[member.id for member in generation.members]} step {generation.step}: {generation.reason}",
            )
            self.invariants.publish(generation, worker.me.id)
        return winner

    def save(self, number: int, state: State) -> None:
        """Save a checkpoint as a member of generation `number`."""
        if self.folder.save(number, state):
            self.invariants.accept(number, state)

    # -- faults -------------------------------------------------------------------------------------------------------------

    def _plan(self, fault: Fault) -> None:
        duration_s = (
            fault.duration_s if fault.duration_s is not None or fault.kind in LASTING else 3.0
        )
        self.last_fault_end_s = max(self.last_fault_end_s, fault.at_s + (duration_s or 0))
        self.clock.at(fault.at_s, lambda: self._apply(fault, True))
        if duration_s is not None:
            self.clock.at(fault.at_s + duration_s, lambda: self._apply(fault, False))

    def _apply(self, fault: Fault, starts: bool) -> None:
        self.note("****", f"{fault.kind} {sorted(fault.targets)} {'starts' if starts else 'ends'}")
        if fault.kind in WORKER_FAULTS:
            for index in sorted(
                {index % (self.history.hosts * self.history.slots) for index in fault.targets}
            ):
                self._apply_to_worker(
                    fault.kind,
                    self.hosts[index // self.history.slots],
                    index % self.history.slots,
                    starts,
                )
        else:
            self._apply_to_hosts(
                fault.kind,
                [
                    self.hosts[index]
                    for index in sorted({index % len(self.hosts) for index in fault.targets})
                ],
                starts,
            )

    def _apply_to_worker(self, kind: str, host: Host, slot: int, starts: bool) -> None:
        worker = host.workers_by_slot[slot]
        if kind == "drain":
            (self.drained.add if starts else self.drained.discard)((host.name, slot))
        if worker is None or not worker.alive:
            return
        if kind not in HARMLESS:
            worker.trouble.change(starts, self.clock.now_s)
        match kind, starts:
            case "kill", True:
                worker.end()
            case "stop", True:
                worker.stopped = True
            case "stop", False:
                worker.resume()
            case "reset", True:
                worker.reset()
            case "slow leave", _:
                worker.main.slow = starts
            case "drain", True:
                worker.main.drains = True
                self.clock.after(5, worker.end)
            case "evict", _:
                for voter in self.living:
                    voter.main.evicts = worker.me.id if starts else ""

    def _apply_to_hosts(self, kind: str, hosts: Sequence[Host], starts: bool) -> None:
        match kind:
            case "cut" | "one-way cut" | "cut pair":
                others = [host for host in self.hosts if host not in hosts]
                pairs = (
                    [(hosts[0], hosts[-1])]
                    if kind == "cut pair"
                    else [(host, other) for host in hosts for other in others]
                )
                for host, other in [(host, other) for host, other in pairs if host is not other]:
                    for direction in [(host.name, other.name), (other.name, host.name)][
                        : 1 if kind == "one-way cut" else 2
                    ]:
                        (self.network.block if starts else self.network.unblock)(direction)
                    host.trouble.change(starts, self.clock.now_s)
                    other.trouble.change(starts, self.clock.now_s)
            case _:
                for host in hosts:
                    host.active_faults[kind] += 1 if starts else -1
                for host in (
                    hosts if kind == "power" else self.hosts if kind == "very slow network" else ()
                ):
                    host.trouble.change(starts, self.clock.now_s)
                for worker in [
                    worker
                    for host in hosts
                    for worker in host.workers_by_slot
                    if worker and not host.on
                ]:
                    worker.end(silently=True)


def play(
    history: History, protocol: type[Protocol] = Protocol, folder: type[Folder] = Folder
) -> Cluster:
    """Play a history to its end. Violation, with its trace, when an invariant does not hold."""
    cluster = Cluster(history, protocol, folder)
    try:
        cluster.play()
    except Violation as violation:
        violation.add_note("\n".join(cluster.trace[-200:]))
        raise
    return cluster
