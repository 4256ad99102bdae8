"""Timeouts of waits for c10d work: gloo blocks this thread, NCCL only a stream."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.runtime.work import WorkWaiter


class RecordingWork(dist.Work):
    """A work that is done, and records how it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.timeouts.append(timeout)
        return True


@pytest.mark.parametrize("in_thread", [True, False])
def test_only_a_cpu_waits_with_a_timeout(in_thread: bool) -> None:
    """With one, NCCL's wait polls until the kernel has finished, so nothing overlaps."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7)
    )
    try:
        work = RecordingWork()
        WorkWaiter(in_thread=in_thread).wait([None, work])
        assert work.timeouts == [timedelta(seconds=7) if in_thread else None]
    finally:
        dist.destroy_process_group()
