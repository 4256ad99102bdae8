"""A checkpoint of any layout can be resumed in any other layout with the same bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from test_layouts import CONFIG, Model, build_local_model, model_named, one_step, replica_of
from test_shared_checkpoint import bytes_read

from lockstep.checkpoint import commands
from lockstep.checkpoint.folder import folder_name
from lockstep.checkpoint.shards import open_tensors
from lockstep.config.schema import OptimOptions
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError
from lockstep.layout import Layout
from lockstep.models.llama import Llama, init_param
from lockstep.models.llama_io import model_tensors
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.tasks.optim import make_optimizers
from lockstep.training.checkpointer import Checkpointer

FIRST, LAST = 2, 4
FROM = [Layout(), Layout(2, 2), Layout(1, 1, 2), Layout(1, 1, 1, 2)]
TO = {
    Layout(): [Layout(2, 2), Layout(1, 2, 2)],
    Layout(2, 2): [Layout(), Layout(1, 4), Layout(1, 3), Layout(1, 1, 2)],
    Layout(1, 1, 2): [Layout(2), Layout(1, 1, 1, 2)],
    Layout(1, 1, 1, 2): [Layout(1, 2), Layout(1, 1, 2)],
}


def train_to(
    runtime: ElasticRuntime, layout: Layout, folder: str, steps: int, mixed_precision: bool = False
) -> list[list[float]]:
    """Resume the run in `folder`, train to step `steps` and save; return each step's sorted losses.

    The losses of all micro-batches differ, so they also show which micro-batches were trained: a
    missing, repeated or wrong one gives other losses.

    mixed_precision  also with dropout
    """
    model = model_named("translator", dropout=0.1 if mixed_precision else 0.0)
    local = build_local_model(runtime, model, layout, torch.float32)
    optimizer = make_optimizers(local, OptimOptions(learning_rate=3e-3))[0]
    losses = []
    with (
        Checkpointer(Path(folder), runtime, local, optimizer) as checkpointer,
        replica_of(local, 4) as replica,
    ):
        for step in range(checkpointer.resume(), steps):
            losses.append(
                losses_of_all_ranks(one_step(local, replica, model, step, narrow=mixed_precision))
            )
            commit_gradient(list(local.parameters()), replica.grad_norm_squared(), 72).clip_(1.0)
            optimizer.step()
        checkpointer.save(steps)
    return losses


def losses_of_all_ranks(own: dict[int, float]) -> list[float]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, [*own.values()])
    return sorted(loss for losses in by_rank for loss in losses)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The losses and the digest of one worker."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    losses = np.array(run_ranks(train_to, 1, Layout(), str(folder / "checkpoints"), LAST)[0])
    assert losses.shape == (LAST, 4) and np.diff(np.sort(losses.ravel())).min() > 1e-4, (
        "no two micro-batches have the same loss"
    )
    return losses, commands.digest_line(folder)


@pytest.mark.parametrize("first_layout", FROM, ids=str)
def test_run_resumes_in_another_layout(
    first_layout: Layout, uninterrupted: tuple[Any, str], tmp_path: Path
) -> None:
    all_losses, right = uninterrupted
    checkpoints = tmp_path / "first_layout" / "checkpoints"
    first = run_ranks(train_to, first_layout.workers, first_layout, str(checkpoints), FIRST)[0]
    assert np.array(first) == pytest.approx(all_losses[:FIRST], rel=1e-5)
    assert commands.verify(tmp_path / "first_layout")[0] and not list(checkpoints.glob(".part-*"))
    for layout in TO[first_layout]:
        shutil.copytree(checkpoints, tmp_path / str(layout) / "checkpoints")
        rest = run_ranks(
            train_to, layout.workers, layout, str(tmp_path / str(layout) / "checkpoints"), LAST
        )[0]
        assert np.array(rest) == pytest.approx(all_losses[FIRST:], rel=1e-5), layout
        if first_layout.tensor == first_layout.pipeline == layout.tensor == layout.pipeline == 1:
            assert commands.digest_line(tmp_path / str(layout)) == right, layout


def test_two_layout_changes_keep_the_bits(tmp_path: Path) -> None:
    uninterrupted = run_ranks(
        train_to, 1, Layout(), str(tmp_path / "uninterrupted" / "checkpoints"), LAST, True
    )[0]
    checkpoints, losses = str(tmp_path / "changed" / "checkpoints"), []
    for steps, layout in ((1, Layout(2)), (2, Layout(1, 2)), (LAST, Layout(2, 2))):
        losses += run_ranks(train_to, layout.workers, layout, checkpoints, steps, True)[0]
    assert losses == uninterrupted
    assert commands.digest_line(tmp_path / "changed") == commands.digest_line(
        tmp_path / "uninterrupted"
    )


def test_damaged_shard_is_detected_and_the_previous_checkpoint_loaded(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for steps in (1, FIRST):
        run_ranks(train_to, 2, Layout(1, 2), str(checkpoints), steps)
    parts = sorted((checkpoints / "step-00000002").glob("*.safetensors"))
    assert [path.name for path in parts] == [
        "tensors-00000.safetensors",
        "tensors-01000.safetensors",
    ]
    content = bytearray(parts[1].read_bytes())
    content[len(content) // 2] ^= 4
    parts[1].write_bytes(content)
    assert not commands.verify(tmp_path)[0]
    assert (
        len(run_ranks(train_to, 2, Layout(1, 2), str(checkpoints), FIRST)[0]) == FIRST - 1
    )  # from step 1
    assert commands.verify(tmp_path)[0]


def outcome_of_resume(runtime: ElasticRuntime, layout: Layout, folder: str, how: str) -> str:
    local = build_local_model(runtime, model_named("translator"), layout, torch.float32)
    checkpointer = Checkpointer(
        Path(folder), runtime, local, make_optimizers(local, OptimOptions())[0]
    )
    try:
        return f"step {checkpointer.resume(how)}"
    except CheckpointError as error:
        return error.what


def test_all_workers_of_a_sharded_replica_resume_or_none(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    run_ranks(train_to, 2, Layout(1, 2), str(checkpoints), FIRST)
    assert (
        run_ranks(outcome_of_resume, 2, Layout(1, 2), str(checkpoints), str(FIRST))
        == [f"step {FIRST}"] * 2
    )
    part = checkpoints / f"step-{FIRST:08d}" / "tensors-01000.safetensors"
    content = bytearray(part.read_bytes())
    for place in (len(content) // 2, 12):  # in a tensor, then in the header
        content[place] ^= 4
        part.write_bytes(content)
        outcomes = run_ranks(outcome_of_resume, 2, Layout(1, 2), str(checkpoints), str(FIRST))
        assert outcomes == [f"damaged: the checkpoint of step {FIRST}"] * 2


WIDE = replace(CONFIG, vocab_size=2000, dim=256, ffn_dim=512)
WIDE_MODEL = Model(
    "llama", lambda: Llama(WIDE), lambda name, shape: init_param(name, shape, WIDE.n_layers, 1)
)


def resume_and_save(
    runtime: ElasticRuntime, layout: Layout, folder: str, step: int, hosts: int = 1
) -> tuple[int, int]:
    """Resume, or make a state by one update, and save it as `step`. Return the bytes that this rank
    read from files, and how many it sent to other hosts."""
    per_host = runtime.world.size // hosts
    runtime.world = replace(runtime.world, host=f"host {runtime.world.rank // per_host}")
    local = build_local_model(runtime, WIDE_MODEL, layout, torch.float32)
    optimizer = make_optimizers(local, OptimOptions())[0]
    send, sent = runtime.group.isend, list[int]()

    def isend(tensor: torch.Tensor, rank: int) -> Any:
        if rank // per_host != runtime.world.rank // per_host:
            sent.append(tensor.nbytes)
        return send(tensor, rank)

    runtime.group.isend = isend  # type: ignore[method-assign]
    with Checkpointer(Path(folder), runtime, local, optimizer) as checkpointer:
        before = bytes_read()
        resumed = checkpointer.resume()
        read = bytes_read() - before
        if not resumed:
            for parameter in local.parameters():
                parameter.grad = (
                    torch.arange(parameter.numel(), dtype=torch.float32).cos().view_as(parameter)
                )
            optimizer.step()
        checkpointer.save(step)
    return read, sum(sent)


@pytest.mark.parametrize("first_layout", [Layout(), Layout(2, 2), Layout(1, 1, 2)], ids=str)
def test_each_byte_is_read_once_and_sent_once_to_each_host_in_any_layout(
    first_layout: Layout, tmp_path: Path
) -> None:
    """Every rank verified its share and then read again the files that it needed."""
    saved = tmp_path / "saved"
    run_ranks(resume_and_save, first_layout.workers, first_layout, str(saved), 1)
    size = sum(path.stat().st_size for path in (saved / "step-00000001").iterdir())
    assert size > 20_000_000
    for layout, hosts in (
        (Layout(1, 2), 1),
        (Layout(2, 2), 2),
        (Layout(1, 2, 2), 1),
        (Layout(2, 1, 2), 2),
        (Layout(1, 1, 1, 2), 1),
    ):
        folder = tmp_path / str(layout)
        shutil.copytree(saved, folder)
        read, sent = map(
            sum,
            zip(
                *run_ranks(resume_and_save, layout.workers, layout, str(folder), 2, hosts),
                strict=True,
            ),
        )
        print(
            f"{first_layout} -> {layout} on {hosts} hosts: {read / size:.2f} of the checkpoint read, {sent / size:.2f} sent"
        )
        assert size <= read < 1.05 * size, layout
        assert sent <= size * (hosts - 1), layout
        digests = [commands.digest_line(folder, step).split()[-1] for step in (1, 2)]
        assert digests[0] == digests[1], layout


def test_exports_of_all_layouts_are_equal(tmp_path: Path) -> None:
    for name, layout in (("whole", Layout()), ("sharded", Layout(2, 2))):
        run_ranks(train_to, layout.workers, layout, str(tmp_path / name / "checkpoints"), 2)
        assert "step 2" in commands.export(tmp_path / name, None, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (
        tmp_path / "sharded.safetensors"
    ).read_bytes()
    whole, sharded = (
        model_tensors(open_tensors(tmp_path / name / "checkpoints" / folder_name(2), 2))
        for name in ("whole", "sharded")
    )
    assert set(whole) == set(sharded) and all(
        torch.equal(whole[name], sharded[name]) for name in whole
    )
