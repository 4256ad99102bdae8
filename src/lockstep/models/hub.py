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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import commit, tensorfile
from lockstep.checkpoint.state import DTYPES, TORCH_DTYPES, bytes_of, shown, tensor_of
from lockstep.checkpoint.tensorfile import ITEM_BYTES, Spec
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, write_json
from lockstep.models.llama import Llama, Scaling, Shape

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
    """Our name of each parameter -> its size. Nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Llama(shape).named_parameters()}


# -- the shape --------------------------------------------------------------------------------------------------------


def shape_of(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json describes. CheckpointError when it describes something else than a Llama."""
    named = [*(config.get("architectures") or []), config.get("model_type")]
    if named[0] not in (ARCHITECTURE, "llama"):
        raise CheckpointError(f"the architecture is {named[0]}, not {ARCHITECTURE}", where, f"only {ARCHITECTURE} is read so far")
    refused = {"quantization_config": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    for key, plain in refused.items():
        if config.get(key, plain) != plain:
            hint = "use the model as it was before quantization" if key == "quantization_config" else "only the plain Llama is read so far"
            raise CheckpointError(f"{key} is {json.dumps(config[key])[:80]}", where, hint)
    try:
        width, heads = config["hidden_size"], config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return Shape(
            vocabulary=config["vocab_size"],
            width=width,
            layers=config["num_hidden_layers"],
            heads=heads,
            key_value_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or width // heads,
            feed_forward=config["intermediate_size"],
            context=config.get("max_position_embeddings", 2048),
            rope_base=float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
            rope_scaling=scaling_of(rope or config.get("rope_scaling") or {}, where),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise CheckpointError(f"{error} is missing", where, "copy the whole folder again") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"this is not the shape of a model: {error}", where, "copy the whole folder again") from None


def scaling_of(rope: Mapping[str, Any], where: str) -> Scaling | None:
    """How rotary positions are stretched; KeyError when a number is missing."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"rotary positions are scaled by {kind!r}", where, "only 'llama3' and 'default' are read so far")
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return Scaling(factor, low, high, int(rope["original_max_position_embeddings"]))


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
    """The inverse of `shape_to_json`. TypeError, ValueError when it is none."""
    scaling = value.get("rope_scaling")
    return Shape(**{**value, "rope_scaling": Scaling(**scaling) if scaling else None})


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
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_BYTES):
                raise CheckpointError(f"{path.name} is cut off: {size} bytes, its header alone has {length}", str(path), again)
            header = json.loads(file.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        specs = [Spec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries]
        spans = [tuple(entry["data_offsets"]) for _, entry in entries]
        unknown = sorted({spec.dtype for spec in specs} - ITEM_BYTES.keys())
        odd = [spec.name for spec, (start, end) in zip(specs, spans, strict=True) if not unknown and end - start != spec.bytes]
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing", str(path.parent), "copy the whole folder again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} has no header of safetensors: {error}", str(path), again) from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}", str(path), "check permissions and mounts") from error
    if unknown or odd:
        what = f"numbers of the kind {shown(unknown)}" if unknown else f"another number of bytes than its shape has: {shown(odd)}"
        raise CheckpointError(f"{path.name} holds {what}", str(path), again)
    if size < (needed := 8 + length + max((end for _, end in spans), default=0)):
        raise CheckpointError(f"{path.name} is cut off: {size} bytes of {needed}", str(path), again)
    return {spec.name: Place(path, spec, 8 + length + start) for spec, (start, _) in zip(specs, spans, strict=True)}


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
    if outside := sorted({file for file in files.values() if Path(file).name != file}):
        raise CheckpointError(f"{INDEX} names files outside the folder: {shown(outside)}", str(folder / INDEX), "do not use this folder")
    missing = [file for file in sorted(set(files.values())) if not (folder / file).exists()]
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
        config = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG} cannot be read: {error}", where, "copy the file again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{CONFIG} holds no object", where, "copy the file again")
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
    """The model's old config.json if it says this shape, else a new one; with the type of its numbers."""
    kept = config is not None and shape_of(config, "the config that came with the model") == shape
    base = dict(config) if kept and config is not None else config_of(shape)
    spelled = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    return base | {"dtype" if "dtype" in base else "torch_dtype": spelled}


def write_chunks(path: Path, chunks: Iterator[bytes | memoryview] | list[bytes]) -> None:
    """One new file, flushed to the disk."""
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
