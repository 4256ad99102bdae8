"""Measure how long a step waits for communication."""

from __future__ import annotations

import time
from typing import Any

import torch


class CommTimer:
    """Times of the last bucket sent and received in a step; on CUDA by events."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        self.buckets = 0
        self._last_sent: Any = None
        self._last_received: Any = None

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sent(self) -> None:
        self.buckets += 1
        self._last_sent = self.now()

    def received(self) -> None:
        self._last_received = self.now()

    def exposed_s(self) -> float:
        if self._last_sent is None or self._last_received is None:
            return 0.0
        if self.cuda:
            self._last_received.synchronize()
            return max(0.0, float(self._last_sent.elapsed_time(self._last_received)) / 1000)
        return max(0.0, float(self._last_received - self._last_sent))
