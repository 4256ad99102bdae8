"""Into what the model of a run can be cut, told from the run alone, before anything is read or built."""

from __future__ import annotations

from lockstep.config import Run
from lockstep.layout import Bounds


def bounds(run: Run) -> Bounds:
    """Of the translator."""
    model = run.model
    return Bounds(run.batch.micro_batches, (model.heads, model.feed_forward), model.encoder_layers + model.decoder_layers)
