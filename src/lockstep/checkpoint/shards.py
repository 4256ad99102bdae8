"""One checkpoint written by several workers, each of which holds slices of the tensors.

Each writer puts its files, flushed to the disk, into a separate folder beside the checkpoints, and
last `part.json` with their sizes and hashes. Writer 0 waits for the folders of the others, renames
their files into its attempt, and commits it (commit.py). No byte is copied or sent.

    .part-00001200-7-3/     of step 1200, in generation 7, by writer 3

The header of each file records which slice of which tensor it holds (tensor_slice.py), so any
layout can read a checkpoint. The digest of a state is that of its whole tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.commit import Attempt, FileRecord
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.errors import CheckpointError, DamagedFileError
from lockstep.files import fsync_folder, open_unpublished, publish, read_json
from lockstep.runtime.exit_report import error_summary
from lockstep.tensor_slice import TensorSlice

T = TypeVar("T")

SHARD_LIST = "part.json"
SHARD_FOLDER = re.compile(r"\.part-([0-9]{8,})-[0-9]+-[0-9]+")
SHARD_TIMEOUT_S = 600.0
POLL_S = 0.02
FILES_PER_WRITER = 1000  # so that file names of different writers differ


@dataclass(frozen=True)
class ShardWriter:
    """One of the workers that write a checkpoint together."""

    writer: int  # its number
    writers: int  # how many write
    # Tensor name -> the slice that this worker writes; an unlisted tensor is whole.
    slices: Mapping[str, TensorSlice]
    # Returns the number of the current generation; called at each save.
    generation: Callable[[], int]
    # Returns why the other writers will not finish; "" while they may.
    generation_error: Callable[[], str]

    def folder(self, folder: Path, step: int, generation: int, writer: int) -> Path:
        return folder / f".part-{step:08d}-{generation}-{writer}"

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        slices = {
            name: self.slices[name].to_json()
            for name in names
            if name in self.slices and not self.slices[name].is_whole
        }
        return {"pieces": json.dumps(slices)} if slices else {}

    def write(
        self,
        folder: Path,
        step: int,
        files: Iterable[tuple[str, Iterable[bytes | memoryview]]],
        run: commit.Run = commit.exhaust,
    ) -> None:
        """Write this worker's files. A failure is reported to writer 0, too."""
        path = self.folder(folder, step, self.generation(), self.writer)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            records = {
                name: vars(commit.write_file(path / name, chunks, run=run))
                for name, chunks in files
            }
            fsync_folder(path)
            write_shard_list(path, {"files": records})
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) else None
            write_shard_list(path, {"error": f"{why or error_summary(error)} ({path.name})"})
            raise

    def collect(self, attempt: Attempt, folder: Path, step: int) -> None:
        """For writer 0: move in the files of the others. CheckpointError when one fails."""
        generation, deadline = self.generation(), time.monotonic() + SHARD_TIMEOUT_S
        for writer in range(1, self.writers):
            path = self.folder(folder, step, generation, writer)
            while not (path / SHARD_LIST).exists():
                if (why := self.generation_error()) or time.monotonic() > deadline:
                    why = why or f"not written within {SHARD_TIMEOUT_S:g} s"
                    raise CheckpointError(
                        f"the checkpoint of step {step} lacks the part of writer {writer}",
                        f"{path}: {why}",
                        "the save is retried",
                    )
                time.sleep(POLL_S)
            for name, record in read_shard_list(path, writer, step).items():
                os.rename(path / name, attempt.path / name)
                attempt.files[name] = record
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self, folder: Path, step: int) -> None:
        """Delete leftover folders of writers from steps before `step`."""
        for path in folder.glob(".part-*"):
            match = SHARD_FOLDER.fullmatch(path.name)
            if match and int(match[1]) < step:
                shutil.rmtree(path, ignore_errors=True)


ONLY_WRITER = ShardWriter(0, 1, {}, lambda: 0, str)


def write_shard_list(path: Path, listed: Mapping[str, Any]) -> None:
    """Publish the list of a writer's folder. Writer 0 may delete the folder at once."""
    with open_unpublished(path / SHARD_LIST) as file:
        file.write(json.dumps(listed).encode())
        publish(file)


def read_shard_list(path: Path, writer: int, step: int) -> dict[str, FileRecord]:
    try:
        listed = read_json(path / SHARD_LIST)
        if "error" not in listed:
            return commit.parse_file_records(listed["files"])
    except (DamagedFileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the part of writer {writer} of step {step} is damaged: {error}",
            str(path / SHARD_LIST),
            "the next save is a new attempt",
        ) from error
    raise CheckpointError(
        f"writer {writer} could not write its part of step {step}: {listed['error']}", str(path), ""
    )


# Elements of a tensor as unsigned integers of the same width.
RawArray = npt.NDArray[np.unsignedinteger[Any]]


class StoredSlice(NamedTuple):
    """A slice of a tensor in a file. spec: of the slice."""

    spec: TensorSpec
    data: memoryview
    slice: TensorSlice
    file: str

    def raw(self) -> RawArray:
        return np.frombuffer(self.data, f"u{safetensors_io.ITEM_BYTES[self.spec.dtype]}").reshape(
            self.spec.shape
        )

    def part(self, wanted: TensorSlice) -> StoredSlice:
        """Return a part of this slice: a copy, unless it is all of it."""
        return StoredSlice(
            *assemble(self.spec._replace(shape=self.slice.shape), [self], wanted), wanted, self.file
        )


@dataclass
class StoredTensor:
    """One tensor of a checkpoint: whole, or in slices."""

    slices: list[StoredSlice] = field(default_factory=list)

    @property
    def spec(self) -> TensorSpec:
        first = self.slices[0]
        return first.spec._replace(shape=first.slice.shape)

    def data(self) -> memoryview:
        return self.read(TensorSlice.whole(self.spec.shape))[1]

    def read(self, wanted: TensorSlice) -> tuple[TensorSpec, memoryview]:
        """Return spec and bytes of any slice of the tensor. See `assemble`."""
        return assemble(self.spec, self.slices, wanted)


def assemble(
    whole: TensorSpec, slices: Iterable[StoredSlice], wanted: TensorSlice
) -> tuple[TensorSpec, memoryview]:
    """Return spec and bytes of `wanted`, a slice of a tensor of spec `whole`: a copy, unless one of
    `slices` is that slice. CheckpointError when they lack a part of it."""
    fitting = [
        stored
        for stored in slices
        if stored.spec.dtype == whole.dtype and stored.slice.shape == whole.shape
    ]
    for stored in fitting:
        if stored.slice == wanted:
            return stored.spec, stored.data
    values = np.empty(wanted.local_shape, f"u{safetensors_io.ITEM_BYTES[whole.dtype]}")
    missing = np.ones(wanted.local_shape[:2], np.bool_)
    for stored in fitting:
        stored.slice.copy_to(wanted, stored.raw(), values)
        stored.slice.copy_to(wanted, np.zeros(stored.slice.local_shape[:2], np.bool_), missing)
    if missing_count := int(missing.sum()):
        raise CheckpointError(
            f"slices of {whole.name} are missing",
            f"{missing_count} of its rows and columns are in no file",
        )
    return whole._replace(shape=wanted.local_shape), values.reshape(-1).view(np.uint8).data


class StoredTensors(dict[str, StoredTensor]):
    """All tensors of a checkpoint by name. contents: file name -> bytes of the file."""

    def __init__(self, contents: Mapping[str, memoryview]) -> None:
        super().__init__()
        for file, content in contents.items():
            metadata, tensors = safetensors_io.parse_file(content)
            slices = json.loads(metadata.get("pieces", "{}"))
            for spec, data in tensors:
                part = TensorSlice.whole(spec.shape)
                if spec.name in slices:
                    part = TensorSlice.from_json(slices[spec.name])
                stored = StoredSlice(spec, data, part, file)
                self.setdefault(spec.name, StoredTensor()).slices.append(stored)

    def fingerprints(
        self, names: Iterable[str] | None = None, slices: Mapping[str, TensorSlice] | None = None
    ) -> dict[str, str]:
        """Return name -> fingerprint of these tensors (all): of the slice in `slices`, else of the
        whole tensor. Memory: one tensor."""
        slices = slices or {}
        lines = {}
        for name in self if names is None else names:
            tensor = self[name]
            part = slices.get(name) or TensorSlice.whole(tensor.spec.shape)
            lines[name] = safetensors_io.tensor_fingerprint(*tensor.read(part))
        return lines


def open_tensors(path: Path, step: int) -> StoredTensors:
    """Return the tensors of a verified checkpoint, with their bytes mapped rather than read."""
    files, _ = commit.read_manifest(path, step)
    return StoredTensors(
        {
            name: safetensors_io.map_file(path / name)
            for name in sorted(files)
            if name.endswith(".safetensors")
        }
    )


def parameter_of(name: str) -> str:
    """Return the parameter of a tensor in a state (checkpoint/state_dict.py), by name; for a
    tensor of a stateful object its own name."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return rest
    return rest.rpartition(".")[0] if kind == "optim" else name


def is_text(name: str) -> bool:
    """Return whether a tensor in a state is JSON text (checkpoint/json_tree.py): never sliced."""
    return name.endswith(":json") and not name.startswith("model.")


def inference_weights(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the weights to evaluate and export by parameter: averaged ones (`ema` of the
    optimizer) where the run has them."""
    names = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
    return {
        name: tensors[average if (average := f"optim.{name}.ema") in tensors else f"model.{name}"]
        for name in names
    }


def slice_of(name: str, shape: tuple[int, ...], slices: Mapping[str, TensorSlice]) -> TensorSlice:
    """Return the slice of tensor `name` (of whole shape `shape`) that a worker holds: that of its
    parameter (`slices`: parameter name -> slice) if the shapes are equal, else all of it."""
    parameter_slice = None if is_text(name) else slices.get(parameter_of(name))
    if parameter_slice is not None and parameter_slice.shape == tuple(shape):
        return parameter_slice
    if parameter_slice is not None and shape and parameter_slice.local_shape == tuple(shape):
        raise CheckpointError(
            f"{name} has the shape {tuple(shape)}, "
            f"which is also that of this worker's slice of the parameter {parameter_slice.shape}",
            "layout",
            "resume with another layout.shard",
        )
    return TensorSlice.whole(shape)
