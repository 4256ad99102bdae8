"""`lockstep drill`: train several times and compare the hashes of the last checkpoints."""

import argparse
import os
import signal
import sys
from pathlib import Path

from lockstep.cli.script import is_script
from lockstep.cli.start import refuse_layout, workers_per_replica
from lockstep.config.resolve import parse_flags, resolve
from lockstep.drill.compare import drill, self_check
from lockstep.drill.run import FAULTS
from lockstep.remote.working_copy import RunPlace


def main(args: argparse.Namespace, rest: list[str]) -> int:
    folder = str(RunPlace(args.out or "runs/drill"))
    flags = parse_flags(rest)
    # So that the runs of the drill exit, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    words = [*([args.target] if args.target else []), *rest]
    faults = args.faults
    if is_script(args.target):
        if faults is None:
            return self_check(words, folder, args.workers or 2)
        workers = args.workers or 3
        steps = None
    else:
        run = resolve(Path(args.target) if args.target else None, flags, os.environ).run
        workers = args.workers or workers_per_replica(run) * (run.layout.replicate or 3)
        refuse_layout(run, workers, "--workers")
        faults = faults or len(FAULTS)
        steps = (run.steps, run.checkpoint.every_steps)
    return drill(words, folder, workers=workers, faults=faults, seed=args.seed, steps=steps)
