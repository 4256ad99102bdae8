"""`lockstep run`: run a script on all devices of this machine."""

import argparse
import os
import sys

from lockstep.cli.script import asks_for_help
from lockstep.cli.start import read_script_request, start_here
from lockstep.errors import UsageError
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.processes import die_with_parent
from lockstep.runtime.variables import LAYOUT, PROFILE, TRACK
from lockstep.runtime.worker_env import read_worker_env


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if not args.file.endswith(".py"):
        file, colon, _ = args.file.partition(":")
        hint = "give FILE.py; a run file: lockstep train RUN.toml"
        if colon:
            hint = f"give {file}; lockstep train takes FILE.py:FUNCTION"
        raise UsageError(f"{args.file!r} is no script", "command line", hint)
    if args.parent:
        die_with_parent(args.parent)
    request = read_script_request(args, args.file, rest)
    for_sessions = {variable: vars(args)[f"layout.{axis}"] for axis, variable in LAYOUT.items()}
    for_sessions |= {TRACK: ",".join(args.track), PROFILE: args.profile}
    os.environ.update({name: str(value) for name, value in for_sessions.items() if value})
    is_worker = read_worker_env(os.environ) or read_rank_info(os.environ)
    if asks_for_help(rest) and not is_worker:
        os.execv(sys.executable, [sys.executable, *request.script_words, *rest])
    return start_here(request, args.workers)
