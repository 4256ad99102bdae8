"""A run as `lockstep watch` draws it in the terminal."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name
from lockstep.elastic.control import generation_line, worker_rows
from lockstep.log import printable
from lockstep.record.step_timer import FIELDS, format_fields, measured_fields
from lockstep.report.curve import Curve
from lockstep.report.run_data import FAILURES, MEASURED, RunData, end_text
from lockstep.units import counted, format_duration

BLOCKS = "▁▂▃▄▅▆▇█"
NAMES = {key: name for key, name, _ in FIELDS}
MEASURED_CURVES = ("tokens_per_second", "samples_per_second", "exposed_communication")
EVENTS = 10  # newest ones
ALL_ROWS = sys.maxsize
WIDE = 10.0  # highest over lowest value of a curve from which on it is drawn as logarithms


def frame(
    data: RunData, status: dict[str, Any], console: Console, rows: int = ALL_ROWS
) -> RenderableType:
    """Return the display. rows: of the screen, which the tables share; long texts are cut then"""
    now_s = time.time()
    head = Group(
        state_line(data, status),
        progress_line(data, has_ended=bool(status.get("ended"))),
        checkpoint_line(data, 0.0 if "source" in status else now_s),
        *step_lines(data, status, console.width),
    )
    is_running = "members" in status and not status["ended"]
    titles, *workers = worker_rows(status) if is_running else [()]
    tables = [curve_rows(data, console.width), workers, newest_events(data, now_s)]
    used = len(console.render_lines(head)) + 3 * is_running + 2 * bool(tables[2])
    shares = share_rows(rows - used, list(map(len, tables)))
    shown = [table[:share] for table, share in zip(tables, shares, strict=True)]
    cut = partial(plain, is_cut=rows < ALL_ROWS)
    parts: list[RenderableType] = [head, table([], shown[0], cut)]
    if is_running:
        more = len(workers) - shares[1]
        parts += [
            Text(f"{more} more workers" * bool(more), "dim"),
            cut(generation_line(status)),
            table(titles, shown[1], cut),
        ]
    if shares[2]:
        styles = ["red" if event in FAILURES else "" for _, event, _ in shown[2]]
        failures = Text(f"\nfailures: {data.history.failures}", "dim")
        parts += [failures, table([], shown[2], cut, styles)]
    return Group(*parts)


def share_rows(rows: int, wanted: Sequence[int]) -> list[int]:
    """Deal `rows` to tables in turn, to each as many as it wants at most."""
    shares = [0] * len(wanted)
    for _ in range(min(rows, sum(wanted))):
        open_tables = [i for i, share in enumerate(shares) if share < wanted[i]]
        shares[min(open_tables, key=shares.__getitem__)] += 1
    return shares


def step_lines(data: RunData, status: dict[str, Any], columns: int) -> Iterator[Text]:
    """Yield what is missing, the best score, an early stop, and what was measured last."""
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
        values["shares"] = status.get("shares", ())
        yield Text(format_fields(measured_fields(values), {}, columns))


def curve_rows(data: RunData, columns: int) -> list[tuple[str, ...]]:
    """Return (name, blocks, newest value) of the loss, of what the loop logs, and of what is
    measured."""
    curves = data.steps.curves
    own = [key for key in curves if not MEASURED.fullmatch(key)]
    keys = [key for key in ("loss", *own, *MEASURED_CURVES) if key in curves]
    texts = [(NAMES.get(key, key), f"{curves[key].last[1]:.4g}") for key in keys]
    free = columns - max((len(name + value) for name, value in texts), default=0) - 6
    return [
        (name, sparkline(curves[key], max(1, free)), value)
        for key, (name, value) in zip(keys, texts, strict=True)
    ]


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


def progress_line(data: RunData, *, has_ended: bool) -> Text:
    step, total = data.steps.newest, data.history.total_steps
    if total < max(1, step):
        return Text(f"step {step:,}")
    done = min(1.0, step / total)
    bar = "━" * round(40 * done)
    left = ""
    if 0 < done < 1 and not has_ended and (curve := data.steps.curves.get("seconds")):
        recent = [point[1] for point in curve.points()[1:][-20:]]  # without the warm-up
        if recent:
            left_s = (total - step) * fmean(recent)
            left = f", about {format_duration(left_s, 0)} left"
    return Text.assemble(
        f"step {step:,} of {total:,} ",
        (bar, "green"),
        ("─" * (40 - len(bar)), "dim"),
        f" {done:.0%}{left}",
    )


def sparkline(curve: Curve, bins: int) -> str:
    """Return the newest bins of a curve as blocks, from their lowest to their highest mean."""
    values = [point[1] for point in curve.points()[-bins:]]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if 0 < WIDE * low < high:
        values = list(map(math.log, values))
        low, high = math.log(low), math.log(high)
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


def newest_events(data: RunData, now_s: float) -> list[tuple[str, ...]]:
    """Return the rows of the newest generations and failures, the newest one first."""
    history = data.history
    notes = [note for note in history.notes if note.event in FAILURES]
    events = [(note.time_s, note.event, note.text) for note in notes]
    for formed in history.generations:
        workers = counted(len(formed.workers), "worker")
        text = f"{workers} after step {formed.step:,}: {formed.why}".removeprefix("0 workers ")
        events.append((formed.time_s, f"generation {formed.number}", text))
    newest = sorted(events, reverse=True)[:EVENTS]
    return [(ago(now_s - time_s), *event) for time_s, *event in newest]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    cell: Callable[[str], Text],
    styles: Sequence[str] = (),
) -> Table:
    """Return a table in which only the last column is cut or wrapped. styles: of the rows"""
    grid = Table(
        box=None,
        show_header=bool(head),
        header_style="dim",
        pad_edge=False,
        padding=(0, 2, 0, 0),
        row_styles=styles,
    )
    *names, last = head or [*rows, ("",)][0]
    for name in names:
        grid.add_column(name, no_wrap=True)
    grid.add_column(last, overflow="fold")
    for row in rows:
        grid.add_row(*map(cell, row))
    return grid


def plain(text: str, *, is_cut: bool = False) -> Text:
    """Return text of a file for the terminal: the console would pass escape sequences on."""
    return Text(printable(text), no_wrap=is_cut, overflow="ellipsis" if is_cut else None)


def ago(seconds: float) -> str:
    return f"{format_duration(max(0.0, seconds), 0)} ago"
