"""The mean of a function over a data set, with the same bits on any number of workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from lockstep.data.order import splitmix64
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError, UsageError
from lockstep.runtime.numerics import seed_generators
from lockstep.training.loader import Collate, get_samples, number_of_samples, to_device

log = logging.getLogger("lockstep")
Scores = dict[int, dict[str, float]]  # by batch number, then by name


def mean_over(
    dataset: Any,
    function: Callable[[Any], Any],
    runtime: ElasticRuntime,
    *,
    batch_size: int,
    collate_fn: Collate | None,
    seed: int,
    replica_size: int,
) -> Any:
    """Collective. Return the mean of function(batch), weighted by samples; see Session.evaluate."""
    count, device = (
        number_of_samples(dataset, "session.evaluate(function, dataset)"),
        runtime.world.device,
    )
    if not count:
        hint = "give it samples, or leave the call out where there are none"
        raise UsageError(
            "there is no sample to evaluate", "session.evaluate(function, dataset)", hint
        )
    batches = [
        range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)
    ]

    def compute_scores(numbers: Iterable[int]) -> Scores:
        scores = {}
        for number in numbers:
            seed_generators(splitmix64(seed, number) >> 1, device)
            batch = (collate_fn or default_collate)(get_samples(dataset, batches[number]))
            scores[number] = to_numbers(function(to_device(batch, device)))
        return scores

    with torch.no_grad(), runtime.during("evaluating"):
        scores = compute_in_shares(runtime, compute_scores, len(batches), replica_size)
    means = {
        name: weighted_mean([(len(batches[n]), scores[n][name]) for n in range(len(batches))])
        for name in scores[0]
    }
    return means[""] if [*means] == [""] else means


def compute_in_shares(
    runtime: ElasticRuntime,
    compute: Callable[[Iterable[int]], Scores],
    count: int,
    replica_size: int,
) -> Scores:
    """Collective. Return compute(range(count)), of which each replica computes a share.

    If a worker is lost, this worker computes everything, and the next step regroups. PeersLostError
    where a replica is several workers, which compute the same batches together. A replica that has
    joined computes everything before its first step: the others have evaluated, and wait in the step.
    """
    has_joined = (
        runtime.progress.step
        < 0
        <= max((member.step for member in runtime.member_progress), default=-1)
    )
    if has_joined or (runtime.is_late and replica_size == 1):
        return compute(range(count))
    rank, size = (
        (0, 1)
        if runtime.is_joining
        else (runtime.world.rank // replica_size, runtime.world.size // replica_size)
    )
    own = compute(range(rank, count, size))
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
    training = [
        module
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        if module.training
    ]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def to_numbers(value: Any) -> dict[str, float]:
    """Return the numbers of a batch by name; a single number has the name ""."""
    return {
        str(name): float(number)
        for name, number in (value.items() if isinstance(value, Mapping) else [("", value)])
    }


def weighted_mean(rows: list[tuple[int, float]]) -> float:
    """Return the mean of (weight, value) rows. Sums are exactly rounded, in any order."""
    if not all(math.isfinite(value) for _, value in rows):
        return math.nan
    total = sum(weight for weight, _ in rows)
    values = [weight * value for weight, value in rows]
    if all(map(math.isfinite, values)):
        with suppress(OverflowError):
            return math.fsum(values) / total
    return float(
        sum(weight * Fraction(value) for weight, value in rows) / total
    )  # the mean lies between the values
