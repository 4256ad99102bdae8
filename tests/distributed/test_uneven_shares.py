"""Uneven shares of the micro-batches have the bits of equal ones. Real processes over gloo."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from support.fork_loop import LoopResult, run_loop
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.parallel.build_replica import build_replica
from lockstep.record.metrics import iter_steps

LOOP = Path(__file__).parents[1] / "support" / "loops" / "uneven.py"
SHARES: dict[int, list[tuple[int, ...]]] = {
    1: [(8,)] * 4,
    2: [(6, 2), (5, 3), (1, 7), (4, 4)],
    3: [(4, 3, 1), (1, 1, 6), (2, 5, 1), (3, 3, 2)],
}


def digest_of(tensors: list[Tensor | None]) -> str:
    return hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for tensor in tensors if tensor is not None)
    ).hexdigest()[:16]


def gradients(runtime: ElasticRuntime, bucket_bytes: int) -> list[str]:
    """Return the digest of the gradient of each step, with other shares in each."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.2), nn.GELU(), nn.Linear(33, 16))
    digests = []
    with build_replica(model, micro_batches=8, bucket_bytes=bucket_bytes) as replica:
        for step, shares in enumerate(SHARES[runtime.world.size]):
            own = []
            for k in replica.micro_batches(step, shares=shares):
                own.append(k)
                replica.backward(replica(torch.full((3, 16), 0.1 * k)).square().sum())
            assert own == replica.own_leaves and len(own) == shares[runtime.world.rank]
            digests.append(digest_of([p.grad for p in model.parameters()]))
    return digests


@pytest.mark.parametrize("bucket_bytes", [100, 25_000_000])
def test_gradient_has_one_digest_for_uneven_shares_of_1_to_3_replicas(bucket_bytes: int) -> None:
    digests = [run_ranks(gradients, size, bucket_bytes) for size in (1, 2, 3)]
    assert {tuple(of_rank) for of_size in digests for of_rank in of_size} == {tuple(digests[0][0])}


@pytest.mark.parametrize(("workers", "shard"), [(2, 1), (4, 2)])
def test_slow_replica_gets_fewer_micro_batches_within_ten_steps_and_the_bits_stay(
    tmp_path: Path, workers: int, shard: int
) -> None:
    """Replica 1 takes three times as long from step 6 on."""
    alone, uneven = tmp_path / "alone", tmp_path / "uneven"
    assert run_loop(LOOP, alone, 1, pause_s=0.0) == LoopResult(0, "")
    assert run_loop(LOOP, uneven, workers, shard=shard) == LoopResult(0, "")
    assert digest_line(alone) == digest_line(uneven)
    shares = {line["step"]: line["first_share"] for line in iter_steps(uneven / "metrics.jsonl")}
    assert shares[17] > 4 and shares[30] > 4, shares  # of 8
