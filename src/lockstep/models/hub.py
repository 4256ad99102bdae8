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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.state_dict import digest
from lockstep.config.adapter_config import ADAPTER_CONFIG
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import fsync_folder, read_json, scheme_of, write_atomic, write_json
from lockstep.models.hf_config import (
    HARMLESS_KEYS,
    config_from_hf,
    config_to_hf,
    family_of,
    hf_name,
    parameter_shapes,
)
from lockstep.models.llama_config import LlamaConfig
from lockstep.models.transformers_model import TransformersConfig
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of
from lockstep.units import join_names

CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE = (
    "config.json",
    "model.safetensors.index.json",
    "model.safetensors",
)
ADAPTER_STEM = "adapter_model"
COMPANION_FILES = (  # files of a model besides config.json and its tensors; copied unchanged
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
SHARD_BYTES = 5 * 10**9

# -- tensors in files ------------------------------------------------------------------------------


class LazyTensors(Mapping[str, Tensor]):
    """The tensors of these names, in order; `compute(name)` returns one: memory holds one at a
    time."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self.names, self.compute = dict.fromkeys(names), compute

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
    first_row: int = 0  # of a part of a packed tensor
    packed: bool = False

    def map(self) -> Tensor:
        """Map the tensor into memory until it is released; changing it does not change the file."""
        with safe_open(self.path, framework="pt") as file:
            if self.packed:
                return cast(
                    Tensor,
                    file.get_slice(self.name)[self.first_row : self.first_row + self.shape[0]],
                )
            return cast(Tensor, file.get_tensor(self.name))


def tensor_locations(path: Path) -> dict[str, TensorLocation]:
    """Locate the tensors of a safetensors file by its header. CheckpointError: it is damaged."""
    again = "copy the file again"
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path.name} is not a regular file", str(path), again)
    try:
        with safe_open(path, framework="pt") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            return {
                name: TensorLocation(path, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in headers.items()
            }
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is missing", str(path.parent), "copy the whole folder again"
        ) from None
    except SafetensorError as error:
        what = f"{path.name} is truncated or has no valid safetensors header: {error}"
        raise CheckpointError(what, f"{path}, {path.stat().st_size} bytes", again) from None
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", str(path), "check permissions and mounts"
        ) from error


def locations_in_folder(folder: Path) -> dict[str, TensorLocation]:
    if not (folder / INDEX_FILE).exists():
        if not (folder / WEIGHTS_FILE).exists() and sorted(folder.glob("*.bin")):
            hint = "load it with transformers and save it again: save_pretrained writes safetensors"
            raise CheckpointError(
                f"there is no {WEIGHTS_FILE}, only pickled weights, which can run arbitrary code",
                str(folder),
                hint,
            )
        return tensor_locations(folder / WEIGHTS_FILE)
    try:
        files = {
            str(name): str(file)
            for name, file in read_json(folder / INDEX_FILE)["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{INDEX_FILE} cannot be read: {error}", str(folder / INDEX_FILE), "copy the file again"
        ) from None
    if outside := sorted(
        {file for file in files.values() if Path(file).name != file or file == ".."}
    ):
        what = f"{INDEX_FILE} names files outside the folder: {join_names(outside)}"
        raise CheckpointError(what, str(folder / INDEX_FILE), "do not use this folder")
    present = {path.name for path in folder.iterdir()}
    shards = sorted(set(files.values()))
    if missing := [file for file in shards if file not in present]:
        what = f"{len(missing)} of {len(shards)} shards are missing: {join_names(missing)}"
        raise CheckpointError(
            what, f"{folder / INDEX_FILE} names them", "copy the missing files into the folder"
        )
    located = {file: tensor_locations(folder / file) for file in shards}
    if lost := [f"{name} in {file}" for name, file in files.items() if name not in located[file]]:
        what = f"{INDEX_FILE} and the shards disagree: {len(lost)} tensors are not in the file it names"
        raise CheckpointError(what, f"{folder}: {join_names(lost)}", "copy the whole folder again")
    return {name: located[file][name] for name, file in files.items()}


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaWeights:
    """The model in a folder.

    tensors     under the names of llama.py or transformers_model.py; each is read on access
    companions  tokenizer files and the like
    dtype       of the published weights, as torch spells it
    """

    folder: Path
    config: LlamaConfig | TransformersConfig
    hf_config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    companions: list[Path]
    dtype: str

    def sha256(self) -> str:
        return digest(self.tensors)


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def is_hub(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def open_hub(folder: Path, backend: str = "lockstep") -> LlamaWeights:
    """Open the model in a Hugging Face folder; checks names, shapes and lengths, reads no tensor.

    UsageError: there is no such folder. CheckpointError: it is damaged or not a supported Llama.
    """
    if scheme := scheme_of(folder):
        hint = "download it: lockstep checkpoint export ADDRESS --out FOLDER"
        raise UsageError(
            f"a model is read from a folder, not from {scheme}://",
            "command line; llama.init_from",
            hint,
        )
    if not is_hub(folder):
        raise UsageError(
            f"there is no {CONFIG_FILE} in {folder}",
            "command line",
            "give the folder of a complete Hugging Face model",
        )
    where = str(folder / CONFIG_FILE)
    try:
        if not isinstance(hf_config := read_json(folder / CONFIG_FILE), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{CONFIG_FILE} cannot be read: {error}", where, "copy the file again"
        ) from None
    config: LlamaConfig | TransformersConfig = (
        TransformersConfig(hf_config)
        if backend == "transformers"
        else config_from_hf(hf_config, where)
    )
    located: Mapping[str, TensorLocation] = locations_in_folder(folder)
    if isinstance(config, LlamaConfig) and family_of(hf_config, where) == "phi3":
        located, hf_config = unpack_phi3(located, config), new_config(config, hf_config)
    tensors = match_tensors(located, config, folder)
    companions = [folder / name for name in COMPANION_FILES if (folder / name).is_file()]
    return LlamaWeights(folder, config, hf_config, tensors, companions, dtype_of(tensors))


def unpack_phi3(
    located: Mapping[str, TensorLocation], config: LlamaConfig
) -> dict[str, TensorLocation]:
    """Return the tensors of a Phi-3 under the names of a Llama, whose matrices it packs by rows."""
    key_rows = config.n_kv_heads * config.head_dim
    packs = {
        "qkv_proj": [
            ("q_proj", config.n_heads * config.head_dim),
            ("k_proj", key_rows),
            ("v_proj", key_rows),
        ],
        "gate_up_proj": [("gate_proj", config.ffn_dim), ("up_proj", config.ffn_dim)],
    }
    unpacked = {}
    for name, pack in located.items():
        parts = packs.get(name.removesuffix(".weight").rpartition(".")[2], [])
        if pack.shape[:1] != (sum(rows for _, rows in parts),):
            unpacked[name] = pack
            continue
        first = 0
        for part, rows in parts:
            path = name.removesuffix(".weight").rpartition(".")[0]
            unpacked[f"{path}.{part}.weight"] = pack._replace(
                shape=(rows, *pack.shape[1:]), first_row=first, packed=True
            )
            first += rows
    return unpacked


def match_tensors(
    located: Mapping[str, TensorLocation], config: LlamaConfig | TransformersConfig, folder: Path
) -> LazyTensors:
    """Return the tensors under the names of the model. CheckpointError: they do not fit
    `config`."""
    if isinstance(config, LlamaConfig):
        shapes = parameter_shapes(config)
        spares = (
            {hf_name("output.weight"): hf_name("embedding.weight")} if config.tie_embeddings else {}
        )
    else:
        model = config.meta_model()
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        first = {parameter: name for name, parameter in reversed(list(model.named_parameters()))}
        tied = {
            name: first[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        spares = {hf_name(name): hf_name(other) for name, other in tied.items() if name != other}
    return match_shapes(located, shapes, spares, folder / CONFIG_FILE)


def match_shapes(
    located: Mapping[str, TensorLocation],
    shapes: Mapping[str, tuple[int, ...]],
    spares: Mapping[str, str],
    config_file: Path,
) -> LazyTensors:
    """Return the tensors under the names of `shapes`. CheckpointError: names, shapes or dtypes
    differ.

    spares  copies of other tensors, by name
    """
    names = {name: hf_name(name) for name in shapes}
    problems = []
    if missing := [name for name in names.values() if name not in located]:
        problems.append(f"missing: {join_names(missing)}")
    if wrong := [
        name
        for name, other in names.items()
        if other in located and located[other].shape != shapes[name]
    ]:
        lines = [
            f"{names[name]} is {located[names[name]].shape}, {config_file.name} makes it {shapes[name]}"
            for name in wrong
        ]
        problems.append(f"of another shape: {join_names(lines)}")
    # Older files hold the rotary frequencies, which follow from the config.
    others = [
        name
        for name in sorted(located.keys() - set(names.values()))
        if not name.endswith("rotary_emb.inv_freq")
    ]
    for spare, embedding in spares.items():
        if spare in others and not problems:
            others.remove(spare)
            if not torch.equal(located[spare].map(), located[embedding].map()):
                problems.append(
                    f"{config_file.name} ties the output to the embedding, but {spare} differs from it"
                )
    if others:
        problems.append(f"unexpected: {join_names(others)}")
    dtypes = sorted({located[name].dtype for name in names.values() if name in located})
    if not problems and (
        len(dtypes) > 1
        or dtypes[0] not in TORCH_DTYPES
        or not TORCH_DTYPES[dtypes[0]].is_floating_point
    ):
        problems.append(f"dtypes {', '.join(dtypes)}, expected one floating-point dtype")
    if problems:
        hint = f"copy the whole folder again, or correct its {config_file.name}"
        raise CheckpointError(
            f"the tensors are not those of {config_file.name}",
            "\n".join([str(config_file.parent), *problems]),
            hint,
        )
    return LazyTensors(names, lambda name: located[names[name]].map())


# -- writing ---------------------------------------------------------------------------------------


def write_hub(
    folder: Path,
    config: LlamaConfig | TransformersConfig,
    tensors: Mapping[str, Tensor],
    *,
    hf_config: Mapping[str, Any] | None = None,
    companions: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    adapter: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write a Hugging Face folder atomically; return the names of its tensor files.

    tensors      under the names of llama.py; accessed one at a time
    hf_config    the model's earlier config.json; kept as is if it still describes `config`
    companions   files to copy into the folder
    shard_bytes  most tensor bytes per file; a larger tensor has a file to itself
    adapter      adapter_config.json; `tensors` are adapters, and the folder is one of PEFT
    UsageError: the folder exists and is not empty. CheckpointError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} already exists and is not empty",
            "--out",
            "name a new folder, or an empty one",
        )
    stem = ADAPTER_STEM if adapter else "model"
    own_names = {hf_name(name): name for name in tensors}
    specs = [
        TensorSpec(other, DTYPES[tensors[name].dtype], tuple(tensors[name].shape))
        for other, name in own_names.items()
    ]
    needed_bytes = sum(spec.bytes + 256 for spec in specs)
    partial = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with commit.explain_write_errors(f"{folder} was not written", partial.parent, needed_bytes):
        partial.mkdir()
        try:
            parts = [specs] if adapter else safetensors_io.split_into_files(specs, shard_bytes)
            files = [
                f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)
            ]
            files = files if len(files) > 1 else [f"{stem}.safetensors"]
            for file, part in zip(files, parts, strict=True):
                chunks = safetensors_io.file_chunks(
                    part, lambda name: bytes_of(tensors[own_names[name]]), {"format": "pt"}
                )
                write_atomic(partial / file, chunks)
            if len(parts) > 1:
                where = {
                    spec.name: file
                    for file, part in zip(files, parts, strict=True)
                    for spec in part
                }
                total = {"total_size": sum(spec.bytes for spec in specs)}
                write_json(
                    partial / INDEX_FILE,
                    {"metadata": total, "weight_map": dict(sorted(where.items()))},
                )
            for path in companions:
                write_atomic(partial / path.name, path.read_bytes())
            config_file = ADAPTER_CONFIG if adapter else CONFIG_FILE
            write_json(
                partial / config_file, adapter or config_to_write(config, hf_config, specs[0].dtype)
            )
            fsync_folder(partial)
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        fsync_folder(folder.absolute().parent)
    return files


def new_config(config: LlamaConfig, old: Mapping[str, Any]) -> dict[str, Any]:
    return config_to_hf(config) | {key: value for key, value in old.items() if key in HARMLESS_KEYS}


def config_to_write(
    config: LlamaConfig | TransformersConfig, hf_config: Mapping[str, Any] | None, dtype: str
) -> dict[str, Any]:
    """Return the old config.json if it describes `config`, else a new one; with `dtype`."""
    old = dict(hf_config or {})
    if isinstance(config, TransformersConfig) or (
        old and config_from_hf(old, "the config that came with the model") == config
    ):
        base = old
    else:
        base = new_config(config, old)
    torch_dtype = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
    return base | dict.fromkeys(
        [key for key in ("dtype", "torch_dtype") if key in base] or ["torch_dtype"], torch_dtype
    )
