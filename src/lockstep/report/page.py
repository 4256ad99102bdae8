"""The report of one run, or of two runs together, as one HTML file that loads nothing."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from markupsafe import Markup

import lockstep
from lockstep.config.schema import flatten
from lockstep.files import write_atomic
from lockstep.record.backends import without_secrets
from lockstep.record.goodput import CATEGORIES, NAMES
from lockstep.record.step_timer import CATEGORIES as WAITS
from lockstep.report.charts import (
    Chart,
    Line,
    Mark,
    clock,
    hide_secrets,
    line_chart,
    number,
    percents,
    share_bar,
    timeline,
)
from lockstep.report.curve import Curve
from lockstep.report.run_data import (
    MEASURED,
    NORMAL_EXIT,
    VALIDATION,
    Facts,
    Note,
    RunData,
    mapping,
    read_facts,
)
from lockstep.units import counted, format_bytes, format_count, format_duration, format_seconds

UNITS = ("tokens", "samples", "steps")  # that a run counts, one of them
LOSSES = {"loss": "training", "validation_loss": "validation", "val_loss": "validation"}
WAITED = {"exposed_communication": "exposed communication", "data_wait": "data"}
STEP_TIME = "Step time"
CHARTS = (
    Chart("Loss", LOSSES, css="wide"),
    Chart(STEP_TIME, {"seconds": "all categories"}, "s", css="zero cut half"),
    Chart("Gradient norm", {"norm": "norm"}, css="zero"),
    *(
        Chart("Throughput", {f"{unit}_per_second": "all devices"}, f"{unit}/s", css="zero")
        for unit in UNITS
    ),
    Chart("Model FLOPs utilization", {"mfu": "all devices"}, "%", 0.01, "zero"),
    Chart("Link and data waits", WAITED, "% of a step", 0.01, "zero"),
    Chart("Memory", {"memory_bytes": "peak of rank 0"}, "GiB", 2**30, "zero"),
    Chart("Learning rate", {"lr": "learning rate"}, css="zero"),
)
MAX_OWN = 8  # charts
MAX_EVENTS = 100
MAX_EVALUATIONS = 50
EVALUATION_SETTINGS = (
    "averaged",
    "lowercase",
    "average",
    "bleu_signature",
    "chrf_signature",
    "seconds",
)
BAND_NAMES: dict[str, str] = {name: NAMES.get(name, name) for name in CATEGORIES}
BAND_CSS = {name: f"c{i}" for i, name in enumerate([*CATEGORIES, "overhead"])}


EventTable: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[object]]]  # caption, head, rows


class Run(NamedTuple):
    data: RunData
    facts: Facts
    values: dict[str, Any]  # of run.json, by "section.key", or of a function; without secrets
    prefix: str  # "NAME: " beside another run, else ""
    css: str  # "a" or "b": its color

    @property
    def ledger(self) -> dict[str, float]:
        """Seconds by category: the later of the last end of the run and its newest checkpoint."""
        saved = {
            name: float(value)
            for name, value in mapping(
                mapping(self.facts.checkpoint.get("time")).get("seconds")
            ).items()
        }
        ledger = max(
            self.data.history.seconds, saved, key=lambda seconds: math.fsum(seconds.values())
        )
        return {name: ledger[name] for name in CATEGORIES if ledger.get(name)}


def write_report(folders: Sequence[Path], out: Path) -> str:
    """Write the report of one run or two to `out`; return a line that describes it. OSError."""
    start_s = time.monotonic()
    names = [folder.resolve().name for folder in folders]
    names = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    runs = []
    for folder, name, css in zip(folders, names, "ab", strict=False):
        facts = read_facts(folder)
        data, prefix = RunData(folder).update(), f"{name}: " if len(folders) > 1 else ""
        values = mapping(facts.run.get("values") or facts.checkpoint.get("values"))
        runs.append(Run(data, facts, flatten(without_secrets(values)), prefix, css))
    page = render(runs, " and ".join(names))
    write_atomic(out, page)
    steps = sum(run.data.steps.count for run in runs)
    return (
        f"{out}: {format_bytes(len(page.encode()))}, "
        f"{steps:,} steps, in {format_duration(time.monotonic() - start_s)}"
    )


def render(runs: Sequence[Run], title: str) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # training does not need it

    here, steps = Path(__file__).parent, step_range(runs)
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else hide_secrets(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measures = [summary(run) for run in runs]
    names = dict.fromkeys(name for measure in measures for name in measure)
    functions = (headline, problems, goodput, run_timeline, events, evaluations, origins)
    page = environment.get_template("page.html").render(
        {function.__name__: function for function in functions},
        runs=runs,
        title=title,
        source=lambda name: (here / name).read_text(),
        cards={name: [measure.get(name, "–") for measure in measures] for name in names},
        asked=shlex.quote(str(runs[0].data.folder)),
        charts=step_charts(runs, steps),
        differing=differences(runs),
        environment=environment_of,
        version=lockstep.__version__,
        date=date_of(time.time()),
    )
    return page.lstrip()


def date_of(time_s: float) -> str:
    """Return a date in UTC; "" for 0."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s)) if time_s else ""


def headline(run: Run) -> str:
    """Return the task, the start, and the end of a run that did not fail."""
    end = "" if has_failed(run) else run.facts.end
    words = (run.values.get("task"), date_of(run.data.history.first_s), end)
    return " · ".join(filter(None, words))


def has_failed(run: Run) -> bool:
    return bool(run.facts.end) and not NORMAL_EXIT.match(run.facts.end)


def problems(run: Run) -> Iterator[str]:
    if has_failed(run):
        yield run.facts.end
    for name, count in (
        ("metrics.jsonl", run.data.steps.damaged),
        ("events.jsonl", run.data.history.damaged),
    ):
        if count:
            yield f"{name}: skipped {counted(count, 'damaged line')}"
    for name, curve in run.data.steps.curves.items():
        first, count = curve.not_finite
        if count:
            yield f"{name} is not finite at {counted(count, 'step')}, first at step {first:,}"
    if not run.data.steps.count:
        yield "no step has been committed"
    missing = [f"metrics.jsonl: {problem}" for problem in run.data.missing()]
    yield from dict.fromkeys([*run.facts.problems, *missing])


def summary(run: Run) -> dict[str, str]:
    """Return the figures at the top of the page, by name, as far as they were measured."""
    steps = run.data.steps
    history = run.data.history
    sums = {name: curve.total for name, curve in steps.curves.items()}
    seconds = sums.get("seconds", 0.0)
    figures = {}
    if "loss" in sums:
        figures["loss"] = number(steps.curves["loss"].last[1])
    if seconds:
        times = [point[1] for point in steps.curves["seconds"].points()]
        figures["median step time"] = format_seconds(median(times))
    figures["step"] = f"{steps.newest:,}"
    if history.total_steps:
        figures["step"] += f" of {history.total_steps:,}"
    if run.ledger:
        figures["goodput"] = f"{percents(run.ledger).get('training', 0.0):.1f}%"
    for unit in UNITS:
        if seconds and unit in sums:
            figures[f"{unit}/s"] = format_count(round(sums[unit] / seconds, 1))
    if seconds and sums.get("communication_seconds"):
        figures["exposed communication"] = f"{sums['communication_seconds'] / seconds:.1%}"
    if history.best:
        step, score = history.best
        figures["best"] = f"{number(score)} (step {step:,})"
    figures["failures"] = f"{history.failures:,}"
    figures["generations"] = f"{history.formed:,}"
    return figures | {"time": clock(math.fsum(run.ledger.values()) or seconds)}


def step_charts(runs: Sequence[Run], steps: tuple[float, float]) -> Iterator[str]:
    """Yield the charts over steps: those of every run, the shares of a step beside its time; then
    the values that only the user's loop logs, each beside its validation."""
    own = own_charts(key for run in runs for key in run.data.steps.curves)
    marks = [
        Mark(
            formed.step,
            f"{run.prefix}generation {formed.number} after step {formed.step:,}: {formed.why}",
            run.css,
        )
        for run in runs
        for formed in run.data.history.generations
        if formed.failed
    ]
    for chart in [*CHARTS, *own]:
        lines = [line for run in runs for line in curves(run, chart)]
        notes = [extremes(run, chart) for run in runs]
        for run in runs if chart.names is LOSSES else ():
            evaluated = [*scores(run, steps)]
            lines += evaluated
            notes += [smoothing_note(run)] * bool(evaluated)
        yield line_chart(chart, lines, steps, marks, "; ".join(filter(None, notes)))
        if chart.title == STEP_TIME:
            yield from (step_bands(run, steps) for run in runs)


def own_charts(keys: Iterable[str]) -> list[Chart]:
    """Return the charts of what only the user's loop logs. All that have a validation are among
    them."""
    known = {key for chart in CHARTS for key in chart.names}
    own = [key for key in dict.fromkeys(keys) if key not in known and not MEASURED.fullmatch(key)]
    charts = {key: {key: key} for key in own if not VALIDATION.fullmatch(key)}
    validated: dict[str, dict[str, str]] = {}
    for key in own:
        if score := VALIDATION.fullmatch(key):
            name = score[1] if score[1] in (charts | validated) else key
            if charts.pop(name, None):
                validated[name] = {name: "training"}
            validated.setdefault(name, {})[key] = "validation"
    drawn = [Chart(title, names) for title, names in (validated | charts).items()]
    return drawn[: max(MAX_OWN, len(validated))]


def step_range(runs: Sequence[Run]) -> tuple[float, float]:
    """Return the first and the last step of all runs; never an empty range."""
    points = [
        point[0]
        for run in runs
        for curve in run.data.steps.curves.values()
        for point in curve.points()
    ] or [0.0]
    low, high = min(points), max(points)
    return (low, high) if low < high else (low - 1, low + 1)


def measured(run: Run, chart: Chart) -> dict[str, Curve]:
    """Return the curves of the chart by key. A wait that is always 0 was not measured."""
    curves = {key: run.data.steps.curves.get(key) for key in chart.names}
    is_wait = chart.names is WAITED
    return {key: curve for key, curve in curves.items() if curve and (curve.total or not is_wait)}


def curves(run: Run, chart: Chart) -> Iterator[Line]:
    for i, (key, curve) in enumerate(measured(run, chart).items()):
        points = [(x, *(y / chart.size for y in ys)) for x, *ys in curve.points()]
        kind = "dots" if VALIDATION.fullmatch(key) else "line"
        yield Line(run.prefix + chart.names[key], run.css + "2" * (i > 0), points, kind)


def scores(run: Run, steps: tuple[float, float]) -> Iterator[Line]:
    """Yield the losses in evaluations.jsonl, by split."""
    losses: dict[str, list[Sequence[float]]] = {}
    for line in run.facts.evaluations:
        step, loss = line["step"], line.get("loss")
        if type(loss) is float and math.isfinite(loss) and steps[0] <= step <= steps[1]:
            points = losses.setdefault(str(line.get("split", "validation")), [])
            points.append((step, loss, loss, loss))
    for i, (split, points) in enumerate(losses.items(), 3):
        yield Line(f"{run.prefix}evaluated: {split}", f"{run.css}{i}", points, "dots")


def smoothing_note(run: Run) -> str:
    """Return why evaluated losses of a translator are not comparable with those of training."""
    smoothing = run.values.get("optim.label_smoothing")
    if run.values.get("task") != "translate" or not smoothing:
        return ""
    return f"{run.prefix}not comparable: training smooths labels ({smoothing}), evaluation does not"


def extremes(run: Run, chart: Chart) -> str:
    curve = next(iter(measured(run, chart).values()), None)
    if not curve or not curve.bins:
        return ""
    (_, last), *extreme = curve.last, curve.lowest, curve.highest
    low, high = (f"{number(value / chart.size)} (step {step:,})" for step, value in extreme)
    note = f"{run.prefix}last {number(last / chart.size)}"
    return note if run.prefix or low == high else f"{note}, from {low} to {high}"


def step_bands(run: Run, steps: tuple[float, float]) -> str:
    """Return a chart of the shares of a step: training and each kind of waiting there was."""
    drawn = [
        run.data.steps.curves.get(key) for key in ("seconds", *(f"{w}_seconds" for w in WAITS))
    ]
    whole_curves = [curve for curve in drawn if curve]
    if len(whole_curves) < len(drawn) or len({curve.width for curve in whole_curves}) > 1:
        return ""
    bands: dict[str, list[Sequence[float]]] = {name: [] for name in ("training", *WAITS)}
    for seconds, *waits in zip(*(curve.points() for curve in whole_curves), strict=False):
        waited = [point[1] for point in waits]
        whole = max(seconds[1], math.fsum(waited)) or 1.0
        below = 0.0
        for band, value in zip(bands.values(), [whole - math.fsum(waited), *waited], strict=True):
            share = 100 * value / whole
            band.append((seconds[0], share, below, below + share))
            below += share
    lines = [
        Line(BAND_NAMES.get(name, name), BAND_CSS[name], points, "band")
        for name, points in bands.items()
        if any(low < high for *_, low, high in points)
    ]
    chart = Chart(f"{run.prefix}Shares of a step", BAND_NAMES, "%", css="zero")
    return line_chart(chart, lines, steps, (), "the bands sum to 100%")


def goodput(run: Run) -> tuple[str, list[tuple[str, ...]]]:
    """Return a bar and the rows of a table: the wall time by category."""
    shares = percents(run.ledger)
    named = {BAND_NAMES[name]: share for name, share in shares.items()}
    css = {BAND_NAMES[name]: BAND_CSS[name] for name in shares}
    swatch = Markup('<i class="swatch {}"></i>{}')
    rows: list[tuple[str, ...]] = [
        (swatch.format(BAND_CSS[name], BAND_NAMES[name]), clock(seconds), f"{shares[name]:.1f}%")
        for name, seconds in run.ledger.items()
    ]
    total = clock(math.fsum(run.ledger.values()))
    rows.append(("sum", total, f"{math.fsum(shares.values()):.1f}%"))
    return share_bar(named, css, f"{run.prefix}wall time"), rows


def run_timeline(run: Run) -> str:
    marks = [
        Mark(formed.time_s, f"generation {formed.number} after step {formed.step:,}: {formed.why}")
        for formed in run.data.history.generations
        if formed.failed
    ]
    title = f"{run.prefix}Members of each generation"
    return timeline(run.data.all_stretches(), marks, run.data.history.first_s, title)


def events(run: Run) -> tuple[EventTable, EventTable]:
    """Return the tables of the events and of the reports of slow workers."""
    history = run.data.history
    notes = [*history.notes]
    for item in history.generations:
        reason = f"{counted(len(item.workers), 'worker')}: {item.why}".removeprefix("0 workers: ")
        notes.append(Note(item.time_s, item.step, f"generation {item.number}", reason))
    notes.sort(key=lambda note: note.time_s)
    return event_table(run, "event", notes), event_table(run, "slow-worker report", history.slow)


def event_table(run: Run, noun: str, notes: Collection[Note]) -> EventTable:
    rows = [
        (clock(time_s - run.data.history.first_s), "" if step is None else step, *words)
        for time_s, step, *words in [*notes][-MAX_EVENTS:]
    ]
    caption = counted(len(notes), noun)
    if len(rows) < len(notes):
        caption = f"the last {len(rows)} of {caption}"
    return run.prefix + caption, ("after", "step", "event", "reason"), rows


def evaluations(run: Run) -> tuple[list[str], list[list[object]]]:
    """Return the head and the rows of a table of scores."""
    lines = run.facts.evaluations[-MAX_EVALUATIONS:]
    names = list(
        dict.fromkeys(name for line in lines for name in line if name not in EVALUATION_SETTINGS)
    )
    rows = [
        [number(value) if type(value := line.get(name, "")) is float else value for name in names]
        for line in lines
    ]
    return names, rows


def differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return the rows of a table: the values that differ between the first and the last run."""
    first, last = runs[0].values, runs[-1].values
    keys = [key for key in {**first, **last} if first.get(key) != last.get(key)]
    return [(key, first.get(key, ""), last.get(key, "")) for key in keys]


def origins(run: Run) -> list[tuple[object, ...]]:
    """Return the rows of a table: each value of the run, and its origin if that is known."""
    origin = mapping(run.facts.run.get("origin"))
    if not origin:
        return [*run.values.items()]
    return [(key, value, origin.get(key, "")) for key, value in run.values.items()]


def environment_of(run: Run) -> list[tuple[str, object]]:
    code, numerics = (mapping(run.facts.checkpoint.get(key)) for key in ("code", "numerics"))
    return [row for row in {**code, **numerics}.items() if row[1] != "not set"]
