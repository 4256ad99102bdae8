"""After a loss a survivor holds no gradient of the broken step beyond the buckets of the next one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from support.ranks import run_ranks
from torch import nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.parallel.build_replica import build_replica

M_MMAP_THRESHOLD = -3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def bytes_held(runtime: ElasticRuntime, broken_at: int) -> list[float]:
    """Break step 1 after a micro-batch; return resident memory, in gradients of the model.

    After step 0, when step 1 breaks, after `release_groups`, and after the next step.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # freed tensors return to the system
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    before, held = resident_bytes(), []
    replica = build_replica(model, micro_batches=8, bucket_bytes=10_000_000)
    for step in range(3):
        loop = replica.micro_batches(step)
        for k in loop:
            replica.backward(replica(torch.ones(1, 1024)).square().sum())
            if (step, k) == (1, broken_at):
                break
        loop.close()
        held.append(resident_bytes() - before)
        if step == 1:
            replica.release_groups()
            held.append(resident_bytes() - before)
    replica.__exit__()
    return [held_bytes / gradient_bytes for held_bytes in held]


def test_partial_sums_of_a_broken_step_are_freed_at_the_heal() -> None:
    for broken_at in (3, 5, 6):
        _, broken, released, after_next = run_ranks(bytes_held, 1, broken_at)[0]
        assert broken > 1.9, "the sum of an earlier subtree, and the gradients"
        assert released < 1.5 and after_next < 1.5, (broken_at, broken, released, after_next)
