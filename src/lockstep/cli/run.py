"""`lockstep run`: run a script on all devices of this machine."""

import argparse
import os
import sys

from lockstep.cli.script import asks_for_help
from lockstep.cli.start import (
    choose_worker_count,
    read_script_request,
    run_as_worker,
    start_local_agent,
)
from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.runtime.processes import die_with_parent
from lockstep.runtime.variables import PROFILE, TRACK, environment_variable


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if not args.file.endswith(".py"):
        file, colon, _ = args.file.partition(":")
        hint = "give FILE.py; a run file: lockstep train RUN.toml"
        if colon:
            hint = f"give {file}; lockstep train takes FILE.py:FUNCTION"
        elif rest and rest[-1].endswith(".py"):
            hint = f"unknown option {rest[0]}; see lockstep run --help"
        raise UsageError(f"{args.file!r} is no script", "command line", hint)
    if args.parent:
        die_with_parent(args.parent)
    request = read_script_request(args, args.file, rest)
    for axis in ("shard", "tensor", "pipeline"):
        if size := vars(args)[f"layout.{axis}"]:
            os.environ[environment_variable(f"layout.{axis}")] = str(
                size
            )  # for the Sessions of the workers
    if args.track:
        os.environ[TRACK] = ",".join(args.track)
    if args.profile:
        os.environ[PROFILE] = args.profile
    code = run_as_worker(request, args.workers)
    if code is not None:
        return code
    if asks_for_help(rest):
        os.execv(sys.executable, [sys.executable, *request.script_words, *rest])
    workers, _ = choose_worker_count(args.workers, None)
    code = start_local_agent(request, None, workers, workers if request.restart == "all" else 1)
    if args.profile and not (request.folder / "profile").exists():
        log.warning("--profile %s: no Session has trained these steps", args.profile)
    return code
