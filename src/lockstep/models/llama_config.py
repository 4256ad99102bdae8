"""The numbers that define a Llama, its sizes, and its config.json and tensor names in Hugging Face
folders, also those of FAMILIES that differ from it in little. Without torch.

Unknown keys of a config.json are refused unless they are known to change no logit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.models.llama import Llama


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary frequencies for contexts longer than the one trained on.

    Waves longer than `original_max_seq_len / low_freq_factor` positions are stretched by `factor`,
    those shorter than `original_max_seq_len / high_freq_factor` are kept; between, interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that defines the model except the values of its parameters."""

    vocab_size: int  # memory and time of the output layer grow with it
    dim: int  # width of the residual stream; parameters grow with its square
    n_layers: int
    n_heads: int  # query heads of a layer
    n_kv_heads: int  # key-value heads that they share; the cache grows with it
    head_dim: int  # even
    ffn_dim: int  # inner width of SwiGLU, about 3.5 times dim
    max_seq_len: int = 8192  # positions that it is trained for; this code does not enforce it
    # The slowest rotary wave is this many times as long as the fastest.
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # the output matrix is the embedding
    qkv_bias: bool = False  # query, key and value have biases, as in Qwen 2
    qk_norm: bool = False  # RMSNorm of each query and key before its rotation, as in Qwen 3

    unrotated_layers: tuple[int, ...] = ()  # without rotary positions, as in SmolLM 3

    def __post_init__(self) -> None:
        if family_for(self) is None:
            several = " cannot be combined with ".join(
                name for name, plain in PLAIN_FEATURES.items() if getattr(self, name) != plain
            )
            raise ValueError(f"{several}: no supported architecture has both")
        if self.n_heads % self.n_kv_heads or self.head_dim % 2:
            heads = (
                f"n_heads {self.n_heads}, n_kv_heads {self.n_kv_heads}, head_dim {self.head_dim}"
            )
            raise ValueError(
                f"{heads}: n_heads must be a multiple of n_kv_heads, head_dim must be even"
            )

    @property
    def rope_kinds(self) -> tuple[int, ...]:
        """Of each layer the number of its rotary frequencies in `llama.rope_frequencies`."""
        return tuple(int(number in self.unrotated_layers) for number in range(self.n_layers))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.meta_model().parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {}

    def meta_model(self) -> Llama:
        import torch  # not needed to plan a run

        from lockstep.models.llama import Llama

        with torch.device("meta"):
            return Llama(self)


# -- families --------------------------------------------------------------------------------------

PLAIN_FEATURES: dict[str, Any] = {  # of a Llama
    "qkv_bias": False,
    "qk_norm": False,
    "unrotated_layers": (),
}


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face whose arithmetic `llama.py` has.

    features  fields of LlamaConfig by which it differs from a Llama
    flags     further such fields, with numbers of layers -> the key of config.json that has 0 for
              these layers, and 1 for the others
    optional  fields that its config.json may lack; the defaults of others differ from version to
              version
    required  keys whose absence means a value that is not supported
    ignored   keys without effect in this family
    written   further keys of an exported config.json
    packed    matrices that hold several of a Llama, one after the other
    ropes     supported types of rotary positions
    theta     rope_theta of a config.json without it
    tied      tie_word_embeddings of a config.json without it
    """

    architecture: str
    features: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ("head_dim",)
    required: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    written: Mapping[str, Any] = field(default_factory=dict)
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("llama3", "default")
    theta: float = 10_000.0
    tied: bool = False


FAMILIES = {  # by model_type; an export has the first whose features are those of the model
    "llama": Family(
        "LlamaForCausalLM",
        optional=("n_kv_heads", "head_dim", "norm_eps"),
        written={"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family("MistralForCausalLM", required=("sliding_window",)),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        features={"qkv_bias": True},
        ignored=("sliding_window",),  # has no effect unless use_sliding_window is true
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        features={"qk_norm": True},
        optional=(),
        ignored=("sliding_window",),
        written={"attention_bias": False},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        ignored=("original_max_position_embeddings",),  # has no effect without scaling
        packed={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
        ropes=("default",),
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        flags={"unrotated_layers": "no_rope_layers"},
        ignored=("no_rope_layer_interval",),  # of no_rope_layers, which are written out
        theta=2_000_000.0,
        tied=True,
    ),
}


def family_for(config: LlamaConfig) -> str | None:
    """Return the model_type of the first family with the features of `config`."""
    for kind, family in FAMILIES.items():
        fixed = PLAIN_FEATURES | dict(family.features)
        if all(getattr(config, name) == fixed[name] for name in fixed.keys() - family.flags):
            return kind
    return None


# -- sizes -----------------------------------------------------------------------------------------

LLAMA_32 = RopeScaling(factor=32.0)
LLAMA_CONFIGS = {
    # small ones, for experiments on a CPU
    "1M": LlamaConfig(2048, 128, 4, 4, 2, 32, 384, 1024, 10_000.0, tie_embeddings=True),
    "5M": LlamaConfig(4096, 256, 6, 4, 2, 64, 704, 1024, 10_000.0, tie_embeddings=True),
    "25M": LlamaConfig(8192, 512, 8, 8, 4, 64, 1408, 2048, 10_000.0, tie_embeddings=True),
    "100M": LlamaConfig(16_384, 768, 14, 12, 4, 64, 2048, 2048, 10_000.0, tie_embeddings=True),
    # as published: Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B
    "1B": LlamaConfig(
        128_256, 2048, 16, 32, 8, 64, 8192, 131_072, rope_scaling=LLAMA_32, tie_embeddings=True
    ),
    "3B": LlamaConfig(
        128_256, 3072, 28, 24, 8, 128, 8192, 131_072, rope_scaling=LLAMA_32, tie_embeddings=True
    ),
    "8B": LlamaConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope_scaling=RopeScaling()),
    "70B": LlamaConfig(128_256, 8192, 80, 64, 8, 128, 28_672, 131_072, rope_scaling=RopeScaling()),
    "405B": LlamaConfig(
        128_256, 16_384, 126, 128, 8, 128, 53_248, 131_072, rope_scaling=RopeScaling()
    ),
}

# -- names -----------------------------------------------------------------------------------------

INNER = "inner."  # of the names of transformers_model.py
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
    "architectures", "model_type", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
    "rope_parameters", "rope_scaling",
}  # fmt: skip
# The fields of RopeScaling.
SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ONLY_PLAIN = "only the plain Llama is supported"
FIXED_KEYS: dict[str, Any] = json.loads("""{
    "quantization_config": null, "attention_bias": false, "mlp_bias": false, "hidden_act": "silu",
    "attention_dropout": 0, "partial_rotary_factor": 1, "rope_interleaved": false,
    "sliding_window": null, "use_sliding_window": false, "is_encoder_decoder": false,
    "add_cross_attention": false, "cross_attention_hidden_size": null,
    "tie_encoder_decoder": false, "pruned_heads": {}, "auto_map": {}, "activation": "swiglu",
    "is_llama_config": true, "use_mrope": false, "embd_pdrop": 0, "resid_pdrop": 0
}""")  # keys that must have this value, or null
# Keys that change no logit: names, token ids, transformers' defaults for training and sampling.
HARMLESS_NAMES = """
    _attn_implementation _attn_implementation_autoset _name_or_path attn_implementation
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range
    is_decoder label2id length_penalty max_length max_sequence_length max_window_layers
    min_length model_max_length neftune_noise_alpha no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
HARMLESS_KEYS = {*HARMLESS_NAMES.split()}


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
    family = FAMILIES[family_of(given)]
    refuse_other_values(given, family)
    n_heads = given.whole_number(*SIZES["n_heads"])
    dim = given.whole_number(*SIZES["dim"])
    if given.get("head_dim") is None and dim % n_heads:
        raise given.error(
            f"hidden_size {dim} is not a multiple of num_attention_heads {n_heads}",
            "correct one, or set head_dim",
        )
    tied = given.get("tie_word_embeddings", family.tied)
    if not isinstance(tied, bool):
        raise given.wrong("tie_word_embeddings", "write true or false")
    defaults = {"n_kv_heads": n_heads, "head_dim": max(1, dim // n_heads), "norm_eps": 1e-6}
    known: dict[str, Any] = {name: defaults[name] for name in family.optional}
    known["max_seq_len"] = 2048
    values: dict[str, Any] = {**family.features}
    values |= {name: unflagged_layers(given, key) for name, key in family.flags.items()}
    values |= {name: given.whole_number(*SIZES[name], known.get(name)) for name in SIZES}
    theta, scaling = rope_of(given, family)
    try:
        return LlamaConfig(
            **values,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=given.positive("rms_norm_eps", known.get("norm_eps"), below=1.0),
            tie_embeddings=tied,
        )
    except ValueError as error:
        raise given.error(f"this is not a valid Llama: {error}") from None


def unflagged_layers(given: JsonObject, key: str) -> tuple[int, ...]:
    """Return the numbers of the layers with 0 in the list `key`."""
    flags = given.get(key)
    layers = given.get("num_hidden_layers")
    if not isinstance(flags, list) or len(flags) != layers or any(f not in (0, 1) for f in flags):
        raise given.wrong(key, f"write a list of {layers} numbers, 0 or 1 for each layer")
    return tuple(number for number, flag in enumerate(flags) if flag == 0)


def family_of(given: JsonObject) -> str:
    """Return the model_type. CheckpointError: it is unsupported, or contradicts the
    architecture."""
    kinds = {family.architecture: kind for kind, family in FAMILIES.items()}
    named = given.get("architectures", [])
    kind = given.get("model_type")
    if not isinstance(named, list):
        raise given.wrong("architectures", 'write ["LlamaForCausalLM"]')
    unknown = [name for name in named if name not in list(kinds)]
    if not named and kind not in (None, *FAMILIES):
        unknown = [kind]
    if unknown:
        raise given.error(
            f"the architecture is {unknown[0]}",
            f"supported: {', '.join(kinds)}; "
            "others train with --llama.backend transformers --llama.init_from FOLDER",
        )
    families = {kinds[name] for name in named} or {kind or "llama"}
    if len(families) > 1 or kind not in (None, *families):
        raise given.error(
            f"model_type is {as_json(kind)} under the architecture {', '.join(named)}"
        )
    return str(families.pop())


def packed_matrices(hf_config: Mapping[str, Any], where: str) -> Mapping[str, Sequence[str]]:
    """Return the names of the matrices that its family packs, each with those of a Llama in it."""
    return FAMILIES[family_of(JsonObject(hf_config, where))].packed


def refuse_other_values(given: JsonObject, family: Family) -> None:
    """CheckpointError: a key of config.json may change what the model computes."""
    layers = given.get("layer_types")
    plain = FIXED_KEYS | {
        "layer_types": ["full_attention"] * len(layers) if isinstance(layers, list) else None
    }
    if missing := [key for key in family.required if key not in given.values]:
        raise given.error(
            f"{missing[0]} is missing, which does not mean null in a {family.architecture}",
            "only null is supported",
        )
    harmless = READ_KEYS | HARMLESS_KEYS | {*family.ignored, *family.flags.values()}
    for key, value in given.values.items():
        if key in harmless or value is None or (key in plain and value == plain[key]):
            continue
        if key == "quantization_config":
            raise given.wrong(key, "use the model as it was before quantization")
        if key in plain:
            raise given.wrong(key, ONLY_PLAIN)
        raise given.wrong(
            key, "this key is unknown; remove it if it does not change what the model computes"
        )


def rope_of(given: JsonObject, family: Family) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling); rope_scaling precedes rope_parameters, as in transformers."""
    parameters = given.inner("rope_parameters")
    scaling = given.inner("rope_scaling")
    rope = scaling if scaling.values else parameters
    theta = rope.positive("rope_theta", given.positive("rope_theta", family.theta))
    if (other := parameters.values.get("rope_theta", theta)) != theta:
        raise given.error(
            f"rope_parameters has rope_theta {as_json(other)}, and rope_scaling has {theta:g}",
            "keep one of them",
        )
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in family.ropes:
        raise given.error(
            f"rotary positions are scaled by rope_type {as_json(kind)}",
            f"supported in a {family.architecture}: {', '.join(family.ropes)}",
        )
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
    """Return a config.json that transformers 4 and 5 both read."""
    kind = family_for(config)
    assert kind is not None
    family = FAMILIES[kind]
    scaling = config.rope_scaling and {
        "rope_type": "llama3",
        **dict(zip(SCALING_KEYS, astuple(config.rope_scaling), strict=True)),
    }
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{key: getattr(config, field) for field, (key, _) in SIZES.items()},
        "hidden_act": "silu",
        **family.written,
        **{
            key: [int(number not in getattr(config, name)) for number in range(config.n_layers)]
            for name, key in family.flags.items()
        },
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
