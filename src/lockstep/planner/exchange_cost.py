"""Seconds and bytes of the collectives of a step, on the links of a cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lockstep.network.collectives import halving
from lockstep.network.moves import Link
from lockstep.network.simulate import Network, Simulation
from lockstep.network.subtrees import equal_shares
from lockstep.planner.devices import Cluster

MAX_PLAYED = 64  # ranks whose messages are played one by one


def tree_all_reduce_cost(
    ranks: tuple[int, ...], leaves: int, nbytes: float, cluster: Cluster
) -> tuple[float, float]:
    """Return (seconds, bytes that the busiest rank sends) of the ordered sum of `nbytes`."""
    size = len(ranks)
    if size > MAX_PLAYED:
        return halving_seconds(ranks, nbytes, cluster), 2 * nbytes * (size - 1) / size
    latency_s, seconds, sent = tree_all_reduce_rates(ranks, leaves, cluster)
    return latency_s + seconds * nbytes, sent * nbytes


@lru_cache(maxsize=4096)
def tree_all_reduce_rates(
    ranks: tuple[int, ...], leaves: int, cluster: Cluster
) -> tuple[float, float, float]:
    """Return (latency, seconds per byte, bytes that the busiest rank sends of each) of the ordered
    sum, whose messages are played."""
    if len(ranks) == 1:
        return 0.0, 0.0, 0.0
    scatter, gather = halving(equal_shares(len(ranks), leaves), ranks, renamed=False)
    # Other groups exchange beside this one, and its own workers of a host share what is left: the
    # bytes of a round follow each other, its latencies do not.
    of_host = max(Counter(rank // cluster.per_host for rank in ranks).values())
    other, same = cluster.other_host, cluster.same_host
    rate = other.bytes_per_s * of_host / cluster.per_host
    network = Network(Link(other.latency_s / of_host, rate), same, cluster.per_host)
    at_once = replace(network, between=Link(0.0, rate), inside=Link(0.0, same.bytes_per_s))
    waiting = Simulation(scatter + gather, cluster.devices, 0.0, network)
    sending = Simulation(scatter + gather, cluster.devices, 1.0, at_once)
    return waiting.seconds, sending.seconds, max(sending.bytes)


def halving_seconds(ranks: Sequence[int], nbytes: float, cluster: Cluster) -> float:
    """Return the seconds of an all-reduce by recursive halving and doubling."""
    seconds, size = 0.0, len(ranks)
    for turn in range(math.ceil(math.log2(size))):
        link = cluster.link(ranks[0], ranks[min(1 << turn, size - 1)])
        seconds += 2 * link.seconds(nbytes / 2 ** (turn + 1))
    return seconds


def all_to_all_seconds(ranks: Sequence[int], nbytes: float, cluster: Cluster) -> float:
    """Return the seconds in which each rank sends `nbytes` to each other rank, and receives as
    much."""
    slowest_s = 0.0
    for rank in ranks:
        peers = Counter(cluster.link(rank, peer) for peer in ranks if peer != rank)
        for link, count in peers.items():
            slowest_s = max(slowest_s, link.seconds(nbytes * count))
    return slowest_s
