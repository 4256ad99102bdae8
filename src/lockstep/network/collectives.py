"""The collectives, by several algorithms, as schedules of moves.

Rank 0 is the root. Range r of N equal ones is that of rank r: what it has before an all-gather and
after a reduce-scatter.

naive         rank 0 sends to each rank in turn, or receives from each
direct        the same in one round: rank 0 sends to all ranks at once
tree          binomial tree: log2(N) rounds of ever more pairs
ring          each rank sends to the next one: N - 1 rounds of 1/N of the buffer; from or to the
              root, the buffer passes through all ranks in CHUNKS pieces
halving       the engine's own exchange, tree_exchange.py: log2(N) rounds, the bytes of the ring
hierarchical  inside each host, then between the hosts, then inside again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from lockstep.errors import UsageError
from lockstep.network.moves import Move, Phase, Range, Schedule, reverse, round_of, side_by_side
from lockstep.network.tree_exchange import WHOLE, Step, exchange_steps, transfers

COLLECTIVES = ("broadcast", "reduce", "all-reduce", "all-gather", "reduce-scatter")
ALGORITHMS = ("naive", "direct", "tree", "ring", "halving", "hierarchical")
CHUNKS = 32  # of a buffer that passes through a chain of ranks
Ranks = Sequence[int]
Spread = Callable[[Ranks, Sequence[Range]], Schedule]


def schedule_of(collective: str, algorithm: str, ranks: int, ranks_per_host: int = 1) -> Schedule:
    """Return the schedule. UsageError for hosts that this number of ranks does not fill."""
    refuse_hosts(ranks, ranks_per_host)
    everyone, parts = range(ranks), cut(ranks)
    if algorithm == "hierarchical":
        return hierarchical(collective, ranks, ranks_per_host)
    if algorithm in SPREADS:
        return rooted(collective, SPREADS[algorithm], everyone)
    if algorithm == "ring":
        if collective in ("broadcast", "reduce"):
            return chain(ranks) if collective == "broadcast" else reverse(chain(ranks), adds=True)
        scatter, gather = ring_reduce_scatter(everyone, parts), ring_all_gather(everyone, parts)
    else:
        scatter, gather = halving((1,) * ranks, everyone, renamed=collective != "all-reduce")
    return {
        "broadcast": lambda: tree(everyone, parts) + gather,
        "reduce": lambda: scatter + reverse(tree(everyone, parts), adds=False),
        "all-reduce": lambda: scatter + gather,
        "all-gather": lambda: gather,
        "reduce-scatter": lambda: scatter,
    }[collective]()


def algorithms_for(ranks: int, ranks_per_host: int) -> list[str]:
    """Return the algorithms that exist for these ranks, each for every collective."""
    return [name for name in ALGORITHMS if name != "hierarchical" or 1 < ranks_per_host < ranks]


def refuse_hosts(ranks: int, ranks_per_host: int) -> None:
    if ranks % ranks_per_host:
        divisors = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
        raise UsageError(
            f"{ranks} ranks do not fill hosts of {ranks_per_host}",
            "--ranks, --ranks-per-host",
            f"give one of {', '.join(divisors[:12])} ranks per host",
        )


def cut(count: int, start: int = 0, stop: int = WHOLE) -> list[Range]:
    """Cut a range into equal ones."""
    return [
        (start + i * (stop - start) // count, start + (i + 1) * (stop - start) // count)
        for i in range(count)
    ]


def rooted(collective: str, spread: Spread, ranks: Ranks) -> Schedule:
    """Return a collective through the first rank."""
    whole, parts = [(0, WHOLE)] * len(ranks), cut(len(ranks))
    reduce, broadcast = reverse(spread(ranks, whole), adds=True), spread(ranks, whole)
    return {
        "broadcast": lambda: broadcast,
        "reduce": lambda: reduce,
        "all-reduce": lambda: reduce + broadcast,
        "all-gather": lambda: reverse(spread(ranks, parts), adds=False) + broadcast,
        "reduce-scatter": lambda: reduce + spread(ranks, parts),
    }[collective]()


def star(ranks: Ranks, parts: Sequence[Range]) -> Schedule:
    """Send to each rank its part, from the first rank."""
    return [round_of([move]) for move in sends_of_first(ranks, parts)]


def fan_out(ranks: Ranks, parts: Sequence[Range]) -> Schedule:
    """Send to each rank its part, from the first rank, to all at once."""
    return [round_of(sends_of_first(ranks, parts))]


def sends_of_first(ranks: Ranks, parts: Sequence[Range]) -> list[Move]:
    pairs = zip(ranks, parts, strict=True)
    return [Move(ranks[0], rank, *part, False) for rank, part in list(pairs)[1:]]


def tree(ranks: Ranks, parts: Sequence[Range]) -> Schedule:
    """Send to each rank its part, through those before it: a rank receives for half as many
    others."""
    schedule, size = [], len(ranks)
    for distance in (1 << bit for bit in reversed(range((size - 1).bit_length()))):
        pairs = [
            (i, i + distance, min(i + 2 * distance, size))
            for i in range(0, size - distance, 2 * distance)
        ]
        schedule.append(
            round_of(
                [
                    Move(ranks[i], ranks[first], parts[first][0], parts[end - 1][1], False)
                    for i, first, end in pairs
                ]
            )
        )
    return schedule


SPREADS: dict[str, Spread] = {"naive": star, "direct": fan_out, "tree": tree}


def chain(size: int) -> Schedule:
    """Send the buffer from rank 0 through all ranks: in round k, rank i sends chunk k - i."""
    chunks = cut(CHUNKS)
    senders = [
        range(max(0, k - CHUNKS + 1), min(size - 1, k + 1)) for k in range(size + CHUNKS - 2)
    ]
    return [
        round_of([Move(i, i + 1, *chunks[k - i], False) for i in ranks])
        for k, ranks in enumerate(senders)
    ]


def ring_reduce_scatter(ranks: Ranks, parts: Sequence[Range]) -> Schedule:
    return [ring(ranks, parts, adds=True)]


def ring_all_gather(ranks: Ranks, parts: Sequence[Range]) -> Schedule:
    return [ring(ranks, parts, adds=False)]


def ring(ranks: Ranks, parts: Sequence[Range], *, adds: bool) -> Phase:
    """Return N - 1 rounds: in round k, rank i sends part i - k to rank i + 1, modulo N; the part
    before if the receiver adds."""
    size = len(ranks)
    return Phase(
        size - 1,
        lambda k: [
            Move(ranks[i], ranks[(i + 1) % size], *parts[(i - k - adds) % size], adds)
            for i in range(size)
        ],
    )


def halving(shares: tuple[int, ...], ranks: Ranks, *, renamed: bool) -> tuple[Schedule, Schedule]:
    """Return the engine's exchange among `ranks`, which compute so many micro-batches each:
    (reduce-scatter, all-gather). renamed: the rank that sums slice r is the r-th one."""
    merges, (first, *returns) = exchange_steps(shares)
    names = dict(enumerate(ranks))
    if renamed:
        owners = [part.rank for part in merges[-1].total.slices]
        names = dict(zip(owners, ranks, strict=True))

    def moves(steps: Sequence[Step], *, adds: bool) -> list[Move]:
        own = [{part.rank for part in before.slices} for before, _ in steps]
        return [
            Move(names[sender], names[receiver], start, stop, adds and receiver not in holders)
            for (before, after), holders in zip(steps, own, strict=True)
            for sender, receiver, start, stop in transfers(before, after)
        ]

    scatter: defaultdict[int, list[Move]] = defaultdict(list)
    gather: defaultdict[int, list[Move]] = defaultdict(list)
    for left, right, total in merges:
        scatter[total.node.leaves] += moves([(left, total), (right, total)], adds=True)
    for steps in returns:
        gather[steps[0][0].node.leaves] += moves(steps, adds=False)
    rounds = [moves(first, adds=False), *(gather[leaves] for leaves in sorted(gather)[::-1])]
    return [round_of(scatter[leaves]) for leaves in sorted(scatter)], [
        round_of(messages) for messages in rounds if messages
    ]


def hierarchical(collective: str, ranks: int, per_host: int) -> Schedule:
    """Return a collective inside hosts and between them. UsageError if there is one level only."""
    if not 1 < per_host < ranks:
        raise UsageError(
            f"no hierarchical {collective} of {ranks} ranks with {per_host} on each host: "
            "it takes two hosts of two ranks or more",
            "--algorithm, --ranks-per-host",
            "set --ranks-per-host, or give another algorithm: "
            f"{', '.join(algorithms_for(ranks, per_host))}",
        )
    parts, whole = cut(ranks), [(0, WHOLE)] * per_host
    hosts = [range(first, first + per_host) for first in range(0, ranks, per_host)]
    leaders, ranges = range(0, ranks, per_host), cut(len(hosts))
    if collective in ("broadcast", "reduce"):
        broadcast = tree(leaders, [(0, WHOLE)] * len(hosts)) + side_by_side(
            [tree(host, whole) for host in hosts]
        )
        return broadcast if collective == "broadcast" else reverse(broadcast, adds=True)
    if collective == "all-reduce":
        slices = cut(per_host)
        across = [
            (range(i, ranks, per_host), cut(len(hosts), *part)) for i, part in enumerate(slices)
        ]
        return [
            *side_by_side([ring_reduce_scatter(host, slices) for host in hosts]),
            *side_by_side(
                [
                    ring_reduce_scatter(peers, part) + ring_all_gather(peers, part)
                    for peers, part in across
                ]
            ),
            *side_by_side([ring_all_gather(host, slices) for host in hosts]),
        ]
    inside = side_by_side([tree(host, parts[host.start : host.stop]) for host in hosts])
    everything = side_by_side([tree(host, whole) for host in hosts])
    if collective == "all-gather":
        return reverse(inside, adds=False) + ring_all_gather(leaders, ranges) + everything
    return reverse(everything, adds=True) + ring_reduce_scatter(leaders, ranges) + inside
