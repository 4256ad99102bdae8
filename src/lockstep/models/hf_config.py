"""A Llama's config.json and tensor names as Hugging Face writes them, also those of families that
differ from Llama in little: Mistral without a window, Qwen 2, Qwen 3, Phi-3.

Unknown keys are refused unless they are known to change no logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.models.llama_config import LlamaConfig, RopeScaling
from lockstep.models.transformers_model import INNER

ARCHITECTURES = {  # -> model_type
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
}

# -- names -----------------------------------------------------------------------------------------

HF_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
HF_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.out": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """layers.3.attention.query.weight -> model.layers.3.self_attn.q_proj.weight; inner.NAME -> NAME

    Adapters as in PEFT: ...query.lora_down -> base_model.model.model...q_proj.lora_A.weight
    """
    if (path := name.removesuffix(".lora_down").removesuffix(".lora_up")) != name:
        module = hf_name(f"{path}.weight").removesuffix("weight")
        return f"base_model.model.{module}lora_{'A' if name.endswith('down') else 'B'}.weight"
    if name.startswith(INNER):
        return name.removeprefix(INNER)
    path, _, leaf = name.rpartition(".")
    if not path.startswith("layers."):
        return f"{HF_NAMES[path]}.{leaf}"
    _, number, inside = path.split(".", 2)
    return f"model.layers.{number}.{HF_LAYER_NAMES[inside]}.{leaf}"


# -- config.json -----------------------------------------------------------------------------------

SIZES = {  # field of LlamaConfig -> (key of config.json, largest accepted value)
    "vocab_size": ("vocab_size", 1 << 24),
    "dim": ("hidden_size", 1 << 20),
    "n_layers": ("num_hidden_layers", 1_000),
    "n_heads": ("num_attention_heads", 1 << 16),
    "n_kv_heads": ("num_key_value_heads", 1 << 16),
    "head_dim": ("head_dim", 1 << 16),
    "ffn_dim": ("intermediate_size", 1 << 22),
    "max_seq_len": ("max_position_embeddings", 1 << 31),
}
READ_KEYS = {key for key, _ in SIZES.values()} | {
    "architectures", "model_type", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
}  # fmt: skip
# The fields of RopeScaling.
SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Qwen's window has no effect unless use_sliding_window is true, Phi-3's length without scaling.
IGNORED_KEYS = {
    "qwen2": "sliding_window",
    "qwen3": "sliding_window",
    "phi3": "original_max_position_embeddings",
}
ONLY_PLAIN = "only the plain Llama is supported"
FIXED_KEYS: dict[str, Any] = {  # keys that must have this value, or null
    "quantization_config": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0,
    "partial_rotary_factor": 1, "rope_interleaved": False, "sliding_window": None, "use_sliding_window": False, "is_encoder_decoder": False,
    "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {}, "auto_map": {},
    "activation": "swiglu", "is_llama_config": True, "use_mrope": False, "embd_pdrop": 0, "resid_pdrop": 0,
}  # fmt: skip
HARMLESS_KEYS = {  # keys that change no logit: names, token ids, transformers' defaults for training and sampling
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attn_implementation", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "max_window_layers", "min_length", "model_max_length", "neftune_noise_alpha",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class JsonObject:
    """The values of a config.json, or of an object in it, checked on access.

    where  the file, for errors. CheckpointError: a value is missing, malformed or unsupported.
    """

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def inner(self, key: str) -> JsonObject:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "write an object, or null")
        return JsonObject(value, self.where)

    def whole_number(self, key: str, most: int, default: int | None = None) -> int:
        value = self._required(key, default)
        if type(value) is int and 1 <= value <= most:
            return value
        raise self.wrong(key, f"write a whole number from 1 to {most:,}", value)

    def positive(self, key: str, default: float | None = None, below: float = 1e30) -> float:
        value = self._required(key, default)
        if type(value) in (int, float) and 0 < value < below:
            return float(value)
        raise self.wrong(key, f"write a number above 0 and below {below:g}", value)

    def _required(self, key: str, default: float | None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key!r} is missing")
        return value

    def wrong(self, key: str, hint: str, value: Any = None) -> CheckpointError:
        return self.error(f"{key} is {as_json(self.get(key, value))}", hint)

    def error(self, what: str, hint: str = "copy the whole folder again") -> CheckpointError:
        return CheckpointError(what, self.where, hint)


def config_from_hf(hf_config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Parse a config.json. CheckpointError: a key is missing, malformed or unsupported."""
    given = JsonObject(hf_config, where)
    family = family_of(given)
    refuse_other_values(given, family)
    n_heads = given.whole_number(*SIZES["n_heads"])
    dim = given.whole_number(*SIZES["dim"])
    if given.get("head_dim") is None and dim % n_heads:
        what = f"hidden_size {dim} is not a multiple of num_attention_heads {n_heads}"
        raise given.error(what, "correct one, or set head_dim")
    if not isinstance(given.get("tie_word_embeddings", False), bool):
        raise given.wrong("tie_word_embeddings", "write true or false")
    defaults: dict[str, int] = {"max_seq_len": 2048}
    # Other families have other defaults, which differ from version to version.
    if family == "llama":
        defaults["n_kv_heads"] = n_heads
    if family != "qwen3":
        defaults["head_dim"] = max(1, dim // n_heads)
    sizes = {field: given.whole_number(*SIZES[field], defaults.get(field)) for field in SIZES}
    theta, scaling = rope_of(given)
    if family == "phi3" and scaling:
        raise given.error(
            "rope_type llama3 under the model_type phi3", "only 'default' is supported"
        )
    try:
        return LlamaConfig(
            **sizes,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=given.positive("rms_norm_eps", 1e-6 if family == "llama" else None, below=1.0),
            tie_embeddings=given.get("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except ValueError as error:
        raise given.error(f"this is not a valid Llama: {error}") from None


def family_of(given: JsonObject) -> str:
    """Return the model_type. CheckpointError: it is unsupported, or contradicts the
    architecture."""
    named = given.get("architectures", [])
    kind = given.get("model_type")
    if not isinstance(named, list):
        raise given.wrong("architectures", 'write ["LlamaForCausalLM"]')
    unknown = [name for name in named if name not in list(ARCHITECTURES)]
    if not named and kind not in (None, *ARCHITECTURES.values()):
        unknown = [kind]
    if unknown:
        hint = f"supported: {', '.join(ARCHITECTURES)}; others train with --llama.backend transformers --llama.init_from FOLDER"
        raise given.error(f"the architecture is {unknown[0]}", hint)
    families = {ARCHITECTURES[name] for name in named} or {kind or "llama"}
    if len(families) > 1 or kind not in (None, *families):
        what = f"model_type is {as_json(kind)} under the architecture {', '.join(named)}"
        raise given.error(what)
    return str(families.pop())


def refuse_other_values(given: JsonObject, family: str) -> None:
    """CheckpointError: a key of config.json may change what the model computes."""
    layers = given.get("layer_types")
    plain = FIXED_KEYS | {
        "layer_types": ["full_attention"] * len(layers) if isinstance(layers, list) else None
    }
    if family == "mistral" and "sliding_window" not in given.values:
        what = "sliding_window is missing, which means 4096 in a Mistral"
        raise given.error(what, "only null is supported")
    harmless = READ_KEYS | HARMLESS_KEYS | {IGNORED_KEYS.get(family)}
    for key, value in given.values.items():
        if key in harmless or value is None or (key in plain and value == plain[key]):
            continue
        if key == "quantization_config":
            raise given.wrong(key, "use the model as it was before quantization")
        if key in plain:
            raise given.wrong(key, ONLY_PLAIN)
        hint = "this key is unknown; remove it if it does not change what the model computes"
        raise given.wrong(key, hint)


def rope_of(given: JsonObject) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling); rope_scaling precedes rope_parameters, as in transformers."""
    parameters = given.inner("rope_parameters")
    scaling = given.inner("rope_scaling")
    rope = scaling if scaling.values else parameters
    theta = rope.positive("rope_theta", given.positive("rope_theta", 10_000.0))
    if (other := parameters.values.get("rope_theta", theta)) != theta:
        what = f"rope_parameters has rope_theta {as_json(other)}, and rope_scaling has {theta:g}"
        raise given.error(what, "keep one of them")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in ("default", "llama3"):
        what = f"rotary positions are scaled by rope_type {as_json(kind)}"
        raise given.error(what, "only 'llama3' and 'default' are supported")
    if rope.values.get("partial_rotary_factor", 1) != 1:
        raise rope.wrong("partial_rotary_factor", ONLY_PLAIN)
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "llama3":
        known |= {*SCALING_KEYS}
    for key in sorted(rope.values.keys() - known):
        if rope.values[key] is not None:
            raise rope.wrong(key, f"with rope_type {kind} this key is unknown: remove it")
    if kind == "default":
        return theta, None
    factor, low, high = (rope.positive(key) for key in SCALING_KEYS[:3])
    if low >= high:
        raise given.error(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return theta, RopeScaling(factor, low, high, rope.whole_number(SCALING_KEYS[3], 1 << 31))


def as_json(value: Any) -> str:
    return json.dumps(value)[:80]


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 both read: a Llama, Qwen 2 or Qwen 3."""
    family, unbiased = "llama", ["attention_bias", "mlp_bias"]
    if config.qkv_bias:
        family, unbiased = "qwen2", []
    elif config.qk_norm:
        family, unbiased = "qwen3", ["attention_bias"]
    scaling = config.rope_scaling and {
        "rope_type": "llama3",
        **dict(zip(SCALING_KEYS, astuple(config.rope_scaling), strict=True)),
    }
    return {
        "architectures": [name for name, kind in ARCHITECTURES.items() if kind == family],
        "model_type": family,
        **{key: getattr(config, field) for field, (key, _) in SIZES.items()},
        "hidden_act": "silu",
        **dict.fromkeys(unbiased, False),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_to_write(config: LlamaConfig, old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the old config.json if it describes `config`, else a new one with its token ids."""
    is_whole = not old.keys() <= HARMLESS_KEYS
    if is_whole and config_from_hf(old, "the config that came with the model") == config:
        return dict(old)
    return new_config(config, old)


def new_config(config: LlamaConfig, old: Mapping[str, Any]) -> dict[str, Any]:
    return config_to_hf(config) | {key: value for key, value in old.items() if key in HARMLESS_KEYS}
