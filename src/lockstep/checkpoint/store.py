"""Checkpoints of one run: saved whole, verified on loading, retired when newer ones have come.

    store = Store(Path("runs/first/checkpoints"))
    store.save(1200, capture(model, optimizer), {"run": ...})
    checkpoint = store.load_newest()

Tensors and JSON, nothing pickled. `commit.py` makes a folder of files a checkpoint, `seal.py` keeps its state; here the
bytes get their meaning, and the rules about several checkpoints are kept:

* a step that is saved twice must have the same content, since runs are deterministic; other content is an alarm
* a damaged newest checkpoint is set aside only when an older whole one takes its place; nothing damaged is deleted
* retention never deletes what is being read, what is protected, or the last checkpoint known to be whole
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import commit
from lockstep.checkpoint import folder as seal
from lockstep.checkpoint import safetensors_io as tensorfile
from lockstep.checkpoint.commit import FACTS
from lockstep.checkpoint.policy import expendable, show_steps
from lockstep.checkpoint.safetensors_io import Spec
from lockstep.checkpoint.shards import FILES_A_WRITER, Part, Taken, Tensors, parameter_of, place_of, take, tensors_at
from lockstep.checkpoint.state_dict import fingerprints, spec_of, tensor_of
from lockstep.errors import CheckpointError
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.tensor_slice import Piece
from lockstep.units import show_bytes, show_seconds, shown

log = logging.getLogger("lockstep")

FILE_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory. Tensors are on the CPU and share the memory that their file was read into."""

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Store:
    """The checkpoints in `folder`.

    keep        newest ones to keep; 0: all. The disk must hold one more than that
    file_bytes  most tensor bytes in one file; a larger tensor has a file to itself
    at          called at each place of a save and a deletion where a test may want to die
    """

    def __init__(self, folder: Path, keep: int = 3, *, file_bytes: int = FILE_BYTES, at: seal.Seam = seal.no_seam) -> None:
        self.folder, self.keep, self.file_bytes, self.at = folder, keep, file_bytes, at
        self.made = False  # the folder is known to be there: when it is missing its disk is away, and it is not made anew
        self.part: Part | None = None  # where several workers write a checkpoint together: what this one does of it
        self._good: int | None = None  # the last step that this process wrote or verified

    # -- which there are ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending."""
        return seal.committed_steps(self.folder)

    def newest(self) -> int | None:
        """The last step with a committed checkpoint."""
        return max(self.steps(), default=None)

    # -- writing ------------------------------------------------------------------------------------------------------

    def preflight(self, needed_bytes: int = 0) -> None:
        """Try all that a save does to the disk, in small; raise now what a save would raise an hour from now.

        needed_bytes  size of one checkpoint, when known
        CheckpointError: read-only, not permitted, no locks, too little space.
        """
        with commit.writing("checkpoints cannot be saved here", self.folder, needed_bytes):
            self._make()
            with commit.Attempt(self.folder, 0) as attempt:
                attempt.put(FACTS, [b"{}"])
            self._require_space(needed_bytes)

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], protect: Collection[int] = ()) -> Path:
        """Commit the state after `step` steps; the checkpoint's folder, which is whole, or there is none.

        tensors  as `capture` gives them; on any device
        facts    what JSON can hold
        protect  steps that retention must leave, such as the best
        CheckpointError: disk full, read-only, a disk error (older checkpoints are whole, nothing partial stays, a later
        try may succeed); or the step is there already with other content.
        """
        began = time.monotonic()
        text = json.dumps(dict(facts), indent=1, sort_keys=True).encode() + b"\n"
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        needed_bytes = sum(spec.bytes + 256 for spec in specs) + len(text)
        path = self.folder / seal.folder_name(step)
        failing = partial(commit.writing, f"the checkpoint of step {step} was not saved", self.folder, needed_bytes)
        with failing():
            self._make()
        if self.part and self.part.writer:
            with failing():
                self.part.write(self.folder, step, self._files(specs, tensors))
            return path
        with failing():
            seal.sweep(self.folder)
            while not self._has_same(step, tensors):
                self._require_space(needed_bytes)
                # The inner `failing` measures the free space before the attempt is removed.
                with commit.Attempt(self.folder, step, self.at) as attempt, failing():
                    self.at("begun")
                    attempt.put(FACTS, [text])
                    for name, chunks in self._files(specs, tensors):
                        attempt.put(name, chunks)
                    if self.part:
                        self.part.adopt(attempt, self.folder, step)
                    if attempt.commit():
                        break
        self._good = step
        if self.part:
            self.part.sweep(self.folder, step)
        log.info("saved %s: %s in %s", path, show_bytes(needed_bytes), show_seconds(time.monotonic() - began))
        self.retire(protect)
        return path

    def _make(self) -> None:
        if not self.made:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.made = True

    def _files(self, specs: list[Spec], tensors: Mapping[str, Tensor]) -> list[tuple[str, Iterable[bytes | memoryview]]]:
        """(name, content) of each file of tensors; the content is a generator, for one use."""
        first = self.part.writer * FILES_A_WRITER if self.part else 0
        found: list[tuple[str, Iterable[bytes | memoryview]]] = []
        for number, some in enumerate(tensorfile.split(specs, self.file_bytes)):
            words = self.part.metadata([spec.name for spec in some]) if self.part else {}
            content = tensorfile.chunks(some, lambda name: bytes_of(tensors[name]), words)
            found.append((f"tensors-{first + number:05d}.safetensors", content))
        return found

    def _require_space(self, needed_bytes: int) -> None:
        """ENOSPC before the disk is full, rather than when it is: others write there too."""
        if commit.free_bytes(self.folder) < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _has_same(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """True when the step is committed with this content. A damaged one is set aside; other content is an alarm."""
        with seal.pinned(self.folder, step) as path:
            if path is None:
                return False
            if problems := commit.check(path, step):
                aside = seal.set_aside(path, "damaged")
                log.warning("checkpoint %s is damaged (%s), set aside as %s; saved anew", path, shown(problems), aside)
                return False
            stored = tensors_at(path, step)
            if self.part:
                mine = {name: self.part.pieces.get(name, Piece.whole(tensor.shape)) for name, tensor in tensors.items()}
                there = fingerprints({name: tensor_of(*stored[name].piece(mine[name])) for name in mine if name in stored})
            else:
                there = stored.fingerprints()
            here = fingerprints(tensors)
        if there == here:
            log.info("%s is there already, with the same content", path)
            return True
        names = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        raise CheckpointError(
            f"step {step} has a checkpoint with other content, which was not overwritten",
            f"{path}: {len(names)} of {len(there.keys() | here.keys())} tensors differ: {shown(names)}\n"
            f"sha256 {tensorfile.digest(there)} there, {tensorfile.digest(here)} here",
            "runs are deterministic, so something differs (data, options, threads, versions) or a bit flipped in this "
            "process; to train anew choose another --out",
        )

    def retire(self, protect: Collection[int] = ()) -> list[int]:
        """Delete the checkpoints that are no longer kept; those that were deleted. A failure is logged, not raised."""
        gone = []
        for step in expendable(self.steps(), keep=self.keep, protect=protect, good=self._good):
            try:
                if seal.retire(self.folder, step, self.at):
                    gone.append(step)
                else:
                    log.info("the checkpoint of step %d is being read; deleted at a later save", step)
            except OSError as error:
                log.warning("the old checkpoint of step %d could not be deleted: %s", step, error)
        return gone

    # -- reading ------------------------------------------------------------------------------------------------------

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, every byte verified. CheckpointError when it is missing or damaged.

        Memory: the state once. Each file is hashed as it is read, and the tensors lie in the bytes that were hashed.
        """
        checkpoint, problems = self._read(step)
        if checkpoint is None:
            raise self._missing(step) if not problems else self._damaged({step: problems})
        return checkpoint

    def load_newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None when there is none at all.

        Damaged newer ones are set aside (renamed, not deleted). CheckpointError when all are damaged: none is touched.
        """
        damaged: dict[int, list[str]] = {}
        for step in reversed(self.steps()):
            checkpoint, problems = self._read(step)
            if problems:
                damaged[step] = problems
            elif checkpoint:
                self.settle(damaged, step)
                return checkpoint
        self.settle(damaged, None)
        return None

    def settle(self, damaged: Mapping[int, list[str]], whole: int | None) -> None:
        """Set damaged checkpoints aside, since `whole` is there. CheckpointError when there is none: then none is touched."""
        if damaged and whole is None:
            raise self._damaged(damaged)
        for step, problems in damaged.items():
            self._quarantine(step, problems, whole)
        self._good = whole

    def go_back(self, step: int) -> list[int]:
        """Set aside the checkpoints after `step`, so that a run that goes on from it finds no later ones; their steps. Deletes nothing.

        Several processes may do it at once.
        """
        later = [there for there in self.steps() if there > step]
        for there in later:
            if aside := seal.set_aside(self.folder / seal.folder_name(there), "abandoned"):
                log.warning("going back to step %d: the checkpoint of step %d is set aside as %s", step, there, aside.name)
        return later

    def verify(self, step: int, share: tuple[int, int] = (0, 1)) -> list[str]:
        """Everything that is wrong with the checkpoint of `step`, in words; empty when it is whole. Reads every byte.

        share  (i, n): of n that verify it together this is number i, and looks into its part of the files
        """
        first, all_of_them = share
        with commit.reading(self.folder), seal.pinned(self.folder, step) as path:
            if path is None:
                raise self._missing(step)
            files, _ = commit.read_manifest(path, step)
            problems = commit.check(path, step, None if all_of_them == 1 else sorted(files)[first::all_of_them])
        if not problems and all_of_them == 1:
            self._good = step
        return problems

    def _read(self, step: int) -> tuple[Checkpoint | None, list[str]]:
        """(the checkpoint, []) or (None, what is wrong with it); (None, []) when there is none."""
        with commit.reading(self.folder), seal.pinned(self.folder, step) as path:
            if path is None:
                return None, []
            files, problems = manifest_of(path, step)
            contents: dict[str, bytearray] = {}
            for name, record in sorted(files.items()):
                content, problem = commit.read_checked(path / name, record)
                if problem:
                    problems.append(problem)
                elif not problems:
                    contents[name] = content
            if problems:
                return None, problems
            if foreign := commit.strays(path, files):
                log.warning("%s holds files that are not part of it: %s", path, ", ".join(foreign))
        facts = json.loads(contents.pop(FACTS))
        self._good = step
        stored = Tensors({name: memoryview(content) for name, content in contents.items()})
        return Checkpoint(step, {name: tensor_of(one.spec, one.data()) for name, one in stored.items()}, facts), []

    def pieces(self, step: int, wanted: Mapping[str, Piece]) -> Checkpoint:
        """The pieces that a worker holds of the checkpoint of `step`: of each parameter named, and of its optimizer state; the rest whole.

        wanted  name of a parameter -> its piece
        Each file of which something is needed is read once, and its pieces are copied out of the bytes that were hashed: in the layout that
        saved, that is this worker's own file. Memory: these pieces, and one file.
        CheckpointError when it is missing or damaged.
        """
        with commit.reading(self.folder), seal.pinned(self.folder, step) as path:
            if path is None:
                raise self._missing(step)
            try:
                stored = tensors_at(path, step)
            except (OSError, ValueError, LookupError):  # a header that is not what it was
                raise self._damaged({step: commit.check(path, step)}) from None
            mine = {name: one for name, one in stored.items() if parameter_of(name) in wanted}
            taken = {name: Taken(one.spec, place_of(name, one.spec.shape, wanted)) for name, one in mine.items()}
            used = {piece.file for name, one in mine.items() for piece in one.needed(taken[name].place)}
            files, problems = manifest_of(path, step)
            needed = sorted(used & files.keys())
            problems += [problem for name in needed if (problem := take(path / name, files[name], taken))]
            if not problems:
                text, problem = commit.read_checked(path / FACTS, files[FACTS])
                problems += [problem] if problem else []
            if problems:
                raise self._damaged({step: problems})
            tensors = {name: tensor_of(*one.content()) for name, one in taken.items()}
        return Checkpoint(step, tensors, json.loads(text))

    def _quarantine(self, step: int, problems: list[str], instead: int | None) -> None:
        path = self.folder / seal.folder_name(step)
        try:
            aside = seal.set_aside(path, "damaged")
            place = f"set aside as {aside.name}" if aside else "gone meanwhile"
        except OSError as error:
            place = f"could not be renamed ({error.strerror})"
        log.warning("checkpoint %s is damaged (%s), %s; step %d is used instead", path, shown(problems), place, instead)

    def _missing(self, step: int) -> CheckpointError:
        return CheckpointError(
            f"there is no checkpoint of step {step}", f"{self.folder}; {show_steps(self.steps())}", "see lockstep checkpoint list"
        )

    def _damaged(self, damaged: Mapping[int, list[str]]) -> CheckpointError:
        what = ", ".join(str(step) for step in sorted(damaged))
        where = [f"{self.folder / seal.folder_name(step)}: {shown(damaged[step])}" for step in sorted(damaged)]
        others = sorted(set(self.steps()) - damaged.keys())
        hint = f"try --resume STEP ({show_steps(others)})" if others else "there is no other one; nothing was deleted"
        return CheckpointError(f"damaged: the checkpoint of step {what}", "\n".join(where), hint)


def manifest_of(path: Path, step: int) -> tuple[dict[str, commit.Record], list[str]]:
    """Return (the files of a checkpoint, problems of its manifest). A manifest without the facts file is a problem."""
    files, problems = commit.read_manifest(path, step)
    return files, problems or ([] if FACTS in files else [f"the manifest does not name {FACTS}"])
