"""`lockstep lab`: simulate a collective, draw it, and run its messages between processes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from lockstep import log
from lockstep.agent.agent import run_static_group
from lockstep.agent.forkserver import STATIC_PRELOAD, WorkerProgram
from lockstep.cli.start import refuse_other_worker_count
from lockstep.errors import UsageError
from lockstep.network.collectives import algorithms_for, schedule_of
from lockstep.network.draw import align, draw_svg, draw_text
from lockstep.network.links import Link
from lockstep.network.simulate import Network, Simulation, best_by_size
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.exit_report import worker_main
from lockstep.units import format_count, format_seconds

if TYPE_CHECKING:
    from lockstep.parallel.run_moves import Measured

MAX_RUN_RANKS = 64  # processes of this machine


class Experiment:
    """A collective by one or more algorithms, on the network that the options describe."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.collective, self.ranks, self.size, per_host = args.collective, args.ranks, int(args.bytes), args.ranks_per_host
        inside = Link(args.host_latency or args.latency / 10, args.host_rate or 10 * args.rate)
        self.network = Network(Link(args.latency, args.rate), inside, per_host)
        names = [args.algorithm] if args.algorithm else algorithms_for(self.ranks, per_host)
        self.schedules = {name: schedule_of(self.collective, name, self.ranks, per_host) for name in names}
        self.simulate = lru_cache(maxsize=None)(lambda name, size: Simulation(self.schedules[name], self.ranks, size, self.network))
        self.simulations = {name: self.simulate(name, self.size) for name in names}
        self.fastest = min(names, key=lambda name: self.simulations[name].seconds)
        hosts = f" on hosts of {per_host}" if per_host > 1 else ""
        link = f"{format_count(args.rate)}B/s, latency {format_seconds(args.latency)}"
        self.title = f"{self.collective} of {format_count(self.size)}B, {self.ranks:,} ranks{hosts}, {link}"

    def best_by_size(self) -> list[tuple[float, str]]:
        return best_by_size(lambda name, size: self.simulate(name, size).seconds, list(self.schedules), self.size)


def main(args: argparse.Namespace, rest: list[str]) -> int:
    refuse_options(args)
    if not args.run:
        return report(args, Experiment(args), {})
    rank_info, description = read_rank_info(os.environ)
    if rank_info is None:
        return run_static_group(WorkerProgram(("lab", *sys.argv[2:]), preload=(*STATIC_PRELOAD, "lockstep.parallel.run_moves")), args.ranks)
    refuse_other_worker_count(args.ranks, rank_info.size, description)
    return worker_main(lambda: run_worker(args))


def refuse_options(args: argparse.Namespace) -> None:
    if args.picture and not args.algorithm:
        raise UsageError("--picture without --algorithm", "command line", "give the algorithm to draw: --algorithm tree")
    if args.run and args.ranks > MAX_RUN_RANKS:
        what = f"--run with {args.ranks:,} ranks: each is a process of this machine"
        raise UsageError(what, "command line", f"give at most {MAX_RUN_RANKS} ranks, or simulate them without --run")


def run_worker(args: argparse.Namespace) -> int:
    """Collective. Send the messages of each algorithm in this worker; rank 0 reports."""
    import torch.distributed as dist  # these load torch

    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.parallel.run_moves import measure_moves

    with ElasticRuntime.join(threads=1) as runtime:
        log.set_up_logging(rank=runtime.world.rank)
        experiment, group = Experiment(args), dist.group.WORLD
        assert group is not None
        schedules = experiment.schedules.items()
        measured = {name: measure_moves(args.collective, schedule, experiment.size, group) for name, schedule in schedules}
        return report(args, experiment, measured) if runtime.world.rank == 0 else 0


def report(args: argparse.Namespace, experiment: Experiment, measured: dict[str, Measured]) -> int:
    """Print the result, whose last line has the total time in seconds, and write the picture."""
    if args.picture:
        schedule, simulation = experiment.schedules[args.algorithm], experiment.simulations[args.algorithm]
        args.picture.write_text(draw_svg(schedule, simulation, f"{args.algorithm} {experiment.title}"), encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(args, experiment, measured)))
        return 0
    print(f"{experiment.title}\n\n{table(experiment, measured)}\n")
    if args.algorithm:
        print(draw_text(experiment.schedules[args.algorithm], experiment.simulations[args.algorithm]))
    else:
        ranges = experiment.best_by_size()
        print("fastest: " + "; ".join(f"{name} from {format_count(round(size))}B" if size else name for size, name in ranges))
    print(f"\ntotal time of {experiment.fastest}: {experiment.simulations[experiment.fastest].seconds:.6f} s")
    return 0


def table(experiment: Experiment, measured: dict[str, Measured]) -> str:
    """Return a line for each algorithm, the fastest first; messages and bytes are of the busiest sender."""
    head = ["algorithm", "time", "rounds", "messages", "bytes", *(["measured", "torch", "difference"] if measured else [])]
    rows = [head]
    for name, simulation in sorted(experiment.simulations.items(), key=lambda pair: pair[1].seconds):
        counts = [f"{len(simulation.round_ends_s):,}", f"{max(simulation.messages):,}", f"{format_count(max(simulation.bytes))}B"]
        row = [name, format_seconds(simulation.seconds), *counts]
        if result := measured.get(name):
            row += [format_seconds(result.seconds), format_seconds(result.torch_seconds), f"{result.difference:.1g}"]
        rows.append(row)
    return align(rows)


def as_json(args: argparse.Namespace, experiment: Experiment, measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the result, times in seconds."""
    algorithms = {
        name: {
            "seconds": simulation.seconds,
            "rounds": len(simulation.round_ends_s),
            "messages": max(simulation.messages),
            "bytes": max(simulation.bytes),
            **({"measured": measured[name]._asdict()} if name in measured else {}),
        }
        for name, simulation in experiment.simulations.items()
    }
    return {
        "collective": experiment.collective,
        "ranks": experiment.ranks,
        "bytes": experiment.size,
        "algorithms": algorithms,
        "fastest_from_bytes": experiment.best_by_size() if len(algorithms) > 1 else [],
        "fastest": experiment.fastest,
        "seconds": experiment.simulations[experiment.fastest].seconds,
    }
