"""The HTML of a report: complete without JavaScript, self-contained, without secrets, of bounded size."""

from __future__ import annotations

import html
import json
import re
import shlex
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.written_run import (
    SPIKE_STEP,
    append_note,
    write_long_metrics,
    write_many_generations,
    write_run_folder,
)

from lockstep.elastic.generation_log import Generation, GenerationLog, RunResult
from lockstep.files import add_checksum
from lockstep.record.events import append_event
from lockstep.report.charts import (
    CUT,
    Chart,
    Line,
    hide_secrets,
    line_chart,
    number,
    percents,
    tick_labels,
    ticks,
    vertical_range,
)
from lockstep.report.page import MAX_EVENTS, write_report
from lockstep.report.run_data import KEPT

CHART = re.compile(r'<figure class="chart.*?</figure>', re.DOTALL)


def page_of(*runs: Path) -> str:
    out = runs[0] / "report.html"
    write_report(runs, out)
    return out.read_text()


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Return the data of each chart, by title."""
    found = {}
    for figure in CHART.findall(page):
        title = html.unescape(re.search("<h3>(.*?) <small>", figure)[1])
        found[title] = json.loads(
            re.search('<script type="application/json">(.*?)</script>', figure)[1]
        )
        for drawing in re.findall("<svg.*?</svg>", figure):
            ET.fromstring(drawing)  # well-formed
        assert 'role="img" aria-label="' in figure
    return found


def test_the_page_of_one_run_knows_the_folder_that_a_click_names(tmp_path: Path) -> None:
    runs = [write_run_folder(tmp_path / 'a "b"'), write_run_folder(tmp_path / "c")]
    folder = re.search('<body data-run="([^"]*)">', page_of(runs[0]))[1]
    assert shlex.split(html.unescape(folder)) == [str(runs[0])]
    assert "data-run" not in page_of(*runs)


def test_charts_have_all_steps_the_spike_and_the_failure(tmp_path: Path) -> None:
    page = page_of(write_run_folder(tmp_path / "run"))
    charts = charts_of(page)
    assert {
        "Loss",
        "Gradient norm",
        "Throughput",
        "Memory",
        "Link and data waits",
        "Step time",
        "Shares of a step",
    } <= charts.keys()
    assert charts["Loss"]["x"] == [1.0, 60.0] and charts["Loss"]["marks"] == [
        [30, "generation 2 after step 30: a/0: exited"]
    ]
    norm = charts["Gradient norm"]["lines"][0]
    assert norm["y"][norm["x"].index(SPIKE_STEP)] == 900.0
    bands = charts["Shares of a step"]["lines"]
    assert [band["name"] for band in bands] == ["training", "data wait", "exposed communication"]
    assert (
        all(abs(sum(band["y"][i] for band in bands) - 100) < 0.01 for i in range(60))
        and bands[0]["y"][0] == 70.0
    )
    for words in (
        "goodput",
        '<dd class="a">70.0%</dd>',
        "martedì",
        "Tuesday &lt;b&gt;",
        "a/0: killed by SIGKILL",
        "31.5",
    ):
        assert words in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page), "the page loads something"


def test_scores_of_a_validation_are_drawn_beside_what_they_validate(tmp_path: Path) -> None:
    own = {f"own_{i}": 0.5 for i in range(12)} | {"accuracy": 0.9, "lr": 0.1}
    scores = {"val_loss": 2.0, "val_accuracy": 0.8, "validation_f1": 0.7}
    more = own | {"samples_per_second": 3.0, "samples": 4, "mfu": 0.25}
    write_long_metrics(
        tmp_path / "metrics.jsonl", 60, lambda step: more | (scores if step % 20 == 0 else {})
    )
    charts = charts_of(page_of(tmp_path))
    drawn = {title: [line["name"] for line in chart["lines"]] for title, chart in charts.items()}
    assert drawn["Loss"] == ["training", "validation"]
    assert drawn["accuracy"] == ["training", "validation"]
    assert drawn["validation_f1"] == ["validation"]
    assert charts["accuracy"]["lines"][1]["x"] == [20, 40, 60]
    assert charts["Model FLOPs utilization"]["lines"][0]["y"][0] == 25.0
    assert {"Learning rate", "Throughput", "own_0"} <= drawn.keys() and "samples" not in drawn


def test_exposed_communication_that_was_not_measured_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "seconds": 0.5}\n')
    page = page_of(tmp_path)
    assert "exposed communication" not in page and "tokens/s" not in page and "–" not in page
    waits = {"communication_seconds": 0.0, "exposed_communication": 0.0, "data_wait": 0.1}
    line = {"step": 1, "loss": 2.0, "seconds": 0.5, "data_seconds": 0.05, **waits}
    line |= {"saving_seconds": 0.0, "overhead_seconds": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = page_of(tmp_path)
    assert "exposed communication" not in page and "data wait" in page
    assert '<li class="a">data</li>' in page, "the chart has a line for one wait of two"
    write_run_folder(tmp_path / "measured")
    assert '<dt>exposed communication</dt><dd class="a">20.0%</dd>' in page_of(
        tmp_path / "measured"
    )


def test_losses_that_are_not_comparable_have_a_note(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", **{"optim.label_smoothing": "0.2"})
    note = "not comparable: training smooths labels (0.2), evaluation does not"
    assert note in page_of(run)
    assert note not in page_of(write_run_folder(tmp_path / "b", **{"optim.label_smoothing": "0"}))
    (run / "evaluations.jsonl").unlink()
    assert note not in page_of(run), "there is one loss"
    other = write_run_folder(tmp_path / "c")
    assert f"; c: {note.replace('0.2', '0.1')}</p>" in page_of(run, other)


def test_reports_of_slow_workers_are_folded_and_hide_no_other_event(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    for _ in range(MAX_EVENTS + 1):
        append_event(run, "slow", worker="worker 1 on host b", seconds=0.004, median=0.002)
    page = page_of(run)
    folded = re.search(
        "<details[^>]*><summary>the last 100 of 101 slow-worker reports.*?</details>",
        page,
        re.DOTALL,
    )
    assert folded[0].count("worker 1 on host b: 4 ms for a micro-batch, the median is 2 ms") == 100
    assert page.count("worker 1 on host b") == 100 and "<caption>4 events</caption>" in page


def test_a_failed_run_has_its_end_among_the_problems(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    (run / "generations").mkdir()
    end = RunResult(4, "the loss is NaN")
    GenerationLog(run / "generations").propose(Generation(1, "t", (), "", 60, "ended", end=end))
    assert '<p class="problem">ended with exit code 4: the loss is NaN</p>' in page_of(run)


def test_the_best_score_and_what_the_loop_printed_are_shown(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path)
    append_event(run, "best score", step=40, score=0.75)
    append_event(run, "stopped early", step=60, why="no score better than 0.75 in 3")
    (run / "printed.txt").write_text("step 60  Guten Tag <b>\n")
    page = page_of(run)
    assert '<dt>best</dt><dd class="a">0.75 (step 40)</dd>' in page
    assert "stopped early" in page and "no score better than 0.75 in 3" in page
    assert "step 60  Guten Tag &lt;b&gt;" in page
    append_event(run, "began", generation=4, step=30, workers=[])  # as without an agent
    page = page_of(run)
    assert "<td>restarted from step 30</td>" in page
    assert "<dt>best</dt>" not in page, "these steps are trained again"


def test_two_runs_share_their_charts(tmp_path: Path) -> None:
    runs = [write_run_folder(tmp_path / "a", 40), write_run_folder(tmp_path / "b", 60, seed="7")]
    page = page_of(*runs)
    loss = charts_of(page)["Loss"]
    assert [line["name"] for line in loss["lines"]][:2] == ["a: training", "b: training"] and loss[
        "x"
    ] == [1.0, 60.0]
    assert (
        len(loss["marks"]) == 2
        and "values that differ" in page
        and '<th scope="row">seed</th><td>1</td><td>7</td>' in page
    )


def test_shares_sum_to_exactly_100() -> None:
    for seconds in (
        {"a": 1.0, "b": 1.0, "c": 1.0},
        {"a": 1e-9, "b": 5.0},
        {"a": 12.588, "b": 11.615, "c": 0.27, "d": 2.45},
    ):
        shares = percents(seconds)
        assert round(sum(shares.values()), 6) == 100.0 and all(
            abs(shares[k] - 100 * v / sum(seconds.values())) < 0.1 for k, v in seconds.items()
        )
    assert percents({}) == {} and percents({"a": 0.0}) == {"a": 0.0}


def test_secrets_do_not_get_into_the_page(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    saved = json.loads((tmp_path / "run.json").read_text())
    saved["values"]["track"] |= {
        "wandb_api_key": "s3cr3t-1",
        "project": "https://me:s3cr3t-2@host/x",
    }
    (tmp_path / "run.json").write_text(
        json.dumps(add_checksum({key: saved[key] for key in saved if key != "sha256"}))
    )
    append_note(
        tmp_path,
        "failed: cannot open https://me:s3cr3t-3@host/x with password=s3cr3t-4 and token: 's3cr3t-5', hf_s3cr3t6789012345",
    )
    (tmp_path / "samples.json").write_text(
        json.dumps({"lines": ["AWS_SECRET_ACCESS_KEY=s3cr3t-7"]})
    )
    page = page_of(tmp_path)
    assert "s3cr3t" not in page and page.count("(hidden)") >= 4 and "wandb_api_key" in page
    assert (
        hide_secrets("tokens 512, token_stream, monkey: 3") == "tokens 512, token_stream, monkey: 3"
    )


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "<script>alert(1)<")
    append_note(run, "</script><img onerror=x>")
    with open(run / "events.jsonl") as file:
        lines = file.read().replace("a/0: exited", "</script><b>")
    (run / "events.jsonl").write_text(lines)
    page = page_of(run)
    assert (
        page.count("<script") == page.count("</script>")
        and "<b>" not in page
        and "<img" not in page
        and "alert(1)<" not in page
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "run.json"])
def test_one_file_is_enough(tmp_path: Path, name: str) -> None:
    whole = write_run_folder(tmp_path / "whole")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / name).write_bytes((whole / name).read_bytes())
    page = page_of(tmp_path / "part")
    assert ("no step has been committed" in page) == (name != "metrics.jsonl")


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 61, "loss": "NaN", "norm": "Infinity"}\n')
    page = page_of(tmp_path)
    assert "loss is not finite at 1 step, first at step 61" in page and "NaN" not in json.dumps(
        charts_of(page)["Loss"]
    )


def test_two_long_runs_with_many_workers_and_failures_have_a_small_report(tmp_path: Path) -> None:
    random, runs = Random(1), [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        write_long_metrics(
            run / "metrics.jsonl",
            3000,
            lambda step: {f"own_{i}": random.gauss(0, 1) for i in range(12)},
        )
        write_many_generations(run, generations=150, workers=24)
    start_s = time.process_time()
    page = page_of(*runs)
    assert len(page.encode()) < 2_000_000 and time.process_time() - start_s < 10
    norm = charts_of(page)["Gradient norm"]["lines"][0]
    assert 300 < len(norm["x"]) <= 600 and max(norm["high"]) == 900.0, "the spike is lost"
    assert page.count("<rect") <= 2 * (2 * KEPT + 24) and "the last 100 of 150 events" in page


def test_slow_steps_leave_the_chart_of_step_times() -> None:
    points = [(step, y, y, y) for step, y in enumerate((90.0, 1.0, 2.0, 3.0), 1)]
    lines = [Line("", "a", points)]
    assert vertical_range(lines, "zero cut") == (0.0, 2.5 * CUT * 1.05)
    slower = Line("", "b", [(1, 20.0, 20.0, 20.0)])
    assert vertical_range([*lines, slower], "zero cut") == (0.0, 20.0 * CUT * 1.05)
    assert vertical_range(lines, "zero") == (0.0, 90.0 * 1.05)
    assert vertical_range(lines, "") == (1.0 - 89 * 0.05, 90.0 + 89 * 0.05)
    assert vertical_range([Line("", "a", [(1, 0.0, 0.0, 0.0)])], "zero") == (0.0, 1.0)
    chart = Chart("Step time", {}, "s", css="zero cut")
    assert "; cut at 10.5" in line_chart(chart, lines, (1, 4), note="last 3")


def test_ticks_of_steps_are_whole_and_labels_differ() -> None:
    assert ticks(0, 2, least=1) == [0, 1, 2] and ticks(1, 400, least=1) == [100, 200, 300, 400]
    assert tick_labels([0, 20_000]) == ["0", "20 k"]
    assert tick_labels([12_010, 12_020]) == ["12,010", "12,020"]
    assert tick_labels([8.56612, 8.56614]) == ["8.56612", "8.56614"]


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0.0, 1.0), (1, 60), (3.7, 8.6), (-0.02, 0.01), (0, 1e9)):
        marks = ticks(low, high)
        assert 2 <= len(marks) <= 9 and low <= marks[0] and marks[-1] <= high
    assert [number(value) for value in (0.0, 8.566, 1234.0, 15_000.0, 2.5e6)] == [
        "0",
        "8.566",
        "1,234",
        "15 k",
        "2.5 M",
    ]
