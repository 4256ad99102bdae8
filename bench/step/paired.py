"""Cells of the paired rounds (rounds.py): start one, and print its ratios."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.step.contestants import WORKERS, run
from bench.step.contests import ALLOCATOR, HERE


@dataclass(frozen=True)
class Cell:
    width: int
    precision: str
    micro_batches: int  # per process

    @property
    def name(self) -> str:
        return f"paired-{self.width}-{self.precision}-{self.micro_batches}"


CELLS = {
    cell.name: cell
    for cell in (Cell(*values) for values in product((128, 512), ("bf16", "fp32"), (1, 4)))
}


def run_cell(cell: Cell, folder: Path, seconds: float, limit_s: float) -> dict[str, Any]:
    """Return the answer of rounds.py: the seconds of each contestant and round, and the traffic.

    A wide cell gets three times the seconds of a narrow one; `seconds` is the mean.
    """
    place = folder / cell.name
    place.mkdir()
    (place / "cell.json").write_text(
        json.dumps(asdict(cell) | {"seconds": seconds * (1.5 if cell.width > 128 else 0.5)})
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    run(
        [*torchrun, str(HERE / "rounds.py"), str(place / "cell.json"), str(place)],
        place,
        ALLOCATOR,
        limit_s,
    )
    answer: dict[str, Any] = json.loads((place / "rounds.json").read_text())
    return {"cell": cell.name, "load": round(os.getloadavg()[0], 2), **answer}


def rows_of_cells(answers: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: the median of the ratios of each round, and their quartiles."""
    yield "| cell | opponent | its step, s | lockstep / it | quartiles | rounds |"
    yield "| --- | --- | ---: | ---: | --- | ---: |"
    for answer in answers:
        seconds: dict[str, list[float]] = answer["seconds"]
        for name, its in seconds.items():
            if name == "lockstep":
                continue
            ratios = [ours / theirs for ours, theirs in zip(seconds["lockstep"], its, strict=True)]
            columns = f"{median(its):.3f} | {median(ratios):.3f} | {spread(ratios)} | {len(ratios)}"
            yield f"| {answer['cell']} | {name} | {columns} |"
    yield ""
    names = list(answers[0]["bytes"])
    yield f"| cell | bytes by formula | {' | '.join(names)} |"
    yield f"| --- | ---: |{' ---: |' * len(names)}"
    for answer in answers:
        formula = answer["formula_bytes"]
        shares = " | ".join(f"{answer['bytes'][name] / formula:.3f}" for name in names)
        yield f"| {answer['cell']} | {formula:,.0f} | {shares} |"


def spread(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"
