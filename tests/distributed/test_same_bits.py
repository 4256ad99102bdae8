"""One sha256 of the trained state for every number of processes, through stops and kills.

The default model with dropout, bf16 autocast and clipping, K = 8, on a small part of the embedded
corpus. A rank is killed by SIGKILL. Each rank records its samples in a ledger file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.ranks import run_ranks

from lockstep.checkpoint.commands import digest_line
from lockstep.config.saved_run import open_run
from lockstep.corpus.encoded_pairs import EncodedPairs
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.metrics import read_metrics

FLAGS = {
    "data.pairs": "1500",
    "data.held_out": "50",
    "batch.micro_batches": "8",
    "batch.tokens": "128",
    "batch.buckets": "3",
    "compute.precision": "bf16",
    "optim.clip_norm": "0.5",
    "checkpoint.every_steps": "3",
    "checkpoint.keep": "0",
    "evaluate.at_end": "0",
    "elastic.rehearse": "false",  # so that the ledgers have each micro-batch once
}
STEPS = 6


def trained(
    runtime: ElasticRuntime,
    folder: str,
    steps: int,
    kill: tuple[int, int] | None,
    flags: Mapping[str, str] | None = None,
) -> str:
    """Train in `folder` to `steps`; kill = (rank, step): that rank dies by SIGKILL after that step."""
    path = Path(folder)
    resolved = open_run(path, None, {**FLAGS, **(flags or {}), "steps": str(steps)}, {})
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    if kill and runtime.world.rank == kill[0]:
        threading.Thread(
            target=die_after, args=(path / "metrics.jsonl", kill[1]), daemon=True
        ).start()
    keep_ledger(path / f"ledger-{runtime.world.rank}.jsonl")
    train(resolved, path, runtime)
    return digest_line(path) if runtime.world.leader else ""


def die_after(metrics: Path, step: int) -> None:
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < step:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def keep_ledger(path: Path) -> None:
    """Record every set of samples that this rank turns into tensors."""
    gather = EncodedPairs.gather

    def noted(self: EncodedPairs, ids: np.ndarray, rows: int, *lengths: int) -> object:
        with path.open("a") as file:
            file.write(json.dumps([int(i) for i in ids]) + "\n")
        return gather(self, ids, rows, *lengths)

    EncodedPairs.gather = noted  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that one process trained without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(trained, 1, str(folder), STEPS, None)
    return folder


def prepared_folder(uninterrupted: Path, folder: Path) -> Path:
    """Return a new folder with the tokenized corpus, which takes seconds to make."""
    shutil.copytree(uninterrupted / "data", folder / "data")
    return folder


def losses(folder: Path) -> list[tuple[int, float, float, int]]:
    return [
        (line["step"], line["loss"], line["norm"], line["tokens"])
        for line in read_metrics(folder / "metrics.jsonl")
    ]


def fed(folder: Path) -> list[str]:
    return sorted(
        line for path in folder.glob("ledger-*.jsonl") for line in path.read_text().splitlines()
    )


@pytest.mark.parametrize(("size", "then"), [(1, 3), (2, 2), (3, 4), (4, 1)])
def test_stopped_run_resumes_on_another_number_of_processes(
    uninterrupted: Path, tmp_path: Path, size: int, then: int
) -> None:
    folder = prepared_folder(uninterrupted, tmp_path / "run")
    run_ranks(trained, size, str(folder), STEPS // 2, None)
    run_ranks(trained, then, str(folder), STEPS, None)
    assert digest_line(folder) == digest_line(uninterrupted)
    assert losses(folder) == losses(uninterrupted) and [
        step for step, *_ in losses(folder)
    ] == list(range(1, STEPS + 1))
    assert fed(folder) == fed(uninterrupted)


@pytest.mark.parametrize("victim", [0, 1])
def test_run_killed_and_resumed_has_the_same_bits(
    uninterrupted: Path, tmp_path: Path, victim: int
) -> None:
    folder = prepared_folder(uninterrupted, tmp_path / "run")
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(trained, 2, str(folder), STEPS, (victim, 4))
    before = losses(folder)
    assert 3 < len(before) < STEPS + 1
    run_ranks(trained, 3, str(folder), STEPS, None)
    assert digest_line(folder) == digest_line(uninterrupted)
    assert losses(folder) == losses(uninterrupted)
    assert before == losses(uninterrupted)[: len(before)], (
        "repeated steps must have the same losses"
    )


@pytest.mark.long
def test_a_compiled_model_has_one_digest_in_replicas_and_shards(
    uninterrupted: Path, tmp_path: Path
) -> None:
    flags = {
        "compute.compile": "true",
        "batch.buckets": "1",
        "model.encoder_layers": "1",
        "model.decoder_layers": "2",
    }
    digests = {}
    for replicas, shards in ((1, 1), (2, 1), (1, 2), (2, 2)):
        folder = tmp_path / f"{replicas}-{shards}"
        in_layout = {**flags, "layout.shard": str(shards), "layout.replicate": str(replicas)}
        digests[replicas, shards] = run_ranks(
            trained, replicas * shards, str(folder), 3, None, in_layout
        )[0]
    assert len(set(digests.values())) == 1, digests
