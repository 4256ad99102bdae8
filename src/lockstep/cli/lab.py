"""`lockstep lab`: simulate a collective, draw it, and run its messages between processes."""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from typing import TYPE_CHECKING

from lockstep.cli.start import run_in_group
from lockstep.errors import UsageError
from lockstep.network.collectives import algorithms_for, schedule_of
from lockstep.network.draw import align, draw_svg, draw_text
from lockstep.network.moves import Link
from lockstep.network.simulate import Network, Simulation, best_by_size
from lockstep.units import format_count, format_seconds

if TYPE_CHECKING:
    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.parallel.run_moves import Measured

MAX_RUN_RANKS = 64  # processes of this machine


class Experiment:
    """A collective by one or more algorithms, on the network that the options describe."""

    def __init__(self, args: argparse.Namespace) -> None:
        ranks = args.ranks
        per_host = args.ranks_per_host
        self.size = int(args.bytes)
        inside = Link(args.host_latency or args.latency / 10, args.host_rate or 10 * args.rate)
        network = Network(Link(args.latency, args.rate), inside, per_host)
        names = [args.algorithm] if args.algorithm else algorithms_for(ranks, per_host)
        self.schedules = {
            name: schedule_of(args.collective, name, ranks, per_host) for name in names
        }
        self.simulate = cache(
            lambda name, size: Simulation(self.schedules[name], ranks, size, network)
        )
        self.simulations = {name: self.simulate(name, self.size) for name in names}
        self.fastest = min(names, key=lambda name: self.simulations[name].seconds)
        hosts = f" on hosts of {per_host}" if per_host > 1 else ""
        link = f"{format_count(args.rate)}B/s, latency {format_seconds(args.latency)}"
        self.title = (
            f"{args.collective} of {format_count(self.size)}B, {ranks:,} ranks{hosts}, {link}"
        )

    def best_by_size(self) -> list[tuple[float, str]]:
        return best_by_size(
            lambda name, size: self.simulate(name, size).seconds, list(self.schedules), self.size
        )


def main(args: argparse.Namespace, rest: list[str]) -> int:
    refuse_options(args)
    if not args.run:
        return report(args, Experiment(args), {})
    Experiment(args)  # refuses before any process is started
    words = ("lab", *sys.argv[2:])
    modules = ["lockstep.parallel.run_moves"]
    return run_in_group(
        words, args.ranks, lambda runtime: measure(args, runtime), modules, "--ranks"
    )


def refuse_options(args: argparse.Namespace) -> None:
    if args.picture and not args.algorithm:
        raise UsageError(
            "--picture without --algorithm",
            "command line",
            "give the algorithm to draw: --algorithm tree",
        )
    if args.ranks_per_host == 1 and (args.host_rate or args.host_latency):
        raise UsageError(
            "--host-rate and --host-latency describe a host of several ranks; here each has one",
            "command line",
            "give --ranks-per-host 2 or more",
        )
    if args.run and args.ranks > MAX_RUN_RANKS:
        raise UsageError(
            f"--run with {args.ranks:,} ranks: each is a process of this machine",
            "command line",
            f"give at most {MAX_RUN_RANKS} ranks, or simulate them without --run",
        )


def measure(args: argparse.Namespace, runtime: ElasticRuntime) -> int:
    """Collective. Send the messages of each algorithm in this worker; rank 0 reports."""
    import torch.distributed as dist  # these load torch

    from lockstep.parallel.run_moves import measure_moves

    experiment, group = Experiment(args), dist.group.WORLD
    assert group is not None
    measured = {
        name: measure_moves(args.collective, schedule, experiment.size, group)
        for name, schedule in experiment.schedules.items()
    }
    return report(args, experiment, measured) if runtime.world.rank == 0 else 0


def report(args: argparse.Namespace, experiment: Experiment, measured: dict[str, Measured]) -> int:
    """Print the result, whose last line has the total time in seconds, and write the picture."""
    seconds = experiment.simulations[experiment.fastest].seconds
    if args.picture:
        schedule = experiment.schedules[args.algorithm]
        simulation = experiment.simulations[args.algorithm]
        args.picture.write_text(
            draw_svg(schedule, simulation, f"{args.algorithm} {experiment.title}"), encoding="utf-8"
        )
    if args.json:
        values = {
            name: facts(simulation, measured.get(name))
            for name, simulation in experiment.simulations.items()
        }
        answer = {
            "algorithms": values,
            "fastest_from_bytes": experiment.best_by_size(),
            "fastest": experiment.fastest,
            "seconds": seconds,
        }
        print(json.dumps(answer))
        return 0
    print(f"{experiment.title}\n\n{table(experiment, measured)}\n")
    if args.algorithm:
        print(
            draw_text(experiment.schedules[args.algorithm], experiment.simulations[args.algorithm])
        )
    else:
        (_, first), *others = experiment.best_by_size()
        ranges = [first, *(f"{name} from {format_count(round(size))}B" for size, name in others)]
        print("fastest:", "; ".join(ranges))
    print(f"\ntotal time of {experiment.fastest}: {seconds:.6f} s")
    return 0


def facts(simulation: Simulation, measured: Measured | None) -> dict[str, float]:
    """Return what is shown of an algorithm; messages and bytes are of the busiest sender."""
    counts = {
        "rounds": len(simulation.round_ends_s),
        "messages": max(simulation.messages),
        "bytes": max(simulation.bytes),
    }
    return {"seconds": simulation.seconds, **counts, **(measured._asdict() if measured else {})}


def table(experiment: Experiment, measured: dict[str, Measured]) -> str:
    """Return a line for each algorithm, the fastest first."""
    rows = [
        [
            "algorithm",
            "time",
            "rounds",
            "messages",
            "bytes",
            *(["measured", "torch", "difference"] if measured else []),
        ]
    ]
    for name, simulation in sorted(
        experiment.simulations.items(), key=lambda pair: pair[1].seconds
    ):
        seconds, rounds, messages, size, *others = facts(simulation, measured.get(name)).values()
        cells = [format_seconds(seconds), f"{rounds:,}", f"{messages:,}", f"{format_count(size)}B"]
        rows.append(
            [
                name,
                *cells,
                *map(format_seconds, others[:2]),
                *(f"{value:.1g}" for value in others[2:]),
            ]
        )
    return align(rows)
