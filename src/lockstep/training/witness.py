"""What the step after a checkpoint began with: loss and gradient of its first micro-batch.

A run writes them down when it computes that micro-batch anyway. A start that resumes from the
checkpoint computes it again. Other numbers mean that something which decides the loss is not in the
checkpoint: data that changed, an attribute, a variable of the loop, a number drawn before the loop.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.files import add_checksum, read_json, verify_checksum, write_json
from lockstep.log import log

NAME = "witness.json"  # in the run folder


@dataclass(frozen=True)
class FirstMicroBatch:
    """The passes of the first micro-batch of a step that is not skipped. Equal passes have equal
    values.

    number    of the micro-batch
    loss      decimals that restore its bits
    gradient  64 bits over the gradient; None: in slices of a tensor or pipeline layout
    slices    sizes of the tensor and pipeline axes, which change the bits
    """

    number: int
    loss: str
    gradient: int | None
    slices: tuple[int, int] = (1, 1)

    @classmethod
    def from_json(cls, values: Any) -> FirstMicroBatch:
        """ValueError, KeyError or TypeError for other values than those of `asdict`."""
        tensor, pipeline = values["slices"]
        gradient = None if values["gradient"] is None else int(values["gradient"])
        return cls(
            int(values["number"]),
            str(float(values["loss"])),
            gradient,
            (int(tensor), int(pipeline)),
        )


def describe_difference(saved: FirstMicroBatch, now: FirstMicroBatch) -> str:
    """Return what differs, "loss 0.5, now 0.7"; "" for equal passes, and for passes of
    other layouts or micro-batches, which cannot be compared."""
    if (saved.slices, saved.number) != (now.slices, now.number):
        return ""
    if saved.loss != now.loss:
        return f"loss {saved.loss}, now {now.loss}"
    if saved.gradient != now.gradient:
        return f"loss {saved.loss} as now, and another gradient"
    return ""


class WitnessFile:
    """The records of a run folder, by the step of their checkpoint. A damaged file holds none."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def read(self) -> dict[int, FirstMicroBatch]:
        try:
            values = verify_checksum(read_json(self.path))["steps"]
            return {int(step): FirstMicroBatch.from_json(record) for step, record in values.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("%s is damaged, and nothing is compared with it: %s", self.path, error)
            return {}

    def write(self, step: int, first: FirstMicroBatch, kept: Collection[int]) -> None:
        """Record the step after checkpoint `step`. Records from before the steps `kept` are
        removed."""
        oldest = min(kept, default=0)
        records = {other: record for other, record in self.read().items() if other >= oldest}
        self._write(records | {step: first})

    def drop_after(self, step: int) -> None:
        """Remove the records of checkpoints after `step`, which a new course of the run
        replaces."""
        records = self.read()
        kept = {other: record for other, record in records.items() if other <= step}
        if kept != records:
            self._write(kept)

    def _write(self, records: dict[int, FirstMicroBatch]) -> None:
        steps = {str(step): asdict(record) for step, record in sorted(records.items())}
        try:
            write_json(self.path, add_checksum({"steps": steps}))
        except OSError as error:
            log.warning("%s was not written: %s", self.path, error.strerror)
