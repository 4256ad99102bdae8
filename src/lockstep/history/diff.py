"""Where two runs part: the first step, and in it the first tensor.

The records give the step. Both runs are then replayed to it, and each tensor of a micro-batch is
compared in the order in which it is computed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.history.replay import Line, Replayed, difference_of, replay
from lockstep.history.request import Replay
from lockstep.parallel.digest import INTEGERS
from lockstep.record.metrics import iter_steps

MISSING = "nothing"


@dataclass(frozen=True)
class Side:
    """One of the two runs, and the interpreter that replays it."""

    folder: Path
    python: str
    from_start: bool

    def look(self, step: int, dump: Path | None = None, dumped: int = 0) -> Replayed:
        """Replay `step` and record its tensors. LockstepError when the replay differs from the
        record: then it tells nothing about the run."""
        request = Replay("", step, observes=True, dumped=dumped, dump=str(dump or ""))
        done = replay(self.folder, request, self.python, from_start=self.from_start)
        if difference := done.difference():
            raise LockstepError(
                f"{self.folder} cannot be looked into: its replay differs from its record in "
                f"{difference}",
                f"replayed with {self.python}, from step {done.first}",
                "code, data or machine have changed since the run; give the interpreter of its "
                "code by --python-a or --python-b",
            )
        return done


@dataclass(frozen=True)
class Parting:
    """Where the runs part in a step.

    tensor       as the replay names it: "layers.0 output"
    number       of it, among those of the micro-batch
    micro_batch  None: outside of the micro-batches
    """

    step: int
    what: str
    tensor: str = ""
    number: int = 0
    micro_batch: int | None = None

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"step {self.step}{where}: {self.what}"


def first_difference(a: Path, b: Path) -> tuple[int, int, str]:
    """Return the last step that both have recorded before they part, that step, and what differs
    in it; (last common step, 0, "") for equal records, which may have none in common: 0."""
    lines = [{line["step"]: line for line in iter_steps(run / "metrics.jsonl")} for run in (a, b)]
    common = sorted(lines[0].keys() & lines[1].keys())
    last = 0
    for step in common:
        if what := difference_of(lines[0][step], lines[1][step]):
            return last, step, what
        last = step
    return last, 0, ""


def locate(a: Side, b: Side, step: int) -> Parting:
    """Replay both runs to `step`; return where they part."""
    ours, theirs = a.look(step).observed, b.look(step).observed
    place = compare_lines(step, ours, theirs)
    if place.micro_batch is None and place.tensor.endswith(" before") and step > 1:
        return locate(a, b, step - 1)
    return place


def compare_lines(step: int, ours: list[Line], theirs: list[Line]) -> Parting:
    """Return the first difference between what two replays have seen of a step."""
    nothing: Line = {}
    for line, other in zip_longest(ours, theirs, fillvalue=nothing):
        k = line.get("micro_batch", other.get("micro_batch"))
        tensors = zip_longest(line.get("tensors", []), other.get("tensors", []))
        number, pair = next(
            ((i, pair) for i, pair in enumerate(tensors) if pair[0] != pair[1]), (0, None)
        )
        is_backward = pair is None or any(item and item[0].endswith(" gradient") for item in pair)
        if line.get("loss") != other.get("loss") and is_backward:
            return Parting(step, f"the loss, {line.get('loss')} and {other.get('loss')}", "", 0, k)
        if pair:
            names = [item[0] if item else MISSING for item in pair]
            if names[0] != names[1]:
                return Parting(step, f"{names[0]} in one, {names[1]} in the other", "", 0, k)
            return Parting(step, describe(names[0]), names[0], number, k)
    return Parting(step, "nothing that a replay sees")


def describe(tensor: str) -> str:
    """Return in words what has computed a tensor."""
    name, _, kind = tensor.rpartition(" ")
    if kind.isdecimal():  # one of several
        name, _, kind = name.rpartition(" ")
    if tensor.startswith(("(batch)", "the model input")):
        return f"the data: {tensor}"
    parent = name.rpartition(".")[0] or "the model"
    words = {
        "before": f"the weights before it: {name}",
        "updated": f"the update of {name}",
        "input": f"{parent}, which computes the input of {name}",
    }
    return words.get(kind, tensor)


def distance(a: Side, b: Side, place: Parting) -> str:
    """Replay both runs once more; return how far the tensors are apart, in words."""
    with tempfile.TemporaryDirectory(prefix="lockstep-diff-") as name:
        tensors = []
        for side, label in ((a, "a"), (b, "b")):
            folder = Path(name, label)
            folder.mkdir()
            side.look(place.step, folder, place.micro_batch or 0)
            file = place.tensor.rpartition(" ")[2]  # before, or updated
            if place.micro_batch is not None:
                file = f"micro-batch-{place.micro_batch}"
            with safe_open(folder / f"{file}.safetensors", "pt") as dumped:
                tensors.append(dumped.get_tensor(f"{place.number:05d} {place.tensor}"))
    return describe_distance(*tensors)


def describe_distance(ours: Tensor, theirs: Tensor) -> str:
    """Return how many elements differ, and by how many units in the last place at most."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        forms = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (ours, theirs)]
        return f"{forms[0]} and {forms[1]}"
    differ = int((ours != theirs).sum())
    text = f"{differ:,} of {ours.numel():,} elements differ"
    integers = INTEGERS.get(ours.element_size()) if ours.is_floating_point() else None
    if integers is None or not differ:
        return text
    ulp = (in_order(ours.view(integers)) - in_order(theirs.view(integers))).abs().max()
    return f"{text}, by at most {int(ulp):,} ulp"


def in_order(bits: Tensor) -> Tensor:
    """Return the bits of floats as int64 whose order and distances are those of the floats."""
    low = torch.iinfo(bits.dtype).min
    wide = bits.long()
    return torch.where(wide < 0, low - wide, wide)
