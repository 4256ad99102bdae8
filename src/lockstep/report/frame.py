"""A run as `lockstep watch` draws it in the terminal."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name
from lockstep.elastic.control import generation_line, worker_rows
from lockstep.log import printable
from lockstep.record.step_timer import format_step_line
from lockstep.report.curve import Curve
from lockstep.report.run_data import FAILURES, VALIDATION, RunData, end_text
from lockstep.units import counted, format_duration

BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {
    "loss": "loss",
    "norm": "norm",
    "tok/s": "tokens_per_second",
    "samples/s": "samples_per_second",
    "exposed comm": "exposed_communication",
}
SHOWN = 5  # newest generations and failures


def frame(data: RunData, status: dict[str, Any], rows: int = 1 << 16) -> RenderableType:
    """Return the display. rows: how many workers fit."""
    now_s = time.time()
    formed = [
        (str(g.number), ago(now_s - g.time_s), f"{g.step:,}", str(len(g.workers)), g.why)
        for g in data.history.generations
    ]
    failures = [
        (ago(now_s - note.time_s), note.event, note.text)
        for note in data.history.notes
        if note.event in FAILURES
    ]
    in_all = f"{len(failures)} in all" if len(failures) > SHOWN else ""
    return Group(
        state_line(data, status),
        progress_line(data),
        *step_lines(data, status),
        curves_table(data),
        *members(status, rows),
        *newest_rows(("generation", "formed", "step", "workers", "reason"), formed),
        *newest_rows(("failed", in_all, ""), failures, "red"),
        Text(),
        checkpoint_line(data, 0.0 if "source" in status else now_s),
    )


def step_lines(data: RunData, status: dict[str, Any]) -> Iterator[Text]:
    """Yield what is missing, the best score, an early stop, and the values of the last step."""
    for problem in data.missing():
        yield Text(f"metrics.jsonl: {problem}", "yellow")
    if data.history.best:
        step, score = data.history.best
        yield Text(f"best score: {score:.4g}, step {step:,}")
    stops = [note for note in data.history.notes if note.event == "stopped early"]
    if stops and stops[-1].step == data.steps.newest:
        yield plain(f"stopped early, {stops[-1].text}")
    values = {key: value for key, value in data.steps.last.items() if type(value) in (int, float)}
    if values:
        shares = {"shares": status.get("shares", ())}
        yield plain(format_step_line(data.steps.newest, values | shares))


def curves_table(data: RunData) -> Table:
    curves = data.steps.curves
    validations = {key: key for key in curves if VALIDATION.fullmatch(key)}
    shown = {name: curves[key] for name, key in (CURVES | validations).items() if key in curves}
    rows = [(name, sparkline(curve), f"{curve.last[1]:.4g}") for name, curve in shown.items()]
    return table([], rows)


def members(status: dict[str, Any], rows: int) -> Iterator[RenderableType]:
    if "members" not in status or status["ended"]:
        return
    head, *workers = worker_rows(status)
    yield plain(f"\n{generation_line(status)}")
    yield table(head, workers[:rows])
    if len(workers) > rows:
        yield Text(f"and {len(workers) - rows} more workers")


def state_line(data: RunData, status: dict[str, Any]) -> Text:
    ended, members = status.get("ended"), status.get("members", [])
    if ended:
        state = end_text(**ended)
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
        state = f"{counted(len(members), 'worker')} on {counted(hosts, 'host')}"
        style = "green"
    return Text.assemble(
        (printable(status.get("run") or str(data.folder)), "bold"), "  ", (printable(state), style)
    )


def progress_line(data: RunData) -> Text:
    step, total = data.steps.newest, data.total_steps
    if not total:
        return Text(f"step {step:,}")
    done = min(1.0, step / total)
    bar = "━" * round(40 * done)
    left = ""
    if 0 < done < 1 and (curve := data.steps.curves.get("seconds")):
        recent = [point[1] for point in curve.points()[-20:]]
        if recent:
            left_s = (total - step) * fmean(recent)
            left = f", about {format_duration(left_s)} left"
    return Text.assemble(
        f"step {step:,} of {total:,} ",
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
        saved_s = (folder / folder_name(steps[-1]) / COMMITTED).stat().st_mtime
        age = f", {ago(now_s - saved_s)}" if now_s else ""
        return Text(f"checkpoint: step {steps[-1]:,}{age}; {len(steps)} kept")
    return Text("checkpoint: none", style="yellow")


def newest_rows(
    head: Sequence[str], rows: Sequence[Sequence[str]], style: str = ""
) -> list[RenderableType]:
    """Return an empty line and a table of the newest rows; [] without rows."""
    return [Text(), table(head, rows[-SHOWN:], style)] if rows else []


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
