"""Time of a vote on a step with real processes on one machine: a reduction in O(log N) rounds against a ring all-gather.

The same processes vote in turn both ways, each time after a barrier. In the ring, gloo's all-gather hands on a row per rank in N - 1
rounds, and every rank counts N rows: the votes until 2026-11-21. The reduction waits as under an agent, in a thread that can be left
behind. Rank 0 measures the time until it has the decision, and the CPU time of its threads meanwhile.

    python -m bench.growth.votes --keep votes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from bench.results import keep, machine
from lockstep.elastic.collectives import vote_on_step
from lockstep.elastic.consensus import Vote
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.runtime.work import WorkWaiter

LOSSES = 4  # per rank
WARM_UP = 10


def vote_in_ring(vote: Vote, size: int) -> tuple[float, int]:
    """Send 7 + LOSSES numbers per rank around a ring, and count the votes of all ranks."""
    digest = (vote.digest >> 32, vote.digest & 0xFFFFFFFF)
    sent = torch.tensor(
        [
            0,
            vote.save_failed,
            vote.joiners_waiting,
            vote.leaving,
            *digest,
            vote.count,
            *(loss for loss in vote.losses if loss is not None),
        ],
        dtype=torch.float64,
    )
    received = torch.empty(size * len(sent), dtype=torch.float64)
    dist.all_gather_single(received, sent)  # type: ignore[attr-defined]  # public at run time
    votes = []
    for row in received.view(size, -1).tolist():
        digest_of_row = int(row[4]) << 32 | int(row[5])
        votes.append(
            Vote(
                row[7:],
                int(row[6]),
                save_failed=bool(row[1]),
                joiners_waiting=bool(row[2]),
                leaving=bool(row[3]),
                digest=digest_of_row,
            )
        )
    assert Counter(vote.digest for vote in votes).most_common(1)[0][1] == size
    assert not any(
        vote.save_failed or vote.joiners_waiting or vote.leaving or vote.stop_signal
        for vote in votes
    )
    return math.fsum(loss for vote in votes for loss in vote.losses if loss is not None), sum(
        vote.count or 0 for vote in votes
    )


def vote_in_rounds(runtime: ElasticRuntime, vote: Vote) -> tuple[float, int]:
    decision = vote_on_step(runtime, vote)
    return decision.loss, decision.count


def measure(rank: int, size: int, folder: str, repetitions: int) -> None:
    """Vote in turn both ways; rank 0 writes a line for each repetition to `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]  # public at run time
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    runtime = ElasticRuntime(World(rank, size, rank, size, "", torch.device("cpu")))
    runtime.group._waits = WorkWaiter(lambda: "")
    losses: list[float | None] = [None] * (LOSSES * size)
    losses[LOSSES * rank : LOSSES * (rank + 1)] = [1.0 + rank] * LOSSES
    vote = Vote(losses, 100, digest=2**63 + 7)
    subjects = {
        "ring": partial(vote_in_ring, vote, size),
        "rounds": partial(vote_in_rounds, runtime, vote),
    }
    lines = []
    for repetition in range(WARM_UP + repetitions):
        for name, subject in subjects.items():
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            result = subject()
            wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            assert result == (LOSSES * size * (size + 1) / 2, 100 * size)
            if repetition >= WARM_UP:
                lines.append(
                    json.dumps(
                        {
                            "ranks": size,
                            "subject": name,
                            "wall_s": round(wall_s, 7),
                            "cpu_s": round(cpu_s, 7),
                        }
                    )
                )
    if rank == 0:
        Path(folder, "raw.jsonl").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument(
        "--repetitions", type=int, default=200, help="of each way to vote, per number of ranks"
    )
    parser.add_argument(
        "--keep", metavar="NAME", default="", help="keep the results in bench/growth/DATE-NAME"
    )
    options = parser.parse_args()
    load, rows = os.getloadavg(), []
    table = [
        "| ranks | ring | rounds | rounds / ring | CPU of rank 0, ring | rounds |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            start_processes(measure, (size, folder, options.repetitions), size, start_method="fork")
            rows += [
                json.loads(line) for line in Path(folder, "raw.jsonl").read_text().splitlines()
            ]
        ring, rounds = (
            [row for row in rows if (row["ranks"], row["subject"]) == (size, name)]
            for name in ("ring", "rounds")
        )
        ratio = statistics.median(
            b["wall_s"] / a["wall_s"] for a, b in zip(ring, rounds, strict=True)
        )
        ring_us, rounds_us, ring_cpu, rounds_cpu = (
            f"{1e6 * statistics.median(row[what] for row in of):.0f} µs"
            for what in ("wall_s", "cpu_s")
            for of in (ring, rounds)
        )
        table.append(
            f"| {size} | {ring_us} | {rounds_us} | {ratio:.2f} | {ring_cpu} | {rounds_cpu} |"
        )
        print(table[-1], flush=True)
    if options.keep:
        about = (
            f"Time of a vote, median of {options.repetitions} repetitions of each, in turn.\n\n"
            + "\n".join(table)
        )
        print(keep(options.keep, rows, about, machine("none", load)))


if __name__ == "__main__":
    main()
