"""Into what the model of a run can be cut, told from the run alone, before a process starts."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import Run
from lockstep.layout import Bounds


def bounds(run: Run) -> Bounds:
    """See Bounds. The shape of a Llama is looked up only where a layer or the row of layers is to be cut: that takes torch."""
    if run.task == "translate":
        model = run.model
        return Bounds(run.batch.micro_batches, (model.heads, model.feed_forward), model.encoder_layers + model.decoder_layers)
    if run.layout.tensor == run.layout.pipeline == 1:
        return Bounds(run.batch.micro_batches)
    from lockstep.models.hub import open_hub
    from lockstep.models.llama import SHAPES
    from lockstep.models.pretrained import is_run, read_model

    start = Path(run.llama.start)
    shape = SHAPES[run.llama.shape] if not run.llama.start else read_model(start)[0] if is_run(start) else open_hub(start).shape
    return Bounds(run.batch.micro_batches, (shape.heads, shape.key_value_heads, shape.feed_forward), shape.layers)
