"""The checkpoints of a run: written atomically, verified on loading, deleted by retention.

    store = CheckpointStore(Path("runs/first/checkpoints"))
    store.save(1200, get_state_dict(model, optimizer), {"run": ...})
    checkpoint = store.load_newest()

Tensors and JSON, no pickle. `commit.py` makes a folder of files a checkpoint and `folder.py` keeps
its state. Here the bytes become tensors, and these rules hold across checkpoints:

* saving a step twice with different content is an error, since runs are deterministic
* a damaged checkpoint is set aside, never deleted, and only when an older whole one replaces it
* retention never deletes a checkpoint that is being read, that is protected, or that is the newest
  one known to be whole
"""

import errno
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import commit, safetensors_io, shards
from lockstep.checkpoint.commit import FACTS
from lockstep.checkpoint.folder import (
    FailPoint,
    committed_steps,
    folder_name,
    no_fail_point,
    pinned,
    retire,
    set_aside,
    sweep,
)
from lockstep.checkpoint.json_tree import spec_of
from lockstep.checkpoint.policy import missing_checkpoint, show_steps, steps_to_delete
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.state_dict import fingerprints, tensor_from_bytes
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import scheme_of
from lockstep.log import log
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.units import format_bytes, format_duration, join_names

FILE_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in memory. CPU tensors share the bytes of their file."""

    step: int
    tensors: Mapping[str, Tensor]
    facts: dict[str, Any]


class CheckpointStore:
    """The checkpoints in `folder`.

    keep        number of newest checkpoints to keep; 0: all. The disk must hold one more
    file_bytes  most tensor bytes in one file; a larger tensor has a separate file
    fail_point  called with a name at each place of a save or deletion where tests kill the process
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        *,
        file_bytes: int = FILE_BYTES,
        fail_point: FailPoint = no_fail_point,
    ) -> None:
        if scheme := scheme_of(folder):
            raise UsageError(
                f"checkpoints are not written to {scheme}:// directly",
                str(folder),
                "give a folder; lockstep run --out s3://BUCKET/RUN mirrors it",
            )
        self.folder = folder
        self.keep = keep
        self.file_bytes = file_bytes
        self.fail_point = fail_point
        self._folder_exists = False
        self.shard_writer = shards.ONLY_WRITER  # another one where workers save together
        # The last step that this process wrote or verified; retention keeps it.
        self._verified_step: int | None = None

    def steps(self) -> list[int]:
        return committed_steps(self.folder)

    def require_folder(self) -> None:
        """Never create the folder from now on: if it is missing its disk is not mounted."""
        self._folder_exists = True

    def share_writing(self, shard_writer: shards.ShardWriter) -> None:
        """Save from now on as one of the workers that write together, or as the only one."""
        self.shard_writer = shard_writer

    def preflight(self) -> None:
        """Report problems of the disk before training.
        CheckpointError: read-only, not permitted, no locks, no space."""
        with commit.explain_write_errors("checkpoints cannot be saved here", self.folder, 0):
            self._create_folder()
            commit.try_disk(self.folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        protect: Collection[int] = (),
        run: commit.Run = commit.exhaust,
    ) -> Path:
        """Commit the state after `step` steps, atomically; return the checkpoint's folder.

        tensors  as from `get_state_dict`, on any device
        facts    JSON values
        protect  steps that retention must keep, such as the best
        run      runs the hashing and writing of each file, see `write_file`
        CheckpointError: a failed write (older checkpoints are whole, nothing partial stays, a later
        attempt may succeed); or a checkpoint of this step with other content exists.
        """
        start_s = time.monotonic()
        text = json.dumps(dict(facts), indent=1, sort_keys=True).encode() + b"\n"
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        needed_bytes = sum(spec.bytes + 256 for spec in specs) + len(text)
        path = self.folder / folder_name(step)
        explain = partial(
            commit.explain_write_errors,
            f"the checkpoint of step {step} was not saved",
            self.folder,
            needed_bytes,
        )
        with explain():
            self._create_folder()
        if self.shard_writer.writer:
            with explain():
                self.shard_writer.write(self.folder, step, self._files(specs, tensors), run)
            return path
        with explain():
            sweep(self.folder)
            while not self._has_same(step, tensors):
                # Before the disk is full: other programs write there too.
                if commit.free_bytes(self.folder) < needed_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                # The inner `explain` measures the free space before the attempt is removed.
                with commit.Attempt(self.folder, step, self.fail_point) as attempt, explain():
                    self.fail_point("started")
                    attempt.put(FACTS, [text])
                    for name, chunks in self._files(specs, tensors):
                        attempt.put(name, chunks, run)
                    self.shard_writer.collect(attempt, self.folder, step)
                    if attempt.commit():
                        break
        self._verified_step = step
        self.shard_writer.sweep(self.folder, step)
        log.info(
            "saved %s: %s in %s",
            path,
            format_bytes(needed_bytes),
            format_duration(time.monotonic() - start_s),
        )
        self.retire(protect)
        return path

    def _create_folder(self) -> None:
        if not self._folder_exists:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._folder_exists = True

    def _files(
        self, specs: list[TensorSpec], tensors: Mapping[str, Tensor]
    ) -> list[tuple[str, Iterable[bytes | memoryview]]]:
        """Return (name, content) of each file of tensors. A content can be read once."""
        writer = self.shard_writer
        files: list[tuple[str, Iterable[bytes | memoryview]]] = []
        split = safetensors_io.split_into_files(specs, self.file_bytes)
        for number, file_specs in enumerate(split, writer.writer * shards.FILES_PER_WRITER):
            metadata = writer.metadata([spec.name for spec in file_specs])
            content = safetensors_io.file_chunks(
                file_specs, lambda name: bytes_of(tensors[name]), metadata
            )
            files.append((f"tensors-{number:05d}.safetensors", content))
        return files

    def _has_same(self, step: int, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the step is committed with this content. Set a damaged one aside.
        CheckpointError for other content."""
        with pinned(self.folder, step) as path:
            if path is None:
                return False
            if problems := commit.find_damage(path, step):
                aside = set_aside(path, "damaged")
                log.warning(
                    "checkpoint %s is damaged (%s), set aside as %s; saving it again",
                    path,
                    join_names(problems),
                    aside,
                )
                return False
            stored = shards.open_tensors(path, step)
            is_whole = self.shard_writer.writers == 1
            names = set(stored) if is_whole else stored.keys() & tensors.keys()
            saved = stored.fingerprints(names, self.shard_writer.slices)
            current = fingerprints(tensors)
        if saved == current:
            log.info("%s exists already, with the same content", path)
            return True
        all_names = saved.keys() | current.keys()
        wrong = sorted(name for name in all_names if saved.get(name) != current.get(name))
        saved_digest, current_digest = map(safetensors_io.digest_of_fingerprints, (saved, current))
        raise CheckpointError(
            f"step {step} has a checkpoint with other content, which was not overwritten",
            f"{path}: {len(wrong)} of {len(all_names)} tensors differ: {join_names(wrong)}\n"
            f"sha256 {saved_digest} there, {current_digest} here",
            "runs are deterministic, so something differs (data, options, threads, versions) "
            "or a bit flipped in this process; to train again from step 0 choose another --out",
        )

    def retire(self, protect: Collection[int] = ()) -> None:
        """Delete checkpoints as retention asks. Failures are only logged."""
        for step in steps_to_delete(
            self.steps(), keep=self.keep, protect=protect, good=self._verified_step
        ):
            try:
                if not retire(self.folder, step, self.fail_point):
                    log.info(
                        "the checkpoint of step %d is being read; a later save deletes it", step
                    )
            except OSError as error:
                log.warning("the old checkpoint of step %d could not be deleted: %s", step, error)

    def load(self, step: int) -> Checkpoint:
        """Return the checkpoint of `step`, every byte verified. CheckpointError.
        Memory: the state once. The tensors share the bytes that were hashed."""
        checkpoint, problems = self._read(step)
        if checkpoint:
            return checkpoint
        if problems:
            raise self._damaged({step: problems})
        raise missing_checkpoint(step, self.steps(), str(self.folder))

    def load_newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, if any, and set damaged newer ones aside.
        CheckpointError when all are damaged: then all stay in place."""
        damaged: dict[int, list[str]] = {}
        for step in reversed(self.steps()):
            checkpoint, problems = self._read(step)
            if problems:
                damaged[step] = problems
            elif checkpoint:
                self.set_damaged_aside(damaged, step)
                return checkpoint
        self.set_damaged_aside(damaged, None)
        return None

    def require(self, step: int | None) -> Checkpoint:
        """Return the checkpoint of `step`, or the newest whole one. CheckpointError: none."""
        checkpoint = self.load_newest() if step is None else self.load(step)
        if checkpoint is None:
            raise CheckpointError(
                "there is no checkpoint yet",
                str(self.folder),
                "train on: checkpoint.every_steps is the interval of checkpoints",
            )
        return checkpoint

    def set_damaged_aside(self, damaged: Mapping[int, list[str]], whole: int | None) -> None:
        """Set damaged checkpoints (step -> problems) aside, since step `whole`, verified, replaces
        them. CheckpointError when `whole` is None: then all stay in place."""
        if damaged and whole is None:
            raise self._damaged(damaged)
        for step, problems in damaged.items():
            path = self.folder / folder_name(step)
            try:
                aside = set_aside(path, "damaged")
                outcome = f"set aside as {aside.name}" if aside else "deleted by another process"
            except OSError as error:
                outcome = f"could not be renamed ({error.strerror})"
            log.warning(
                "checkpoint %s is damaged (%s), %s; step %d is used instead",
                path,
                join_names(problems),
                outcome,
                whole,
            )
        self._verified_step = whole

    def set_aside_after(self, step: int) -> None:
        """Set aside the checkpoints after `step`, from which a run resumes. Several processes may
        call it at once."""
        for later in (later for later in self.steps() if later > step):
            if aside := set_aside(self.folder / folder_name(later), "abandoned"):
                log.warning(
                    "resuming from step %d: the checkpoint of step %d is set aside as %s",
                    step,
                    later,
                    aside.name,
                )

    def _read(self, step: int) -> tuple[Checkpoint | None, list[str]]:
        """Return (the checkpoint, []) or (None, its problems); (None, []) when there is none."""
        stored, facts, problems = self.read_share(step)
        if stored is None:
            return None, problems
        tensors = {
            name: tensor_from_bytes(tensor.spec, tensor.data()) for name, tensor in stored.items()
        }
        return Checkpoint(step, tensors, facts), []

    def read_share(
        self, step: int, share: tuple[int, int] = (0, 1)
    ) -> tuple[shards.StoredTensors | None, dict[str, Any], list[str]]:
        """Return the tensors in the i-th of n shares of the files, the facts, and no problems; or
        None and the problems of the share. (None, {}, []) when there is no checkpoint. share: (i,
        n)."""
        index, count = share
        with commit.explain_read_errors(self.folder), pinned(self.folder, step) as path:
            if path is None:
                return None, {}, []
            files, problems = commit.read_manifest(path, step)
            contents: dict[str, bytearray] = {}
            for name in [*sorted(files.keys() - {FACTS})[index::count], *(files.keys() & {FACTS})]:
                content, problem = commit.read_verified(path / name, files[name])
                if problem:
                    problems.append(problem)
                elif not problems:
                    contents[name] = content
            if problems:
                return None, {}, sorted(problems)
            if index == 0 and (foreign := commit.unlisted_files(path, files)):
                log.warning("%s holds files that are not part of it: %s", path, ", ".join(foreign))
        facts = json.loads(contents.pop(FACTS))
        if count == 1:
            self._verified_step = step
        views = {name: memoryview(content) for name, content in contents.items()}
        return shards.StoredTensors(views), facts, []

    def _damaged(self, damaged: Mapping[int, list[str]]) -> CheckpointError:
        listed = ", ".join(map(str, sorted(damaged)))
        where = [
            f"{self.folder / folder_name(step)}: {join_names(problems)}"
            for step, problems in sorted(damaged.items())
        ]
        hint = "there is no other checkpoint; nothing was deleted"
        if others := set(self.steps()) - damaged.keys():
            hint = f"try --resume STEP ({show_steps(others)})"
        return CheckpointError(f"damaged: the checkpoint of step {listed}", "\n".join(where), hint)
