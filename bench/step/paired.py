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
from bench.step.rounds import OPPONENTS


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


def run_cell(cell: Cell, folder: Path, seconds: float, limit_s: float) -> list[dict[str, Any]]:
    """Return the answer of rounds.py for each opponent: the seconds of each round, and the traffic.

    One opponent and the Session share two processes, so the memory and the caches of the other
    opponents do not count. A wide cell gets three times the seconds of a narrow one; `seconds` is
    the mean.
    """
    share_s = seconds / len(OPPONENTS) * (1.5 if cell.width > 128 else 0.5)
    return [run_pair(cell, opponent, folder, share_s, limit_s) for opponent in OPPONENTS]


def run_pair(
    cell: Cell, opponent: str, folder: Path, seconds: float, limit_s: float
) -> dict[str, Any]:
    place = folder / f"{cell.name}-{opponent}".replace(" ", "-")
    place.mkdir()
    values = asdict(cell) | {"opponent": opponent, "seconds": seconds}
    (place / "cell.json").write_text(json.dumps(values))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", str(WORKERS), str(HERE / "rounds.py")]
    run([*torchrun, *script, str(place / "cell.json"), str(place)], place, ALLOCATOR, limit_s)
    answer: dict[str, Any] = json.loads((place / "rounds.json").read_text())
    load = round(os.getloadavg()[0], 2)
    return {"cell": cell.name, "opponent": opponent, "load": load, **answer}


def rows_of_cells(answers: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: the median of the ratios of each round, and their quartiles; the bytes
    of a step over those of the formula."""
    yield "| cell | opponent | its step, s | Session / it | quartiles | rounds | its bytes | ours |"
    yield "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"
    for answer in answers:
        opponent = answer["opponent"]
        ours, its = answer["seconds"]["Session"], answer["seconds"][opponent]
        ratios = [own / other for own, other in zip(ours, its, strict=True)]
        bytes_over = [
            answer["bytes"][name] / answer["formula_bytes"] for name in (opponent, "Session")
        ]
        yield (
            f"| {answer['cell']} | {opponent} | {median(its):.3f} | {median(ratios):.3f} "
            f"| {spread(ratios)} | {len(ratios)} | {bytes_over[0]:.3f} | {bytes_over[1]:.3f} |"
        )


def spread(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{low:.3f} to {high:.3f}"
