"""A checkpoint of any layout can be resumed in any other layout with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_layouts import local_model_of, model_named, one_step, replica_of

from lockstep.checkpoint import commands
from lockstep.config.schema import OptimOptions
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError
from lockstep.layout import Layout
from lockstep.models.llama_io import checkpoint_tensors
from lockstep.parallel.grad_norm import divide_and_clip
from lockstep.testing.ranks import run_ranks
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.optim import adamw

FIRST, LAST = 3, 6
FROM = [Layout(), Layout(2, 2), Layout(1, 1, 2), Layout(1, 1, 1, 2)]
TO = {
    Layout(): [Layout(2, 2), Layout(1, 2, 2)],
    Layout(2, 2): [Layout(), Layout(1, 4), Layout(1, 3), Layout(1, 1, 2)],
    Layout(1, 1, 2): [Layout(2), Layout(1, 1, 1, 2)],
    Layout(1, 1, 1, 2): [Layout(1, 2), Layout(1, 1, 2)],
}


def go_on(world: World, layout: Layout, folder: str, steps: int, wild: bool = False) -> list[list[float]]:
    """Train the run in `folder` up to `steps`, from where it is, and save; of each of these steps the losses of all micro-batches, sorted.

    Each micro-batch has a loss of its own, so this is the ledger of what was trained, too: a micro-batch that is left out, or done twice,
    or another one in its place shows.

    wild  with dropout and bf16 products
    """
    model = model_named("translator", dropout=0.1 if wild else 0.0)
    held = local_model_of(world, model, layout, torch.float32)
    optimizer = adamw(held, OptimOptions(learning_rate=3e-3))
    losses = []
    with Checkpointer(Path(folder), world, held, optimizer) as checkpointer, replica_of(held, 4) as replica:
        for step in range(checkpointer.resume(), steps):
            losses.append(everybodys(one_step(held, replica, model, step, narrow=wild)))
            divide_and_clip(held.parameters(), divisor=72, clip_norm=1.0, grad_norm_squared=replica.grad_norm_squared())
            optimizer.step()
        checkpointer.save(steps)
    return losses


def everybodys(own: list[float]) -> list[float]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return sorted(loss for some in everybody for loss in some)


@pytest.mark.parametrize("begun", FROM, ids=str)
def test_run_resumes_in_another_layout(begun: Layout, tmp_path: Path) -> None:
    undisturbed = run_ranks(go_on, 1, Layout(), str(tmp_path / "undisturbed" / "checkpoints"), LAST)[0]
    right = commands.digest_line(tmp_path / "undisturbed")
    ledger = np.array(undisturbed)
    assert ledger.shape == (LAST, 4) and np.diff(np.sort(ledger.ravel())).min() > 1e-4, "no two micro-batches have the same loss"
    there = tmp_path / "begun" / "checkpoints"
    first = run_ranks(go_on, begun.workers, begun, str(there), FIRST)[0]
    assert np.array(first) == pytest.approx(ledger[:FIRST], rel=1e-5)
    assert commands.verify(tmp_path / "begun")[0] and not list(there.glob(".part-*"))
    for layout in TO[begun]:
        shutil.copytree(there, tmp_path / str(layout) / "checkpoints")
        rest = run_ranks(go_on, layout.workers, layout, str(tmp_path / str(layout) / "checkpoints"), LAST)[0]
        assert np.array(rest) == pytest.approx(ledger[FIRST:], rel=1e-5), layout
        if begun.tensor == begun.pipeline == layout.tensor == layout.pipeline == 1:
            assert commands.digest_line(tmp_path / str(layout)) == right, layout


def test_two_layout_changes_keep_the_bits(tmp_path: Path) -> None:
    undisturbed = run_ranks(go_on, 1, Layout(), str(tmp_path / "undisturbed" / "checkpoints"), LAST, True)[0]
    there, losses = str(tmp_path / "changed" / "checkpoints"), []
    for steps, layout in ((2, Layout(2)), (4, Layout(1, 2)), (LAST, Layout(2, 2))):
        losses += run_ranks(go_on, layout.workers, layout, there, steps, True)[0]
    assert losses == undisturbed
    assert commands.digest_line(tmp_path / "changed") == commands.digest_line(tmp_path / "undisturbed")


def test_damaged_shard_is_detected_and_the_previous_checkpoint_loaded(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"
    for steps in (2, FIRST):
        run_ranks(go_on, 2, Layout(1, 2), str(there), steps)
    parts = sorted((there / "step-00000003").glob("*.safetensors"))
    assert [path.name for path in parts] == ["tensors-00000.safetensors", "tensors-01000.safetensors"]
    content = bytearray(parts[1].read_bytes())
    content[len(content) // 2] ^= 4
    parts[1].write_bytes(content)
    assert not commands.verify(tmp_path)[0]
    assert len(run_ranks(go_on, 2, Layout(1, 2), str(there), FIRST)[0]) == FIRST - 2  # from step 2
    assert commands.verify(tmp_path)[0]


def resumed(world: World, layout: Layout, folder: str, how: str) -> tuple[bool, str]:
    """Return (True when this worker can read its slices, the outcome of the collective resume)."""
    held = local_model_of(world, model_named("translator"), layout, torch.float32)
    checkpointer = Checkpointer(Path(folder), world, held, adamw(held, OptimOptions()))
    try:
        checkpointer.store.load_slices(FIRST, held.slices)
        readable = True
    except CheckpointError:
        readable = False
    try:
        return readable, f"step {checkpointer.resume(how)}"
    except CheckpointError as error:
        return readable, error.what


def test_each_worker_reads_its_own_files_and_all_resume_or_none(tmp_path: Path) -> None:
    there = tmp_path / "checkpoints"
    run_ranks(go_on, 2, Layout(1, 2), str(there), FIRST)
    assert run_ranks(resumed, 2, Layout(1, 2), str(there), str(FIRST)) == [(True, f"step {FIRST}")] * 2
    part = there / f"step-{FIRST:08d}" / "tensors-01000.safetensors"
    content = bytearray(part.read_bytes())
    for place in (len(content) // 2, 12):  # among the numbers, then in the header too
        content[place] ^= 4
        part.write_bytes(content)
        found = run_ranks(resumed, 2, Layout(1, 2), str(there), str(FIRST))
        assert [what for _, what in found] == [f"damaged: the checkpoint of step {FIRST}"] * 2
        assert [readable for readable, _ in found] == [place != 12, False]


def test_export_is_whole_for_every_layout(tmp_path: Path) -> None:
    for name, layout in (("whole", Layout()), ("pieces", Layout(2, 2))):
        run_ranks(go_on, layout.workers, layout, str(tmp_path / name / "checkpoints"), 2)
        assert "step 2" in commands.export(tmp_path / name, None, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "pieces.safetensors").read_bytes()
    whole, pieces = (checkpoint_tensors(tmp_path / name, 2) for name in ("whole", "pieces"))
    assert set(whole) == set(pieces) and all(torch.equal(whole[name], pieces[name]) for name in whole)
