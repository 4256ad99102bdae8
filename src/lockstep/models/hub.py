"""Hugging Face folders of Llama models, read and written.

    config.json                       configuration; tokenizer files are beside it
    model.safetensors                 all tensors, or
    model-00001-of-00004.safetensors  some of them, and model.safetensors.index.json: tensor -> file

A model may be larger than memory: one tensor at a time is mapped, used and released. Nothing is
unpickled, cast or permuted, so a round trip keeps all bits.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.safetensors_io import ITEM_BYTES, TensorSpec
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, write_atomic, write_json
from lockstep.models.hf_config import HARMLESS_KEYS, as_json, config_from_hf, config_to_hf, hf_name, parameter_shapes
from lockstep.models.lazy_tensors import LazyTensors
from lockstep.models.llama import LlamaConfig
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of
from lockstep.units import join_names

CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE = "config.json", "model.safetensors.index.json", "model.safetensors"
COMPANION_FILES = (  # files of a model besides config.json and its tensors; copied unchanged
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 100 * 10**6  # the limit of the safetensors library

# -- tensors in files -------------------------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    path: Path
    spec: TensorSpec
    start: int  # byte offset in the file

    def map(self) -> Tensor:
        """Map the tensor into memory until it is released; changing it does not change the file."""
        padding = self.start % mmap.ALLOCATIONGRANULARITY
        if self.spec.bytes == 0:
            return tensor_from_bytes(self.spec, memoryview(b""))
        with open(self.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), padding + self.spec.bytes, access=mmap.ACCESS_COPY, offset=self.start - padding)
        return tensor_from_bytes(self.spec, memoryview(mapped)[padding:])


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
    if unknown := sorted({spec.dtype for spec in specs} - ITEM_BYTES.keys()):
        raise CheckpointError(f"{path.name} holds unknown dtypes {join_names(unknown)}", str(path), again)
    if odd := [spec.name for spec, (start, end) in zip(specs, spans, strict=True) if end - start != spec.bytes]:
        what = f"{path.name} holds tensors whose byte count does not match their shape: {join_names(odd)}"
        raise CheckpointError(what, str(path), again)
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
    shards = sorted(set(files.values()))
    if missing := [file for file in shards if file not in present]:
        what = f"{len(missing)} of {len(shards)} shards are missing: {join_names(missing)}"
        raise CheckpointError(what, f"{folder / INDEX_FILE} names them", "copy the missing files into the folder")
    located = {file: tensor_locations(folder / file) for file in shards}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in located[file]]:
        what = f"{INDEX_FILE} and the shards disagree: {len(lost)} tensors are not in the file it names"
        raise CheckpointError(what, f"{folder}: {join_names(lost)}", "copy the whole folder again")
    return {name: located[file][name] for name, file in files.items()}


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HubFolder:
    folder: Path
    hf_config: dict[str, Any]
    config: LlamaConfig
    tensors: LazyTensors  # under the names of llama.py

    @property
    def companions(self) -> list[Path]:
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


def match_tensors(located: Mapping[str, TensorLocation], config: LlamaConfig, folder: Path) -> LazyTensors:
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
        if not torch.equal(located[spare].map(), located[hf_name("embedding.weight")].map()):
            problems.append(f"{CONFIG_FILE} ties the output to the embedding, but {spare} differs from it")
    if others:
        problems.append(f"unexpected: {join_names(others)}")
    dtypes = sorted({located[name].spec.dtype for name in names.values() if name in located})
    if not problems and (len(dtypes) > 1 or not TORCH_DTYPES[dtypes[0]].is_floating_point):
        problems.append(f"dtypes {', '.join(dtypes)}, expected one floating-point dtype")
    if problems:
        hint = "copy the whole folder again, or correct its config.json"
        raise CheckpointError(f"the tensors are not those of {CONFIG_FILE}", "\n".join([str(folder), *problems]), hint)
    return LazyTensors(names, lambda name: located[names[name]].map())


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
    hf_config    the model's earlier config.json; kept as is if it still describes `config`
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
                chunks = safetensors_io.file_chunks(part, lambda name: bytes_of(tensors[own_names[name]]), {"format": "pt"})
                write_atomic(partial / file, chunks)
            if len(parts) > 1:
                where = {spec.name: file for file, part in zip(files, parts, strict=True) for spec in part}
                total = {"total_size": sum(spec.bytes for spec in specs)}
                write_json(partial / INDEX_FILE, {"metadata": total, "weight_map": dict(sorted(where.items()))})
            for path in companions:
                write_atomic(partial / path.name, path.read_bytes())
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
