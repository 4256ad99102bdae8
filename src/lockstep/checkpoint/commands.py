"""The commands `lockstep checkpoint list | verify | digest | export`, on files only: no torch."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint import commit, safetensors_io
from lockstep.checkpoint.fingerprints import BEST_STEP, newest_facts
from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name, pinned
from lockstep.checkpoint.policy import choose_step, show_steps
from lockstep.checkpoint.shards import StoredTensors, inference_weights, open_tensors
from lockstep.errors import CheckpointError, UsageError
from lockstep.files import read_json, write_atomic
from lockstep.record.tracker import metrics_damage
from lockstep.units import format_bytes


def checkpoints_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(
            "no such folder", str(folder), "give the folder of a run, as with --out"
        )
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def list_table(folder: Path) -> str:
    """Return a table of the committed checkpoints, unverified, and of other checkpoint folders."""
    folder = checkpoints_folder(folder)
    lines = []
    for step in committed_steps(folder):
        path = folder / folder_name(step)
        sizes = [entry.stat().st_size for entry in os.scandir(path)]
        saved = time.strftime(
            "%Y-%m-%d %H:%M:%S", time.localtime((path / COMMITTED).stat().st_mtime)
        )
        lines.append(
            f"{step:>12}  {format_bytes(sum(sizes)):>10}  {len(sizes):>5}  {saved}  {path.name}"
        )
    lines += [f"not a checkpoint: {name}" for name in uncommitted_folders(folder)]
    head = f"{'step':>12}  {'size':>10}  {'files':>5}  {'saved':<19}  folder"
    return "\n".join([head, *lines]) if lines else f"there is no committed checkpoint in {folder}"


def verify(folder: Path) -> tuple[bool, list[str]]:
    """Return (True when checkpoints exist and all are whole, and the metrics up to the newest are
    as they were written; findings). Reads every byte."""
    run, folder = folder, checkpoints_folder(folder)
    lines, whole = [], True
    for step in committed_steps(folder):
        with commit.explain_read_errors(folder), pinned(folder, step) as path:
            if path is None:
                continue  # deleted by retention since the listing
            problems = commit.find_damage(path, step)
        whole = whole and not problems
        lines += [f"step {step} is damaged: {problem}" for problem in problems] or [
            f"step {step} is whole"
        ]
    if not lines:
        return False, [f"there is no committed checkpoint in {folder}"]
    damage = metrics_damage(run, max(committed_steps(folder), default=0)) if folder != run else []
    lines += [f"metrics.jsonl: {problem}" for problem in damage]
    whole = whole and not damage
    return whole, lines + [f"not a checkpoint: {name}" for name in uncommitted_folders(folder)]


def best_step(folder: Path) -> int:
    """Return the best step of the validation in training, else the one in best.json."""
    _, facts = newest_facts(checkpoints_folder(folder)) or (0, {})
    validated = int(facts.get("validation", facts).get(BEST_STEP, -1))
    try:
        return validated if validated >= 0 else int(read_json(folder / "best.json")["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no best checkpoint is known: {error}",
            str(folder),
            "give the step; a loop names its best one with lockstep.Best, a recipe with "
            f"evaluate.every_steps or lockstep evaluate {folder}",
        ) from error


def digest_line(folder: Path, step: int | None = None) -> str:
    """Return `step S sha256 HEX` of the state at `step` (None: the newest). CheckpointError."""
    with open_verified(folder, step) as (verified_step, tensors):
        digest = safetensors_io.digest_of_fingerprints(tensors.fingerprints())
        return f"step {verified_step} sha256 {digest}"


def export(folder: Path, step: int | None, target: Path) -> str:
    """Write the model's weights at `step` (None: the newest) to one safetensors file, atomically;
    return a line that describes it. Names have no prefix "model."; optimizer state is omitted,
    except for averaged weights, which replace the last ones."""
    if target.exists() and not target.is_file():  # a rename over it would replace even /dev/null
        raise UsageError(
            f"{target} is not a regular file", "--out", "give the path of a new .safetensors file"
        )
    with open_verified(folder, step) as (verified_step, tensors):
        weights = inference_weights(tensors)
        specs = [tensor.spec._replace(name=name) for name, tensor in weights.items()]
        metadata = {"format": "pt", "step": str(verified_step)}
        size = sum(spec.bytes for spec in specs)
        with commit.explain_write_errors(f"{target.name} was not written", target.parent, size):
            write_atomic(
                target,
                safetensors_io.file_chunks(specs, lambda name: weights[name].data(), metadata),
            )
    return f"step {verified_step}: {len(specs)} tensors, {format_bytes(size)}, written to {target}"


@contextmanager
def open_verified(folder: Path, step: int | None) -> Iterator[tuple[int, StoredTensors]]:
    """Yield (step, tensors) of a verified checkpoint, which is not deleted inside the block."""
    folder = checkpoints_folder(folder)
    steps = committed_steps(folder)
    step = choose_step(step, steps, folder)
    with commit.explain_read_errors(folder), pinned(folder, step) as path:
        if path is None:
            raise CheckpointError(
                f"the checkpoint of step {step} was deleted by another process",
                str(folder),
                "try again",
            )
        if problems := commit.find_damage(path, step):
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged",
                "\n".join([str(path), *problems]),
                f"try another: {show_steps(steps)}",
            )
        yield step, open_tensors(path, step)


def uncommitted_folders(folder: Path) -> list[str]:
    committed = {folder_name(step) for step in committed_steps(folder)}
    return sorted(
        name
        for name in os.listdir(folder)
        if name.lstrip(".").startswith("step-") and name not in committed
    )
