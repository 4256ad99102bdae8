"""`lockstep watch`: the state of a run in the terminal, refreshed until it ends.

A refresh asks the workers for their state and reads what was appended to the run's files. Piped
output has one frame. HOST:RUN runs the command on that host by OpenSSH.
"""

import argparse
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

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name
from lockstep.elastic.control import generation_line, run_status, worker_rows
from lockstep.errors import UsageError
from lockstep.log import printable
from lockstep.object_store.address import parse_address
from lockstep.record.step_timer import format_step_line
from lockstep.remote.followed_copy import ReadStatus, followed_copy
from lockstep.report.curve import Curve
from lockstep.report.run_data import FAILURES, VALIDATION, RunData, require_run
from lockstep.units import format_duration

TAIL_BYTES = 1 << 18  # of metrics.jsonl, that are read at the start
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {
    "loss": "loss",
    "norm": "norm",
    "tok/s": "tokens_per_second",
    "samples/s": "samples_per_second",
    "exposed comm": "exposed_communication",
}
PIPED_WIDTH = 140  # columns
SSH_FAILED = 255  # exit code of ssh when it cannot run the command
SHOWN = 5  # newest generations and failures


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
    require_run(Path(args.run))
    watch(Path(args.run), args.every)
    return 0


def watch(folder: Path, every_s: float, read_status: ReadStatus | None = None) -> None:
    """Draw the run in `folder` until it ends. read_status: see `refresh`."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    data, status = RunData(folder, TAIL_BYTES), dict[str, Any]()
    if console.is_terminal:
        signal.signal(
            signal.SIGTERM, signal.default_int_handler
        )  # leaves the alternate screen then, too
        with (
            suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            while not (status := refresh(data, read_status)).get("ended"):
                live.update(frame(data, status, rows=max(4, console.height - 28)), refresh=True)
                time.sleep(every_s)
    console.print(frame(data, status or refresh(data, read_status)))


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
    line = f"if command -v lockstep >/dev/null; then exec lockstep {words}; else exec {shlex.quote(sys.executable)} -m lockstep {words}; fi"
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


def frame(data: RunData, status: dict[str, Any], rows: int = 1 << 16) -> RenderableType:
    """Return the display. rows: how many workers fit."""
    now_s = time.time()
    parts: list[RenderableType] = [state_line(data, status), progress_line(data)]
    parts += [Text(f"metrics.jsonl: {problem}", "yellow") for problem in data.missing()]
    if data.history.best:
        parts.append(Text(f"best score: {data.history.best[1]:.4g}, step {data.history.best[0]:,}"))
    stops = [note for note in data.history.notes if note.event == "stopped early"]
    if stops and stops[-1].step == data.steps.newest:
        parts.append(plain(f"stopped early, {stops[-1].text}"))
    numbers = {key: value for key, value in data.steps.last.items() if type(value) in (int, float)}
    parts += (
        [
            plain(
                format_step_line(data.steps.newest, {**numbers, "shares": status.get("shares", ())})
            )
        ]
        if numbers
        else []
    )
    validations = {key: key for key in data.steps.curves if VALIDATION.fullmatch(key)}
    shown = (CURVES | validations).items()
    curves = {name: data.steps.curves[key] for name, key in shown if key in data.steps.curves}
    parts.append(
        table(
            [], [(name, sparkline(curve), f"{curve.last[1]:.4g}") for name, curve in curves.items()]
        )
    )
    if "members" in status and not status["ended"]:
        head, *workers = worker_rows(status)
        parts += [plain(f"\n{generation_line(status)}"), table(head, workers[:rows])]
        parts += [Text(f"and {len(workers) - rows} more workers")] if len(workers) > rows else []
    formed = [
        (str(g.number), ago(now_s - g.time_s), f"{g.step:,}", str(len(g.workers)), g.why)
        for g in data.history.generations
    ]
    notes = [
        (ago(now_s - note.time_s), note.event, note.text)
        for note in data.history.notes
        if note.event in FAILURES
    ]
    parts += (
        [Text(), table(("generation", "formed", "step", "workers", "reason"), formed[-SHOWN:])]
        if formed
        else []
    )
    parts += (
        [
            Text(),
            table(
                ("failed", f"{len(notes)} in all" if len(notes) > SHOWN else "", ""),
                notes[-SHOWN:],
                "red",
            ),
        ]
        if notes
        else []
    )
    return Group(*parts, Text(), checkpoint_line(data, 0.0 if "source" in status else now_s))


def state_line(data: RunData, status: dict[str, Any]) -> Text:
    ended, members = status.get("ended"), status.get("members", [])
    if ended:
        state = f"ended with exit code {ended['code']}: {ended['text']}".removesuffix(": ")
        style = "red" if ended["code"] else "green"
    elif "source" in status:
        state, style = status["source"], "yellow" if status["silent"] else "green"
        state += "; silent: its host may be lost" * status["silent"]
    elif not status:
        state, style = "no list of workers: started without an agent, or not started", "yellow"
    elif members and all("unreachable" in member for member in members):
        state, style = "no worker answers", "red"
    else:
        hosts = len({member["host"] for member in members})
        state, style = f"{len(members)} workers on {hosts} host{'s' * (hosts != 1)}", "green"
    return Text.assemble(
        (printable(status.get("run") or str(data.folder)), "bold"), "  ", (printable(state), style)
    )


def progress_line(data: RunData) -> Text:
    total = data.total_steps
    if not total:
        return Text(f"step {data.steps.newest:,}")
    done, recent = (
        min(1.0, data.steps.newest / total),
        data.steps.curves["seconds"].points()[-20:] if "seconds" in data.steps.curves else [],
    )
    left_s = (total - data.steps.newest) * sum(point[1] for point in recent) / max(1, len(recent))
    bar = "━" * round(40 * done)
    left = f", about {format_duration(left_s)} left" if 0 < done < 1 and recent else ""
    return Text.assemble(
        f"step {data.steps.newest:,} of {total:,} ",
        (bar, "green"),
        ("─" * (40 - len(bar)), "dim"),
        f" {done:.0%}{left}",
    )


def sparkline(curve: Curve) -> str:
    """Return the newest bins of a curve as blocks, from their lowest to their highest mean."""
    values = [point[1] for point in curve.points()[-40:]]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(
        BLOCKS[int((len(BLOCKS) - 1) * (value - low) / ((high - low) or 1.0))] for value in values
    )


def checkpoint_line(data: RunData, now_s: float) -> Text:
    """now_s: 0 where the times of the files are those of a copy."""
    folder = data.folder / "checkpoints"
    steps = committed_steps(folder)
    with suppress(OSError, IndexError):
        age = (
            f", {ago(now_s - (folder / folder_name(steps[-1]) / COMMITTED).stat().st_mtime)}"
            if now_s
            else ""
        )
        return Text(f"checkpoint: step {steps[-1]:,}{age}; {len(steps)} kept")
    return Text("checkpoint: none", style="yellow")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "") -> Table:
    grid = Table(
        box=None, show_header=bool(head), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0)
    )
    for name in head or [*rows, ()][0]:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*map(plain, row), style=style)
    return grid


def plain(text: str) -> Text:
    """Return text of a file for the terminal: the console would pass escape sequences on."""
    return Text(printable(text))


def ago(seconds: float) -> str:
    return f"{format_duration(max(0.0, seconds))} ago"
