"""`lockstep report`: one HTML file about a run, or about two runs together. Every training ends
with one."""

import argparse
from pathlib import Path

from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.report.page import write_report
from lockstep.report.run_data import require_run

PREEMPTED_BYTES = 32 << 20  # of metrics.jsonl, read in about a second


def main(args: argparse.Namespace, rest: list[str]) -> int:
    folders = [args.folder, *([args.compare] if args.compare else [])]
    for folder in folders:
        require_run(folder)
    if args.compare and args.compare.resolve() == args.folder.resolve():
        raise UsageError(
            f"{args.compare} is compared with itself", "--compare", "give the folder of another run"
        )
    out = args.out or args.folder / ("compare.html" if args.compare else "report.html")
    try:
        print(write_report(folders, out))
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror or error}",
            "--out" if args.out else "the run folder",
            "give --out FILE.html, in a folder that exists and that this user can write",
        ) from error
    return 0


def write_at_end(folder: Path, host: str = "", *, is_preempted: bool = False) -> None:
    """Write RUN/report.html after training, if the last rank 0 was on `host` ("": in any case).
    A failure is a warning: it changes neither the run nor its exit code.
    is_preempted: the host may be lost in seconds; leave a long run to `lockstep report`"""
    try:
        if not (metrics := folder / "metrics.jsonl").exists() or (
            host and host != last_leader_host(folder)
        ):
            return
        if is_preempted and metrics.stat().st_size > PREEMPTED_BYTES:
            log.info("report.html was not written: lockstep report %s does", folder)
        else:
            log.info("report: %s", write_report([folder], folder / "report.html"))
    except (Exception, KeyboardInterrupt) as error:
        log.warning(
            "report.html was not written (%s: %s); lockstep report %s tries again",
            type(error).__name__,
            error,
            folder,
        )


def last_leader_host(folder: Path) -> str:
    """Return the host of rank 0 in the newest generation with members; "" without one."""
    generations = GenerationLog(folder / "generations")
    newest = generations.newest()
    if newest.end and newest.number > 1:
        newest = generations.read(newest.number - 1)
    return newest.members[0].host if newest.members else ""
