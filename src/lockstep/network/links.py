"""The cost of a message: latency, then bytes at a rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The cost of a message between two ranks: of the same host, or of different hosts.

    latency_s    seconds from the start of a send to its first byte on the other side
    bytes_per_s  rate of one direction; above zero
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + bytes / self.bytes_per_s
