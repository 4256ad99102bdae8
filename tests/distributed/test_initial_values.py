"""Initial values are drawn once per replica in a new run, and not at all when a state is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.checkpoint import commands
from lockstep.config.saved_run import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError
from lockstep.parallel.build_replica import build_replica, take_weights_of_rank_0
from lockstep.recipes.script import lock_run_folder, train
from lockstep.tasks import translation
from lockstep.tasks.open import open_task
from lockstep.training.checkpointer import Checkpointer

TINY: dict[str, Any] = {
    "data.kind": "files",
    "tokenizer.kind": "word",
    "tokenizer.min_frequency": 1,
    "evaluate.at_end": 0,
}
TINY |= {
    "model.dim": 16,
    "model.n_heads": 2,
    "model.encoder_layers": 2,
    "model.decoder_layers": 2,
    "model.ffn_dim": 24,
}
TINY |= {
    "data.held_out": 40,
    "checkpoint.every_steps": 1,
    "batch.micro_batches": 4,
    "model.dropout": 0.0,
}


def text_of(folder: Path) -> str:
    rng = random.Random(1)
    numbers = [[rng.randrange(10) for _ in range(6)] for _ in range(2000)]
    (folder / "text.tsv").write_text(
        "".join(
            f"{' '.join(f'a{n}' for n in row)}\t{' '.join(f'b{n}' for n in row)}\n"
            for row in numbers
        )
    )
    return str(folder / "text.tsv")


def train_and_count(
    runtime: ElasticRuntime, folder: Path, flags: dict[str, Any]
) -> tuple[int, int]:
    """Train the run; return (the random numbers that this worker drew, those of the whole model)."""
    init_param, drawn = translation.init_param, list[int]()

    def count(name: str, shape: torch.Size, seed: int) -> Tensor:
        drawn.append(shape.numel() if len(shape) > 1 else 0)
        return init_param(name, shape, seed)

    translation.init_param = count
    try:
        resolved = open_run(folder, None, {**TINY, **flags}, {})
        with lock_run_folder(folder, resolved, alone=runtime.world.leader):
            train(resolved, folder, runtime)
        task = open_task(resolved.run, folder, runtime)
    finally:
        translation.init_param = init_param
    return sum(drawn), sum(p.numel() for p in task.meta_model().parameters() if p.dim() > 1)


def test_a_resumed_run_draws_no_initial_values(tmp_path: Path) -> None:
    """Both workers drew all of them, and the checkpoint replaced them."""
    flags = {"data.train": text_of(tmp_path)}
    first = run_ranks(train_and_count, 2, tmp_path / "run", {**flags, "steps": 1})
    assert first[0][0] == first[0][1] == first[1][0] > 1000
    assert [
        drawn for drawn, _ in run_ranks(train_and_count, 2, tmp_path / "run", {**flags, "steps": 2})
    ] == [0, 0]
    uninterrupted = run_ranks(train_and_count, 1, tmp_path / "uninterrupted", {**flags, "steps": 2})
    assert uninterrupted[0][0] == uninterrupted[0][1]
    assert commands.digest_line(tmp_path / "run") == commands.digest_line(
        tmp_path / "uninterrupted"
    )


def test_the_shards_of_a_replica_draw_each_value_once(tmp_path: Path) -> None:
    """Each of them drew the whole model and kept its rows. The digest is that of one worker."""
    flags = {"data.train": text_of(tmp_path), "steps": 1, "batch.micro_batches": 4}
    run_ranks(train_and_count, 1, tmp_path / "whole", flags)
    for shards in (2, 3):
        counts = run_ranks(
            train_and_count, shards, tmp_path / str(shards), {**flags, "layout.shard": shards}
        )
        total = counts[0][1]
        assert sum(drawn for drawn, _ in counts) == total, "every value is drawn by one worker"
        assert max(drawn for drawn, _ in counts) < 0.8 * total
        assert commands.digest_line(tmp_path / str(shards)) == commands.digest_line(
            tmp_path / "whole"
        )


def train_without_values(runtime: ElasticRuntime, folder: Path, flags: dict[str, Any]) -> str:
    """Train a new run that takes its parameters for loaded; return the error."""
    load = Checkpointer.resume

    def resume(self: Checkpointer, *args: Any, **kwargs: Any) -> int:
        step = load(self, *args, **kwargs)
        self.loaded = True
        return step

    Checkpointer.resume = resume  # type: ignore[method-assign]
    try:
        train_and_count(runtime, folder, flags)
    except DivergedError as error:
        return str(error)
    finally:
        Checkpointer.resume = load  # type: ignore[method-assign]
    return ""


def test_a_model_without_values_is_refused_at_the_first_step(tmp_path: Path) -> None:
    (error,) = run_ranks(
        train_without_values, 1, tmp_path / "run", {"data.train": text_of(tmp_path), "steps": 1}
    )
    assert "nan" in error
    assert not commands.committed_steps(tmp_path / "run" / "checkpoints")


def start_replica(runtime: ElasticRuntime, seeds: tuple[int, int]) -> tuple[int, list[float]]:
    """Return how many tensors were sent, and the weights after the start."""
    sent, broadcast = list[int](), dist.broadcast

    def count(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return broadcast(tensor, *arguments, **options)

    torch.manual_seed(seeds[runtime.world.rank])
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).requires_grad_()
    dist.broadcast = count
    try:
        build_replica(model, micro_batches=2)
    finally:
        dist.broadcast = broadcast
    return len(sent), model[0].weight.flatten().tolist()


@pytest.mark.parametrize(
    ("seeds", "tensors"), [((1, 1), 0), ((1, 2), 7)], ids=["equal", "different"]
)
def test_weights_are_sent_only_where_they_differ(seeds: tuple[int, int], tensors: int) -> None:
    first, second = run_ranks(start_replica, 2, seeds)
    assert first == second and first[0] == tensors
    torch.manual_seed(1)
    assert first[1] == nn.Linear(3, 2).weight.flatten().tolist()


def take_strided(runtime: ElasticRuntime) -> list[Any]:
    """Take tensors that are parts of others; return these."""
    rank = dist.get_rank()
    rows, columns = torch.full((3, 4), float(rank)), torch.arange(6.0).view(2, 3) + 10 * rank
    take_weights_of_rank_0([rows[:, :2], columns.T], runtime.world.device, runtime.group.wait)
    return [rows.tolist(), columns.tolist()]


def test_weights_that_are_parts_of_tensors_are_taken_whole() -> None:
    """gloo sends and overwrites adjacent elements, whatever the strides."""
    for rank, (rows, columns) in enumerate(run_ranks(take_strided, 2)):
        assert rows == [[0.0, 0.0, rank, rank]] * 3
        assert columns == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
