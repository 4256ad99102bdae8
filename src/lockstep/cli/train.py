"""`lockstep train`: train a run file or a function on all devices of this machine."""

import argparse
import os

from lockstep.cli.plan import with_planned_layout
from lockstep.cli.start import read_request, start_here
from lockstep.config.saved_run import format_run
from lockstep.runtime.variables import PROFILE


def main(args: argparse.Namespace, rest: list[str]) -> int:
    request = read_request(args, rest)
    if args.profile:
        os.environ[PROFILE] = args.profile  # for the Sessions of the workers
    if args.show and not request.script:
        print(format_run(request.open(request.resume)))
        return 0
    if args.layout == "auto":
        request = with_planned_layout(request, args.workers)
    return start_here(request, args.workers)
