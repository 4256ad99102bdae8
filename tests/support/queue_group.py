"""Process groups whose connections are queues, so that threads can run an exchange."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

from support.traffic import Traffic
from torch import Tensor

Transfers = Iterable[tuple[int, Tensor]]


class QueueGroup:
    """One rank of a process group whose connections are queues; also waits for its receives."""

    def __init__(
        self, rank: int, size: int, queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]]
    ) -> None:
        self._rank, self._size, self.queues = rank, size, queues
        self.traffic = Traffic()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def wait(self, works: list[Callable[[], object]], group: object = None) -> None:
        for work in works:
            work()


def start_exchange(
    sends: Transfers, receives: Transfers, group: QueueGroup, tag: int
) -> list[Callable[[], object]]:
    for peer, tensor in sends:
        if tensor.numel():
            group.traffic.add([tensor])
            group.queues[group.rank(), peer].put(tensor.clone())
    pairs = [
        (tensor, group.queues[peer, group.rank()]) for peer, tensor in receives if tensor.numel()
    ]
    return [
        lambda tensor=tensor, source=source: tensor.copy_(source.get(timeout=20))
        for tensor, source in pairs
    ]  # type: ignore[misc]


def run_in_threads(size: int, run: Callable[[QueueGroup], None]) -> None:
    """Call run(group) for each rank, one thread per rank."""
    queues = {
        (sender, receiver): queue.SimpleQueue[Tensor]()
        for sender in range(size)
        for receiver in range(size)
    }
    threads = [
        threading.Thread(target=run, args=(QueueGroup(rank, size, queues),)) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
