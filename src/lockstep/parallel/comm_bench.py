"""Time collectives and messages between the workers of a run: `lockstep bench comm`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.files import write_json
from lockstep.network.measurements import (
    PairTimes,
    Row,
    class_links,
    describe,
    pairing_rounds,
    slow_links,
)
from lockstep.network.subtrees import Subtree
from lockstep.parallel.ordered_sum import start_exchange, tree_all_reduce
from lockstep.runtime.work import WorkWaiter

BUDGET_S, MAX_REPEATS = 0.2, 50  # per size
TOO_LONG_S = 2.0  # a longer one is not repeated, and larger sizes are skipped
TIMEOUT_S = 600.0
Play = Callable[[], object]


def main(out: Path, sizes: str, file: str = "") -> None:
    """Collective. Measure, print the results on each terminal, and write them to a file on rank 0.

    out    run folder
    sizes  bytes, separated by commas
    file   to write; "": comm.json in the run folder
    """
    path = Path(file or out / "comm.json")
    with ElasticRuntime.join(timeout_s=TIMEOUT_S) as runtime:
        runtime.board.enter("preparing")  # as long as the measurements take
        hosts = all_gather_json(runtime, runtime.world.host)
        bench = CommBench(runtime)
        lengths = sorted({int(size) for size in sizes.split(",")})
        pairs = bench.measure_pairs(hosts, lengths)
        slow = slow_links(pairs)
        rows = [row for name in bench.plays(0) for row in bench.measure(name, lengths)]
        if runtime.shows_progress():
            print(describe(rows, class_links(pairs, slow), slow), flush=True)
        if runtime.world.leader:
            write_json(path, results(bench, hosts, pairs, rows))
            print(f"\nwrote {path}", flush=True)


def results(
    bench: CommBench, hosts: list[str], pairs: list[PairTimes], rows: list[Row]
) -> dict[str, Any]:
    """Return what the JSON file holds: docs/network.md."""
    slow = slow_links(pairs)
    return {
        "links": {kind: vars(link) for kind, link in class_links(pairs, slow).items()},
        "slow": [link._asdict() for link in slow],
        "pairs": [{**pair._asdict(), "class": pair.kind} for pair in pairs],
        "table": [{**row._asdict(), "algbw": row.algbw, "busbw": row.busbw} for row in rows],
        "backend": "nccl" if bench.device.type == "cuda" else "gloo",
        "hosts": hosts,
    }


class CommBench:
    """The default group of a run, and how to time it. All methods are collective."""

    def __init__(self, runtime: ElasticRuntime) -> None:
        assert dist.group.WORLD is not None
        self.runtime = runtime
        self.group = dist.group.WORLD
        self.device = runtime.world.device
        self.rank = runtime.world.rank
        self.size = runtime.world.size
        self.waits = WorkWaiter(in_thread=self.device.type == "cpu")

    def plays(self, length: int) -> dict[str, Play]:
        """Return the collectives over float32 buffers of `length`, a multiple of the number of
        ranks."""
        whole, other = (torch.zeros(length, device=self.device) for _ in range(2))
        part = other[: length // self.size]
        leaves = (1,) * self.size
        own = [(Subtree(self.rank, 1), whole)]
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        # The names since torch 2.13, else the earlier ones.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return {
            "all_reduce": lambda: dist.all_reduce(whole),
            "engine": lambda: tree_all_reduce(own, leaves, self.group, whole, self.waits),
            "broadcast": lambda: dist.broadcast(whole, src=0),
            "all_gather": lambda: all_gather(whole, part),
            "reduce_scatter": lambda: reduce_scatter(part, whole),
            "send_recv": lambda: self.exchange([(to, whole)], [(source, other)]),
        }

    def measure(self, name: str, sizes: Sequence[int]) -> list[Row]:
        """Return one row for each size; the slowest rank counts."""
        rows = []
        self.plays(self.size)[name]()  # NCCL connects at first use
        for size in sizes:
            length = -(-size // (4 * self.size)) * self.size
            play = self.plays(length)[name]
            seconds = self.slowest(self.timed(play))
            count = repeats(seconds)
            if count:
                seconds = self.slowest(self.timed(play, count))
            rows.append(Row(name, self.size, 4 * length, seconds))
            if not count:
                break
        return rows

    def measure_pairs(self, hosts: list[str], sizes: Sequence[int]) -> list[PairTimes]:
        """Time messages between the first ranks of each pair of hosts, and between the first two
        of each host. Disjoint pairs of hosts are measured at once: they share no interface."""
        ranks_of = defaultdict[str, list[int]](list)
        for rank, host in enumerate(hosts):
            ranks_of[host].append(rank)
        firsts = [ranks[0] for ranks in ranks_of.values()]
        turns = [[(ranks[0], ranks[1]) for ranks in ranks_of.values() if len(ranks) > 1]]
        turns += [[(firsts[a], firsts[b]) for a, b in turn] for turn in pairing_rounds(len(firsts))]
        pairs = []
        for turn in turns:
            own = [self.exchanges(*pair, sizes) for pair in turn if self.rank in pair]
            times = all_gather_json(self.runtime, [list(took.items()) for took in own])
            for a, b in turn:
                pairs.append(PairTimes((a, b), (hosts[a], hosts[b]), dict(times[a][0])))
        return pairs

    def exchanges(self, first: int, second: int, sizes: Sequence[int]) -> dict[int, float]:
        """Return the seconds in which two ranks send each other a message, by its size: both at
        once, as in a sum, where confirmations share the link with the data. The shortest counts,
        because longer ones include the load of the hosts. `first` decides how often."""
        starts, peer = self.rank == first, first + second - self.rank
        result = {}
        count = torch.ones(1, dtype=torch.int64, device=self.device)

        def agree_on_count() -> None:
            self.exchange([(peer, count)] * starts, [(peer, count)] * (not starts))

        agree_on_count()  # NCCL connects at first use
        for size in sizes:
            buffers = torch.zeros(2, size, dtype=torch.uint8, device=self.device)

            def both(buffers: Tensor = buffers) -> None:
                self.exchange([(peer, buffers[0])], [(peer, buffers[1])])

            once_s = self.timed(both)
            count.fill_(repeats(once_s))
            agree_on_count()
            result[size] = min([once_s, *(self.timed(both) for _ in range(int(count)))])
            if not count:
                break
        return result

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.waits.wait(start_exchange(sends, receives, self.group), self.group)

    def timed(self, play: Play, count: int = 1) -> float:
        """Return the seconds of one `play`, the mean over `count` of them."""
        start_s = time.perf_counter()
        for _ in range(count):
            play()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start_s) / count

    def slowest(self, seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)


def repeats(seconds: float) -> int:
    """Return how often to repeat what takes so long; 0: never, and skip larger sizes."""
    return 0 if seconds > TOO_LONG_S else max(1, min(MAX_REPEATS, int(BUDGET_S / seconds)))
