"""`lockstep watch`: the state of a run in the terminal, refreshed until it ends.

A refresh asks the workers for their state and reads what was appended to the run's files. Piped
output has one frame. HOST:RUN runs the command on that host by OpenSSH.
"""

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from lockstep.elastic.control import run_status
from lockstep.errors import UsageError, perhaps
from lockstep.object_store.address import parse_address
from lockstep.remote.download import ReadStatus, followed_copy
from lockstep.report.frame import frame
from lockstep.report.run_data import RunData, is_run, require_run

TAIL_BYTES = 1 << 18  # of metrics.jsonl, that are read at the start
PIPED_WIDTH = 140  # columns
SSH_FAILED = 255  # exit code of ssh when it cannot run the command


def main(args: argparse.Namespace, rest: list[str]) -> int:
    host, _, remote = args.run.partition(":")
    if host and remote and not remote.startswith("//") and not Path(args.run).exists():
        if not shutil.which("ssh"):
            raise UsageError(
                f"{args.run} is on another host, and there is no ssh here",
                "command line; PATH",
                "install OpenSSH's client",
            )
        return watch_by_ssh(host, ssh_words(host, remote, args.every, terminal=sys.stdout.isatty()))
    if address := parse_address(args.run):
        with followed_copy(address) as (folder, read_status):
            watch(folder, args.every, read_status)
        return 0
    folder = Path(args.run)
    if sys.stdout.isatty() and may_start(folder):
        print(f"{folder} does not exist yet: waiting for its run to start (Ctrl-C ends)")
        try:
            while not is_run(folder):
                time.sleep(args.every)
        except KeyboardInterrupt:
            return 0
    require_run(folder)
    watch(folder, args.every)
    return 0


def may_start(folder: Path) -> bool:
    """Return whether a run may start in a folder that does not exist: no other one there has a
    similar name, unless it differs in digits only."""
    name = re.sub(r"\d", "", folder.name)
    others = {re.sub(r"\d", "", other.name) for other in folder.parent.glob("*")}
    is_new = not folder.exists() and folder.parent.is_dir()
    return is_new and not perhaps(name, others - {name})


def watch(folder: Path, every_s: float, read_status: ReadStatus | None = None) -> None:
    """Draw the run in `folder` until it ends. read_status: see `refresh`."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    data, status = RunData(folder, TAIL_BYTES), dict[str, Any]()
    if console.is_terminal:
        # Leaves the alternate screen then, too.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with (
            suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not (status := refresh(data, read_status)).get("ended"):
                live.update(frame(data, status, console, console.height), refresh=True)
                time.sleep(every_s)
    console.print(frame(data, status or refresh(data, read_status), console))


def watch_by_ssh(host: str, words: Sequence[str]) -> int:
    """Run ssh until it ends, and pass signals on; return its exit code. UsageError: ssh itself
    failed."""
    ssh = subprocess.Popen(words)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: ssh.send_signal(number))
    code = ssh.wait()
    if code == SSH_FAILED:
        raise UsageError(
            f"ssh does not reach {host}, or was cut off",
            "RUN; the line above is from ssh",
            f"try ssh {host} true",
        )
    return code if code >= 0 else 128 - code


def ssh_words(host: str, run: str, every: float, *, terminal: bool) -> list[str]:
    """Return the ssh command that watches `run` on `host`: with the command of its PATH, else with
    this Python, as it is where the hosts share their disks."""
    words = shlex.join(["watch", run, "--every", f"{every:g}"])
    line = (
        f"if command -v lockstep >/dev/null; then exec lockstep {words}; "
        f"else exec {shlex.quote(sys.executable)} -m lockstep {words}; fi"
    )
    return ["ssh", *(["-t"] if terminal else []), "--", host, line]


def refresh(data: RunData, read_status: ReadStatus | None = None) -> dict[str, Any]:
    """Read what is new and ask the workers; return their status, {} for a run without an agent.
    read_status: replaces asking the workers, where they are out of reach; it brings the new
    files"""
    status = read_status() if read_status else {}
    data.update()
    with suppress(UsageError):
        return status or run_status(data.folder, data.history.shares)
    return {}
