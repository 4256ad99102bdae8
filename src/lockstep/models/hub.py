"""Hugging Face folders of Llama models, read and written: config.json, names of tensors, safetensors in one file or in shards.

    config.json                       the shape; generation_config.json and the tokenizer's files beside it
    model.safetensors                 all tensors, or
    model-00001-of-00004.safetensors  some of them, and model.safetensors.index.json, which says where each one is

A model may be larger than the memory: files are checked by their headers, then one tensor at a time is mapped, used and
let go. Nothing is unpickled, nothing is cast or permuted, so what goes in and out again has the same bits.
Formats: https://huggingface.co/docs/safetensors (format), transformers' `LlamaConfig`.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import commit
from lockstep.checkpoint import safetensors_io as tensorfile
from lockstep.checkpoint.safetensors_io import ITEM_BYTES, Spec
from lockstep.checkpoint.state_dict import tensor_of
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, write_json
from lockstep.models.llama import Llama, Scaling, Shape
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of
from lockstep.units import shown

ARCHITECTURE = "LlamaForCausalLM"
CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"
CARRIED = (  # what belongs to a model besides its shape and its tensors; copied as it is
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 100 * 10**6  # the safetensors library accepts no longer one either

# -- names ------------------------------------------------------------------------------------------------------------

OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
INSIDE = {
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


def hub_name(name: str) -> str:
    """layers.3.attention.query.weight -> model.layers.3.self_attn.q_proj.weight"""
    if not name.startswith("layers."):
        return OUTSIDE[name.removesuffix(".weight")] + ".weight"
    _, number, inside = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{number}.{INSIDE[inside]}.weight"


def sizes_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Our name of each parameter -> its size, in the model's order. Nothing is allocated; one layer is built for all of them."""
    with torch.device("meta"):
        one = {name: tuple(parameter.shape) for name, parameter in Llama(replace(shape, layers=1)).named_parameters()}
    inside = {name.removeprefix("layers.0."): size for name, size in one.items() if name.startswith("layers.0.")}
    layers = {f"layers.{number}.{name}": size for number in range(shape.layers) for name, size in inside.items()}
    before = [name for name in one if name == "embedding.weight"]
    after = [name for name in one if name not in before and name not in layers]
    return {name: one[name] for name in before} | layers | {name: one[name] for name in after}


# -- the shape --------------------------------------------------------------------------------------------------------

SIZES = {  # keys of config.json that size the model -> the largest value that is believed
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 31,
}
READ = {*SIZES, "architectures", "model_type", "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps", "tie_word_embeddings"}
PLAIN: dict[str, Any] = {  # keys that change the model unless they have this value or null
    "quantization_config": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "attention_dropout": 0,
    "partial_rotary_factor": 1, "rope_interleaved": False, "sliding_window": None, "use_sliding_window": False, "is_encoder_decoder": False,
    "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {}, "auto_map": {},
    "activation": "swiglu", "is_llama_config": True, "use_mrope": False,
}  # fmt: skip
HARMLESS = {  # keys that change no logit: names, token ids, transformers' own defaults for training and sampling
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


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json describes. CheckpointError names the key that is missing, malformed, or not of a plain Llama."""
    refuse_other_models(config, where)

    def size(key: str, default: int | None = None) -> int:
        return whole_number(config, key, SIZES[key], where, default)

    width, heads = size("hidden_size"), size("num_attention_heads")
    if config.get("head_dim") is None and width % heads:
        what = f"hidden_size {width} is not a multiple of num_attention_heads {heads}"
        raise CheckpointError(what, where, "correct one, or set head_dim")
    tied = config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise CheckpointError(f"tie_word_embeddings is {spell(tied)}", where, "write true or false")
    base, scaling = rope_of(config, where)
    try:
        return Shape(
            vocabulary=size("vocab_size"),
            width=width,
            layers=size("num_hidden_layers"),
            heads=heads,
            key_value_heads=size("num_key_value_heads", heads),
            head_width=size("head_dim", max(1, width // heads)),
            feed_forward=size("intermediate_size"),
            context=size("max_position_embeddings", 2048),
            rope_base=base,
            rope_scaling=scaling,
            norm_epsilon=positive(config, "rms_norm_eps", 1e-6, where, below=1.0),
            tied=bool(tied),
        )
    except ValueError as error:
        raise CheckpointError(f"this is not the shape of a model: {error}", where, "copy the whole folder again") from None


def refuse_other_models(config: Mapping[str, Any], where: str) -> None:
    """CheckpointError for another architecture, and for a key whose value changes the model in a way that is not implemented."""
    named = [] if config.get("architectures") is None else config["architectures"]
    if not isinstance(named, list):
        raise CheckpointError(f"architectures is {spell(named)}", where, f'write ["{ARCHITECTURE}"]')
    kind = config.get("model_type")
    if other := [name for name in named if name != ARCHITECTURE] or ([kind] if not named and kind != "llama" else []):
        raise CheckpointError(f"the architecture is {other[0]}, not {ARCHITECTURE}", where, f"only {ARCHITECTURE} is read so far")
    if kind not in (None, "llama"):
        raise CheckpointError(f"model_type is {spell(kind)} under the architecture {ARCHITECTURE}", where, "only 'llama' is read so far")
    layers = config.get("layer_types")
    plain = PLAIN | {"layer_types": ["full_attention"] * len(layers) if isinstance(layers, list) else None}
    for key, value in config.items():
        if key in READ or key in HARMLESS or value is None or (key in plain and value == plain[key]):
            continue
        hint = "this key is not known; remove it if it does not change what the model computes"
        if key in plain:
            hint = "use the model as it was before quantization" if key == "quantization_config" else "only the plain Llama is read so far"
        raise CheckpointError(f"{key} is {spell(value)}", where, hint)


def rope_of(config: Mapping[str, Any], where: str) -> tuple[float, Scaling | None]:
    """(the base of rotary positions, how they are stretched). As in transformers 4 and 5, rope_scaling goes before rope_parameters."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), Mapping | None):
            raise CheckpointError(f"{key} is {spell(config[key])}", where, "write an object, or null")
    rope: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = positive(rope, "rope_theta", positive(config, "rope_theta", 10_000.0, where), where)
    if (other := (config.get("rope_parameters") or {}).get("rope_theta", base)) != base:
        what = f"rope_parameters has rope_theta {spell(other)}, beside rope_scaling with {base:g}"
        raise CheckpointError(what, where, "keep one of them")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        what = f"rotary positions are scaled by rope_type {spell(kind)}"
        raise CheckpointError(what, where, "only 'llama3' and 'default' are read so far")
    stretch = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *(stretch if kind == "llama3" else ())}
    if (part := rope.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(f"partial_rotary_factor is {spell(part)}", where, "only the plain Llama is read so far")
    if unknown := sorted(key for key in rope.keys() - known if rope[key] is not None):
        raise CheckpointError(f"{unknown[0]} is {spell(rope[unknown[0]])}, with rope_type {kind}", where, "it is not known; remove it")
    if kind == "default":
        return base, None
    factor, low, high = (positive(rope, key, None, where) for key in stretch[:3])
    if low >= high:
        raise CheckpointError(f"low_freq_factor {low:g} is not below high_freq_factor {high:g}", where, "copy the whole folder again")
    return base, Scaling(factor, low, high, whole_number(rope, stretch[3], 1 << 31, where))


def whole_number(config: Mapping[str, Any], key: str, most: int, where: str, default: int | None = None) -> int:
    """The integer from 1 to `most` under a key; the default, unless that is None, when it is absent or null."""
    return int(number(config, key, default, where, int, lambda value: 1 <= value <= most, f"a whole number from 1 to {most:,}"))


def positive(config: Mapping[str, Any], key: str, default: float | None, where: str, *, below: float = 1e30) -> float:
    """The number above 0 under a key; the default, unless that is None, when it is absent or null."""
    hint = f"a number above 0 and below {below:g}"
    return float(number(config, key, default, where, int | float, lambda value: 0 < value < below, hint))


def number(
    config: Mapping[str, Any], key: str, default: float | None, where: str, kind: Any, fits: Callable[[Any], bool], hint: str
) -> Any:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise CheckpointError(f"{key!r} is missing", where, "copy the whole folder again")
    if isinstance(value, kind) and not isinstance(value, bool) and fits(value):
        return value
    raise CheckpointError(f"{key} is {spell(value)}", where, f"write {hint}")


def spell(value: Any) -> str:
    """The value as JSON, cut to 80 characters."""
    return json.dumps(value)[:80]


def config_of(shape: Shape) -> dict[str, Any]:
    """A config.json of the shape, in the words that transformers 4 and 5 both read."""
    scaling = shape.rope_scaling
    stretched = scaling and {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original_context,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.feed_forward,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rope_scaling": stretched,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
    }


def shape_to_json(shape: Shape) -> dict[str, Any]:
    return asdict(shape)


def shape_from_json(value: Mapping[str, Any]) -> Shape:
    """The inverse of `shape_to_json`. TypeError, ValueError, CheckpointError when it is none."""
    scaling = value.get("rope_scaling")
    shape = Shape(**{**value, "rope_scaling": None if scaling is None else Scaling(**scaling)})
    shape_of(config_of(shape), "the shape in model.json")
    return shape


# -- tensors in files -------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a tensor lies."""

    path: Path
    spec: Spec
    start: int  # byte of the file


class Tensors(Mapping[str, Tensor]):
    """Tensors that stay in their files: each is mapped when it is asked for, and unmapped when it is let go.

    A tensor may be changed; its file is not. Memory: that of the tensors in use.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places

    def __getitem__(self, name: str) -> Tensor:
        path, spec, start = self.places[name]
        before = start % mmap.ALLOCATIONGRANULARITY
        if spec.bytes == 0:
            return tensor_of(spec, memoryview(b""))
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), before + spec.bytes, access=mmap.ACCESS_COPY, offset=start - before)
        return tensor_of(spec, memoryview(mapped)[before:])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def places_in(path: Path) -> dict[str, Place]:
    """The tensors of a safetensors file by name, from its header alone. CheckpointError when it is not a whole one."""
    again = "copy the file again"
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path.name} is not a regular file", str(path), again)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES):
                raise CheckpointError(f"{path.name} is cut off: {size} bytes, its header alone has {length}", str(path), again)
            specs, spans = read_header(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing", str(path.parent), "copy the whole folder again") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name} has no header of safetensors: {error}", str(path), again) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}", str(path), "check permissions and mounts") from error
    unknown = sorted({spec.dtype for spec in specs} - ITEM_BYTES.keys())
    odd = [spec.name for spec, (start, end) in zip(specs, spans, strict=True) if not unknown and end - start != spec.bytes]
    if unknown or odd:
        what = f"numbers of the kind {shown(unknown)}" if unknown else f"another number of bytes than its shape has: {shown(odd)}"
        raise CheckpointError(f"{path.name} holds {what}", str(path), again)
    if size < (needed := 8 + length + max((end for _, end in spans), default=0)):
        raise CheckpointError(f"{path.name} is cut off: {size} bytes of {needed}", str(path), again)
    ordered = sorted(zip(spans, specs, strict=True))
    if apart := [spec.name for (span, spec), (before, _) in zip(ordered[1:], ordered, strict=False) if span[0] != before[1]]:
        raise CheckpointError(f"{path.name} holds tensors that overlap or leave a gap: {shown(apart)}", str(path), again)
    if (ordered and ordered[0][0][0]) or size > needed:
        raise CheckpointError(f"{path.name} holds {size - 8 - length} bytes beside what its tensors have", str(path), again)
    return {spec.name: Place(path, spec, 8 + length + start) for spec, (start, _) in zip(specs, spans, strict=True)}


def read_header(text: bytes) -> tuple[list[Spec], list[tuple[int, int]]]:
    """(the tensors in a safetensors header, from which byte to which each lies). ValueError, KeyError when a field is malformed."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("it has a name twice")
        return found

    def naturals(value: Any, name: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(type(number) is int and number >= 0 for number in value):
            return tuple(value)
        raise ValueError(f"{name} has {spell(value)} where natural numbers belong")

    specs, spans = [], []
    for name, entry in json.loads(text, object_pairs_hook=unique).items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                raise ValueError("__metadata__ is no object of strings")
            continue
        if not isinstance(entry["dtype"], str):
            raise ValueError(f"{name} has the dtype {spell(entry['dtype'])}")
        start, end = naturals(entry["data_offsets"], name)
        specs.append(Spec(name, entry["dtype"], naturals(entry["shape"], name)))
        spans.append((start, end))
    return specs, spans


def places_of(folder: Path) -> dict[str, Place]:
    """Every tensor of a Hugging Face folder, by its name there."""
    if not (folder / INDEX).exists():
        if not (folder / WHOLE).exists() and sorted(folder.glob("*.bin")):
            hint = "load it with transformers and save it again: save_pretrained writes safetensors"
            raise CheckpointError(f"there is no {WHOLE}, only pickled weights, which may run any code", str(folder), hint)
        return places_in(folder / WHOLE)
    try:
        files = {str(name): str(file) for name, file in read_json(folder / INDEX)["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{INDEX} cannot be read: {error}", str(folder / INDEX), "copy the file again") from None
    if outside := sorted({file for file in files.values() if Path(file).name != file or file == ".."}):
        raise CheckpointError(f"{INDEX} names files outside the folder: {shown(outside)}", str(folder / INDEX), "do not use this folder")
    there = {path.name for path in folder.iterdir()}
    missing = [file for file in sorted(set(files.values())) if file not in there]
    if missing:
        what = f"{len(missing)} of {len(set(files.values()))} shards are missing: {shown(missing)}"
        raise CheckpointError(what, f"{folder / INDEX} names them", "copy the missing files into the folder")
    held = {file: places_in(folder / file) for file in sorted(set(files.values()))}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in held[file]]:
        what = f"{INDEX} and the shards do not fit together: {len(lost)} tensors are not where it says"
        raise CheckpointError(what, f"{folder}: {shown(lost)}", "copy the whole folder again")
    return {name: held[file][name] for name, file in files.items()}


# -- a folder in ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hub:
    """A Hugging Face folder whose parts were found to fit together."""

    folder: Path
    config: dict[str, Any]
    shape: Shape
    tensors: Tensors  # by our names

    @property
    def carried(self) -> list[Path]:
        """The files of the tokenizer, and the like."""
        return [self.folder / name for name in CARRIED if (self.folder / name).is_file()]


def is_hub(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def open_hub(folder: Path) -> Hub:
    """The Llama in a Hugging Face folder, checked by names, shapes and lengths; no tensor is read.

    UsageError: there is no such folder. CheckpointError: what is in it is no whole Llama.
    """
    if not is_hub(folder):
        raise UsageError(f"there is no {CONFIG} in {folder}", "command line", "give the folder of a Hugging Face model, downloaded whole")
    where = str(folder / CONFIG)
    try:
        if not isinstance(config := read_json(folder / CONFIG), dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {error}", where, "copy the file again") from None
    shape = shape_of(config, where)
    return Hub(folder, config, shape, matched(places_of(folder), shape, folder))


def matched(there: Mapping[str, Place], shape: Shape, folder: Path) -> Tensors:
    """The tensors of `folder` under our names. CheckpointError names what is missing, unexpected or of another shape or type."""
    sizes = sizes_of(shape)
    names = {name: hub_name(name) for name in sizes}
    problems = []
    if missing := [name for name in names.values() if name not in there]:
        problems.append(f"missing: {shown(missing)}")
    if wrong := [name for name, other in names.items() if other in there and there[other].spec.shape != sizes[name]]:
        lines = [f"{names[name]} is {there[names[name]].spec.shape}, {CONFIG} makes it {sizes[name]}" for name in wrong]
        problems.append(f"of another shape: {shown(lines)}")
    # Older files hold the frequencies of rotary positions, which follow from the shape.
    others = [name for name in sorted(there.keys() - set(names.values())) if not name.endswith("rotary_emb.inv_freq")]
    spare = hub_name("output.weight")
    if shape.tied and spare in others and not problems:
        others.remove(spare)
        both = Tensors(there)
        if not torch.equal(both[spare], both[hub_name("embedding.weight")]):
            problems.append(f"{CONFIG} ties the output to the embedding, but {spare} differs from it")
    if others:
        problems.append(f"unexpected: {shown(others)}")
    kinds = sorted({there[name].spec.dtype for name in names.values() if name in there})
    if not problems and (len(kinds) > 1 or not TORCH_DTYPES[kinds[0]].is_floating_point):
        problems.append(f"numbers of the kinds {', '.join(kinds)}, where one kind of floating-point numbers is expected")
    if problems:
        hint = "copy the whole folder again, or correct its config.json"
        raise CheckpointError(f"the tensors do not make the model of {CONFIG}", "\n".join([str(folder), *problems]), hint)
    return Tensors({name: there[other]._replace(spec=there[other].spec._replace(name=name)) for name, other in names.items()})


# -- a folder out -----------------------------------------------------------------------------------------------------


def write_hub(
    folder: Path,
    shape: Shape,
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    carried: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Make `folder` a Hugging Face folder, whole or not at all; the names of its tensor files.

    tensors      by our names; one at a time is asked for
    config       the config.json that the model came with: kept word for word if it still says the shape
    shard_bytes  most tensor bytes in one file; a larger tensor has a file to itself
    UsageError: the folder is there and not empty. CheckpointError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already", "--out", "name a new folder, or an empty one")
    ours = {hub_name(name): name for name in tensors}
    specs = [Spec(other, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for other, name in ours.items()]
    needed_bytes = sum(spec.bytes + 256 for spec in specs)
    beside = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with commit.writing(f"{folder} was not written", beside.parent, needed_bytes):
        beside.mkdir()
        try:
            parts = tensorfile.split(specs, shard_bytes)
            files = [WHOLE] if len(parts) == 1 else [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
            for file, part in zip(files, parts, strict=True):
                write_chunks(beside / file, tensorfile.chunks(part, lambda name: bytes_of(tensors[ours[name]]), {"format": "pt"}))
            if len(parts) > 1:
                where = {spec.name: file for file, part in zip(files, parts, strict=True) for spec in part}
                total = {"total_size": sum(spec.bytes for spec in specs)}
                write_json(beside / INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
            for path in carried:
                write_chunks(beside / path.name, [path.read_bytes()])
            write_json(beside / CONFIG, config_to_write(shape, config, specs[0].dtype))
            fsync_folder(beside)
            os.rename(beside, folder)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        fsync_folder(folder.absolute().parent)
    return files


def config_to_write(shape: Shape, config: Mapping[str, Any] | None, dtype: str) -> dict[str, Any]:
    """The model's old config.json if it says this shape, else a new one with its harmless keys; with the type of its numbers."""
    old = dict(config or {})
    kept = bool(old) and shape_of(old, "the config that came with the model") == shape
    base = old if kept else config_of(shape) | {key: value for key, value in old.items() if key in HARMLESS}
    spelled = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    return base | dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in base] or ["torch_dtype"], spelled)


def write_chunks(path: Path, chunks: Iterator[bytes | memoryview] | list[bytes]) -> None:
    """One new file, flushed to the disk."""
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
