"""The initial weights of a Llama run: random from the seed, or loaded; with or without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.schema import LoraOptions, RunConfig
from lockstep.data.tokenizer import BEGIN, END
from lockstep.files import read_json, write_json
from lockstep.models import llama, lora
from lockstep.models.hf_config import config_to_hf
from lockstep.models.hub import LlamaWeights
from lockstep.models.llama import LLAMA_CONFIGS, LlamaConfig
from lockstep.models.llama_io import MODEL, is_llama_run, open_weights, refuse_other_backend, weights_changed_error
from lockstep.models.transformers_model import TransformersConfig


@dataclass(frozen=True)
class InitialWeights:
    """Everything that determines the model before its first step.

    start    the weights that training starts from; None: random ones
    lora     None: without adapters
    adapter  the adapters that training starts from; None: new ones
    """

    config: LlamaConfig | TransformersConfig
    seed: int
    start: LlamaWeights | None
    lora: LoraOptions | None
    adapter: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, run: RunConfig, vocab_size: int) -> InitialWeights:
        """UsageError, CheckpointError: `llama.init_from` or `lora.init_from` cannot be read."""
        start = open_weights(Path(run.llama.init_from), backend=run.llama.backend) if run.llama.init_from else None
        config = start.config if start else replace(LLAMA_CONFIGS[run.llama.size], vocab_size=vocab_size)
        refuse_other_backend(config, run.llama.backend, run.llama.init_from)
        if run.llama.max_seq_len and isinstance(config, LlamaConfig):
            config = replace(config, max_seq_len=run.llama.max_seq_len)
        initial = cls(config, run.seed, start, run.lora if run.lora.rank else None, None)
        if not run.lora.init_from:
            return initial
        return replace(initial, adapter=lora.open_adapter(Path(run.lora.init_from), initial.meta_model(), run.lora))

    def meta_model(self) -> nn.Module:
        model = self.config.meta_model()
        return lora.add_adapters(model, self.lora) if self.lora else model

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        if lora.is_adapter(name):
            return self.adapter[name] if self.adapter else lora.init_param(name, shape, self.seed)
        if isinstance(self.config, TransformersConfig) and name in self.config.buffers:
            return self.config.buffers[name]
        if self.start:
            return self.start.tensors[name]
        return llama.init_param(name, shape, self.config.n_layers, self.seed)

    def is_saved(self, name: str) -> bool:
        return self.lora is None or lora.is_adapter(name)

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"lora": self.lora and {key: getattr(self.lora, key) for key in ("rank", "alpha", "targets", "dropout")}}
        if self.start:
            content |= {"start": str(self.start.folder), "start_sha256": self.start.sha256(), "dtype": self.start.dtype}
            content |= {"config": self.start.hf_config}
        if isinstance(self.config, TransformersConfig):
            return {"backend": "transformers", **content}
        new = config_to_hf(self.config) | {"bos_token_id": BEGIN, "eos_token_id": END}
        return {"shape": asdict(self.config), "config": new, **content}


def write_model_json(initial: InitialWeights, folder: Path) -> str:
    """Write model.json, on rank 0; return the sha256 of the starting weights, "" for random ones.

    CheckpointError: the run there started from other weights.
    """
    content = initial.to_json()
    if is_llama_run(folder):
        was, now = read_json(folder / MODEL).get("start_sha256"), content.get("start_sha256")
        if was != now:
            raise weights_changed_error(folder, str(content.get("start")), str(was), str(now))
    else:
        write_json(folder / MODEL, content)
    return str(content.get("start_sha256", ""))
