"""Any causal language model of `transformers` as the model of a run (llama.backend=transformers).

Its parameters have the names of the Hugging Face folder, behind `inner.`. Where its logits are the
states times a matrix, the loss is computed in chunks, as for a Llama.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import CheckpointError, UsageError
from lockstep.models.llama import IGNORE_INDEX, document_positions
from lockstep.models.llama_config import INNER, LlamaConfig
from lockstep.models.loss import output_cross_entropy
from lockstep.parallel.deferred_init import LikeOnCpu, Recording
from lockstep.parallel.plans import ParallelPlan, find_units, styles_of
from lockstep.units import join_names

BACKEND = "llama.backend=transformers"
CHOOSE_ANOTHER = "choose another model, or train it in a loop of your own"
PROBE_TOKENS = 16  # of each of two documents
# Their frequencies follow the longest document of a batch, "dynamic" also the batches before.
FOLLOWING_ROPES = ("dynamic", "longrope")
OLD_BUFFERS = r"rotary_emb\.inv_freq$"  # of any model
SCALED_ROPES = ("linear", "yarn")  # max_position_embeddings may be the context before scaling


@dataclass(frozen=True)
class TransformersConfig:
    """A config.json, with the sizes that a run needs.

    packing  a row may have several documents: refuse a model that mixes them before it trains
    """

    hf_config: Mapping[str, Any]
    packing: bool = False

    def text_part(self) -> TransformersConfig:
        """Return the config of the text model in a multimodal one; of others this config.

        CheckpointError: it is not a causal language model.
        """
        if not self.hf_config.get("text_config"):
            return self
        parsed = self._read()
        written = json.loads(parsed.text_config.to_json_string(use_diff=False))
        written["tie_word_embeddings"] = parsed.tie_word_embeddings  # this one counts
        part = replace(self, hf_config=written)
        written["architectures"] = [causal_models()[type(part.parsed)].__name__]
        return part

    @cached_property
    def parsed(self) -> Any:
        """Return the configuration object of `transformers`. CheckpointError: it is not
        supported."""
        parsed = self._read()
        if type(parsed) not in causal_models():
            raise CheckpointError(
                f"model_type {parsed.model_type} is not a causal language model of transformers",
                "config.json",
                "choose another model",
            )
        return parsed

    def _read(self) -> Any:
        kind = self.hf_config.get("model_type")
        if self.hf_config.get("quantization_config"):
            raise CheckpointError(
                "quantization_config is set",
                "config.json",
                "use the model as it was before quantization",
            )
        from transformers import AutoConfig  # seconds to import

        try:
            # transformers writes infinity as {"__float__": "Infinity"}.
            decoded = json.loads(json.dumps(self.hf_config), object_hook=decode_float)
            return type(AutoConfig.for_model(str(kind))).from_dict(decoded)
        except Exception as error:  # strict dataclasses raise others than ValueError
            raise CheckpointError(
                f"transformers cannot read the config of model_type {kind}: {error}",
                "config.json",
                "copy the file again",
            ) from error

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

    @property
    def max_seq_len(self) -> int:
        """Return the positions of the model after scaling; 0: any number."""
        return context_of(self.parsed)

    @property
    def following_ropes(self) -> list[str]:
        return following_ropes(self.parsed)

    def meta_model(self) -> TransformersModel:
        with self._refuse_failures(), torch.device("meta"):
            return TransformersModel(self.parsed, packing=self.packing)

    def convert(self, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a folder that `transformers` stores under other names or in other
        shapes than those of the model. In memory. CheckpointError: they do not fit."""
        from transformers import AutoModelForCausalLM

        make: Any = AutoModelForCausalLM.from_pretrained
        with self._refuse_failures():
            model, report = make(
                folder,
                config=self.parsed,
                dtype=dtype,
                output_loading_info=True,
                use_safetensors=True,
                local_files_only=True,
            )
        problems = [
            f"{kind}: {join_names([*map(str, names)])}" for kind, names in report.items() if names
        ]
        if problems:
            raise CheckpointError(
                "the tensors are not those of config.json",
                "\n".join([str(folder), *problems]),
                "copy the whole folder again",
            )
        return {INNER + name: parameter.detach() for name, parameter in model.named_parameters()}

    def ignored_tensors(self, names: Iterable[str]) -> set[str]:
        """Return those of the names in a folder that are not of parameters: buffers that older
        versions stored, and that `transformers` does not read."""
        model = self.meta_model()
        patterns = {*(model.inner._keys_to_ignore_on_load_unexpected or ()), OLD_BUFFERS}
        stored = {
            name.removeprefix(INNER) for name in self.as_stored(dict(model.named_parameters()))
        }
        return {
            name
            for name in {*names} - stored
            if any(re.search(pattern, name) for pattern in patterns)
        }

    def as_stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors as `transformers` stores them: unchanged, or converted in memory."""
        from transformers.core_model_loading import revert_weight_conversion as revert

        inner = self.meta_model().inner
        parameters = dict(inner.named_parameters())
        if revert(inner, parameters).keys() == parameters.keys():
            return tensors
        stored = revert(inner, {name: tensors[INNER + name] for name in parameters})
        return {INNER + name: tensor.contiguous() for name, tensor in stored.items()}

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers (rotary frequencies), which no file holds, on the CPU."""
        from transformers.initialization import no_init_weights

        with self._refuse_failures(), no_init_weights(), LikeOnCpu(), Recording() as recording:
            model = TransformersModel(self.parsed)
        saved = model.state_dict()
        buffers = dict(model.named_buffers())
        for name, buffer in buffers.items():
            if name in saved or not buffer.is_floating_point():
                raise CheckpointError(
                    f"the model has buffers that are not supported: {name}",
                    "config.json",
                    "choose another model",
                )
        with self._refuse_failures():
            recording.finish(buffers)
            return {name: recording.value(name) for name in buffers}

    @contextmanager
    def _refuse_failures(self) -> Iterator[None]:
        """CheckpointError: the model's own code fails when it is built without memory."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # any code of transformers
            raise CheckpointError(
                "llama.backend=transformers cannot build a model "
                f"of model_type {self.hf_config.get('model_type')}: {error}",
                "config.json",
                CHOOSE_ANOTHER,
            ) from error


ModelConfig = LlamaConfig | TransformersConfig


def causal_models() -> Any:
    """Return the causal language models of `transformers` by the class of their configuration."""
    from transformers import AutoModelForCausalLM  # seconds to import

    return AutoModelForCausalLM._model_mapping


def decode_float(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if list(value) == ["__float__"] else value


def ropes_of(parsed: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary positions; of several kinds of layers, one of each."""
    parameters = getattr(parsed, "rope_parameters", None) or {}
    nested = [item for item in parameters.values() if isinstance(item, Mapping)]
    return nested or [parameters]


def following_ropes(parsed: Any) -> list[str]:
    kinds = {str(rope.get("rope_type")) for rope in ropes_of(parsed)}
    return sorted(filter(follows_documents, kinds))


def follows_documents(rope_type: Any) -> bool:
    return any(kind in str(rope_type) for kind in FOLLOWING_ROPES)


def context_of(parsed: Any) -> int:
    """Return how many positions the model has after scaling; 0: any number.

    Of FOLLOWING_ROPES: those for which the frequencies are the same in every batch.
    """
    positions = int(getattr(parsed, "max_position_embeddings", None) or 0)
    constant, scaled = [], [positions]
    for rope in ropes_of(parsed):
        original = int(rope.get("original_max_position_embeddings") or positions)
        if follows_documents(rope.get("rope_type")):
            constant.append(
                min(original, positions) if rope["rope_type"] == "longrope" else positions
            )
        elif rope.get("rope_type") in SCALED_ROPES:
            scaled.append(int(original * (rope.get("factor") or 1)))
    return min(constant, default=max(scaled))


class TransformersModel(nn.Module):
    """`model(tokens, labels, documents)` as of a `Llama`, for replicas and shards."""

    def __init__(self, config: Any, *, packing: bool = False) -> None:
        super().__init__()
        self.packing = packing
        from transformers import AutoModelForCausalLM  # seconds to import

        make: Any = AutoModelForCausalLM.from_config
        self.inner: Any = make(config, dtype=torch.float32)
        self.chunked: bool | None = None  # None: not probed yet
        self.mixed = 0.0  # difference of logits by another document in the row
        self.max_seq_len = context_of(config)
        self.following_ropes = following_ropes(config)
        fix_ropes(self.inner)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits; with labels the sum of their cross-entropy (see `Llama.forward`)."""
        if self.following_ropes and tokens.shape[1] > self.max_seq_len:
            raise UsageError(
                f"a row of {tokens.shape[1]:,} tokens: "
                f"{limit_of_ropes(self.following_ropes, self.max_seq_len)}",
                f"rope_parameters of {type(self.inner).__name__}",
                "give shorter rows",
            )
        inputs = inputs_of(tokens, documents)
        if labels is None:
            return self.inner(**inputs).logits
        if (
            self.chunked is None and next(self.parameters()).isfinite().all()
        ):  # NaN before a state is loaded
            self.chunked = self.probe(tokens.device)
        if self.mixed and (self.packing or documents is not None):
            name = type(self.inner).__name__
            raise UsageError(
                f"{name} mixes the documents of a row: logits differ by {self.mixed:g}",
                BACKEND,
                "train one document per row: data.packing=false; or choose another model",
            )
        if self.chunked:
            weight = self.inner.get_output_embeddings().weight
            states = self.inner.base_model(**inputs).last_hidden_state
            return output_cross_entropy(
                states, weight, labels, smoothing=0.0, ignore_index=IGNORE_INDEX
            )
        logits = self.inner(**inputs).logits.float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)

    def parallel_plan(self) -> ParallelPlan:
        """Return the units, and the styles and widths if the configuration has a supported plan."""
        config = self.inner.config
        plan = ParallelPlan(tuple(INNER + name for name in find_units(self.inner)))
        try:
            styles = styles_of(self, "auto")
        except UsageError:
            return plan
        heads = config.num_attention_heads
        key_value_heads = getattr(config, "num_key_value_heads", heads)
        widths = (heads, key_value_heads, config.intermediate_size)
        return replace(plan, styles=styles, widths=widths)

    @torch.no_grad()
    def probe(self, device: torch.device) -> bool:
        """Return whether the logits are the states times the output matrix.

        Sets `mixed` if a document in a row depends on the one before it. UsageError: the model does
        not run.
        """
        name, head = type(self.inner).__name__, self.inner.get_output_embeddings()
        was_training, product = self.training, None
        place = torch.arange(2 * PROBE_TOKENS, device=device)[None]
        tokens = place * 7 % self.inner.config.vocab_size
        last = tokens[:, PROBE_TOKENS:]
        self.eval()
        try:
            with (
                torch.autocast(device.type, enabled=False),
                torch.compiler.set_stance("force_eager"),
            ):
                # Not self(...), whose hooks would free the root's weights in shards.
                packed = self.inner(**inputs_of(tokens, place // PROBE_TOKENS)).logits
                alone = self.inner(**inputs_of(last)).logits
                plain = type(head) is nn.Linear and head.bias is None
                # In Llama 4 the base model is the model itself.
                if plain and self.inner.base_model is not self.inner:
                    based = self.inner.base_model(input_ids=last, use_cache=False)
                    product = head(based.last_hidden_state)
        except (
            AttributeError,
            LookupError,
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:
            raise UsageError(
                f"{name} does not run with token ids and position ids: {error}",
                BACKEND,
                CHOOSE_ANOTHER,
            ) from error
        finally:
            self.train(was_training)
        difference = (packed[:, PROBE_TOKENS:] - alone).abs().max()
        if not difference <= 1e-3 * alone.std():
            self.mixed = float(difference)
        return product is not None and torch.equal(product, alone)


def limit_of_ropes(kinds: list[str], positions: int) -> str:
    return (
        f"beyond {positions:,} positions a rope "
        f"of type {join_names(kinds)} follows the longest document of a batch"
    )


def fix_ropes(model: nn.Module) -> None:
    """Keep the frequencies of FOLLOWING_ROPES as they are for up to `context_of` positions.

    transformers computes them again in each forward pass, from the longest document of the batch:
    other documents beside it would change what the model computes for a document.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):  # by kind of layer
            for layer, kind in rope_type.items():
                if follows_documents(kind):
                    rope_type[layer] = "default"
        elif follows_documents(rope_type):
            vars(module)["rope_type"] = "default"  # of a class of transformers


def inputs_of(tokens: Tensor, documents: Tensor | None = None) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "position_ids": document_positions(tokens, documents)[0],
        "use_cache": False,
    }
