"""The buckets: gradients that travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LAST_BYTES = 2**20  # of the last bucket, whose exchange no backward pass hides


def default_bucket_size(device_type: str) -> int:
    """Return how many bytes of gradients are reduced together: NCCL needs more for its
    bandwidth."""
    return 100_000_000 if device_type == "cuda" else 25_000_000


def group_by_size(
    sizes: Sequence[tuple[Hashable, int]], limit: int, order: Sequence[int]
) -> list[list[int]]:
    """Group parameters, by number, into buckets of one dtype, in the order of completion.

    Made from the end, so that the last bucket is small. Parameters without elements are in no
    bucket: autograd may leave them out.

    sizes  [(dtype, bytes)] of the parameters
    limit  bytes of a bucket
    order  in which their gradients become ready
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, list[int]] = {}
    for i in reversed(order):
        dtype, size = sizes[i]
        if not size:
            continue
        if dtype not in open_groups:
            groups.append(open_groups.setdefault(dtype, []))
        group = open_groups[dtype]
        group.append(i)
        most = limit if len(groups) > 1 else min(limit, LAST_BYTES)
        if sum(sizes[j][1] for j in group) >= most:
            del open_groups[dtype]
    return [group[::-1] for group in reversed(groups)]
