"""What measured messages say about a network: the cost of a link, bandwidths, slow hosts and pairs.

Pure: parallel/comm_bench.py measures, `lockstep bench comm` prints. The columns are those of
nccl-tests: algbw is bytes / time, busbw is the rate at which the busiest link has to send for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, linear_regression, median
from typing import Any, NamedTuple

from lockstep.network.moves import Link
from lockstep.units import format_bytes

SAME_HOST, OTHER_HOST = "same_host", "other_host"
SLOW_FACTOR = 2.0  # a link is slow below the median of its class divided by this


class PairTimes(NamedTuple):
    """Measured seconds of one message between two ranks, by its bytes, ascending."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    seconds: dict[int, float]

    @property
    def kind(self) -> str:
        return SAME_HOST if self.hosts[0] == self.hosts[1] else OTHER_HOST


class Row(NamedTuple):
    """One line of the table: a collective over `ranks` ranks with `bytes` in its largest buffer."""

    collective: str
    ranks: int
    bytes: int
    seconds: float

    @property
    def algbw(self) -> float:
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        return self.algbw * bus_factor(self.collective, self.ranks)


class SlowLink(NamedTuple):
    """A host, or a pair of hosts, below half of the median; rates in bytes per second."""

    hosts: tuple[str, ...]
    bytes_per_s: float
    median_bytes_per_s: float

    def __str__(self) -> str:
        host, *others = self.hosts
        where = f"the link between {host} and {others[0]}" if others else f"host {host}, at best"
        where = f"the links inside host {host}" if others == [host] else where
        return (
            f"slow: {where}: {format_rate(self.bytes_per_s)}; "
            f"the median is {format_rate(self.median_bytes_per_s)}"
        )


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw / algbw: the bytes that each rank has to send, in units of the buffer."""
    if collective in ("all_reduce", "engine"):
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ("all_gather", "reduce_scatter") else 1.0


def fit_link(seconds: dict[int, float]) -> Link:
    """Fit the rate and the latency of a link to the seconds of messages by their bytes.

    The rate is that of the least squares line, which the largest messages decide. The latency is
    what is left, by least squares of relative errors, which the smallest messages decide.
    """
    sizes, times = list(seconds), list(seconds.values())
    slope = linear_regression(sizes, times).slope if len(sizes) > 1 else 0.0
    if slope <= 0:  # one size, or times that do not grow
        slope = times[-1] / sizes[-1]
    rest = [took - slope * size for size, took in seconds.items()]
    latency_s = fmean(rest, weights=[took**-2 for took in times])
    # zero or less where a token bucket lets small messages pass at once
    return Link(latency_s if latency_s > 0 else times[0], 1 / slope)


def class_links(pairs: Sequence[PairTimes], slow: Iterable[SlowLink] = ()) -> dict[str, Link]:
    """Return the link of each class of pairs, fitted to the median times, without the slow
    links."""
    slow = list(slow)
    links = {}
    for kind in (SAME_HOST, OTHER_HOST):
        members = [pair for pair in pairs if pair.kind == kind]
        usual = [
            pair for pair in members if not any(is_named(pair, link.hosts) for link in slow)
        ] or members
        sizes = sorted(set.intersection(*(set(pair.seconds) for pair in usual))) if usual else []
        if sizes:
            links[kind] = fit_link(
                {size: median(pair.seconds[size] for pair in usual) for size in sizes}
            )
    return links


def is_named(pair: PairTimes, hosts: tuple[str, ...]) -> bool:
    return pair.hosts == hosts or (
        len(hosts) == 1 and hosts[0] in pair.hosts and pair.kind == OTHER_HOST
    )


def slow_links(pairs: Sequence[PairTimes]) -> list[SlowLink]:
    """Name slow hosts and pairs of hosts, one kind of pair at a time.

    A host whose best link to another host is slow is named once, not with each of its pairs: of
    three hosts, one slow one slows down two of the three pairs, and their median with them.
    """
    across, inside = (
        {pair.hosts: fit_link(pair.seconds).bytes_per_s for pair in pairs if pair.kind == kind}
        for kind in (OTHER_HOST, SAME_HOST)
    )
    hosts = sorted({host for pair in across for host in pair})
    slow = below_median(
        {(host,): max(rate for pair, rate in across.items() if host in pair) for host in hosts}
    )
    named = {host for link in slow for host in link.hosts}
    slow += below_median({pair: rate for pair, rate in across.items() if not named & set(pair)})
    return slow + below_median(inside)


def below_median(rates: Mapping[Any, float]) -> list[SlowLink]:
    middle = median(rates.values()) if rates else 0.0
    return [
        SlowLink(hosts, rate, middle)
        for hosts, rate in rates.items()
        if rate * SLOW_FACTOR < middle
    ]


def pairing_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of 0 ... size - 1 in rounds of disjoint pairs (the circle method)."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def format_rate(bytes_per_s: float) -> str:
    """Return a rate as networks are sold, in bits: 95.6 Mbit/s."""
    units = {1.25e8: "Gbit/s", 1.25e5: "Mbit/s", 125.0: "kbit/s"}
    size = max((size for size in units if bytes_per_s >= size), default=125.0)
    return f"{bytes_per_s / size:.1f} {units[size]}"


def describe(rows: Sequence[Row], links: Mapping[str, Link], slow: Iterable[SlowLink]) -> str:
    """Return the table, one block per collective, then a line per class of pairs and slow link.
    GB/s is 1e9 bytes per second, as in nccl-tests."""
    lines = []
    for name in dict.fromkeys(row.collective for row in rows):
        lines += [
            f"# {name}, {rows[0].ranks} ranks",
            f"#{'size':>10} {'time (us)':>14} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}",
        ]
        for row in (row for row in rows if row.collective == name):
            lines.append(
                f" {format_bytes(row.bytes):>10} "
                f"{1e6 * row.seconds:>14,.1f} {row.algbw / 1e9:>13.4f} {row.busbw / 1e9:>13.4f}"
            )
        lines.append("")
    lines += [
        f"{kind.replace('_', ' ')}: latency {1e6 * link.latency_s:.0f} us, "
        f"{format_rate(link.bytes_per_s)}"
        for kind, link in links.items()
    ]
    return "\n".join([*lines, *map(str, slow)])
