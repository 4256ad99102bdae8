"""Hugging Face folders of Llama models, read and written.

    config.json                       configuration; tokenizer files are beside it
    model.safetensors                 all tensors, or
    model-00001-of-00004.safetensors  some of them, and model.safetensors.index.json: tensor -> file

A model may be larger than memory: one tensor at a time is mapped, used and released. Nothing is
unpickled, cast or permuted, so a round trip keeps all bits.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.json_tree import spec_of
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.state_dict import digest
from lockstep.config.adapter_config import ADAPTER_CONFIG
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, scheme_of, write_atomic, write_json
from lockstep.log import log
from lockstep.models.llama import Llama
from lockstep.models.llama_config import (
    LlamaConfig,
    config_from_hf,
    hf_name,
    new_config,
    packed_matrices,
)
from lockstep.models.transformers_model import ModelConfig, TransformersConfig
from lockstep.runtime.tensor_bytes import TORCH_DTYPES, bytes_of
from lockstep.units import join_names

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
COMPANION_FILES = (  # files of a model besides config.json and its tensors; copied unchanged
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip
TEXT_PARTS = ("language_model.", "text_model.")  # of multimodal models
SHARD_BYTES = 5 * 10**9
COPY_FILE = "copy the file again"
COPY_FOLDER = "copy the whole folder again"

# -- tensors in files ------------------------------------------------------------------------------


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of these names, in order; `compute(name)` returns one: memory holds one at a
    time."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self.names = dict.fromkeys(names)
        self.compute = compute

    def __getitem__(self, name: str) -> Tensor:
        return self.compute(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class TensorLocation(NamedTuple):
    path: Path
    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    rows: slice | None = None  # of a part of a packed tensor

    def map(self) -> Tensor:
        """Map the tensor into memory until it is released; changing it does not change the file."""
        with safe_open(self.path, framework="pt") as file:
            if self.rows:
                return file.get_slice(self.name)[self.rows]
            return file.get_tensor(self.name)


def tensor_locations(path: Path) -> dict[str, TensorLocation]:
    """Locate the tensors of a safetensors file by its header. CheckpointError: it is damaged."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is not a regular file", str(path), COPY_FILE)
    try:
        with safe_open(path, framework="pt") as file:
            # `file` is no dict.
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorLocation(path, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in headers.items()
            }
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing", str(path.parent), COPY_FOLDER) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name} is truncated or has no valid safetensors header: {error}",
            f"{path}, {path.stat().st_size} bytes",
            COPY_FILE,
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", str(path), "check permissions and mounts"
        ) from error


def locations_in_folder(folder: Path) -> dict[str, TensorLocation]:
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / WEIGHTS_FILE).exists() and sorted(folder.glob("*.bin")):
            raise CheckpointError(
                f"there is no {WEIGHTS_FILE}, only pickled weights, which can run arbitrary code",
                str(folder),
                "load it with transformers and save it again: save_pretrained writes safetensors",
            )
        return tensor_locations(folder / WEIGHTS_FILE)
    try:
        files = {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{INDEX_FILE} cannot be read: {error}", str(index), COPY_FILE
        ) from None
    shards = sorted(set(files.values()))
    if outside := [file for file in shards if Path(file).name != file or file == ".."]:
        raise CheckpointError(
            f"{INDEX_FILE} names files outside the folder: {join_names(outside)}",
            str(index),
            "do not use this folder",
        )
    if missing := [file for file in shards if not (folder / file).exists()]:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards are missing: {join_names(missing)}",
            f"{index} names them",
            "copy the missing files into the folder",
        )
    located = {file: tensor_locations(folder / file) for file in shards}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in located[file]]:
        raise CheckpointError(
            f"{INDEX_FILE} and the shards disagree: "
            f"{len(lost)} tensors are not in the file it names",
            f"{folder}: {join_names(lost)}",
            COPY_FOLDER,
        )
    return {name: located[file][name] for name, file in files.items()}


# -- reading ---------------------------------------------------------------------------------------


def release_nothing() -> None:
    """Mapped tensors are released as soon as they are not used."""


@dataclass(frozen=True)
class LlamaWeights:
    """The model in a folder.

    tensors     under the names of llama.py or transformers_model.py; each is read on access
    companions  tokenizer files and the like
    dtype       of the published weights, as torch spells it
    release     frees the memory of converted tensors, until the next access
    """

    folder: Path
    config: ModelConfig
    hf_config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    companions: list[Path]
    dtype: str
    release: Callable[[], None]

    def sha256(self) -> str:
        return digest(self.tensors)


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def is_hub(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def open_hub(folder: Path, backend: str = "lockstep") -> LlamaWeights:
    """Open the model in a Hugging Face folder; checks names, shapes and lengths, reads no tensor.

    Tensors that `transformers` converts are read and checked at the first access, all of them.

    UsageError: there is no such folder. CheckpointError: it is damaged or not a supported Llama.
    """
    if scheme := scheme_of(folder):
        raise UsageError(
            f"a model is read from a folder, not from {scheme}://",
            "command line; llama.init_from",
            "download it: lockstep checkpoint export ADDRESS --out FOLDER",
        )
    if not is_hub(folder):
        raise UsageError(
            f"there is no {CONFIG_FILE} in {folder}",
            "command line",
            "give the folder of a complete Hugging Face model",
        )
    where = str(folder / CONFIG_FILE)
    try:
        hf_config = read_json(folder / CONFIG_FILE)
        if not isinstance(hf_config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{CONFIG_FILE} cannot be read: {error}", where, COPY_FILE) from None
    located = locations_in_folder(folder)
    config: ModelConfig
    if backend == "transformers":
        whole = TransformersConfig(hf_config)
        config = whole.text_part()
        hf_config = dict(config.hf_config)
        if config is not whole:
            located = text_tensors(located)
    else:
        config = config_from_hf(hf_config, where)
        if packed := packed_matrices(hf_config, where):
            located = unpack(located, config, packed)
            hf_config = new_config(config, hf_config)
    companions = [folder / name for name in COMPANION_FILES if (folder / name).is_file()]
    release = release_nothing
    if isinstance(config, TransformersConfig) and is_converted(located, config):
        tensors, dtype, release = converted_tensors(located, config, folder)
    else:
        tensors = match_tensors(located, config, folder)
        dtype = dtype_of(tensors)
    return LlamaWeights(folder, config, hf_config, tensors, companions, dtype, release)


def text_tensors(located: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """Return the tensors of the text model in a multimodal one, under their names in the former."""
    part = next((part for part in TEXT_PARTS if any(part in name for name in located)), None)
    if part is None:
        return dict(located)
    texts = [name for name in located if part in name or name.startswith("lm_head.")]
    log.info(
        "%d of %d tensors are of the text model, the others are not read", len(texts), len(located)
    )
    return {name.replace(part, "", 1): located[name] for name in texts}


def is_converted(located: Mapping[str, TensorLocation], config: TransformersConfig) -> bool:
    """Whether `transformers` converts these tensors as it reads them."""
    parameters = dict(config.meta_model().named_parameters())
    if all(hf_name(name) in located for name in parameters):
        return False
    return config.as_stored(parameters) is not parameters


def converted_tensors(
    located: Mapping[str, TensorLocation], config: TransformersConfig, folder: Path
) -> tuple[LazyTensors, str, Callable[[], None]]:
    """Return the tensors, all of which memory holds from the first access on, their dtype, and what
    frees them."""
    buffers = config.ignored_tensors(located)
    dtype = one_dtype([at for name, at in located.items() if name not in buffers], folder)
    converted = cache(lambda: config.convert(folder, dtype))
    names = [name for name, _ in config.meta_model().named_parameters()]
    tensors = LazyTensors(names, lambda name: converted()[name])
    return tensors, str(dtype).removeprefix("torch."), converted.cache_clear


def one_dtype(locations: Iterable[TensorLocation], folder: Path) -> torch.dtype:
    """Return the dtype of the tensors. CheckpointError: they have several, or another kind."""
    names = sorted({location.dtype for location in locations})
    dtype = TORCH_DTYPES.get(names[0])
    if len(names) > 1 or dtype is None or not dtype.is_floating_point:
        raise CheckpointError(
            f"dtypes {', '.join(names)}, expected one floating-point dtype",
            str(folder),
            "convert the tensors to one dtype",
        )
    return dtype


def unpack(
    located: Mapping[str, TensorLocation],
    config: LlamaConfig,
    packed: Mapping[str, Sequence[str]],
) -> dict[str, TensorLocation]:
    """Return the tensors of a family that packs matrices by rows under the names of a Llama."""
    parameters = dict(config.meta_model().named_parameters())
    rows = {hf_name(name): len(parameter) for name, parameter in parameters.items()}
    unpacked = {}
    for name, pack in located.items():
        path, _, matrix = name.removesuffix(".weight").rpartition(".")
        names = [f"{path}.{part}.weight" for part in packed.get(matrix, ())]
        parts = {part: rows.get(part, 0) for part in names}
        if pack.shape[:1] != (sum(parts.values()),):
            unpacked[name] = pack
            continue
        first = 0
        for part, count in parts.items():
            unpacked[part] = pack._replace(
                shape=(count, *pack.shape[1:]), rows=slice(first, first + count)
            )
            first += count
    return unpacked


def match_tensors(
    located: Mapping[str, TensorLocation], config: ModelConfig, folder: Path
) -> LazyTensors:
    """Return the tensors under the names of the model. CheckpointError: they do not fit
    `config`."""
    model = config.meta_model()
    spares = {}
    if isinstance(model, Llama):
        if config.tie_embeddings:
            spares = {hf_name("output.weight"): hf_name("embedding.weight")}
    else:
        first = {parameter: name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name != first[parameter]:
                spares[hf_name(name)] = hf_name(first[parameter])
    return match_shapes(located, dict(model.named_parameters()), spares, folder / CONFIG_FILE)


def match_shapes(
    located: Mapping[str, TensorLocation],
    parameters: Mapping[str, Tensor],
    spares: Mapping[str, str],
    config_file: Path,
) -> LazyTensors:
    """Return the tensors under the names of `parameters`. CheckpointError: names, shapes or dtypes
    differ.

    spares  copies of other tensors, by name
    """
    names = {name: hf_name(name) for name in parameters}
    shapes = {names[name]: tuple(parameter.shape) for name, parameter in parameters.items()}
    used = {name: located[name] for name in shapes if name in located}
    problems = []
    if missing := [name for name in shapes if name not in used]:
        problems.append(f"missing: {join_names(missing)}")
    if wrong := [
        f"{name} is {location.shape}, {config_file.name} makes it {shapes[name]}"
        for name, location in used.items()
        if location.shape != shapes[name]
    ]:
        problems.append(f"of another shape: {join_names(wrong)}")
    # Older files hold the rotary frequencies, which follow from the config.
    others = [
        name
        for name in sorted(located.keys() - shapes.keys())
        if not name.endswith("rotary_emb.inv_freq")
    ]
    for spare, embedding in spares.items():
        if spare in others and not problems:
            others.remove(spare)
            if not torch.equal(located[spare].map(), located[embedding].map()):
                problems.append(
                    f"{config_file.name} ties the output to the embedding, "
                    f"but {spare} differs from it"
                )
    if others:
        problems.append(f"unexpected: {join_names(others)}")
    if problems:
        raise CheckpointError(
            f"the tensors are not those of {config_file.name}",
            "\n".join([str(config_file.parent), *problems]),
            f"{COPY_FOLDER}, or correct its {config_file.name}",
        )
    one_dtype(used.values(), config_file.parent)
    return LazyTensors(names, lambda name: located[names[name]].map())


# -- writing ---------------------------------------------------------------------------------------


def write_hub(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    companions: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a Hugging Face folder atomically; return the names of its tensor files.

    config       its config.json, except for the dtype
    tensors      under the names of llama.py; accessed one at a time
    companions   files to copy into the folder
    shard_bytes  most tensor bytes per file; a larger tensor has a file to itself
    CheckpointError: the folder is not empty, or cannot be written.
    """
    dtypes = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config = {**config, **dict.fromkeys(dtypes, dtype_of(tensors))}
    named = under_hf_names(tensors)
    parts = safetensors_io.split_into_files(specs_of(named), shard_bytes)
    files = {WEIGHTS_FILE: parts[0]}
    if len(parts) > 1:
        files = {
            f"model-{number:05d}-of-{len(parts):05d}.safetensors": part
            for number, part in enumerate(parts, 1)
        }
    with new_folder(folder, sum(spec.bytes + 256 for part in parts for spec in part)) as partial:
        for file, part in files.items():
            write_tensors(partial / file, part, named)
        if len(files) > 1:
            where = {spec.name: file for file, part in files.items() for spec in part}
            total = {"total_size": sum(spec.bytes for part in parts for spec in part)}
            index = {"metadata": total, "weight_map": dict(sorted(where.items()))}
            write_json(partial / INDEX_FILE, index)
        copy_files(companions, partial)
        write_json(partial / CONFIG_FILE, config)
    return list(files)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a folder of PEFT atomically. CheckpointError: see `write_hub`."""
    named = under_hf_names(tensors)
    specs = specs_of(named)
    with new_folder(folder, sum(spec.bytes + 256 for spec in specs)) as partial:
        write_tensors(partial / ADAPTER_FILE, specs, named)
        write_json(partial / ADAPTER_CONFIG, config)


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        write_atomic(folder / path.name, path.read_bytes())


def under_hf_names(tensors: Mapping[str, Tensor]) -> LazyTensors:
    own_names = {hf_name(name): name for name in tensors}
    return LazyTensors(own_names, lambda name: tensors[own_names[name]])


def specs_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in tensors.items()]


def write_tensors(path: Path, specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    metadata = {"format": "pt"}
    chunks = safetensors_io.file_chunks(specs, lambda name: bytes_of(tensors[name]), metadata)
    write_atomic(path, chunks)


def refuse_existing(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} already exists and is not empty",
            "--out",
            "name a new folder, or an empty one",
        )


@contextmanager
def new_folder(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a hidden folder beside `folder`, which takes its name when the block is complete."""
    partial = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with commit.explain_write_errors(f"{folder} was not written", partial.parent, needed_bytes):
        partial.mkdir()
        try:
            yield partial
            fsync_folder(partial)
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_folder(partial.parent)
