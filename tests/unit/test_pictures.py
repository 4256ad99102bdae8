"""The diagrams of the Learn pages equal what tools/pictures.py draws; recorded pictures are drawn from traces."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import pictures  # noqa: E402


@pytest.mark.parametrize("name", pictures.DIAGRAMS)
def test_a_diagram_equals_its_drawing(name: str) -> None:
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == pictures.DIAGRAMS[name](), (
        "stale: python tools/pictures.py"
    )


@pytest.mark.parametrize("name", [*pictures.DIAGRAMS, *pictures.RECORDED])
def test_a_picture_is_valid_and_shown_by_a_page(name: str) -> None:
    path = ROOT / "docs" / "pictures" / f"{name}.svg"
    ElementTree.fromstring(path.read_text())
    assert path.stat().st_size < 100_000
    assert any(f"pictures/{name}.svg" in page.read_text() for page in (ROOT / "docs").rglob("*.md"))


def test_a_trace_becomes_the_lanes_of_its_last_step(tmp_path: Path) -> None:
    """Two steps; times in microseconds. An operation inside of the backward pass is not forward."""
    rows = [
        ("Optimizer.step#AdamW.step", 0, 1000),
        ("aten::mm", 1000, 5000),
        ("autograd::engine::evaluate_function: MmBackward0", 6000, 4000),
        ("aten::mm", 7000, 1000),
        ("gloo:all_reduce", 8000, 3000),
        ("Optimizer.step#AdamW.step", 11000, 2000),
        ("aten::add_", 11500, 500),
    ]
    events = [{"ph": "X", "name": name, "ts": start, "dur": length} for name, start, length in rows]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}, file)
    lanes = pictures.read_step(tmp_path / "trace.json.gz")
    spans = {name: [(span.start, span.end) for span in lane] for name, lane in lanes.items()}
    assert spans == {
        "forward, rest": [(0, 5)],
        "backward": [(5, 9)],
        "communication": [(7, 10)],
        "update": [(10, 12)],
    }


@pytest.mark.parametrize(
    ("rough", "step"),
    [(0.03, 0.05), (0.2, 0.2), (1, 1), (1.1, 2), (3, 5), (7, 10), (45, 50), (140, 200)],
)
def test_ticks_are_round_numbers(rough: float, step: float) -> None:
    assert pictures.nice_step(rough) == pytest.approx(step)
