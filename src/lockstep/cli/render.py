"""`lockstep render`: write the file that starts a run on a cluster."""

import argparse
from pathlib import Path

from lockstep import __version__
from lockstep.cli.script import is_script
from lockstep.cli.start import max_workers, refuse_layout, workers_per_replica
from lockstep.config.resolve import parse_flags
from lockstep.config.schema import RunConfig
from lockstep.errors import UsageError
from lockstep.files import read_text, write_atomic
from lockstep.log import log
from lockstep.remote.working_copy import RunPlace
from lockstep.render.job import make_job, render


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if is_script(args.run_file):
        raise UsageError(
            f"{args.run_file} is a script, not a run file",
            "command line",
            "a scheduler starts a script with: lockstep launch FILE.py --nodes MIN:MAX --out RUN",
        )
    if args.gpus and args.workers not in (None, args.gpus):
        raise UsageError(
            f"--workers {args.workers} with --gpus {args.gpus}",
            "command line",
            "remove --workers: each GPU has one worker",
        )
    file = Path(args.run_file)
    workers = args.workers or args.gpus or 2
    folder = args.run or f"runs/{file.stem}"
    place = RunPlace(folder)  # a malformed address is not repeated
    job, run = make_job(
        file,
        args.nodes,
        gpus=args.gpus,
        workers=workers,
        run_folder=folder,
        image=args.image or f"lockstep:{__version__}",
        flags=parse_flags(rest),
    )
    place.refuse_split(workers_per_replica(run), workers, f"--workers or --gpus; --run {folder}")
    refuse_sizes(
        run, args.nodes, workers, f"--nodes {job.fewest}:{job.most}, {workers} workers per node"
    )
    text = render(args.target, job)
    if args.out is None:
        print(text, end="")
        return 0
    write_new(args.out, text)
    print(f"wrote {args.out}")
    return 0


def refuse_sizes(run: RunConfig, nodes: tuple[int, int], workers: int, where: str) -> None:
    """UsageError if `lockstep launch` would refuse the smallest or the largest number of nodes."""
    least, most = (count * workers for count in nodes)
    room = max_workers(run, most)
    if least > room:
        raise UsageError(
            f"{least} workers, but a step has work for {room}",
            f"{where}; batch.micro_batches",
            "give fewer nodes, "
            f"or set batch.micro_batches = {most * run.batch.micro_batches // room}",
        )
    for count in (least, most):
        refuse_layout(run, min(count, room), where)
    if most > room:
        log.warning(
            "a step has work for %d workers: %d of %d are on standby", room, most - room, most
        )


def write_new(path: Path, text: str) -> None:
    """Write a file that is absent or equal. UsageError if it has other content."""
    if path.exists() and read_text(path) != text:
        raise UsageError(
            f"{path} exists, with other content", "--out", "move it aside, or give another name"
        )
    write_atomic(path, text)
