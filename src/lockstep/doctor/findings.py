"""The facts of the hosts of a run, and the findings that follow from them. Pure, without torch.

`findings` compares the facts of all hosts. A FAIL keeps a run from starting; a warn costs speed,
disk space or a surprise later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lockstep.network.measurements import PairTimes, format_rate, slow_links
from lockstep.units import format_bytes, join_words

UNLIMITED = 1 << 60
MIN_FREE_BYTES, LOW_FREE_BYTES = 64 << 20, 4 << 30
# A worker that has imported torch takes 300 MiB.
MIN_WORKER_BYTES, LOW_WORKER_BYTES = 512 << 20, 1 << 30
OPEN_FILES, OPEN_FILES_PER_WORKER = 128, 4  # of a worker alone; for its sockets to each other one
SLOW_WRITE_S, CLOCK_S = 1.0, 2.0
SLOW_LINK_BYTES_PER_S = 11e6  # 100 Mbit/s, less the headers of TCP and IP


@dataclass(frozen=True)
class PeerFacts:
    """The facts that a host gathers about another one."""

    error: str = ""  # why it was not reached
    at: str = ""  # "ADDRESS:PORT"
    source: str = ""  # local address of the route to it
    clock_s: float = 0.0  # its clock minus this host's
    bytes_per_s: float = 0.0  # to it; 0: not measured
    sees_file: bool = True  # this host sees its file in the run folder


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host gathers about itself and its peers. All values are JSON."""

    host: str
    workers: int = 1
    errors: dict[str, str] = field(default_factory=dict)  # by check: what failed here
    fingerprint: dict[str, str] = field(default_factory=dict)  # what a run compares at its start
    versions: dict[str, str] = field(default_factory=dict)  # further ones
    address: str = ""
    interface: str = ""  # that has this address
    variables: dict[str, str] = field(default_factory=dict)  # *_SOCKET_IFNAME
    folder: str = ""
    file: str = ""  # that this host has written to the run folder
    is_claimed: bool = True  # this host has created the name that only one host can create
    is_locked: bool = True  # this host holds the lock that only one host can hold
    free_bytes: int = UNLIMITED
    write_s: float = 0.0  # of 1 MiB
    memory_bytes: int = 1 << 60
    memory_source: str = ""
    open_files: int = 1 << 20
    # "NAME, driver VERSION, N MiB used" by nvidia-smi.
    driver_gpus: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)  # names, by torch; [] also if LOCKSTEP_DEVICE=cpu
    master_port: int = 0
    group: str = "not tried"
    peers: dict[str, PeerFacts] = field(default_factory=dict)


Level = Literal["warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    check: str
    host: str
    level: Level
    what: str
    where: str
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.level} {self.check} on {self.host}: {self.what}\n  {self.where}\n  {self.hint}"
        )


SHARED_ADDRESS = "so two names share an address"
FAIL: Level = "FAIL"
WARN: Level = "warn"
Verdict = tuple[str, Level, str, str, str]  # host, level, what, where, hint
# What a host could not gather about itself: where, and what to try.
ERRORS = {
    "ports": (
        "bound on {host.address}",
        "free ports, or widen net.ipv4.ip_local_port_range",
    ),
    "versions": (
        "import of torch",
        "install torch on this host, in the same environment as on the others",
    ),
    "interface": (
        "hosts file: address of this host",
        "write its address in the network between the hosts (ip -br addr shows it)",
    ),
    "gpu": (
        "nvidia-smi: {host.driver_gpus[0]}",
        "install a torch build for the CUDA version of this driver",
    ),
    "group": (
        "process group of one process per host, and an all-reduce",
        "see the findings above; "
        "else NCCL_DEBUG=INFO lockstep doctor, and nc -vz between the hosts",
    ),
}


def findings(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Return what keeps a run on these hosts from starting, or from being fast."""
    judges: dict[str, Callable[[Sequence[HostFacts]], Iterable[Verdict]]] = {
        "ports": of_peers,
        "versions": of_versions,
        "interface": of_addresses,
        "folder": of_folder,
        "clock": of_clocks,
        "memory": of_memory,
        "limits": of_open_files,
        "bandwidth": of_bandwidth,
        "gpu": of_gpus,
        "group": lambda hosts: (),
    }
    found = []
    for check, judge in judges.items():
        for host in hosts:
            if check in ERRORS and check in host.errors:
                where, hint = ERRORS[check]
                where = where.format(host=host)
                found.append(Finding(check, host.host, FAIL, host.errors[check], where, hint))
        found += [Finding(check, *verdict) for verdict in judge(hosts)]
    return found


def of_peers(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    names = {host.host for host in hosts}
    unreached: dict[str, list[str]] = {}
    for host in hosts:
        for name, peer in host.peers.items():
            if peer.error:
                unreached.setdefault(name, []).append(f"{host.host}: {peer.error} at {peer.at}")
    for name, errors in unreached.items():
        hint = (
            "let a firewall pass all TCP ports between the hosts; "
            "is the host up, and the address right?"
        )
        if SHARED_ADDRESS in errors[0]:
            hint = "give each host another address in the hosts file"
        elif all("refused" in error for error in errors):
            hint = f"start lockstep doctor on {name} too; if it runs there, see its own output"
        what = f"does not answer {join_words(errors)}"
        if name not in names:
            what += "; nothing is known about it"
        where = "hosts file; each host answers at this port while its doctor runs"
        yield name, FAIL, what, where, hint


def of_versions(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    compared = {host.host: host.fingerprint for host in hosts if host.fingerprint}
    for name, what in differences(compared):
        where = (
            "versions, code, processor and settings that decide bits; "
            "a run compares them at its start"
        )
        hint = "install the same versions and set the same variables on all hosts"
        yield name, FAIL, what, where, hint
    for name, what in differences({host.host: host.versions for host in hosts}):
        yield name, WARN, what, "not compared by a run", "use the same environment on all hosts"


def differences(values: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (host, how its values differ from what most hosts have)."""
    for host, own in values.items():
        wrong = []
        for key in own:
            counts = Counter(facts[key] for facts in values.values() if key in facts)
            usual, count = counts.most_common(1)[0]
            if own[key] != usual:
                others = [name for name, facts in values.items() if facts.get(key) == usual]
                where = join_words(others) if count < 4 else f"{count} hosts"
                wrong.append(f"{key} is {own[key]}, but {usual} on {where}")
        if wrong:
            yield host, "; ".join(wrong)


def of_addresses(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    for host in hosts:
        if host.peers and host.address.startswith("127.") and "interface" not in host.errors:
            what = f"other hosts cannot reach the loopback address {host.address}"
            yield host.host, FAIL, what, *ERRORS["interface"]
        routes = {peer.source for peer in host.peers.values() if not peer.error}
        routes -= {host.address, ""}
        if routes and host.address:
            what = (
                f"packets to other hosts leave from {join_words(sorted(routes))}, "
                f"not from {host.address} ({host.interface})"
            )
            where = "the routes of this host (ip route get ADDRESS)"
            yield host.host, WARN, what, where, "write the address of that network"
        for variable, text in host.variables.items():
            if not host.interface or allows(text, host.interface):
                continue
            what = f"{variable}={text} is not {host.interface}, the interface with {host.address}"
            hint = f"unset {variable}"
            decides = variable.startswith("NCCL") and host.gpus
            if not decides:
                hint += "; lockstep launch sets gloo's interface itself, torchrun does not"
            yield host.host, FAIL if decides else WARN, what, "environment of this host", hint


def allows(text: str, interface: str) -> bool:
    """Return whether NCCL takes this interface: "^docker,lo" excludes, "=eth0" is exact, "eth" a
    prefix."""
    names = text.lstrip("^=").split(",")
    is_listed = (
        interface in names
        if "=" in text[:2]
        else any(interface.startswith(name.partition(":")[0]) for name in names)
    )
    return is_listed != text.startswith("^")


def of_folder(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    usable = [host for host in hosts if "folder" not in host.errors]
    for host in hosts:
        place = place_of(host)
        where = f"{place.name} {host.folder}"
        if host not in usable:
            yield host.host, FAIL, host.errors["folder"], where, place.hint
            continue
        reached = {name: peer for name, peer in host.peers.items() if not peer.error}
        if unseen := [name for name, peer in reached.items() if not peer.sees_file]:
            what = f"a file that {join_words(unseen)} wrote does not appear here: {place.unseen}"
            yield host.host, FAIL, what, where, place.share_hint
        if host.free_bytes < LOW_FREE_BYTES:
            level = FAIL if host.free_bytes < MIN_FREE_BYTES else WARN
            hint = "free space: a checkpoint takes 12 bytes per parameter"
            yield host.host, level, f"{format_bytes(host.free_bytes)} are free", where, hint
        if host.write_s > SLOW_WRITE_S:
            what = f"{place.written} took {host.write_s:.1f} s"
            hint = f"use a faster {place.kind}: a failure is handled once a file is written there"
            yield host.host, WARN, what, where, hint
    created = sum(host.is_claimed for host in hosts)
    all_see_all = all(
        not peer.error and peer.sees_file for host in hosts for peer in host.peers.values()
    )
    if not hosts or usable != [*hosts] or not all_see_all:
        return
    place = place_of(hosts[0])
    where = f"{place.name} {hosts[0].folder}"
    if created != 1:
        what = f"{created} hosts have created the same file name{place.by}, not one"
        yield hosts[0].host, FAIL, what, where, place.atomic_hint
    locked = sum(host.is_locked for host in hosts)
    if locked > 1:
        what = f"{locked} hosts hold the same file lock by flock(2), not one"
        yield hosts[0].host, WARN, what, where, LOCK_HINT


class Place(NamedTuple):
    """The words about the place where hosts meet."""

    name: str
    kind: str
    hint: str
    unseen: str
    share_hint: str
    written: str
    by: str
    atomic_hint: str


DISK = Place(
    "run folder",
    "disk",
    "use a folder with write permission, on a disk with free space, that is shared, no CIFS: --out",
    "the folder is not shared",
    "mount the same disk on all hosts, or give its path: --out; "
    "hosts without one can meet in a store: --out s3://BUCKET/RUN",
    "writing 1 MiB and fsync",
    " by link(2)",
    "use a file system with atomic hard links: a local disk, NFS, Lustre, GPFS",
)
LOCK_HINT = (
    "mount the folder on all hosts, also on its server; NFS without nolock and local_lock, Lustre "
    "with flock; else retention may delete a checkpoint that another host reads"
)
STORE = Place(
    "object store",
    "store",
    "create the bucket; check AWS_ENDPOINT_URL, "
    "AWS_REGION, the credentials and the clock of this host",
    "the hosts use different stores",
    "set the same AWS_ENDPOINT_URL and AWS_REGION on all hosts",
    "storing 1 MiB",
    "",
    "use a store with conditional writes: AWS S3, MinIO, Ceph Squid, Cloudflare R2",
)


def place_of(host: HostFacts) -> Place:
    return STORE if "://" in host.folder else DISK


def of_clocks(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    for host in hosts[1:]:
        offset_s = hosts[0].peers.get(host.host, PeerFacts()).clock_s
        if abs(offset_s) > CLOCK_S:
            direction = "ahead of" if offset_s > 0 else "behind"
            what = f"its clock is {abs(offset_s):.1f} s {direction} that of {hosts[0].host}"
            hint = (
                "run a time daemon (chrony); training does not need it, times in logs and events do"
            )
            yield host.host, WARN, what, "asked over the network", hint


def of_memory(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    for host in hosts:
        each = host.memory_bytes // host.workers
        if each < LOW_WORKER_BYTES:
            level = FAIL if each < MIN_WORKER_BYTES else WARN
            what = (
                f"{format_bytes(each)} for each of {host.workers} workers; "
                "importing torch takes 300 MiB"
            )
            hint = "raise the limit, or start fewer workers there"
            yield host.host, level, what, f"limit from {host.memory_source}", hint


def of_open_files(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    needed = OPEN_FILES + OPEN_FILES_PER_WORKER * sum(host.workers for host in hosts)
    for host in hosts:
        if host.open_files < needed:
            what = f"{host.open_files:,} open files are allowed, {needed:,} are needed"
            hint = f"ulimit -n {max(needed, 65536)}, or LimitNOFILE= of its service"
            yield host.host, FAIL, what, "RLIMIT_NOFILE (ulimit -n)", hint


def of_bandwidth(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    slow = {}
    pairs = []
    for host in hosts:
        for name, peer in host.peers.items():
            rate = peer.bytes_per_s
            if 0 < rate < SLOW_LINK_BYTES_PER_S:
                slow[host.host] = f"{format_rate(rate)} to {name}"
            if rate:
                pairs.append(PairTimes((0, 1), (host.host, name), {1_000_000: 1e6 / rate}))
    slow |= {link.hosts[0]: str(link) for link in slow_links(pairs)}
    for slow_host, what in slow.items():
        hint = "check cable, switch and interface; all pairs: lockstep bench comm"
        yield slow_host, WARN, what, "measured to the next host of the list", hint


def of_gpus(hosts: Sequence[HostFacts]) -> Iterator[Verdict]:
    for host in hosts:
        gpus = len(host.gpus)
        if 0 < gpus < host.workers:
            what = f"{host.workers} workers, but torch sees {gpus} GPUs"
            hint = f"start {gpus} workers, or set LOCKSTEP_DEVICE=cpu"
            yield host.host, FAIL, what, "hosts file; CUDA_VISIBLE_DEVICES", hint
        busy = [text for text in host.driver_gpus if used_mib(text) > 1024]
        if busy and gpus:
            what = f"memory is in use before the run: {join_words(busy)}"
            yield host.host, WARN, what, "nvidia-smi", "end the processes that use it"
    without = [host.host for host in hosts if not host.gpus]
    if 0 < len(without) < len(hosts):
        hint = "use hosts of one kind, or set LOCKSTEP_DEVICE=cpu"
        yield without[0], FAIL, "no GPU here, but on other hosts", "torch.cuda", hint


def used_mib(gpu: str) -> int:
    """Return the memory in use in a line of `driver_gpus`; 0: unknown."""
    digits = filter(str.isdigit, gpu.rpartition(",")[2])
    return int("".join(digits) or 0)


def report(hosts: Sequence[HostFacts], found: Iterable[Finding]) -> str:
    """Return one line per check and host, then the findings, then what follows."""
    found = list(found)
    by_level = sorted(found, key=lambda item: item.level, reverse=True)
    levels = {(item.check, item.host): item.level for item in by_level}
    values = {host.host: values_of(host) for host in hosts}
    names = list(dict.fromkeys([*values, *(item.host for item in found)]))
    width = max(map(len, names))
    lines = []
    for check in values_of(HostFacts("")):
        for name in names:
            level = levels.get((check, name), "ok" if name in values else "-")
            value = values.get(name, {}).get(check, "")
            lines.append(f"{level:<4}  {check:<9}  {name:<{width}}  {value}".rstrip())
    end = "a run can start on these hosts"
    if failed := sum(item.level == FAIL for item in found):
        end = f"{failed} of {len(found)} findings keep a run from starting"
    return "\n".join([*lines, "", *map(str, found), *[""][: len(found)], end])


def values_of(host: HostFacts) -> dict[str, str]:
    """Return what each check has measured on a host, in the order of the report."""
    reached = [peer for peer in host.peers.values() if not peer.error]
    rates = [
        f"{format_rate(peer.bytes_per_s)} to {name}"
        for name, peer in host.peers.items()
        if peer.bytes_per_s
    ]
    free = f"{format_bytes(host.free_bytes)} free, " if host.free_bytes < UNLIMITED else ""
    own = {
        name: host.fingerprint[name] for name in ("torch", "lockstep") if name in host.fingerprint
    }
    versions = (host.versions | own).items()
    offset_s = max((abs(peer.clock_s) for peer in reached), default=0.0)
    return {
        "versions": ", ".join(f"{name} {text}" for name, text in versions),
        "interface": f"{host.address} on {host.interface}",
        "ports": f"{len(reached)} of {len(host.peers)} other hosts reached",
        "bandwidth": ", ".join(rates) or "not measured",
        "folder": f"{host.folder}: {free}{place_of(host).written} {1e3 * host.write_s:.1f} ms",
        "clock": f"{offset_s:.3f} s from the others",
        "memory": (
            f"{format_bytes(host.memory_bytes)} for {host.workers} workers, "
            f"limit from {host.memory_source}"
        ),
        "limits": f"{host.open_files:,} open files",
        "gpu": ", ".join(host.driver_gpus or host.gpus) or "none",
        "group": host.group,
    }
