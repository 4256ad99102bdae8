"""Hugging Face folders of Llama models, read and written.

    config.json                       configuration; tokenizer files are beside it
    model.safetensors                 all tensors, or
    model-00001-of-00004.safetensors  some of them, and model.safetensors.index.json: tensor -> file

A model may be larger than memory: files are checked by their headers, then one tensor at a time is
mapped, used and released. Nothing is unpickled, cast or permuted, so a round trip keeps all bits.
Formats: https://huggingface.co/docs/safetensors (format), transformers' `LlamaConfig`.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.safetensors_io import ITEM_BYTES, TensorSpec
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, write_json
from lockstep.models.llama import Llama, LlamaConfig, RopeScaling
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of
from lockstep.units import join_names

ARCHITECTURE = "LlamaForCausalLM"
CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
COMPANION_FILES = (  # files of a model besides config.json and its tensors; copied unchanged
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 100 * 10**6  # the limit of the safetensors library

# -- names ------------------------------------------------------------------------------------------------------------

HF_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
HF_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.out": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """layers.3.attention.query.weight -> model.layers.3.self_attn.q_proj.weight"""
    if not name.startswith("layers."):
        return HF_NAMES[name.removesuffix(".weight")] + ".weight"
    _, number, inside = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{number}.{HF_LAYER_NAMES[inside]}.weight"


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return {parameter name: shape} in the model's order, building one layer only."""
    with torch.device("meta"):
        single = {name: tuple(parameter.shape) for name, parameter in Llama(replace(config, n_layers=1)).named_parameters()}
    inside = {name.removeprefix("layers.0."): shape for name, shape in single.items() if name.startswith("layers.0.")}
    layers = {f"layers.{number}.{name}": shape for number in range(config.n_layers) for name, shape in inside.items()}
    before = [name for name in single if name == "embedding.weight"]
    after = [name for name in single if name not in before and name not in layers]
    return {name: single[name] for name in before} | layers | {name: single[name] for name in after}


# -- config.json ------------------------------------------------------------------------------------------------------

MAX_SIZES = {  # keys of config.json that size the model -> largest accepted value
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 31,
}
READ_KEYS = {*MAX_SIZES, "architectures", "model_type", "rms_norm_eps", "tie_word_embeddings"}
READ_KEYS |= {"rope_theta", "rope_parameters", "rope_scaling"}
FIXED_KEYS: dict[str, Any] = {  # keys that must have this value, or null
    "quantization_config": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0,
    "partial_rotary_factor": 1, "rope_interleaved": False, "sliding_window": None, "use_sliding_window": False, "is_encoder_decoder": False,
    "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {}, "auto_map": {},
    "activation": "swiglu", "is_llama_config": True, "use_mrope": False,
}  # fmt: skip
HARMLESS_KEYS = {  # keys that change no logit: names, token ids, transformers' defaults for training and sampling
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attn_implementation", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "initializer_range", "is_decoder", "label2id",
    "length_penalty", "max_length", "max_sequence_length", "min_length", "model_max_length", "neftune_noise_alpha",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
}  # fmt: skip


def config_from_hf(hf_config: Mapping[str, Any], where: str) -> LlamaConfig:
    """Parse a config.json. CheckpointError: a key is missing, malformed or unsupported."""
    refuse_other_models(hf_config, where)

    def size(key: str, default: int | None = None) -> int:
        return whole_number(hf_config, key, MAX_SIZES[key], where, default)

    dim, n_heads = size("hidden_size"), size("num_attention_heads")
    if hf_config.get("head_dim") is None and dim % n_heads:
        what = f"hidden_size {dim} is not a multiple of num_attention_heads {n_heads}"
        raise CheckpointError(what, where, "correct one, or set head_dim")
    tied = hf_config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise CheckpointError(f"tie_word_embeddings is {as_json(tied)}", where, "write true or false")
    theta, scaling = rope_of(hf_config, where)
    try:
        return LlamaConfig(
            vocab_size=size("vocab_size"),
            dim=dim,
            n_layers=size("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=size("num_key_value_heads", n_heads),
            head_dim=size("head_dim", max(1, dim // n_heads)),
            ffn_dim=size("intermediate_size"),
            max_seq_len=size("max_position_embeddings", 2048),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=positive(hf_config, "rms_norm_eps", 1e-6, where, below=1.0),
            tie_embeddings=bool(tied),
        )
    except ValueError as error:
        raise CheckpointError(f"this is not a valid Llama: {error}", where, "copy the whole folder again") from None


def refuse_other_models(hf_config: Mapping[str, Any], where: str) -> None:
    """CheckpointError: another architecture, or a key with a value that is not implemented."""
    named = [] if hf_config.get("architectures") is None else hf_config["architectures"]
    if not isinstance(named, list):
        raise CheckpointError(f"architectures is {as_json(named)}", where, f'write ["{ARCHITECTURE}"]')
    kind = hf_config.get("model_type")
    if other := [name for name in named if name != ARCHITECTURE] or ([kind] if not named and kind != "llama" else []):
        raise CheckpointError(f"the architecture is {other[0]}, not {ARCHITECTURE}", where, f"only {ARCHITECTURE} is supported")
    if kind not in (None, "llama"):
        raise CheckpointError(f"model_type is {as_json(kind)} under the architecture {ARCHITECTURE}", where, "only 'llama' is supported")
    layers = hf_config.get("layer_types")
    plain = FIXED_KEYS | {"layer_types": ["full_attention"] * len(layers) if isinstance(layers, list) else None}
    for key, value in hf_config.items():
        if key in READ_KEYS or key in HARMLESS_KEYS or value is None or (key in plain and value == plain[key]):
            continue
        hint = "this key is unknown; remove it if it does not change what the model computes"
        if key in plain:
            hint = "use the model as it was before quantization" if key == "quantization_config" else "only the plain Llama is supported"
        raise CheckpointError(f"{key} is {as_json(value)}", where, hint)


def rope_of(hf_config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return (rope_theta, scaling); rope_scaling precedes rope_parameters, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf_config.get(key, {}), Mapping | None):
            raise CheckpointError(f"{key} is {as_json(hf_config[key])}", where, "write an object, or null")
    rope: Mapping[str, Any] = hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}
    theta = positive(rope, "rope_theta", positive(hf_config, "rope_theta", 10_000.0, where), where)
    if (other := (hf_config.get("rope_parameters") or {}).get("rope_theta", theta)) != theta:
        what = f"rope_parameters has rope_theta {as_json(other)}, and rope_scaling has {theta:g}"
        raise CheckpointError(what, where, "keep one of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        what = f"rotary positions are scaled by rope_type {as_json(kind)}"
        raise CheckpointError(what, where, "only 'llama3' and 'default' are supported")
    scaling_keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(scaling_keys if kind == "llama3" else ())}
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(f"partial_rotary_factor is {as_json(part)}", where, "only the plain Llama is supported")
    if unknown := sorted(key for key in rope.keys() - known if rope[key] is not None):
        raise CheckpointError(f"{unknown[0]} is {as_json(rope[unknown[0]])}, with rope_type {kind}", where, "unknown key: remove it")
    if kind == "default":
        return theta, None
    factor, low, high = (positive(rope, key, None, where) for key in scaling_keys[:3])
    if low >= high:
        raise CheckpointError(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}", where, "copy the whole folder again")
    return theta, RopeScaling(factor, low, high, whole_number(rope, scaling_keys[3], 1 << 31, where))


def whole_number(hf_config: Mapping[str, Any], key: str, most: int, where: str, default: int | None = None) -> int:
    """Return the integer from 1 to `most` under a key; `default` if absent or null."""
    return int(number(hf_config, key, default, where, int, lambda value: 1 <= value <= most, f"a whole number from 1 to {most:,}"))


def positive(hf_config: Mapping[str, Any], key: str, default: float | None, where: str, *, below: float = 1e30) -> float:
    """Return the number above 0 under a key; `default` if absent or null."""
    hint = f"a number above 0 and below {below:g}"
    return float(number(hf_config, key, default, where, int | float, lambda value: 0 < value < below, hint))


def number(
    hf_config: Mapping[str, Any], key: str, default: float | None, where: str, kind: Any, fits: Callable[[Any], bool], hint: str
) -> Any:
    value = default if hf_config.get(key) is None else hf_config[key]
    if value is None:
        raise CheckpointError(f"{key!r} is missing", where, "copy the whole folder again")
    if isinstance(value, kind) and not isinstance(value, bool) and fits(value):
        return value
    raise CheckpointError(f"{key} is {as_json(value)}", where, f"write {hint}")


def as_json(value: Any) -> str:
    """Return the value as JSON, at most 80 characters."""
    return json.dumps(value)[:80]


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return a config.json that transformers 4 and 5 both read."""
    scaling = config.rope_scaling
    rope_scaling = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def config_from_json(value: Mapping[str, Any]) -> LlamaConfig:
    """Inverse of `asdict`. TypeError, ValueError, CheckpointError: the value is invalid."""
    scaling = value.get("rope_scaling")
    config = LlamaConfig(**{**value, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    config_from_hf(config_to_hf(config), '"shape" in model.json')
    return config


# -- tensors in files -------------------------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    """The place of a tensor in a file."""

    path: Path
    spec: TensorSpec
    start: int  # byte offset in the file

    def renamed(self, name: str) -> TensorLocation:
        return self._replace(spec=self.spec._replace(name=name))


class MappedTensors(Mapping[str, Tensor]):
    """Tensors in safetensors files, each mapped on access and unmapped when released.

    The mapping is copy-on-write: a tensor may be changed, its file is not.
    """

    def __init__(self, locations: Mapping[str, TensorLocation]) -> None:
        self.locations = locations

    def __getitem__(self, name: str) -> Tensor:
        path, spec, start = self.locations[name]
        padding = start % mmap.ALLOCATIONGRANULARITY
        if spec.bytes == 0:
            return tensor_from_bytes(spec, memoryview(b""))
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), padding + spec.bytes, access=mmap.ACCESS_COPY, offset=start - padding)
        return tensor_from_bytes(spec, memoryview(mapped)[padding:])

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)


def tensor_locations(path: Path) -> dict[str, TensorLocation]:
    """Locate the tensors of a safetensors file by its header. CheckpointError: it is damaged."""
    again = "copy the file again"
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path.name} is not a regular file", str(path), again)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES):
                raise CheckpointError(f"{path.name} is truncated: {size} bytes, its header alone has {length}", str(path), again)
            specs, spans = read_header(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing", str(path.parent), "copy the whole folder again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has no valid safetensors header: {error}", str(path), again) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}", str(path), "check permissions and mounts") from error
    unknown = sorted({spec.dtype for spec in specs} - ITEM_BYTES.keys())
    odd = [spec.name for spec, (start, end) in zip(specs, spans, strict=True) if not unknown and end - start != spec.bytes]
    if unknown or odd:
        what = (
            f"unknown dtypes {join_names(unknown)}"
            if unknown
            else f"tensors whose byte count does not match their shape: {join_names(odd)}"
        )
        raise CheckpointError(f"{path.name} holds {what}", str(path), again)
    if size < (needed := 8 + length + max((end for _, end in spans), default=0)):
        raise CheckpointError(f"{path.name} is truncated: {size} bytes of {needed}", str(path), again)
    ordered = sorted(zip(spans, specs, strict=True))
    if apart := [spec.name for (span, spec), (before, _) in zip(ordered[1:], ordered, strict=False) if span[0] != before[1]]:
        raise CheckpointError(f"{path.name} holds tensors that overlap or leave a gap: {join_names(apart)}", str(path), again)
    if (ordered and ordered[0][0][0]) or size > needed:
        raise CheckpointError(f"{path.name} holds {size - 8 - length} bytes, its tensors cover fewer", str(path), again)
    return {spec.name: TensorLocation(path, spec, 8 + length + start) for spec, (start, _) in zip(specs, spans, strict=True)}


def read_header(text: bytes) -> tuple[list[TensorSpec], list[tuple[int, int]]]:
    """Return (tensors, byte ranges) of a header. ValueError, KeyError: a field is malformed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(entries := dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return entries

    def naturals(value: Any, name: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(type(number) is int and number >= 0 for number in value):
            return tuple(value)
        raise ValueError(f"{name} has {as_json(value)} instead of natural numbers")

    specs, spans = [], []
    for name, entry in json.loads(text, object_pairs_hook=unique).items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise ValueError("__metadata__ is not an object of strings")
            continue
        if not isinstance(entry["dtype"], str):
            raise ValueError(f"{name} has the dtype {as_json(entry['dtype'])}")
        start, end = naturals(entry["data_offsets"], name)
        specs.append(TensorSpec(name, entry["dtype"], naturals(entry["shape"], name)))
        spans.append((start, end))
    return specs, spans


def locations_in_folder(folder: Path) -> dict[str, TensorLocation]:
    """Locate every tensor of a Hugging Face folder, by its name there."""
    if not (folder / INDEX_FILE).exists():
        if not (folder / WEIGHTS_FILE).exists() and sorted(folder.glob("*.bin")):
            hint = "load it with transformers and save it again: save_pretrained writes safetensors"
            raise CheckpointError(f"there is no {WEIGHTS_FILE}, only pickled weights, which can run arbitrary code", str(folder), hint)
        return tensor_locations(folder / WEIGHTS_FILE)
    try:
        files = {str(name): str(file) for name, file in read_json(folder / INDEX_FILE)["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{INDEX_FILE} cannot be read: {error}", str(folder / INDEX_FILE), "copy the file again") from None
    if outside := sorted({file for file in files.values() if Path(file).name != file or file == ".."}):
        what = f"{INDEX_FILE} names files outside the folder: {join_names(outside)}"
        raise CheckpointError(what, str(folder / INDEX_FILE), "do not use this folder")
    present = {path.name for path in folder.iterdir()}
    missing = [file for file in sorted(set(files.values())) if file not in present]
    if missing:
        what = f"{len(missing)} of {len(set(files.values()))} shards are missing: {join_names(missing)}"
        raise CheckpointError(what, f"{folder / INDEX_FILE} names them", "copy the missing files into the folder")
    located = {file: tensor_locations(folder / file) for file in sorted(set(files.values()))}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in located[file]]:
        what = f"{INDEX_FILE} and the shards disagree: {len(lost)} tensors are not in the file it names"
        raise CheckpointError(what, f"{folder}: {join_names(lost)}", "copy the whole folder again")
    return {name: located[file][name] for name, file in files.items()}


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubFolder:
    """A checked Hugging Face folder."""

    folder: Path
    hf_config: dict[str, Any]
    config: LlamaConfig
    tensors: MappedTensors  # under the names of llama.py

    @property
    def companions(self) -> list[Path]:
        """Tokenizer files and the like."""
        return [self.folder / name for name in COMPANION_FILES if (self.folder / name).is_file()]


def is_hub(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def open_hub(folder: Path) -> HubFolder:
    """Open the Llama in a Hugging Face folder; checks names, shapes and lengths, reads no tensor.

    UsageError: there is no such folder. CheckpointError: it is damaged or not a supported Llama.
    """
    if not is_hub(folder):
        raise UsageError(f"there is no {CONFIG_FILE} in {folder}", "command line", "give the folder of a complete Hugging Face model")
    where = str(folder / CONFIG_FILE)
    try:
        if not isinstance(hf_config := read_json(folder / CONFIG_FILE), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_FILE} cannot be read: {error}", where, "copy the file again") from None
    config = config_from_hf(hf_config, where)
    return HubFolder(folder, hf_config, config, match_tensors(locations_in_folder(folder), config, folder))


def match_tensors(located: Mapping[str, TensorLocation], config: LlamaConfig, folder: Path) -> MappedTensors:
    """Return the tensors under the names of llama.py. CheckpointError: they do not fit `config`."""
    shapes = parameter_shapes(config)
    names = {name: hf_name(name) for name in shapes}
    problems = []
    if missing := [name for name in names.values() if name not in located]:
        problems.append(f"missing: {join_names(missing)}")
    if wrong := [name for name, other in names.items() if other in located and located[other].spec.shape != shapes[name]]:
        lines = [f"{names[name]} is {located[names[name]].spec.shape}, {CONFIG_FILE} makes it {shapes[name]}" for name in wrong]
        problems.append(f"of another shape: {join_names(lines)}")
    # Older files hold the rotary frequencies, which follow from the config.
    others = [name for name in sorted(located.keys() - set(names.values())) if not name.endswith("rotary_emb.inv_freq")]
    spare = hf_name("output.weight")
    if config.tie_embeddings and spare in others and not problems:
        others.remove(spare)
        tensors = MappedTensors(located)
        if not torch.equal(tensors[spare], tensors[hf_name("embedding.weight")]):
            problems.append(f"{CONFIG_FILE} ties the output to the embedding, but {spare} differs from it")
    if others:
        problems.append(f"unexpected: {join_names(others)}")
    dtypes = sorted({located[name].spec.dtype for name in names.values() if name in located})
    if not problems and (len(dtypes) > 1 or not TORCH_DTYPES[dtypes[0]].is_floating_point):
        problems.append(f"dtypes {', '.join(dtypes)}, expected one floating-point dtype")
    if problems:
        hint = "copy the whole folder again, or correct its config.json"
        raise CheckpointError(f"the tensors are not those of {CONFIG_FILE}", "\n".join([str(folder), *problems]), hint)
    return MappedTensors({name: located[other].renamed(name) for name, other in names.items()})


# -- writing ----------------------------------------------------------------------------------------------------------


def write_hub(
    folder: Path,
    config: LlamaConfig,
    tensors: Mapping[str, Tensor],
    *,
    hf_config: Mapping[str, Any] | None = None,
    companions: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a Hugging Face folder atomically; return the names of its tensor files.

    tensors      under the names of llama.py; accessed one at a time
    hf_config    the config.json that the model came with; kept as is if it still describes `config`
    companions   files to copy into the folder
    shard_bytes  most tensor bytes per file; a larger tensor has a file to itself
    UsageError: the folder exists and is not empty. CheckpointError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists and is not empty", "--out", "name a new folder, or an empty one")
    own_names = {hf_name(name): name for name in tensors}
    specs = [TensorSpec(other, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for other, name in own_names.items()]
    needed_bytes = sum(spec.bytes + 256 for spec in specs)
    partial = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with commit.explain_write_errors(f"{folder} was not written", partial.parent, needed_bytes):
        partial.mkdir()
        try:
            parts = safetensors_io.split_into_files(specs, shard_bytes)
            files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
            files = files if len(files) > 1 else [WEIGHTS_FILE]
            for file, part in zip(files, parts, strict=True):
                write_chunks(
                    partial / file, safetensors_io.file_chunks(part, lambda name: bytes_of(tensors[own_names[name]]), {"format": "pt"})
                )
            if len(parts) > 1:
                where = {spec.name: file for file, part in zip(files, parts, strict=True) for spec in part}
                total = {"total_size": sum(spec.bytes for spec in specs)}
                write_json(partial / INDEX_FILE, {"metadata": total, "weight_map": dict(sorted(where.items()))})
            for path in companions:
                write_chunks(partial / path.name, [path.read_bytes()])
            write_json(partial / CONFIG_FILE, config_to_write(config, hf_config, specs[0].dtype))
            fsync_folder(partial)
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_folder(folder.absolute().parent)
    return files


def config_to_write(config: LlamaConfig, hf_config: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    """Return the old config.json if it describes `config`, else a new one; with `dtype`."""
    old = dict(hf_config or {})
    unchanged = bool(old) and config_from_hf(old, "the config that came with the model") == config
    base = old if unchanged else config_to_hf(config) | {key: value for key, value in old.items() if key in HARMLESS_KEYS}
    torch_dtype = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    return base | dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in base] or ["torch_dtype"], torch_dtype)


def write_chunks(path: Path, chunks: Iterator[bytes | memoryview] | list[bytes]) -> None:
    """Write a new file and fsync it."""
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
