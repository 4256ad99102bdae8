"""A function over a data set, its mean or all results: the same bits on any number of workers."""

from __future__ import annotations

import logging
import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.checkpoint import json_tree
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.data.order import splitmix64
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError, UsageError
from lockstep.runtime.numerics import seed_generators
from lockstep.runtime.tensor_bytes import DTYPES, bytes_of
from lockstep.training.loader import Collate, get_samples, map_tensors, number_of_samples, to_device

log = logging.getLogger("lockstep")
Result = TypeVar("Result")  # of a batch, a JSON value
PACKED = "results"


@dataclass(frozen=True)
class Samples:
    """A data set in batches, which the replicas compute in shares.

    where  the call of the user, for errors
    """

    dataset: Any
    where: str
    batch_size: int
    collate_fn: Collate | None
    seed: int
    replica_size: int

    def compute(
        self, runtime: ElasticRuntime, function: Callable[[int, Any], Result]
    ) -> list[tuple[int, Result]]:
        """Collective. Return (number of samples, function(number of samples, batch)) of each
        batch, in order: computed by one worker each, without gradients, and sent to all as JSON."""
        count, device = number_of_samples(self.dataset, self.where), runtime.world.device
        if not count:
            raise UsageError(
                "there is no sample to evaluate",
                self.where,
                "give it samples, or leave the call out where there are none",
            )
        batches = [
            range(first, min(first + self.batch_size, count))
            for first in range(0, count, self.batch_size)
        ]

        def compute_batches(numbers: Iterable[int]) -> dict[int, Result]:
            results = {}
            for number in numbers:
                seed_generators(splitmix64(self.seed, number) >> 1, device)
                samples = get_samples(self.dataset, batches[number])
                batch = to_device((self.collate_fn or default_collate)(samples), device)
                results[number] = function(len(samples), batch)
            return results

        with torch.no_grad(), runtime.during("evaluating"):
            results = compute_in_shares(runtime, compute_batches, len(batches), self.replica_size)
        return [(len(batch), results[number]) for number, batch in enumerate(batches)]


def mean_over(runtime: ElasticRuntime, samples: Samples, function: Callable[[Any], Any]) -> Any:
    """Collective. Return the mean of function(batch), weighted by samples; see Session.evaluate."""
    rows = samples.compute(runtime, lambda _, batch: to_numbers(function(batch)))
    means = {
        name: weighted_mean([(count, numbers[name]) for count, numbers in rows])
        for name in rows[0][1]
    }
    return means[""] if [*means] == [""] else means


def gather_over(runtime: ElasticRuntime, samples: Samples, function: Callable[[Any], Any]) -> Any:
    """Collective. Return function(batch) of all batches as one; see Session.gather."""

    def pack_results(count: int, batch: Any) -> dict[str, Any]:
        results = function(batch)
        refuse_other_lengths(results, count, samples.where)
        try:
            tensors = json_tree.pack(PACKED, map_tensors(results, on_cpu))
        except UsageError as error:
            raise UsageError(
                f"results cannot be sent: {error.args[0]}",
                samples.where,
                "return tensors, arrays of numbers, or lists of numbers and texts",
            ) from error
        return {name: tensor_to_json(tensor) for name, tensor in tensors.items()}

    rows = samples.compute(runtime, pack_results)
    parts = [
        json_tree.unpack(PACKED, {name: tensor_from_json(value) for name, value in row.items()})
        for _, row in rows
    ]
    try:
        return concatenate(parts)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"the results of the batches have other shapes or structures: {error}",
            samples.where,
            "return the same for each batch, with rows of one shape; or lists",
        ) from error


def refuse_other_lengths(results: Any, count: int, where: str) -> None:
    """UsageError unless these are results of `count` samples: a tensor, array or list with one row
    for each, or a tuple or dict of them."""
    if isinstance(results, tuple | Mapping):
        for part in results.values() if isinstance(results, Mapping) else results:
            refuse_other_lengths(part, count, where)
        return
    is_scalar = not isinstance(results, list) and not getattr(results, "shape", ())
    if is_scalar or len(results) != count:
        what = type(results).__name__ if is_scalar else f"{len(results)} results"
        raise UsageError(
            f"the function returns {what} for a batch of {count} samples",
            where,
            "return a tensor, an array or a list with one row for each sample, "
            "or a tuple or dict of them; session.evaluate takes one number for a batch",
        )


def concatenate(parts: list[Any]) -> Any:
    """Return the results of all batches as those of one."""
    first = parts[0]
    if {type(part) for part in parts} != {type(first)}:
        raise TypeError(f"{type(first).__name__} and others")
    if isinstance(first, Mapping):
        if any(part.keys() != first.keys() for part in parts):
            raise KeyError("other keys")
        return {name: concatenate([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(concatenate(list(column)) for column in zip(*parts, strict=True))
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    return torch.cat(parts)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a complete copy on the CPU, without lazy conjugation."""
    return tensor.detach().resolve_conj().resolve_neg().cpu()


def tensor_to_json(tensor: Tensor) -> list[Any]:
    return [DTYPES[tensor.dtype], list(tensor.shape), b64encode(bytes_of(tensor)).decode()]


def tensor_from_json(value: list[Any]) -> Tensor:
    dtype, shape, text = value
    spec = TensorSpec(PACKED, dtype, tuple(shape))
    return tensor_from_bytes(spec, memoryview(bytearray(b64decode(text))))


def compute_in_shares(
    runtime: ElasticRuntime,
    compute: Callable[[Iterable[int]], dict[int, Result]],
    count: int,
    replica_size: int,
) -> dict[int, Result]:
    """Collective. Return compute(range(count)), of which each replica computes a share.

    If a worker is lost, this worker computes everything, and the next step regroups. PeersLostError
    where a replica is several workers, which compute the same batches together. A replica that has
    joined computes everything before its first step: the others have evaluated, and wait in the
    step.
    """
    newest = max((member.step for member in runtime.member_progress), default=-1)
    has_joined = runtime.progress.step < 0 <= newest
    if has_joined or (runtime.is_late and replica_size == 1):
        return compute(range(count))
    rank, size = runtime.world.rank // replica_size, runtime.world.size // replica_size
    own = compute(range(count) if runtime.is_joining else range(rank, count, size))
    with runtime.catch_peer_loss() as loss:
        return {
            number: scores
            for rows in all_gather_json(runtime, [*own.items()])
            for number, scores in rows
        }
    if replica_size > 1:
        raise PeersLostError(
            f"a worker was lost during an evaluation: {loss.why}", "session.evaluate, in shards"
        )
    log.info(
        "a worker was lost during an evaluation (%s); this worker evaluates everything", loss.why
    )
    return own | compute(number for number in range(count) if number not in own)


@contextmanager
def in_eval_mode(*models: object) -> Iterator[None]:
    """Put all modules of the models into eval mode; restore the mode of each afterwards."""
    modules = [model.modules() for model in models if isinstance(model, nn.Module)]
    training = [module for part in modules for module in part if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def to_numbers(value: Any) -> dict[str, float]:
    """Return the numbers of a batch by name; a single number has the name ""."""
    numbers = value if isinstance(value, Mapping) else {"": value}
    return {str(name): float(number) for name, number in numbers.items()}


def weighted_mean(rows: list[tuple[int, float]]) -> float:
    """Return the mean of (weight, value) rows. Sums are exactly rounded, in any order."""
    if not all(math.isfinite(value) for _, value in rows):
        return math.nan
    total = sum(weight for weight, _ in rows)
    values = [weight * value for weight, value in rows]
    if all(map(math.isfinite, values)):
        with suppress(OverflowError):
            return math.fsum(values) / total
    # The mean lies between the values.
    return float(sum(weight * Fraction(value) for weight, value in rows) / total)
