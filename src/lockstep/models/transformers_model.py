"""Any causal language model of `transformers` as the model of a run (llama.backend=transformers).

Its parameters have the names of the Hugging Face folder, behind `inner.`. Where its logits are the
states times a matrix, the loss is computed in chunks, as for a Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import CheckpointError, UsageError
from lockstep.models.deferred_init import LikeOnCpu, Recording
from lockstep.models.llama import IGNORE_INDEX, document_positions
from lockstep.models.loss import output_cross_entropy

INNER = "inner."
PROBE_TOKENS = 16  # of each of two documents


@dataclass(frozen=True)
class TransformersConfig:
    """A config.json, with the sizes that a run needs."""

    hf_config: Mapping[str, Any]

    @cached_property
    def parsed(self) -> Any:
        """Return the configuration object of `transformers`. CheckpointError: it is not supported."""
        kind = self.hf_config.get("model_type")
        if self.hf_config.get("quantization_config"):
            raise CheckpointError("quantization_config is set", "config.json", "use the model as it was before quantization")
        from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import

        try:
            parsed = type(AutoConfig.for_model(str(kind))).from_dict(dict(self.hf_config))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"transformers cannot read the config of model_type {kind}: {error}", "config.json", "copy the file again"
            ) from error
        if type(parsed) not in AutoModelForCausalLM._model_mapping:
            what = f"model_type {kind} is not a causal language model of transformers"
            raise CheckpointError(what, "config.json", "choose another model")
        return parsed

    @property
    def vocab_size(self) -> int:
        return int(self.parsed.vocab_size)

    @property
    def dim(self) -> int:
        return int(self.parsed.hidden_size)

    @property
    def n_layers(self) -> int:
        return int(self.parsed.num_hidden_layers)

    @property
    def tie_embeddings(self) -> bool:
        return bool(self.parsed.tie_word_embeddings)

    def meta_model(self) -> TransformersModel:
        with torch.device("meta"):
            return TransformersModel(self.parsed)

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers (rotary frequencies), which no file holds, on the CPU."""
        from transformers.initialization import no_init_weights

        with no_init_weights(), LikeOnCpu(), Recording() as recording:
            model = TransformersModel(self.parsed)
        saved = model.state_dict()
        if unknown := [name for name, buffer in model.named_buffers() if name in saved or not buffer.is_floating_point()]:
            raise CheckpointError(f"the model has buffers that are not supported: {unknown[0]}", "config.json", "choose another model")
        recording.finish(dict(model.named_buffers()))
        return {name: recording.value(name) for name, _ in model.named_buffers()}


class TransformersModel(nn.Module):
    """`model(tokens, labels, documents)` as of a `Llama`, for replicas and shards."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM  # seconds to import

        make: Any = AutoModelForCausalLM.from_config
        self.inner: Any = make(config, dtype=torch.float32)
        self.chunked: bool | None = None  # None: not probed yet

    def forward(self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits; with labels the sum of their cross-entropy (see `Llama.forward`)."""
        inputs = inputs_of(tokens, documents)
        if labels is None:
            return cast(Tensor, self.inner(**inputs).logits)
        if self.chunked is None and next(self.parameters()).isfinite().all():  # NaN before a state is loaded
            self.chunked = self.probe(tokens.device)
        if self.chunked:
            weight = self.inner.get_output_embeddings().weight
            states = self.inner.base_model(**inputs).last_hidden_state
            return output_cross_entropy(states, weight, labels, smoothing=0.0, ignore_index=IGNORE_INDEX)
        logits = self.inner(**inputs).logits.float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)

    @torch.no_grad()
    def probe(self, device: torch.device) -> bool:
        """Return whether the logits are the states times the output matrix.

        UsageError: a document in a row depends on the one before it.
        """
        was_training, seen = self.training, []
        head = self.inner.get_output_embeddings()
        tokens = (torch.arange(2 * PROBE_TOKENS, device=device) * 7 % self.inner.config.vocab_size)[None]
        documents = (torch.arange(2 * PROBE_TOKENS, device=device) >= PROBE_TOKENS).long()[None]
        handle = head.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
        self.eval()
        try:
            with torch.autocast(device.type, enabled=False), torch.compiler.set_stance("force_eager"):
                # Not self(...), whose hooks would free the root's weights in shards.
                packed = self.inner(**inputs_of(tokens, documents)).logits
                alone = self.inner(**inputs_of(tokens[:, PROBE_TOKENS:])).logits
                states = self.inner.base_model(input_ids=tokens[:, PROBE_TOKENS:], use_cache=False).last_hidden_state
        finally:
            handle.remove()
            self.train(was_training)
        difference = (packed[:, PROBE_TOKENS:] - alone).abs().max()
        if not difference <= 1e-3 * alone.std():
            raise UsageError(
                f"{type(self.inner).__name__} mixes the documents of a row: logits of the second differ by {difference:g}",
                "llama.backend=transformers",
                "train one document per row with your own loop, or choose another model",
            )
        plain = type(head) is nn.Linear and head.bias is None
        return plain and len(seen) == 2 and torch.equal(seen[1][0], states) and torch.equal(seen[1][1], alone)


def inputs_of(tokens: Tensor, documents: Tensor | None = None) -> dict[str, Any]:
    return {"input_ids": tokens, "position_ids": document_positions(tokens, documents)[0], "use_cache": False}
