"""Any causal language model of `transformers` as the model of a run (llama.backend=transformers).

Its parameters have the names of the Hugging Face folder, behind `inner.`. Where its logits are the
states times a matrix, the loss is computed in chunks, as for a Llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import CheckpointError, UsageError
from lockstep.models.llama import IGNORE_INDEX, document_positions
from lockstep.models.loss import output_cross_entropy
from lockstep.parallel.deferred_init import LikeOnCpu, Recording
from lockstep.parallel.plans import ParallelPlan, find_units
from lockstep.parallel.tensor_plan import styles_of
from lockstep.units import join_names

INNER = "inner."
PROBE_TOKENS = 16  # of each of two documents
# Their frequencies follow the longest document of a batch, "dynamic" also the batches before.
FOLLOWING_ROPES = ("dynamic", "longrope")
SCALED_ROPES = ("linear", "yarn")  # max_position_embeddings may be the context before scaling


@dataclass(frozen=True)
class TransformersConfig:
    """A config.json, with the sizes that a run needs."""

    hf_config: Mapping[str, Any]

    @cached_property
    def parsed(self) -> Any:
        """Return the configuration object of `transformers`. CheckpointError: it is not
        supported."""
        kind = self.hf_config.get("model_type")
        if self.hf_config.get("quantization_config"):
            raise CheckpointError(
                "quantization_config is set",
                "config.json",
                "use the model as it was before quantization",
            )
        from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import

        try:
            parsed = type(AutoConfig.for_model(str(kind))).from_dict(decode_floats(self.hf_config))
        except Exception as error:  # strict dataclasses raise others than ValueError
            what = f"transformers cannot read the config of model_type {kind}: {error}"
            raise CheckpointError(what, "config.json", "copy the file again") from error
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

    @property
    def max_seq_len(self) -> int:
        """Return the positions of the model after scaling; 0: any number."""
        return context_of(self.parsed)

    @property
    def following_ropes(self) -> list[str]:
        kinds = {str(rope.get("rope_type")) for rope in ropes_of(self.parsed)}
        return sorted(filter(follows_documents, kinds))

    def meta_model(self) -> TransformersModel:
        with self._refuse_failures(), torch.device("meta"):
            return TransformersModel(self.parsed)

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers (rotary frequencies), which no file holds, on the CPU."""
        from transformers.initialization import no_init_weights

        with self._refuse_failures(), no_init_weights(), LikeOnCpu(), Recording() as recording:
            model = TransformersModel(self.parsed)
        saved = model.state_dict()
        if unknown := [
            name
            for name, buffer in model.named_buffers()
            if name in saved or not buffer.is_floating_point()
        ]:
            raise CheckpointError(
                f"the model has buffers that are not supported: {unknown[0]}",
                "config.json",
                "choose another model",
            )
        with self._refuse_failures():
            recording.finish(dict(model.named_buffers()))
            return {name: recording.value(name) for name, _ in model.named_buffers()}

    @contextmanager
    def _refuse_failures(self) -> Iterator[None]:
        """CheckpointError: the model's own code fails when it is built without memory."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # any code of transformers
            what = f"llama.backend=transformers cannot build a model of model_type {self.hf_config.get('model_type')}: {error}"
            raise CheckpointError(
                what, "config.json", "choose another model, or train it in a loop of your own"
            ) from error


def decode_floats(value: Any) -> Any:
    """Return a config.json with infinities for {"__float__": "Infinity"}, as transformers writes
    them."""
    if isinstance(value, list):
        return [decode_floats(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if list(value) == ["__float__"]:
        return float(value["__float__"])
    return {key: decode_floats(item) for key, item in value.items()}


def ropes_of(parsed: Any) -> list[Mapping[str, Any]]:
    """Return the parameters of the rotary positions; of several kinds of layers, one of each."""
    parameters = getattr(parsed, "rope_parameters", None) or {}
    nested = [item for item in parameters.values() if isinstance(item, Mapping)]
    return nested or [parameters]


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

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM  # seconds to import

        make: Any = AutoModelForCausalLM.from_config
        self.inner: Any = make(config, dtype=torch.float32)
        self.chunked: bool | None = None  # None: not probed yet
        self.max_seq_len = context_of(config)
        self.fixed_ropes = fix_ropes(self.inner)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return the logits; with labels the sum of their cross-entropy (see `Llama.forward`)."""
        if self.fixed_ropes and tokens.shape[1] > self.max_seq_len:
            what = f"a row of {tokens.shape[1]:,} tokens: {limit_of_ropes(self.fixed_ropes, self.max_seq_len)}"
            raise UsageError(
                what, f"rope_parameters of {type(self.inner).__name__}", "give shorter rows"
            )
        inputs = inputs_of(tokens, documents)
        if labels is None:
            return cast(Tensor, self.inner(**inputs).logits)
        if (
            self.chunked is None and next(self.parameters()).isfinite().all()
        ):  # NaN before a state is loaded
            self.chunked = self.probe(tokens.device)
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

        UsageError: a document in a row depends on the one before it.
        """
        was_training, seen = self.training, []
        head = self.inner.get_output_embeddings()
        tokens = (torch.arange(2 * PROBE_TOKENS, device=device) * 7 % self.inner.config.vocab_size)[
            None
        ]
        documents = (torch.arange(2 * PROBE_TOKENS, device=device) >= PROBE_TOKENS).long()[None]
        handle = head.register_forward_hook(
            lambda module, inputs, output: seen.append((inputs[0], output))
        )
        self.eval()
        try:
            with (
                torch.autocast(device.type, enabled=False),
                torch.compiler.set_stance("force_eager"),
            ):
                # Not self(...), whose hooks would free the root's weights in shards.
                packed = self.inner(**inputs_of(tokens, documents)).logits
                alone = self.inner(**inputs_of(tokens[:, PROBE_TOKENS:])).logits
                # In Llama 4 the base model is the model itself.
                has_base = self.inner.base_model is not self.inner
                states = (
                    self.inner.base_model(
                        input_ids=tokens[:, PROBE_TOKENS:], use_cache=False
                    ).last_hidden_state
                    if has_base
                    else None
                )
        except (
            AttributeError,
            IndexError,
            KeyError,
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:
            what = (
                f"{type(self.inner).__name__} does not run with token ids and position ids: {error}"
            )
            raise UsageError(
                what,
                "llama.backend=transformers",
                "choose another model, or train it in a loop of your own",
            ) from error
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
        if not plain or states is None or len(seen) != 2:
            return False
        return torch.equal(seen[1][0], states) and torch.equal(seen[1][1], alone)


def limit_of_ropes(kinds: list[str], positions: int) -> str:
    return f"beyond {positions:,} positions a rope of type {join_names(kinds)} follows the longest document of a batch"


def fix_ropes(model: nn.Module) -> list[str]:
    """Keep the frequencies of FOLLOWING_ROPES as they are for up to `context_of` positions; return
    their types.

    transformers computes them again in each forward pass, from the longest document of the batch:
    other documents beside it would change what the model computes for a document.
    """
    fixed = set[str]()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            fixed |= {kind for kind in rope_type.values() if follows_documents(kind)}
            kept = {
                layer: "default" if follows_documents(kind) else kind
                for layer, kind in rope_type.items()
            }
            vars(module)["rope_type"] = kept  # of a class of transformers
        elif follows_documents(rope_type):
            fixed.add(str(rope_type))
            vars(module)["rope_type"] = "default"
    return sorted(fixed)


def inputs_of(tokens: Tensor, documents: Tensor | None = None) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "position_ids": document_positions(tokens, documents)[0],
        "use_cache": False,
    }
