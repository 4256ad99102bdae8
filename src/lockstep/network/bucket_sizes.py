"""The buckets: gradients that travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LAST_BYTES = 2**20  # of the last bucket, whose exchange no backward pass hides


def group_by_size(
    sizes: Sequence[tuple[Hashable, int]], bucket_bytes: int, order: Sequence[int]
) -> list[list[int]]:
    """Group parameters, by number, into buckets of one dtype, in the order of completion.

    Made from the end, so that the last bucket is small. Parameters without elements are in no
    bucket: autograd may leave them out.

    sizes  [(dtype, bytes)] of the parameters
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
        limit = bucket_bytes if len(groups) > 1 else min(bucket_bytes, LAST_BYTES)
        if sum(sizes[j][1] for j in group) >= limit:
            del open_groups[dtype]
    return [group[::-1] for group in reversed(groups)]
