"""Which micro-batch and which samples have made the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.history.replay import Line, Replayed

NEIGHBORS = 64  # steps before, with which the loss is compared
SHOWN = 3  # samples
MAX_TEXT = 300
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Suspect:
    """A row of the step, with its loss.

    samples  that are in it, as text: "documents 3, 4"
    content  of each of its parts a text, token ids, or type and shape
    """

    micro_batch: int
    samples: str
    loss: float
    content: Sequence[Any]


def suspects(observed: Sequence[Line]) -> list[Suspect]:
    """Return the rows by falling loss: of each micro-batch those with the highest."""
    found = [
        Suspect(
            line["micro_batch"],
            f"{line['kind']} {', '.join(map(str, worst['samples']))}",
            worst["loss"],
            worst["content"],
        )
        for line in micro_batches(observed)
        for worst in line["worst"]
    ]
    return sorted(found, key=lambda suspect: -suspect.loss)


def micro_batches(observed: Sequence[Line]) -> list[Line]:
    return [line for line in observed if line["micro_batch"] is not None]


def explain(done: Replayed, before: Sequence[Line], decode: Decode) -> Iterator[str]:
    """Yield the lines that tell why the step has its loss. before: the steps before it"""
    line = done.recorded[-1]
    losses = [float(step["loss"]) for step in before[-NEIGHBORS:]]
    usual = f", the {len(losses)} steps before {spread(losses)}" if losses else ""
    yield f"step {line['step']}: loss {float(line['loss']):.6g}{usual}"
    seen = micro_batches(done.observed)
    largest = max(seen, key=lambda one: float(one["norm"]))
    others = [float(one["norm"]) for one in seen if one is not largest]
    more = f", the others {spread(others)}" if others else ""
    number = largest["micro_batch"]
    yield f"largest gradient: micro-batch {number}, norm {float(largest['norm']):.4g}{more}"
    for one in seen:
        yield f"  micro-batch {one['micro_batch']}: loss {one['loss']}, norm {one['norm']:.4g}"
    listed = suspects(seen)[:SHOWN]
    if not listed:
        numbers = ", ".join(map(str, largest["samples"])) or "unknown, without a loader"
        yield f"its loss function gives none by sample; {largest['kind']} of it: {numbers}"
        return
    middle = median(one["median"] for one in seen if one["median"] is not None)
    yield f"highest losses, where the median of the step is {middle:.4g}:"
    for suspect in listed:
        yield f"  {suspect.samples}, in micro-batch {suspect.micro_batch}: {suspect.loss:.4g}"
        for part in suspect.content:
            yield f"    {as_text(part, decode)}"


def spread(values: Sequence[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, median {median(values):.4g}"


def as_text(part: Any, decode: Decode) -> str:
    text = decode(part) if isinstance(part, list) else str(part)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
