"""`lockstep run`: run a script on all devices of this machine."""

from __future__ import annotations

import argparse

from lockstep.cli.run_request import read_script_request
from lockstep.cli.start import choose_worker_count, run_as_worker, start_local_agent
from lockstep.errors import UsageError


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if not args.file.endswith(".py"):
        raise UsageError(f"{args.file!r} is no script", "command line", "write lockstep run FILE.py; a run file: lockstep train RUN.toml")
    request = read_script_request(args, args.file, rest)
    code = run_as_worker(request, args.workers)
    if code is not None:
        return code
    workers, _ = choose_worker_count(args.workers, None)
    return start_local_agent(request, None, workers, workers if request.restart == "all" else 1)
