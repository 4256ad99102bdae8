"""Charts as HTML with inline SVG. Each is readable without JavaScript; page.js adds hover and zoom.

The SVG of a plot is stretched to its box, so that lines and text keep their size on a phone. Text
is HTML beside it, placed in percent.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from lockstep.log import printable
from lockstep.report.run_data import Stretch
from lockstep.units import counted, format_count, format_duration

CUT = 4  # times the median: the slowest steps, such as the first one, would hide all others
WIDTH = 1000  # of a plot
HEIGHT = 300
ROW = 26  # height of a row of the timeline
MAX_ROWS = 32
MAX_MARKS = 200
SECRET_TEXT = re.compile(
    r"(?i)((?:password|passwd|secret|credentials?|(?:api|access|private)[_-]?key|(?<![a-z])token)"
    r"[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"
    r"|\b(?:hf_|sk-|ghp_|AKIA)[A-Za-z0-9_-]{12,}"
)


class Chart(NamedTuple):
    """names: of its curves, by key; css: "zero" includes 0 on the vertical axis, "cut" ends it at
    CUT times the median of the highest line, "wide" fills the page"""

    title: str
    names: Mapping[str, str]
    unit: str = ""
    size: float = 1  # of the unit
    css: str = ""


class Line(NamedTuple):
    name: str
    css: str  # class with the color
    points: Sequence[Sequence[float]]  # (x, mean, lowest, highest)
    kind: str = "line"  # or "dots"; "band": the area from `lowest` to `highest`


class Mark(NamedTuple):
    """A failure, at a step or at a time in seconds."""

    x: float
    text: str
    css: str = "a"


def hide_secrets(value: object) -> str:
    """Return the text of `value` without what looks like a secret, or user:password@ in a URL."""
    shown = re.sub(r"://[^/@\s]+@", "://", printable(str(value)))
    return SECRET_TEXT.sub(lambda match: f"{match[1] or ''}(hidden)", shown)


def text(value: object) -> str:
    """Return `value` for HTML. Every text of a report passes here, or through `hide_secrets`."""
    return html.escape(hide_secrets(value))


def number(value: float) -> str:
    return format_count(value).replace(".0", "") if abs(value) >= 9999.5 else f"{value:,.4g}"


def ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Return two to six round numbers from `low` to `high`, at least `least` apart."""
    gap = max((high - low) / 5, least)
    power = 10.0 ** math.floor(math.log10(gap))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= gap)
    return [round(i * size, 12) for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return the short form of each value, or all digits where short forms would be equal."""
    labels = [number(value) for value in values]
    return labels if len({*labels}) == len(labels) else [f"{value:,.12g}" for value in values]


def axis(name: str, low: float, high: float, unit: str = "", least: float = 0) -> str:
    side = {"x": "left", "y": "bottom"}[name]
    values = ticks(low, high, least)
    items = [
        f'<li style="{side}:{100 * (v - low) / (high - low):.2f}%" data-v="{label}{unit}"></li>'
        for v, label in zip(values, tick_labels(values), strict=True)
    ]
    return f'<ol class="{name}" aria-hidden="true">{"".join(items)}</ol>'


def vertical_range(lines: Sequence[Line], css: str) -> tuple[float, float]:
    """Return the ends of the vertical axis. css: see `Chart`"""
    low = min(point[2] for line in lines for point in line.points)
    high = max(point[3] for line in lines for point in line.points)
    if "cut" in css:
        medians = [median(point[1] for point in line.points) for line in lines]
        high = min(high, CUT * max(medians))
    if lines[0].kind == "band":
        return 0.0, high
    if "zero" in css and low >= 0:
        return 0.0, high * 1.05 or 1.0
    pad = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return low - pad, high + pad


def line_chart(
    chart: Chart,
    lines: Sequence[Line],
    steps: tuple[float, float],
    marks: Sequence[Mark] = (),
    note: str = "",
) -> str:
    """Return a figure of `lines` over `steps`, the range of all charts of the page; "" without
    points."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    title, names, unit, _, css = chart
    is_named = len(lines) > 1 or len(names) > 1
    low, high = vertical_range(lines, css)
    x0, x1 = steps

    def place(x: float, y: float) -> str:
        return f"{WIDTH * (x - x0) / (x1 - x0):.4g},{HEIGHT * (high - y) / (high - low):.4g}"

    if high < max(point[3] for line in lines for point in line.points):
        note += f"; cut at {number(high)}"
    marks = marks[-MAX_MARKS:]
    shapes = [shape for line in lines for shape in shapes_of(line, place)]
    shapes += [
        f'<path class="mark {mark.css}" d="M{WIDTH * (mark.x - x0) / (x1 - x0):.2f},-9999V9999"/>'
        for mark in marks
    ]
    data = {
        "x": steps,
        "y": (low, high),
        "unit": unit,
        "fixed": lines[0].kind == "band",
        "most": high if "cut" in css else None,
        "marks": [(mark.x, hide_secrets(mark.text)) for mark in marks],
        "lines": [line_data(line) for line in lines],
    }
    legend = [f'<li class="{line.css}">{text(line.name)}</li>' for line in lines if is_named]
    described = [f"{title}, {unit}".strip(", "), f"over steps {x0:,.0f} to {x1:,.0f};", note]
    if marks:
        failures = counted(len(marks), "failure")
        if "wide" in css:
            legend.append(f'<li class="mark">{failures}</li>')
        described.append(f"marks: {failures}")
    label = text(" ".join(filter(None, described)))
    script = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart {css}"><figcaption>'
        f"<h3>{text(title)} <small>{unit}</small></h3><p>{text(note)}</p>"
        f'<ul class="legend">{"".join(legend)}</ul></figcaption>'
        '<div class="plot" tabindex="0" role="group" '
        f'aria-label="{text(title)}: arrow keys read values, plus and minus zoom">'
        f"{axis('y', low, high)}{axis('x', x0, x1, least=1)}{svg(HEIGHT, label, shapes)}"
        '<i class="cursor" hidden></i><output hidden></output></div>'
        f'<script type="application/json">{script}</script></figure>'
    )


def shapes_of(line: Line, place: Callable[[float, float], str]) -> Iterator[str]:
    """Yield the paths of a line; `place` returns the coordinates of a point."""
    _, css, points, kind = line
    if kind == "band" or any(bottom < top for _, _, bottom, top in points):
        outline = [place(x, top) for x, _, _, top in points]
        outline += [place(x, bottom) for x, _, bottom, _ in reversed(points)]
        area = "band" if kind == "band" else "area"
        yield f'<path class="{area} {css}" d="M{" ".join(outline)}Z"/>'
    places = [place(x, y) for x, y, _, _ in points]
    if kind != "band" and len(points) > 1:
        yield f'<path class="line {css}" d="M{" ".join(places)}"/>'
    if kind == "dots" or len(points) == 1:
        dots = "".join(f"M{at}h0" for at in places)
        yield f'<path class="dots {css}" d="{dots}"/>'


def svg(height: float, label: str, shapes: Sequence[str]) -> str:
    frame = (
        f'viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{label}"'
    )
    return f"<svg {frame}>{''.join(shapes)}</svg>"


def line_data(line: Line) -> dict[str, Any]:
    """Return the line for page.js: five digits, and the spread of the bins where there is one."""
    columns = [
        [float(f"{value:.5g}") for value in column]
        for column in list(zip(*line.points, strict=True))[1:]
    ]
    values: dict[str, Any] = {
        "name": hide_secrets(line.name),
        "x": [point[0] for point in line.points],
        "y": columns[0],
    }
    return values | ({"low": columns[1], "high": columns[2]} if columns[1] != columns[2] else {})


def percents(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return shares in percent with one decimal, which sum to exactly 100 (largest remainders)."""
    total = math.fsum(seconds.values()) or 1.0
    exact = {name: 1000 * value / total for name, value in seconds.items()}
    tenths = {name: math.floor(value) for name, value in exact.items()}
    missing = round(math.fsum(exact.values())) - sum(tenths.values())
    rounded_up = sorted(exact, key=lambda name: tenths[name] - exact[name])[:missing]
    return {name: (count + (name in rounded_up)) / 10 for name, count in tenths.items()}


def share_bar(shares: Mapping[str, float], css: Mapping[str, str], label: str) -> str:
    """Return a bar with a band for each share, in percent; `css`: their classes."""
    bands, x = [], 0.0
    for name, share in shares.items():
        tip = f"<title>{text(name)} {share:.1f}%</title>"
        bands.append(
            f'<rect class="{css[name]}" x="{10 * x:.1f}" width="{10 * share:.1f}" height="30">'
            f"{tip}</rect>"
        )
        x += share
    label = f"{label}: {', '.join(f'{name} {share:.1f}%' for name, share in shares.items())}"
    return f'<div class="bar">{svg(30, text(label), bands)}<output hidden></output></div>'


def timeline(
    stretches: Sequence[Stretch], marks: Sequence[Mark], start_s: float, title: str
) -> str:
    """Return a row with the generations of each worker; of each host where there are many workers.
    Times are in seconds since 1970."""
    if not stretches:
        return ""
    places = {stretch.worker: stretch.worker.rpartition("/")[::2] for stretch in stretches}
    workers = sorted(places, key=lambda worker: (places[worker][0], int(places[worker][1])))
    by_host = len(workers) > MAX_ROWS
    row_of = {worker: places[worker][0] if by_host else worker for worker in workers}
    rows = list(dict.fromkeys(row_of.values()))
    drawn = {row: i for i, row in enumerate(rows[:MAX_ROWS])}
    end_s = max([stretch.end_s for stretch in stretches] + [mark.x for mark in marks])
    span_s = max(1e-3, end_s - start_s)

    def place(time_s: float) -> float:
        return WIDTH * (time_s - start_s) / span_s

    shapes = []
    counts = Counter(stretch._replace(worker=row_of[stretch.worker]) for stretch in stretches)
    for (row, generation, from_s, to_s), count in counts.items():
        if row in drawn:
            many = f", {count} workers" if by_host else ""
            when = f"generation {generation}, {clock(from_s - start_s)} to {clock(to_s - start_s)}"
            width = max(0.8, place(to_s) - place(from_s))
            box = f'x="{place(from_s):.2f}" width="{width:.2f}" height="{ROW - 8}"'
            tip = f"<title>{text(row)}{many}: {when}</title>"
            shapes.append(
                f'<rect class="g{generation % 3}" y="{drawn[row] * ROW + 4}" {box}>{tip}</rect>'
            )
    height = ROW * len(drawn)
    for mark in marks[-MAX_MARKS:]:
        tip = f"<title>{text(mark.text)}</title>"
        shapes.append(f'<path class="mark" d="M{place(mark.x):.2f},0V{height}">{tip}</path>')
    units = {3600: " h", 60: " min"}
    size = next((size for size in units if span_s > 3 * size), 1)
    generations = {stretch.generation for stretch in stretches}
    counts_text = counted(len(generations), "generation"), counted(len(workers), "worker")
    note = ", ".join([*counts_text, clock(span_s)])
    if hidden := len(rows) - len(drawn):
        note += f"; not drawn: {counted(hidden, 'more host')}"
    names = "".join(f"<li>{text(row)}</li>" for row in drawn)
    return (
        '<figure class="timeline wide">'
        f"<figcaption><h3>{text(title)}</h3><p>{note}</p></figcaption>"
        f'<div class="rows"><ul aria-hidden="true">{names}</ul>'
        f'<div class="plot" style="height:{height}px">'
        f"{axis('x', 0, span_s / size, units.get(size, ' s'))}"
        f"{svg(height, text(f'{title}: {note}'), shapes)}"
        "<output hidden></output></div></div></figure>"
    )


def clock(seconds: float) -> str:
    return format_duration(max(0.0, seconds))
