"""Name the micro-batch and the samples behind the loss of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from lockstep.history.replay import Line, Replayed

NEIGHBORS = 64  # steps before, with which the loss is compared
SHOWN = 3  # samples


def explain(
    step: int, done: Replayed, lines: Sequence[Line], shown: Callable[[Any], str]
) -> Iterator[str]:
    """Yield the lines that tell why the step has its loss.

    lines  the record, up to this step, or to the one before if the run stopped there
    shown  returns a part of a sample as text
    """
    losses = {line["step"]: float(line["loss"]) for line in lines[-NEIGHBORS - 1 :]}
    loss = losses.pop(step, None)
    usual = f", the {len(losses)} steps before {spread([*losses.values()])}" if losses else ""
    yield f"step {step}: " + (f"loss {loss:.6g}" if loss is not None else "not committed") + usual
    seen = [one for one in done.observed if one["micro_batch"] is not None]
    largest = max(seen, key=lambda one: rank(one["norm"]))
    others = [float(one["norm"]) for one in seen if one is not largest]
    more = f", the others {spread(others)}" if others else ""
    yield (
        f"largest gradient: micro-batch {largest['micro_batch']}, "
        f"norm {float(largest['norm']):.4g}{more}"
    )
    for one in seen:
        yield f"  micro-batch {one['micro_batch']}: adds {one['loss']:.6g}, norm {one['norm']:.4g}"
    rows = [(row, one) for one in seen for row in one["worst"]]
    if not all(one["worst"] for one in seen):
        numbers = ", ".join(map(str, largest["samples"])) or "unknown, without a loader"
        yield f"the losses of its {largest['kind']} are not known: {numbers}"
        return
    middle = median(float(one["median"]) for one in seen)
    yield f"highest losses, where the median of the step is {middle:.4g}:"
    for row, one in sorted(rows, key=lambda pair: -rank(pair[0]["loss"]))[:SHOWN]:
        numbers = ", ".join(map(str, row["samples"]))
        where = f"in micro-batch {one['micro_batch']}"
        yield f"  {one['kind']} {numbers}, {where}: {float(row['loss']):.4g}"
        for part in row["content"]:
            yield f"    {shown(part)}"


def rank(loss: float | str) -> float:
    """Return a loss or a norm to sort by: one that is no number is above all others."""
    return math.inf if math.isnan(float(loss)) else float(loss)


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, median {median(values):.4g}"
