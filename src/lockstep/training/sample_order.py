"""Which samples of a user's data set form a micro-batch: by number, by length, or of a mixture."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset

from lockstep.data.order import BucketOrder, MixtureOrder, UniformOrder, choose_bucket_shapes
from lockstep.errors import UsageError
from lockstep.training.loader import Order, makes_micro_batches, number_of_samples

LONGEST_WINDOW = 10_000  # samples of a mixture in which its proportions are exact
SHAPES = 8  # of the micro-batches under a token budget
DISTINCT_LENGTHS = 256  # the choice of the shapes takes the square of their number in memory


class Mixture(ConcatDataset[Any]):
    """Data sets whose samples a loader takes in exact proportions.

    datasets  each with __len__ and __getitem__; small ones are repeated, in shuffled epochs
    weights   of the samples of each data set: [7, 3] or [0.7, 0.3]; or {step: weights} for stages
              that start with these steps: {0: [7, 3], 1000: [1, 1]}

    Of each 10 samples of a run with weights [7, 3], counted from the start of the stage, exactly 7
    are of the first data set. As a data set it has the samples of all data sets, one after the
    other.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float] | Mapping[int, Sequence[float]]
    ) -> None:
        self.sizes = tuple(
            number_of_samples(dataset, f"Mixture(datasets), data set {i}")
            for i, dataset in enumerate(datasets)
        )
        if not datasets or 0 in self.sizes:
            raise UsageError(
                f"data sets of {self.sizes} samples",
                "Mixture(datasets, weights)",
                "give data sets with samples",
            )
        super().__init__(datasets)
        stages = sorted(weights.items()) if isinstance(weights, Mapping) else [(0, weights)]
        if not stages or stages[0][0] != 0 or any(step != int(step) for step, _ in stages):
            raise UsageError(
                "the stages do not start with step 0",
                f"Mixture(datasets, weights={weights})",
                "give {0: weights, STEP: weights of the stage from STEP on}",
            )
        self.stages = tuple(
            (int(step), whole_weights(of_stage, len(self.sizes))) for step, of_stage in stages
        )


def whole_weights(weights: Sequence[float], datasets: int) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of the decimal numbers `weights`."""
    where = f"Mixture(datasets, weights), weights {weights}"
    try:
        exact = [Fraction(str(weight)) for weight in weights]
    except ValueError:
        exact = []
    if len(exact) != datasets or min(exact) < 0 or not any(exact):
        raise UsageError(
            f"these are not the weights of {datasets} data sets",
            where,
            "give one number of at least 0 for each, not all 0",
        )
    scale = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * scale) for weight in exact]
    integers = [weight // math.gcd(*integers) for weight in integers]
    if sum(integers) > LONGEST_WINDOW:
        raise UsageError(
            f"these proportions are exact only over windows of {sum(integers):,} samples",
            where,
            f"round the weights to integers whose sum is at most {LONGEST_WINDOW:,}",
        )
    return tuple(integers)


def make_order(
    dataset: Any,
    batch_size: int | None,
    tokens: int | None,
    lengths: Any,
    micro_batches: int,
    seed: int,
) -> tuple[Order, str]:
    """Return the order of a Session's loader, and what a resumed run must have in common with
    it."""
    if makes_micro_batches(dataset):
        return order_of_micro_batches(dataset, (batch_size, tokens, lengths), micro_batches, seed)
    samples = number_of_samples(dataset, "session.loader(dataset, ...)")
    if batch_size is None:
        return bucket_order(dataset, samples, tokens, lengths, micro_batches, seed)
    if tokens is not None or lengths is not None:
        raise UsageError(
            "batch_size cannot be combined with tokens and lengths",
            f"session.loader(batch_size={batch_size}, tokens={tokens}, lengths=...)",
            "give batch_size, or tokens and lengths",
        )
    if not 1 <= batch_size <= samples or batch_size % micro_batches:
        raise UsageError(
            f"batch_size={batch_size} with micro_batches={micro_batches} and {samples} samples",
            "session.loader(...), Session(micro_batches=...)",
            "batch_size counts the samples of a whole step: "
            f"give a multiple of {micro_batches}, at most the size of the data set",
        )
    fact = f"{samples} samples, batch_size {batch_size}"
    if isinstance(dataset, Mixture):
        stages = "; ".join(
            f"from step {step} {':'.join(map(str, weights))}" for step, weights in dataset.stages
        )
        order = MixtureOrder(dataset.sizes, dataset.stages, batch_size, micro_batches, seed)
        return order, f"{fact}, of data sets of {dataset.sizes} samples {stages}"
    return UniformOrder(samples, batch_size, micro_batches, seed), fact


def order_of_micro_batches(
    dataset: Any, sizes: tuple[Any, ...], micro_batches: int, seed: int
) -> tuple[Order, str]:
    """Return the order of a data set that makes its micro-batches itself."""
    order = dataset.order
    where = f"session.loader({type(dataset).__name__}), which has micro_batch(step, k)"
    if any(size is not None for size in sizes):
        raise UsageError(
            "the micro-batches of this data set have their sizes",
            where,
            "leave out batch_size, tokens and lengths: its `order` has them",
        )
    if (order.micro_batches, order.seed) != (micro_batches, seed):
        raise UsageError(
            f"its order has micro_batches={order.micro_batches}, seed={order.seed}",
            where,
            f"make it with micro_batches={micro_batches}, seed={seed}, as the Session has",
        )
    return order, type(dataset).__name__


def bucket_order(
    dataset: Any, samples: int, tokens: int | None, lengths: Any, micro_batches: int, seed: int
) -> tuple[BucketOrder, str]:
    """Return an order whose micro-batches have samples of similar length within `tokens`."""
    where = f"session.loader(dataset, tokens={tokens}, lengths=...)"
    if tokens is None or lengths is None:
        raise UsageError(
            "a loader needs batch_size, or tokens and lengths",
            "session.loader(dataset, ...)",
            "give batch_size=N, or tokens=N and lengths=[tokens of each sample]",
        )
    if isinstance(dataset, Mixture):
        raise UsageError(
            "tokens and lengths are not supported with a Mixture", where, "give batch_size=N"
        )
    array: npt.NDArray[Any] = np.asarray(lengths)
    if array.shape != (samples,) or array.dtype.kind not in "iu":
        raise UsageError(
            f"lengths of shape {array.shape} and type {array.dtype} for {samples} samples",
            where,
            "give one integer for each sample of the data set",
        )
    if outside := np.flatnonzero((array < 1) | (array > tokens)).tolist():
        raise UsageError(
            f"sample {outside[0]} has {array[outside[0]]} tokens, "
            f"and {len(outside)} of {samples} samples are not within 1 and {tokens}",
            where,
            "increase tokens, or shorten these samples or leave them out of the data set",
        )
    longest = int(array.max())
    unit = -(-longest // DISTINCT_LENGTHS)
    rounded = np.minimum(-(-array.astype(np.int64) // unit) * unit, longest).astype(np.int32)
    shapes, _ = choose_bucket_shapes(rounded, tokens=tokens, shapes=SHAPES)
    digest = hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()[:12]
    return BucketOrder(
        rounded, shapes, micro_batches=micro_batches, seed=seed
    ), f"{samples} samples, tokens {tokens}, lengths {digest}"
