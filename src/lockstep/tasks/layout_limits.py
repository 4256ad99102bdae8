"""Divisors and minimum size of a run's model, computed from the run alone, before data is prepared or the model is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.schema import Run
from lockstep.layout import Bounds

if TYPE_CHECKING:
    from lockstep.models.llama import Shape


def bounds(run: Run) -> Bounds:
    """See Bounds. The shape of a Llama is looked up only where a layer or the row of layers is to be cut: that takes torch."""
    if run.task == "translate":
        model = run.model
        return Bounds(run.batch.micro_batches, (model.heads, model.feed_forward), model.encoder_layers + model.decoder_layers)
    if run.layout.tensor == run.layout.pipeline == 1:
        return Bounds(run.batch.micro_batches)
    shape = llama_shape(run)
    return Bounds(run.batch.micro_batches, (shape.heads, shape.key_value_heads, shape.feed_forward), shape.layers)


def llama_shape(run: Run) -> Shape:
    """Of the run's Llama; the vocabulary of a new one is decided by its tokenizer."""
    from lockstep.models.hub import open_hub
    from lockstep.models.llama import SHAPES
    from lockstep.models.llama_io import is_run, read_model

    start = Path(run.llama.start)
    return SHAPES[run.llama.shape] if not run.llama.start else read_model(start)[0] if is_run(start) else open_hub(start).shape


def least_parameters(run: Run) -> int:
    """Parameters of the model without its embedding, whose size is known when the text is prepared."""
    if run.task == "translate":
        model = run.model
        encoder = model.width * (4 * model.width + 2 * model.feed_forward + 4)
        decoder = model.width * (8 * model.width + 2 * model.feed_forward + 6)
        return model.encoder_layers * encoder + model.decoder_layers * decoder + 4 * model.width
    return replace(llama_shape(run), vocabulary=0).parameters
