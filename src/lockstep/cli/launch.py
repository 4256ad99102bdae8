"""`lockstep launch`: be the agent of this host, or start the agents of all hosts, by ssh or by
Ray."""

import argparse
import socket
from collections.abc import Sequence
from pathlib import Path

from lockstep.agent import ray_nodes
from lockstep.agent.agent import LOOPBACK, AgentConfig
from lockstep.agent.hosts import Host, Hosts, parse_hosts, read_hosts, start_by_ssh
from lockstep.agent.lock import newest_generation
from lockstep.checkpoint.folder import committed_steps
from lockstep.cli.options import build_parser, option_words
from lockstep.cli.start import (
    RunRequest,
    choose_worker_count,
    max_workers,
    read_request,
    refuse_layout,
    start_agent,
    workers_per_replica,
)
from lockstep.config.schema import RunConfig
from lockstep.elastic.control import stop_run
from lockstep.errors import UsageError
from lockstep.log import log, printable
from lockstep.object_store.storage import store_address
from lockstep.remote.working_copy import RunPlace
from lockstep.runtime.processes import die_with_parent
from lockstep.runtime.worker_env import WorkerEnv

# Options that exclude each other.
CONFLICTS = {
    "ray": ("hosts", "host", "ssh", "address"),
    "nodes": ("hosts", "ssh"),
    "hosts": ("address", "workers"),
    "ssh": ("host",),
}


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.stop:
        refuse_other_options(args, rest)
        print(printable(stop_run(args.stop)))
        return 0
    if args.parent:
        die_with_parent(args.parent)
    refuse_conflicts(args)
    request = read_request(args, rest)
    run = request.validate()
    place = RunPlace(store_address(request.folder) or request.folder)
    if request.restart == "all":
        place.refuse_plain_script()
    if args.ray:
        return launch_by_ray(args, request, run, place)
    limits = option_words(args, "min", "max")  # as given: each host has the same defaults
    name, source = own_name(args)
    hosts = find_hosts(args, run, args.address or (name if args.nodes else LOOPBACK))
    for host in hosts.host:
        where = f"host {host.name}; --out {place}"
        place.refuse_split(workers_per_replica(run), host.workers, where)
    fewest, planned = (count * hosts.workers for count in args.nodes or (1, 1))
    if args.nodes and is_complete(request.folder, run):
        log.info(
            "%s has all of its %d steps: nothing to do", request.folder, run.steps if run else 0
        )
        return 0
    if args.min is None:
        args.min = fewest if args.nodes or request.restart == "all" else 1
    most = check_limits(args, run, planned)
    if (args.ssh or hosts.ssh) and not args.host:
        return launch_by_ssh(args, request, place, hosts.host, limits)
    host = hosts.find(name, f"{source}; {args.hosts}")
    env = WorkerEnv(
        folder="",
        state="",
        host=name,
        slot=0,
        slots=host.workers,
        expected_workers=fewest,
        min_workers=max(args.min, workers_per_replica(run)),
        max_workers=most,
        address=host.resolve(),
    )
    config = AgentConfig(env, lives_on=not args.parent, evaluator=args.with_evaluator)
    return start_agent(request, run, config)


def refuse_other_options(args: argparse.Namespace, rest: list[str]) -> None:
    """UsageError for any word besides --stop RUN."""
    alone = vars(build_parser().parse_args(["launch", "--stop", str(args.stop)]))
    given = [name for name, value in vars(args).items() if value != alone[name]]
    words = [args.target if name == "target" else f"--{name.replace('_', '-')}" for name in given]
    if unwanted := [*words, *rest]:
        raise UsageError(
            f"{unwanted[0]} cannot be combined with --stop",
            "command line",
            "write lockstep launch --stop RUN",
        )


def refuse_conflicts(args: argparse.Namespace) -> None:
    """UsageError for two options that exclude each other."""
    for option, others in CONFLICTS.items():
        for name in others:
            if getattr(args, option) and (value := getattr(args, name)):
                shown = "" if value is True else f" {value}"
                raise UsageError(
                    f"--{option} cannot be combined with --{name}{shown}",
                    "command line",
                    "remove one of them",
                )


def own_name(args: argparse.Namespace) -> tuple[str, str]:
    """Return (name of this host, where it comes from)."""
    if args.host:
        return args.host, "--host"
    return socket.gethostname(), "hostname of this machine"


def find_hosts(args: argparse.Namespace, run: RunConfig | None, address: str = LOOPBACK) -> Hosts:
    """Return the hosts of --hosts, or this host alone. UsageError for contradicting options.
    address: of this host, without --hosts."""
    if args.hosts is None:
        if args.ssh:
            raise UsageError(
                "--ssh needs a list of hosts", "command line", "give --hosts HOSTS.toml"
            )
        workers, reason = choose_worker_count(args.workers, run)
        name, source = own_name(args)
        hint = "give 1 worker or more, and a name of letters, digits, dots, dashes and underscores"
        return parse_hosts(
            {"host": [{"name": name, "address": address, "workers": workers}]},
            f"{source}; {reason}",
            hint,
        )
    return read_hosts(args.hosts)


def is_complete(folder: Path, run: RunConfig | None) -> bool:
    """Whether the run ended with code 0 after all of its steps. A host that a scheduler starts
    later would wait in vain for the minimum."""
    end = newest_generation(folder).end if run and (folder / "generations").is_dir() else None
    return bool(
        run and end and not end.code and run.steps in committed_steps(folder / "checkpoints")
    )


def check_limits(args: argparse.Namespace, run: RunConfig | None, workers: int) -> int:
    """Return how many of `workers` may train. UsageError if --min and --max do not allow a
    start."""
    room = max_workers(run, args.max or workers)
    # Further workers are on standby.
    refuse_layout(run, min(workers, room), str(args.hosts or "--workers"))
    most: int = args.max if args.max is not None else room
    if not 1 <= args.min <= most <= room:
        raise UsageError(
            f"--min {args.min} and --max {most} are invalid: a step has work for {room} workers",
            "--min, --max; batch.micro_batches",
            f"give 1 <= --min <= --max <= {room}",
        )
    if args.min > workers:
        raise UsageError(
            f"--min {args.min} exceeds the number of workers, {workers}",
            f"--min; {args.hosts or '--workers'}",
            f"give --min {workers} or less, or more workers",
        )
    return most


def launch_by_ssh(
    args: argparse.Namespace,
    request: RunRequest,
    place: RunPlace,
    hosts: Sequence[Host],
    limits: Sequence[str],
) -> int:
    """Start the agent of every host by ssh; return their combined exit code."""
    scoring = hosts[: place.evaluators(len(hosts)) * args.with_evaluator]

    def words_of(host: Host) -> Sequence[str]:
        evaluator = ["--with-evaluator"] if host in scoring else []
        own = [*option_words(args, "hosts"), *limits, *evaluator, "--host", host.name]
        return "launch", *own, *request.launch_words()

    return start_by_ssh(hosts, words_of)


def launch_by_ray(
    args: argparse.Namespace, request: RunRequest, run: RunConfig | None, place: RunPlace
) -> int:
    """Start an agent on each node of the Ray cluster; return the exit code of the run."""
    with ray_nodes.connected() as ray, place.driver_folder() as folder:
        wanted = ray_nodes.choose_reservation(
            ray_nodes.cluster_resources(ray), args.nodes and args.nodes[1], args.workers
        )
        workers = wanted.nodes * wanted.workers
        if args.min is None:
            args.min = workers if request.restart == "all" else 1
        check_limits(args, run, workers)
        place.refuse_split(workers_per_replica(run), wanted.workers, f"--workers; --out {place}")
        sizes = ["--nodes", str(wanted.nodes), "--workers", str(wanted.workers)]
        words = [*sizes, *option_words(args, "min", "max"), *request.launch_words(has_folder=True)]
        evaluators = place.evaluators(wanted.nodes) * args.with_evaluator
        return ray_nodes.run_agents(
            ray, wanted, words, folder, create=place.create, evaluators=evaluators, wait_s=args.wait
        )
