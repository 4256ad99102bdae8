"""Seconds and bytes of the collectives of a step, on the links of a cluster."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from lockstep.network.links import Link
from lockstep.network.subtrees import equal_shares
from lockstep.network.tree_exchange import WHOLE, rounds_of_rank
from lockstep.planner.devices import Cluster

MAX_PLAYED = 64  # ranks whose messages are played one by one


def tree_all_reduce_cost(
    ranks: tuple[int, ...], leaves: int, nbytes: float, cluster: Cluster
) -> tuple[float, float]:
    """Return (seconds, bytes that the busiest rank sends) of the ordered sum of `nbytes`."""
    size = len(ranks)
    if size == 1:
        return 0.0, 0.0
    if size > MAX_PLAYED:
        return halving_seconds(ranks, nbytes, cluster), 2 * nbytes * (size - 1) / size
    latency_s, _ = play_tree(ranks, leaves, 0.0, cluster)
    without_latency = replace(
        cluster, same_host=at_once(cluster.same_host), other_host=at_once(cluster.other_host)
    )
    seconds, sent = play_tree(ranks, leaves, 1.0, without_latency)
    return latency_s + seconds * nbytes, sent * nbytes


def at_once(link: Link) -> Link:
    return Link(0.0, link.bytes_per_s)


@lru_cache(maxsize=4096)
def play_tree(
    ranks: tuple[int, ...], leaves: int, nbytes: float, cluster: Cluster
) -> tuple[float, float]:
    """Play the messages of network/tree_exchange.py; return (seconds, bytes of the busiest rank).

    A rank starts a round when its last one is done, sends one message after the other, and receives
    at the same time.
    """
    size = len(ranks)
    plans = [rounds_of_rank(rank, equal_shares(size, leaves)) for rank in range(size)]
    rounds = [[*product([True], reduce), *product([False], gather)] for reduce, gather in plans]
    arrivals: dict[tuple[object, ...], float] = {}
    sent = [0.0] * size
    clocks = [0.0] * size
    posted = [-1] * size  # the newest round whose messages a rank has sent
    numbers = [0] * size
    while any(map(operator.lt, numbers, map(len, rounds))):
        for rank, number in enumerate(numbers):
            if number == len(rounds[rank]):
                continue
            adds, turn = rounds[rank][number]
            for message in turn.sends if posted[rank] < number else ():
                link = cluster.link(ranks[rank], ranks[message.peer])
                part = (message.stop - message.start) / WHOLE * nbytes
                clocks[rank] += part / link.bytes_per_s
                key = (adds, message.node, rank, message.peer, message.start)
                arrivals[key] = clocks[rank] + link.latency_s
                sent[rank] += part
            posted[rank] = number
            awaited = [
                (adds, message.node, message.peer, rank, message.start) for message in turn.receives
            ]
            if all(key in arrivals for key in awaited):
                clocks[rank] = max([clocks[rank], *(arrivals[key] for key in awaited)])
                numbers[rank] += 1
    return max(clocks), max(sent)


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
    seconds = []
    for rank in ranks:
        links = [cluster.link(rank, peer) for peer in ranks if peer != rank]
        ports = {
            link: sum(nbytes / other.bytes_per_s for other in links if other == link)
            for link in links
        }
        seconds.append(max((link.latency_s + port for link, port in ports.items()), default=0.0))
    return max(seconds, default=0.0)
