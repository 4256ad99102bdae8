"""What a Llama is when its training begins: new by its seed, or the weights of another one; with adapters or without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import schema as config
from lockstep.data.tokenizer import BEGIN, END
from lockstep.files import read_json, write_json
from lockstep.models import llama, lora
from lockstep.models.hub import config_of, shape_to_json
from lockstep.models.llama import SHAPES, Llama, Shape
from lockstep.models.llama_io import MODEL, Weights, is_run, open_weights, other_start
from lockstep.models.lora import Lora
from lockstep.record.step_timer import flops_per_token


@dataclass(frozen=True)
class Beginning:
    """Everything that fixes the model before its first step. `start`: whose weights it begins with, None for a new one."""

    shape: Shape
    seed: int
    start: Weights | None
    lora: Lora | None
    keeps_all: bool  # whether checkpoints hold what adapters leave as it was

    @classmethod
    def of(cls, run: config.Run, vocabulary: int) -> Beginning:
        """As the run says. UsageError, CheckpointError: `llama.start` cannot be read."""
        start = open_weights(Path(run.llama.start)) if run.llama.start else None
        shape = start.shape if start else replace(SHAPES[run.llama.shape], vocabulary=vocabulary)
        if run.llama.context:
            shape = replace(shape, context=run.llama.context)
        adapters = Lora(run.lora.rank, run.lora.alpha, run.lora.targets) if run.lora.rank else None
        return cls(shape, run.seed, start, adapters, run.lora.save == "all")

    def meta(self) -> nn.Module:
        """The model on the meta device, in training mode, with `requires_grad` as it is trained."""
        with torch.device("meta"):
            model = Llama(self.shape)
        return lora.adapt(model, self.lora) if self.lora else model

    def first_value(self, name: str, shape: torch.Size) -> Tensor:
        """See `Task.first_value`."""
        if lora.is_adapter(name):
            return lora.first_value(name, shape, self.seed)
        if self.start:
            return self.start.tensors[name]
        return llama.first_value(name, shape, self.shape.layers, self.seed)

    def saved(self, name: str) -> bool:
        """See `Task.saved`."""
        return self.lora is None or self.keeps_all or lora.is_adapter(name)

    def flops_per_token(self, length: int) -> float:
        """Operations to train one token in a row of `length`; of a frozen matrix no gradient is made."""
        looked_up = 0 if self.shape.tied else self.shape.vocabulary * self.shape.width
        every = sum(p.numel() for p in self.meta().parameters()) - looked_up
        trained = sum(p.numel() for p in self.meta().parameters() if p.requires_grad) if self.lora else every
        return flops_per_token(every, self.shape.layers, self.shape.width, length) - 2.0 * (every - trained)

    def about(self) -> dict[str, Any]:
        """What model.json says."""
        said: Mapping[str, Any] = self.start.config if self.start else config_of(self.shape) | {"bos_token_id": BEGIN, "eos_token_id": END}
        found: dict[str, Any] = {"shape": shape_to_json(self.shape), "config": said, "lora": asdict(self.lora) if self.lora else None}
        if self.start:
            found |= {"start": str(self.start.folder), "start_sha256": self.start.sha256(), "dtype": self.start.dtype}
        return found


def write_model(beginning: Beginning, folder: Path) -> str:
    """For the leader: model.json in a run's folder; the sha256 of what the model begins with, "" for a new one.

    CheckpointError when the run there began with other weights.
    """
    about = beginning.about()
    if is_run(folder):
        begun = read_json(folder / MODEL)
        if begun.get("start_sha256") != about.get("start_sha256"):
            raise other_start(folder, str(about.get("start")), str(begun.get("start_sha256")), str(about.get("start_sha256")))
    else:
        write_json(folder / MODEL, about)
    return str(about.get("start_sha256", ""))
