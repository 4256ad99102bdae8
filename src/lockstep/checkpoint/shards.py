"""A state of which several workers have a piece each, as one checkpoint.

Each writer puts its files, flushed to the disk, into a folder of its own beside the checkpoints, and last `part.json`, with their sizes
and hashes. The first of them, who commits, waits for the parts of the others and renames their files into its attempt: no byte is copied or
sent, and the checkpoint is sealed by one process, as ever (commit.py).

    .part-00001200-7-3/     of step 1200, in generation 7, by writer 3

In the header of each file stands which piece of which whole tensor it holds (pieces.py), so a checkpoint can be read by any layout: whoever
reads takes what it needs of each piece. The digest of a state is that of its whole tensors, however they are stored.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint import commit
from lockstep.checkpoint import safetensors_io as tensorfile
from lockstep.checkpoint.commit import Attempt, Record
from lockstep.checkpoint.safetensors_io import Spec
from lockstep.errors import CheckpointError, DamagedFileError
from lockstep.files import fsync_folder, read_json, write_json
from lockstep.runtime.exit_report import plainly
from lockstep.tensor_slice import Piece

log = logging.getLogger("lockstep")

PART = "part.json"
FOLDER = re.compile(r"\.part-([0-9]{8,})-[0-9]+-[0-9]+")
PATIENCE_S = 600.0
LOOK_S = 0.02
FILES_A_WRITER = 1000  # so that the names of all of them differ


@dataclass(frozen=True)
class Part:
    """What one of `writers` workers writes of a state.

    pieces      name of a tensor -> which piece of it this worker has; what is not named is whole
    generation  the number of the group that saves together, asked for at each save
    broken      why that group will not bring its parts any more; "" while it may
    """

    writer: int
    writers: int
    pieces: Mapping[str, Piece]
    generation: Callable[[], int]
    broken: Callable[[], str]

    def folder(self, folder: Path, step: int, generation: int, writer: int) -> Path:
        return folder / f".part-{step:08d}-{generation}-{writer}"

    def metadata(self, names: Iterable[str]) -> dict[str, str]:
        """For the header of a file that holds these tensors."""
        cut = {name: self.pieces[name].to_json() for name in names if name in self.pieces and not self.pieces[name].is_whole}
        return {"pieces": json.dumps(cut)} if cut else {}

    def write(self, folder: Path, step: int, files: Iterable[tuple[str, Iterable[bytes | memoryview]]]) -> None:
        """Write this part. A failure is told to the one who waits for it, too."""
        path = self.folder(folder, step, self.generation(), self.writer)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            records = {name: vars(commit.write_file(path / name, chunks)) for name, chunks in files}
            fsync_folder(path)
            write_json(path / PART, {"files": records})
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) else None
            write_json(path / PART, {"error": f"{why or plainly(error)} ({path.name})"})
            raise

    def adopt(self, attempt: Attempt, folder: Path, step: int) -> None:
        """For the first writer: wait for the parts of the others, and put their files into the attempt. CheckpointError when one fails."""
        generation, deadline = self.generation(), time.monotonic() + PATIENCE_S
        for writer in range(1, self.writers):
            path = self.folder(folder, step, generation, writer)
            while not (path / PART).exists():
                if (why := self.broken()) or time.monotonic() > deadline:
                    why = why or f"it did not come within {PATIENCE_S:g} s"
                    raise CheckpointError(
                        f"the checkpoint of step {step} lacks the part of writer {writer}", f"{path}: {why}", "it is tried again"
                    )
                time.sleep(LOOK_S)
            for name, record in read_part(path, writer, step).items():
                os.rename(path / name, attempt.path / name)
                attempt.files[name] = record
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self, folder: Path, step: int) -> None:
        """Delete the parts of earlier steps, which nobody has taken."""
        for path in folder.glob(".part-*"):
            found = FOLDER.fullmatch(path.name)
            if found and int(found[1]) < step:
                shutil.rmtree(path, ignore_errors=True)


def read_part(path: Path, writer: int, step: int) -> dict[str, Record]:
    """Return the files that writer `writer` wrote to `path`. CheckpointError when the write failed or its list is damaged."""
    try:
        said = read_json(path / PART)
        if "error" not in said:
            return commit.records_of(said["files"])
    except (DamagedFileError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the part of writer {writer} of step {step} is damaged: {error}", str(path / PART), "the next save is tried"
        ) from error
    raise CheckpointError(f"writer {writer} could not write its part of step {step}: {said['error']}", str(path), "")


# -- reading ----------------------------------------------------------------------------------------------------------


Raw = npt.NDArray[np.unsignedinteger[Any]]  # the numbers of a tensor as they lie there, whatever they mean


class StoredPiece(NamedTuple):
    """A piece of a tensor in a file. spec: of the piece."""

    spec: Spec
    data: memoryview
    piece: Piece
    file: str

    def raw(self) -> Raw:
        return np.frombuffer(self.data, f"u{tensorfile.ITEM_BYTES[self.spec.dtype]}").reshape(self.spec.shape)


@dataclass
class Stored:
    """One tensor as a checkpoint has it: whole, or in pieces."""

    pieces: list[StoredPiece] = field(default_factory=list)

    @property
    def spec(self) -> Spec:
        """Of the whole."""
        first = self.pieces[0]
        return first.spec._replace(shape=first.piece.shape)

    def needed(self, wanted: Piece) -> list[StoredPiece]:
        """What of it has to be read for a piece: that very one, where it is stored, else all that have some of it."""
        same = [one for one in self.pieces if one.piece == wanted]
        return same[:1] or [one for one in self.pieces if one.piece.meets(wanted)]

    def data(self) -> memoryview:
        """The bytes of the whole."""
        first = self.pieces[0]
        return first.data if first.piece.is_whole else self.piece(Piece.whole(self.spec.shape))[1]

    def piece(self, wanted: Piece) -> tuple[Spec, memoryview]:
        """A piece of the tensor, which need not be one that is stored: a copy."""
        taken = Taken(self.spec, wanted)
        taken.add(self)
        return taken.content()


class Taken:
    """The piece `place` of a tensor, filled from the verified files of a checkpoint one after the other. whole: the tensor's spec."""

    def __init__(self, whole: Spec, place: Piece) -> None:
        self.whole, self.place = whole, place
        self.filled: tuple[Raw, npt.NDArray[np.bool_]] | None = None  # values, and which are missing: once a verified file fits the spec

    def add(self, stored: Stored) -> None:
        """Copy the parts of the piece that one file holds."""
        for one in stored.pieces:
            if one.spec.dtype == self.whole.dtype and one.piece.shape == self.whole.shape:
                values, missing = self.filled = self.filled or self._empty()
                one.piece.copy_to(self.place, one.raw(), values)
                one.piece.copy_to(self.place, np.zeros(one.piece.size[:2], np.bool_), missing)

    def _empty(self) -> tuple[Raw, npt.NDArray[np.bool_]]:
        kind = f"u{tensorfile.ITEM_BYTES[self.whole.dtype]}"
        return np.empty(self.place.size, kind), np.ones(self.place.size[:2], np.bool_)

    def content(self) -> tuple[Spec, memoryview]:
        """Return the spec and bytes of the piece. CheckpointError when the files lack a part of it."""
        values, missing = self.filled or self._empty()
        if lacking := int(missing.sum()):
            raise CheckpointError(f"pieces of {self.whole.name} are missing", f"{lacking} of its rows and columns are in no file")
        return self.whole._replace(shape=self.place.size), values.reshape(-1).view(np.uint8).data


def take(path: Path, record: Record, taken: Mapping[str, Taken]) -> str:
    """Copy the needed pieces from one file, read once. Return its problem, "" when it is whole."""
    content, problem = commit.read_checked(path, record)
    for name, stored in Tensors({} if problem else {path.name: memoryview(content)}).items():
        if name in taken:
            taken[name].add(stored)
    return problem


class Tensors(Mapping[str, Stored]):
    """All tensors of a checkpoint by name, from its files: their names and contents (in memory or mapped)."""

    def __init__(self, contents: Mapping[str, memoryview]) -> None:
        self._stored: dict[str, Stored] = {}
        for file, content in contents.items():
            pieces = json.loads(tensorfile.metadata_in(content).get("pieces", "{}"))
            for spec, data in tensorfile.tensors_in(content):
                piece = Piece.from_json(pieces[spec.name]) if spec.name in pieces else Piece.whole(spec.shape)
                self._stored.setdefault(spec.name, Stored()).pieces.append(StoredPiece(spec, data, piece, file))

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def fingerprints(self) -> dict[str, str]:
        """name -> a line that fixes dtype, shape and bytes of the whole tensor. Memory: one tensor."""
        return {name: tensorfile.fingerprint(one.spec, one.data()) for name, one in self.items()}


def tensors_at(path: Path, step: int) -> Tensors:
    """The tensors of a verified checkpoint; their bytes are mapped, not in memory."""
    files, _ = commit.read_manifest(path, step)
    return Tensors({name: tensorfile.mapped(path / name) for name in sorted(files) if name.endswith(".safetensors")})


def parameter_of(name: str) -> str:
    """The parameter to which a tensor of a captured state (checkpoint/state_dict.py) belongs."""
    kind, _, rest = name.partition(".")
    return rest if kind == "model" else rest.rpartition(".")[0]


def place_of(name: str, shape: tuple[int, ...], pieces: Mapping[str, Piece]) -> Piece:
    """Which piece of the tensor `name` (whole: `shape`) belongs to a worker: that of its parameter, where it has the parameter's shape.

    pieces  name of a parameter -> its piece
    """
    piece = pieces.get(parameter_of(name))
    return piece if piece is not None and piece.shape == tuple(shape) else Piece.whole(shape)
