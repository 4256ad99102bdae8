"""Time of two parts of a start and of a step, as ratios to doing the same item by item.

    python -m bench.growth.startup

Both sides alternate in one process; the median of the ratios counts. The bytes and random numbers of
a start are counted in tests/unit/data/test_file_digests.py, tests/distributed/test_initial_values.py
and tests/distributed/test_shared_checkpoint.py.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.order import BucketOrder, choose_bucket_shapes
from lockstep.data.text.packing import count_labels
from lockstep.data.text.token_stream import TokenStream, TokenStreamWriter

REPETITIONS = 9


def compare(name: str, one_by_one: Callable[[int], Any], at_once: Callable[[int], Any]) -> None:
    """Print the median seconds of both sides and the median of their ratios; the results must agree."""
    seconds: list[tuple[float, float]] = []
    for number in range(REPETITIONS):
        start_s = time.perf_counter()
        first = one_by_one(number)
        middle_s = time.perf_counter()
        second = at_once(number)
        seconds.append((middle_s - start_s, time.perf_counter() - middle_s))
        assert np.array_equal(first, second), name
    before, after = (statistics.median(column) for column in zip(*seconds, strict=True))
    ratio = statistics.median(first_s / second_s for first_s, second_s in seconds)
    print(
        f"{name}: one by one {1e3 * before:.1f} ms, at once {1e3 * after:.1f} ms, ratio {ratio:.1f}"
    )


def write_chats(folder: Path, count: int) -> TokenStream:
    """Write chats of 20 to 1,000 tokens, every second of which has a loss."""
    writer = TokenStreamWriter(folder, "train", 1 << 16, has_loss_mask=True)
    for size in np.random.default_rng(1).integers(20, 1000, count).tolist():
        writer.add(bytes(size), (b"\0\1" * size)[:size])
    writer.close()
    return TokenStream.open(folder, "train")


def main() -> None:
    lengths = (np.arange(1_000_000) * 7919 % 120 + 4).astype(np.int32)
    shapes, _ = choose_bucket_shapes(lengths, tokens=4096, shapes=6)
    for k in (64, 512):
        order = BucketOrder(lengths, shapes, micro_batches=k, seed=1)
        compare(
            f"tokens of a step, {k} micro-batches",
            lambda step, order=order, k=k: int(
                lengths[np.concatenate([order.ids(step, i) for i in range(k)])].sum()
            ),
            lambda step, order=order: int(lengths[order.step_ids(step)].sum()),
        )
    with tempfile.TemporaryDirectory() as folder:
        stream = write_chats(Path(folder), 10_000)
        spans = list(itertools.pairwise(map(int, stream.offsets)))
        compare(
            "labels of 10,000 chats",
            lambda _: np.array(
                [int(stream.read_loss_mask(start + 1, end).sum()) for start, end in spans]
            ),
            lambda _: count_labels(stream),
        )


if __name__ == "__main__":
    main()
