"""A Llama's config.json and tensor names as Hugging Face writes them, also those of families that
differ from Llama in little: Mistral without a window, Qwen 2, Qwen 3, Phi-3.

Unknown keys are refused unless they are known to change no logit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import Any

import torch

from lockstep.errors import CheckpointError
from lockstep.models.llama import Llama
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


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} in the model's order, building one layer only."""
    with torch.device("meta"):
        single = {
            name: tuple(parameter.shape)
            for name, parameter in Llama(replace(config, n_layers=1)).named_parameters()
        }
    inside = {
        name.removeprefix("layers.0."): single.pop(name)
        for name in list(single)
        if name.startswith("layers.0.")
    }
    layers = {
        f"layers.{number}.{name}": shape
        for number in range(config.n_layers)
        for name, shape in inside.items()
    }
    return {"embedding.weight": single.pop("embedding.weight")} | layers | single


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
    "architectures",
    "model_type",
    "rms_norm_eps",
    "tie_word_embeddings",
}
READ_KEYS |= {"rope_theta", "rope_parameters", "rope_scaling"}
SCALING_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)  # fields of RopeScaling
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


def config_from_hf(hf_config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Parse a config.json. CheckpointError: a key is missing, malformed or unsupported."""
    family = family_of(hf_config, where)
    refuse_other_values(hf_config, family, where)

    def size(field: str, default: int | None = None) -> int:
        return whole_number(hf_config, *SIZES[field], where, default)

    dim, n_heads = size("dim"), size("n_heads")
    if hf_config.get("head_dim") is None and dim % n_heads:
        what = f"hidden_size {dim} is not a multiple of num_attention_heads {n_heads}"
        raise CheckpointError(what, where, "correct one, or set head_dim")
    tied = hf_config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise CheckpointError(
            f"tie_word_embeddings is {as_json(tied)}", where, "write true or false"
        )
    theta, scaling = rope_of(hf_config, where)
    defaults = {"n_kv_heads": n_heads, "head_dim": max(1, dim // n_heads), "max_seq_len": 2048}
    if (
        family != "llama"
    ):  # other families have other defaults, which differ from version to version
        del defaults["n_kv_heads"]
    if family == "qwen3":
        del defaults["head_dim"]
    if family == "phi3" and scaling:
        raise CheckpointError(
            "rope_type llama3 under the model_type phi3", where, "only 'default' is supported"
        )
    try:
        return LlamaConfig(
            **{field: size(field, defaults.get(field)) for field in SIZES},
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=positive(
                hf_config, "rms_norm_eps", 1e-6 if family == "llama" else None, where, below=1.0
            ),
            tie_embeddings=bool(tied),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    except ValueError as error:
        raise CheckpointError(
            f"this is not a valid Llama: {error}", where, "copy the whole folder again"
        ) from None


def family_of(hf_config: Mapping[str, Any], where: str) -> str:
    """Return the model_type. CheckpointError: it is unsupported, or contradicts the
    architecture."""
    named = [] if hf_config.get("architectures") is None else hf_config["architectures"]
    if not isinstance(named, list):
        raise CheckpointError(
            f"architectures is {as_json(named)}", where, 'write ["LlamaForCausalLM"]'
        )
    kind = hf_config.get("model_type")
    unknown_kind = [] if named or kind in (None, *ARCHITECTURES.values()) else [kind]
    if other := [name for name in named if name not in list(ARCHITECTURES)] or unknown_kind:
        hint = f"supported: {', '.join(ARCHITECTURES)}; others train with --llama.backend transformers --llama.init_from FOLDER"
        raise CheckpointError(f"the architecture is {other[0]}", where, hint)
    families = {ARCHITECTURES[name] for name in named} or {kind or "llama"}
    if len(families) > 1 or kind not in (None, *families):
        what = f"model_type is {as_json(kind)} under the architecture {', '.join(named)}"
        raise CheckpointError(what, where, "copy the whole folder again")
    return str(families.pop())


def refuse_other_values(hf_config: Mapping[str, Any], family: str, where: str) -> None:
    """CheckpointError: a key of config.json may change what the model computes."""
    layers = hf_config.get("layer_types")
    plain = FIXED_KEYS | {
        "layer_types": ["full_attention"] * len(layers) if isinstance(layers, list) else None
    }
    # Qwen's window has no effect unless use_sliding_window is true, Phi-3's length without scaling.
    ignored = {
        "qwen2": "sliding_window",
        "qwen3": "sliding_window",
        "phi3": "original_max_position_embeddings",
    }.get(family)
    if family == "mistral" and "sliding_window" not in hf_config:
        raise CheckpointError(
            "sliding_window is missing, which means 4096 in a Mistral",
            where,
            "only null is supported",
        )
    for key, value in hf_config.items():
        if (
            key in READ_KEYS
            or key in HARMLESS_KEYS
            or key == ignored
            or value is None
            or (key in plain and value == plain[key])
        ):
            continue
        hint = "this key is unknown; remove it if it does not change what the model computes"
        if key in plain:
            hint = (
                "use the model as it was before quantization"
                if key == "quantization_config"
                else "only the plain Llama is supported"
            )
        raise CheckpointError(f"{key} is {as_json(value)}", where, hint)


def rope_of(hf_config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling); rope_scaling precedes rope_parameters, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf_config.get(key, {}), Mapping | None):
            raise CheckpointError(
                f"{key} is {as_json(hf_config[key])}", where, "write an object, or null"
            )
    rope: Mapping[str, Any] = (
        hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    )
    theta = positive(rope, "rope_theta", positive(hf_config, "rope_theta", 10_000.0, where), where)
    if (other := (hf_config.get("rope_parameters") or {}).get("rope_theta", theta)) != theta:
        what = f"rope_parameters has rope_theta {as_json(other)}, and rope_scaling has {theta:g}"
        raise CheckpointError(what, where, "keep one of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        what = f"rotary positions are scaled by rope_type {as_json(kind)}"
        raise CheckpointError(what, where, "only 'llama3' and 'default' are supported")
    known = {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *(SCALING_KEYS if kind == "llama3" else ()),
    }
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(
            f"partial_rotary_factor is {as_json(part)}", where, "only the plain Llama is supported"
        )
    if unknown := sorted(key for key in rope.keys() - known if rope[key] is not None):
        raise CheckpointError(
            f"{unknown[0]} is {as_json(rope[unknown[0]])}, with rope_type {kind}",
            where,
            "unknown key: remove it",
        )
    if kind == "default":
        return theta, None
    factor, low, high = (positive(rope, key, None, where) for key in SCALING_KEYS[:3])
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor {low:g} is not below high_freq_factor {high:g}",
            where,
            "copy the whole folder again",
        )
    return theta, RopeScaling(
        factor, low, high, whole_number(rope, SCALING_KEYS[3], 1 << 31, where)
    )


def whole_number(
    hf_config: Mapping[str, Any], key: str, most: int, where: str, default: int | None = None
) -> int:
    return int(
        number(
            hf_config,
            key,
            default,
            where,
            int,
            lambda value: 1 <= value <= most,
            f"a whole number from 1 to {most:,}",
        )
    )


def positive(
    hf_config: Mapping[str, Any],
    key: str,
    default: float | None,
    where: str,
    *,
    below: float = 1e30,
) -> float:
    hint = f"a number above 0 and below {below:g}"
    return float(
        number(hf_config, key, default, where, int | float, lambda value: 0 < value < below, hint)
    )


def number(
    hf_config: Mapping[str, Any],
    key: str,
    default: float | None,
    where: str,
    kind: Any,
    fits: Callable[[Any], bool],
    hint: str,
) -> Any:
    value = default if hf_config.get(key) is None else hf_config[key]
    if value is None:
        raise CheckpointError(f"{key!r} is missing", where, "copy the whole folder again")
    if isinstance(value, kind) and not isinstance(value, bool) and fits(value):
        return value
    raise CheckpointError(f"{key} is {as_json(value)}", where, f"write {hint}")


def as_json(value: Any) -> str:
    return json.dumps(value)[:80]


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 both read: a Llama, Qwen 2 or Qwen 3."""
    architecture = (
        "Qwen2ForCausalLM"
        if config.qkv_bias
        else "Qwen3ForCausalLM"
        if config.qk_norm
        else "LlamaForCausalLM"
    )
    biases = (
        {}
        if config.qkv_bias
        else {"attention_bias": False} | ({} if config.qk_norm else {"mlp_bias": False})
    )
    scaling = config.rope_scaling
    rope_scaling = scaling and {
        "rope_type": "llama3",
        **dict(zip(SCALING_KEYS, astuple(scaling), strict=True)),
    }
    return {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture],
        **{
            key: getattr(config, field)
            for field, (key, _) in SIZES.items()
            if field != "max_seq_len"
        },
        "hidden_act": "silu",
        **biases,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_from_json(value: Mapping[str, Any]) -> LlamaConfig:
    """Inverse of `asdict`. TypeError, ValueError, CheckpointError: the value is invalid."""
    scaling = value.get("rope_scaling")
    config = LlamaConfig(
        **{**value, "rope_scaling": None if scaling is None else RopeScaling(**scaling)}
    )
    config_from_hf(config_to_hf(config), '"shape" in model.json')
    return config
