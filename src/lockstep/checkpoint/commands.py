"""What `lockstep checkpoint list | verify | digest | export` do, on the files alone: torch is never imported."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint import commit
from lockstep.checkpoint import folder as seal
from lockstep.checkpoint import safetensors_io as tensorfile
from lockstep.checkpoint import shards as parts
from lockstep.checkpoint.policy import show_steps
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import write_atomic
from lockstep.units import show_bytes


def checkpoints_in(folder: Path) -> Path:
    """The folder of checkpoints that the user means: a run's folder, or its checkpoints."""
    if not folder.is_dir():
        raise CheckpointError("there is no such folder", str(folder), "name the folder of a run, as given to --out")
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def list_table(folder: Path) -> str:
    """One line for each committed checkpoint, and for each folder that is none any more. Nothing is verified."""
    place = checkpoints_in(folder)
    lines = []
    for step in seal.committed_steps(place):
        path = place / seal.folder_name(step)
        sizes = [entry.stat().st_size for entry in os.scandir(path)]
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((path / seal.COMMITTED).stat().st_mtime))
        lines.append(f"{step:>12}  {show_bytes(sum(sizes)):>10}  {len(sizes):>5}  {saved}  {path.name}")
    lines += [f"not a checkpoint: {name}" for name in others_in(place)]
    head = f"{'step':>12}  {'size':>10}  {'files':>5}  {'saved':<19}  folder"
    return "\n".join([head, *lines]) if lines else nothing_in(place)


def verify(folder: Path) -> tuple[bool, list[str]]:
    """(every committed checkpoint is whole and there is one; what was found, line by line). Every byte is read."""
    place = checkpoints_in(folder)
    lines, whole = [], True
    for step in seal.committed_steps(place):
        with commit.reading(place), seal.pinned(place, step) as path:
            if path is None:
                continue  # retired meanwhile
            problems = commit.check(path, step)
        whole = whole and not problems
        lines += [f"step {step} is damaged: {problem}" for problem in problems] or [f"step {step} is whole"]
    if not lines:
        return False, [nothing_in(place)]
    return whole, lines + [f"not a checkpoint: {name}" for name in others_in(place)]


def digest_line(folder: Path, step: int | None = None) -> str:
    """`step S sha256 HEX` of the state at `step` (None: the newest). CheckpointError if it is missing or damaged."""
    with verified(folder, step) as (found, tensors):
        return f"step {found} sha256 {tensorfile.digest(tensors.fingerprints())}"


def export(folder: Path, step: int | None, target: Path) -> str:
    """Write the model's weights of one checkpoint as one safetensors file, whole or not at all; a line that says so.

    Names are the model's own (without "model." before them), what belongs to the optimizer is left out.
    """
    if target.exists() and not target.is_file():  # a rename over it would replace even /dev/null
        raise UsageError(f"{target} is no regular file", "--out", "name a new .safetensors file")
    with verified(folder, step) as (found, tensors):
        weights = {name.removeprefix("model."): at for name, at in tensors.items() if name.startswith("model.")}
        specs = [at.spec._replace(name=name) for name, at in weights.items()]
        metadata = {"format": "pt", "step": str(found)}
        size = sum(spec.bytes for spec in specs)
        with commit.writing(f"{target.name} was not written", target.parent, size):
            write_atomic(target, tensorfile.chunks(specs, lambda name: weights[name].data(), metadata))
    return f"step {found}: {len(specs)} tensors, {show_bytes(size)}, written to {target}"


@contextmanager
def verified(folder: Path, step: int | None) -> Iterator[tuple[int, parts.Tensors]]:
    """(the step, its tensors by name) of a checkpoint that was just verified and is not deleted inside the block."""
    place = checkpoints_in(folder)
    steps = seal.committed_steps(place)
    if not steps:
        raise CheckpointError(nothing_in(place))
    wanted = max(steps) if step is None else step
    if wanted not in steps:
        raise CheckpointError(f"there is no checkpoint of step {wanted}", f"{place}; {show_steps(steps)}", "see lockstep checkpoint list")
    with commit.reading(place), seal.pinned(place, wanted) as path:
        if path is None:
            raise CheckpointError(f"the checkpoint of step {wanted} was deleted meanwhile", str(place), "try again")
        if problems := commit.check(path, wanted):
            where = "\n".join([str(path), *problems])
            raise CheckpointError(f"the checkpoint of step {wanted} is damaged", where, f"try another: {show_steps(steps)}")
        yield wanted, parts.tensors_at(path, wanted)


def others_in(place: Path) -> list[str]:
    """Folders that were or would have been checkpoints: set aside as damaged, unfinished."""
    whole = {seal.folder_name(step) for step in seal.committed_steps(place)}
    return sorted(name for name in os.listdir(place) if name.lstrip(".").startswith("step-") and name not in whole)


def nothing_in(place: Path) -> str:
    return f"there is no committed checkpoint in {place}"
