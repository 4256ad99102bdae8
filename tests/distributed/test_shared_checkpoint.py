"""Ranks read a checkpoint together: each byte once, then from rank to rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lockstep.checkpoint import state_dict
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, PeersLostError
from lockstep.training import loading
from lockstep.training.checkpointer import Checkpointer

SIZE = 1_000_000  # bytes of each of the five matrices, and of their two moments


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(5)), nn.BatchNorm1d(3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(step)
    model, optimizer = build()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


class Average:
    """State besides parameters, with a tensor."""

    def __init__(self, step: int) -> None:
        self.values = torch.arange(1000.0) * step

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values["values"]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def resume(runtime: ElasticRuntime, folder: Path, hosts: int = 1) -> dict[str, Any]:
    """Resume; return the digest of the state, the bytes that this rank read, and the sends to other hosts."""
    per_host = runtime.world.size // hosts
    runtime.world = replace(runtime.world, host=f"host {runtime.world.rank // per_host}")
    checkpointer = Checkpointer(folder, runtime, *build(), state={"average": Average(0)})
    send, sent = runtime.group.isend, list[int]()

    def isend(tensor: torch.Tensor, rank: int) -> Any:
        if rank // per_host != runtime.world.rank // per_host:
            sent.append(tensor.numel())
        return send(tensor, rank)

    runtime.group.isend = isend  # type: ignore[method-assign]
    before = bytes_read()
    try:
        step = checkpointer.resume()
    except CheckpointError as error:
        return {"error": error.what}
    count = bytes_read() - before
    return {
        "step": step,
        "digest": state_dict.digest(checkpointer.state_dict()),
        "read": count,
        "sent": sum(sent),
    }


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two checkpoints of 15 MB in eleven files each."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
        state = Checkpointer(
            folder, runtime, *trained(step), state={"average": Average(step)}
        ).state_dict()
        CheckpointStore(folder, file_bytes=2 * SIZE).save(
            step, state, {"run_id": "0123456789abcdef"}
        )
    return folder


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (3, 1), (4, 2)])
def test_each_byte_is_read_once_and_sent_once_to_each_host(
    checkpoints: Path, ranks: int, hosts: int
) -> None:
    """Every rank read all of it: three ranks 45 MB."""
    size = sum(path.stat().st_size for path in (checkpoints / "step-00000002").iterdir())
    right = state_dict.digest(CheckpointStore(checkpoints).load(2).tensors)
    outcomes = run_ranks(resume, ranks, checkpoints, hosts)
    assert {(outcome["step"], outcome["digest"]) for outcome in outcomes} == {(2, right)}
    assert size <= sum(outcome["read"] for outcome in outcomes) < 1.1 * size
    assert max(outcome["read"] for outcome in outcomes) < 1.5 * size / ranks + SIZE
    between_hosts = sum(outcome["sent"] for outcome in outcomes)
    assert (
        0.99 * size * (hosts - 1) < between_hosts <= size * (hosts - 1)
        if hosts > 1
        else between_hosts == 0
    )


def test_damage_in_the_share_of_any_rank_is_found_by_all(checkpoints: Path) -> None:
    files = sorted((checkpoints / "step-00000002").glob("*.safetensors"))
    flip_byte(files[4])
    outcomes = run_ranks(resume, 3, checkpoints)
    assert [outcome["step"] for outcome in outcomes] == [1, 1, 1] and committed_steps(
        checkpoints
    ) == [1]
    assert len({outcome["digest"] for outcome in outcomes}) == 1
    flip_byte(sorted((checkpoints / "step-00000001").glob("*.safetensors"))[7])
    assert run_ranks(resume, 3, checkpoints) == 3 * [{"error": "damaged: the checkpoint of step 1"}]
    assert committed_steps(checkpoints) == [1]


def resume_with_other_bytes(runtime: ElasticRuntime, folder: Path) -> str:
    """Resume while rank 1 changes a byte after it was hashed; return the error."""
    shared = loading.SharedTensors

    def share(*args: Any) -> Any:
        tensors = shared(*args)
        if runtime.world.rank == 1:
            next(stored for stored, _ in tensors._own.values() if stored.spec.bytes == SIZE).data[
                5
            ] ^= 1
        return tensors

    loading.SharedTensors = share  # type: ignore[assignment,misc]
    try:
        resume(runtime, folder)
    except (PeersLostError, RuntimeError) as error:  # a RuntimeError on rank 1, which rank 0 leaves
        return str(error)
    finally:
        loading.SharedTensors = shared  # type: ignore[misc]
    return ""


def test_bytes_that_change_on_the_way_are_refused(checkpoints: Path) -> None:
    errors = run_ranks(resume_with_other_bytes, 2, checkpoints)
    assert "arrived with other bytes than rank 1 sent" in errors[0]


def resume_and_die(runtime: ElasticRuntime, folder: Path) -> str:
    """Resume; rank 1 dies when it receives its first tensors."""
    if runtime.world.rank == 1:
        runtime.group.irecv = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    try:
        resume(runtime, folder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_death_of_a_rank_is_an_error_in_the_others(checkpoints: Path) -> None:
    answers = run_ranks(resume_and_die, 3, checkpoints, kill=(1,), timeout_s=40)
    assert answers[0] and answers[2]
