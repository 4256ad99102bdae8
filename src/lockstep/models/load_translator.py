"""A trained model for use: read from a run's folder, verified, on the best device there is, ready to translate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.state_dict import restore
from lockstep.checkpoint.store import Checkpoint, Store
from lockstep.config import schema as config
from lockstep.config.schema import Run
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import CheckpointError, UsageError
from lockstep.models.build import choose_attention, shape
from lockstep.models.translator import Translator


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode with what belongs to it; `steps` are the checkpoints whose weights it has the mean of."""

    model: Translator
    tokenizer: Tokenizer
    run: Run
    step: int
    steps: tuple[int, ...]


def load_for_use(folder: Path, step: int | None = None, average: int = 0, *, device: torch.device | None = None) -> Loaded:
    """The model of the run in `folder` as it was at `step` (default: at its newest whole checkpoint).

    average  N: the mean of the weights of the newest N checkpoints up to that step, of fewer if there are fewer
    device   default: the GPU if there is one
    UsageError: no run. DataError, CheckpointError: its tokenizer or its checkpoint is missing or damaged.
    """
    run = read_run(folder)
    tokenizer = Tokenizer.load(folder / "data" / "tokenizer.json")
    store = Store(folder / "checkpoints")
    newest = last(store) if step is None else store.load(step)
    steps = newest_up_to(store.steps(), newest.step, average)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = bare(run, tokenizer.size, device)
    restore(model, None, mean_of(store, steps, newest))
    return Loaded(model, tokenizer, run, newest.step, steps)


def read_run(folder: Path) -> Run:
    """The run in `folder`. UsageError when there is none, CheckpointError when it is damaged."""
    found = config.read_run(folder)
    if found is None:
        where = f"{folder / 'run.json'} is missing"
        raise UsageError(f"there is no run in {folder}", where, "give the folder that lockstep train --out wrote")
    return found.run


def last(store: Store) -> Checkpoint:
    """The newest whole checkpoint. CheckpointError when there is none."""
    found = store.load_newest()
    if found is None:
        raise CheckpointError("there is no checkpoint yet", str(store.folder), "train further: save.every_steps says how often one is made")
    return found


def newest_up_to(steps: Sequence[int], step: int, average: int) -> tuple[int, ...]:
    """`step` and the checkpoints before it, `average` in all (at least `step` alone), ascending."""
    before = [s for s in steps if s < step]
    return *(before[len(before) - average + 1 :] if average > 1 and before else []), step


def mean_of(store: Store, steps: Sequence[int], newest: Checkpoint) -> dict[str, Tensor]:
    """The mean of the checkpoints' weights: summed in float64 in ascending order, so its bits depend on the steps alone."""
    if len(steps) == 1:
        return newest.tensors
    sums: dict[str, Tensor] = {}
    for step in steps:
        tensors = newest.tensors if step == newest.step else store.load(step).tensors
        for name, tensor in tensors.items():
            if name.startswith("model."):
                sums[name] = sums[name].add_(tensor.double()) if name in sums else tensor.double()
    return {name: (total / len(steps)).to(newest.tensors[name].dtype) for name, total in sums.items()}


def bare(run: Run, vocabulary: int, device: torch.device) -> Translator:
    """The run's model in evaluation mode with memory on `device`, and no values in it yet."""
    chosen, _ = choose_attention(device.type, run.data.max_tokens)
    with torch.device("meta"):
        model = shape(run.model, vocabulary, chosen if run.model.attention == "auto" else run.model.attention)
    model.to_empty(device=device).eval()
    return model.requires_grad_(False)
