"""Load a trained translator from a run folder, verified, ready to translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.shards import inference_weights
from lockstep.checkpoint.state_dict import set_state_dict
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.config import saved_run
from lockstep.config.schema import RunConfig
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.errors import UsageError
from lockstep.models.translator import Translator, translator_on_meta


@dataclass(frozen=True)
class LoadedTranslator:
    """A translator in evaluation mode; `steps`: the checkpoints whose weights it averages."""

    model: Translator
    tokenizer: Tokenizer
    run: RunConfig
    steps: tuple[int, ...]


def load_translator(
    folder: Path, step: int | None = None, average: int = 0, *, device: torch.device | None = None
) -> LoadedTranslator:
    """Load the model of the run in `folder` at `step` (default: its newest complete checkpoint).

    average  N: average the weights of the newest N checkpoints up to that step, or of all if fewer
    device   default: the GPU if there is one
    UsageError: no run. DataError, CheckpointError: tokenizer or checkpoint is damaged.
    """
    run = read_run(folder)
    tokenizer = Tokenizer.load(folder / "data" / "tokenizer.json")
    store = CheckpointStore(folder / "checkpoints")
    newest = store.require(step)
    steps = newest_steps(store.steps(), newest.step, average)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = translator_on_meta(
        run.model, tokenizer.vocab_size, device.type, run.data.max_tokens
    ).to_empty(device=device)
    weights = average_weights(store, steps, newest)
    set_state_dict(model, None, {f"model.{name}": tensor for name, tensor in weights.items()})
    model.eval().requires_grad_(False)
    return LoadedTranslator(model, tokenizer, run, steps)


def read_run(folder: Path) -> RunConfig:
    saved = saved_run.read_run(folder)
    if saved is None:
        raise UsageError(
            f"there is no run in {folder}",
            f"{folder / 'run.json'} is missing",
            "give the folder that lockstep train --out wrote",
        )
    return saved.run


def newest_steps(steps: Sequence[int], step: int, average: int) -> tuple[int, ...]:
    """Return `step` and the checkpoints before it, `average` in all (at least 1), ascending."""
    until = [*(other for other in steps if other < step), step]
    return tuple(until[-max(1, average) :])


def average_weights(
    store: CheckpointStore, steps: Sequence[int], newest: Checkpoint
) -> Mapping[str, Tensor]:
    """Average the weights, in float64, ascending: the bits depend on the steps alone."""
    own = inference_weights(newest.tensors)
    if len(steps) == 1:
        return own
    sums = {name: torch.full_like(own[name], -0.0, dtype=torch.float64) for name in own}
    for step in steps:
        weights = own if step == newest.step else inference_weights(store.load(step).tensors)
        for name, total in sums.items():
            total.add_(weights[name])
    return {name: (total / len(steps)).to(own[name].dtype) for name, total in sums.items()}
