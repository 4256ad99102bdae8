"""`lockstep generate`: continue texts, in this process or in several that share the model."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.agent.static_group import run_static_group
from lockstep.cli.options import refuse_unknown
from lockstep.errors import UsageError
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.worker_main import worker_main


def main(args: argparse.Namespace, rest: list[str]) -> int:
    refuse_unknown([word for word in rest if word.startswith("-")], "generate")
    args.text += rest  # argparse leaves texts behind an option over
    if args.tensor != 1 and args.compile:
        raise UsageError(f"--compile is not supported with --tensor {args.tensor}", "command line", "remove one of them")
    is_worker = args.tensor != 1 and read_rank_info(os.environ)[0] is not None
    if args.tensor != 1 and not is_worker:
        return launch_workers(args)
    from lockstep.cli.continuations import print_continuations, run_worker  # loads torch, which starting workers does not need

    return worker_main(lambda: run_worker(args)) if is_worker else print_continuations(args)


def launch_workers(args: argparse.Namespace) -> int:
    """Start one process per slice of the model; return the exit code."""
    with TemporaryDirectory(prefix="lockstep-generate-") as folder:
        command = ["generate", *sys.argv[2:]]
        if not args.text and not args.file:  # the workers have no standard input
            lines = Path(folder) / "lines"
            lines.write_bytes(sys.stdin.buffer.read())
            command += ["--file", str(lines)]
        return run_static_group(command, args.tensor)
