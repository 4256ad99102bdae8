"""Run cases in few processes and list what differs from one process.

Bounds. With unit roundoff u of a parameter's dtype, adding K numbers in any order is off by at most
(K - 1) u / (1 - K u) times the sum of their absolute values; dividing by a count adds u. That holds
for each element, so the sum in float64 of the gradients of one process in the same dtype is an exact
reference, and a lost micro-batch shows even in bfloat16. WIDE bounds the distance to the same model
in float64, which includes the rounding of all layers: relative to the norm of all gradients of the
model, since a bias before a norm layer has a gradient of zero and any rounding is infinitely large
beside it. The largest distances of 500 cases were 8.6e-16, 2.5e-6, 0.0064 and 0.089.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from support.gradient_fuzz.fuzz_cases import DTYPES, Case
from support.gradient_fuzz.passes import Arrays, Expected, Outcome, expected_steps, run_cases
from support.ranks import run_ranks

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.layout import Layout

PER_SET = 40  # cases that one set of processes runs
LIMIT_S = 300.0  # of such a set
WIDE = {"float64": 1e-13, "float32": 1e-4, "bfloat16": 0.2, "autocast": 0.9}


@dataclass(frozen=True)
class Result:
    """The faults of a case; `refused` counts the ranks that raised the expected UsageError."""

    case: Case
    faults: list[str]
    refused: int = 0
    distance: float = 0.0

    def __str__(self) -> str:
        listed = "\n  ".join(self.faults[:8])
        return f"LOCKSTEP_CASES=1 LOCKSTEP_SEED={self.case.seed} python -m pytest -s {TEST} -k random\n  {self.case}\n  {listed}"


TEST = "tests/distributed/test_gradient_fuzz.py"


def expected_of_rank(runtime: ElasticRuntime, cases: list[Case]) -> list[list[Expected]]:
    return [expected_steps(case) for case in cases[runtime.world.rank :: runtime.world.size]]


def check(cases: list[Case], plant: str = "") -> list[Result]:
    """Run the cases on their workers and on one, and compare both with plain autograd.

    plant  a fault of the workers (passes.planted)
    """
    expected, several = expected_all(cases), run_all(cases, plant)
    alone = iter(run_all([replace(case, layout=Layout()) for case in cases if case.one_tree], ""))
    return [
        compare(case, steps, next(alone) if case.one_tree else [], ranks)
        for case, steps, ranks in zip(cases, expected, several, strict=True)
    ]


def expected_all(cases: list[Case]) -> list[list[Expected]]:
    found = []
    for first in range(0, len(cases), PER_SET):
        both = run_ranks(expected_of_rank, 2, cases[first : first + PER_SET], timeout_s=LIMIT_S)
        found += [both[i % 2][i // 2] for i in range(sum(map(len, both)))]
    return found


def run_all(cases: list[Case], plant: str) -> list[list[Outcome]]:
    """Return the outcomes of each case by rank. After an error, new processes run the others."""
    outcomes: dict[int, list[Outcome]] = {}
    waiting = [[i] for i, case in enumerate(cases) if case.leave_out]
    for size in {case.workers for case in cases}:
        several = [i for i, case in enumerate(cases) if case.workers == size and not case.leave_out]
        waiting += [several[first : first + PER_SET] for first in range(0, len(several), PER_SET)]
    while waiting:
        now = waiting.pop()
        size = cases[now[0]].workers
        try:
            by_rank = run_ranks(run_cases, size, [cases[i] for i in now], plant, timeout_s=LIMIT_S)
        except AssertionError as error:  # a process died
            if len(now) > 1:
                waiting += [[i] for i in now]
                continue
            by_rank = [[Outcome(error=str(error), died=True)] for _ in range(size)]
        finished = min(map(len, by_rank))
        for number, i in enumerate(now[:finished]):
            outcomes[i] = [rank[number] for rank in by_rank]
        waiting += [now[finished:]] if now[finished:] else []
    return [outcomes[i] for i in range(len(cases))]


def compare(
    case: Case, expected: list[Expected], alone: list[Outcome], ranks: list[Outcome]
) -> Result:
    if expected[-1].unused:
        return compare_refusals(case, len(expected) - 1, expected[-1].unused, ranks)
    if errors := [
        f"rank {rank}: {one.error}" for rank, one in enumerate([*ranks, *alone]) if one.error
    ]:
        return Result(case, errors)
    faults = []
    outcomes = [
        *((f"rank {rank} of {len(ranks)}", one) for rank, one in enumerate(ranks)),
        *(("one worker", one) for one in alone),
    ]
    for step, one in enumerate(expected):
        for where, outcome in outcomes:
            faults += [
                f"step {step}, {where}: {fault}"
                for fault in faults_of_sums(case, outcome.steps[step], one)
            ]
        for rank, outcome in enumerate(ranks[1:], 1):
            if bits(outcome.steps[step]) != bits(ranks[0].steps[step]):
                faults.append(f"step {step}: rank 0 and rank {rank} have other bits")
        losses = sorted(loss for outcome in ranks for loss in outcome.losses[step])
        if case.layout.workers_per_replica == 1 and losses != sorted(one.losses):
            faults.append(f"step {step}: losses {losses}, expected {one.losses}")
    if len({tuple(outcome.group_losses) for _, outcome in outcomes}) > 1:
        faults.append(
            f"the loss of the group depends on the workers: {[outcome.group_losses for _, outcome in outcomes]}"
        )
    distance = wide_distance(ranks[0].steps[0], expected[0])
    if distance > WIDE[rounding_of(case)]:
        faults.append(f"the distance to the float64 model is {distance:.2g}")
    return Result(case, faults, distance=distance)


def compare_refusals(
    case: Case, step: int, unused: dict[int, list[str]], ranks: list[Outcome]
) -> Result:
    """No rank may finish the step, and a rank must name a parameter without a gradient.

    With shards, FSDP2 reduces nothing for the layer on that rank, and gloo ends a process that
    receives another tensor than it expects, sometimes before the error is reported.
    """
    if case.layout.workers_per_replica > 1 and any(one.died for one in ranks):
        return Result(case, [])
    faults = [
        f"rank {rank} finished step {step} without {unused}"
        for rank, one in enumerate(ranks)
        if len(one.steps) != step
    ]
    faults += [f"rank {rank} reported no error" for rank, one in enumerate(ranks) if not one.error]
    named = [
        one
        for one in ranks
        if "no gradient arrived for" in one.error
        and any(names[0] in one.error for names in unused.values())
    ]
    if not named:
        faults.append(f"no rank names {unused}: {[one.error for one in ranks]}")
    return Result(case, faults, refused=len(named))


def bits(gradients: Arrays) -> dict[str, bytes]:
    return {name: gradient.tobytes() for name, gradient in gradients.items()}


def faults_of_sums(case: Case, gradients: Arrays, expected: Expected) -> list[str]:
    if gradients.keys() != expected.tree.keys():
        return [
            f"other parameters have gradients: {sorted(gradients.keys() ^ expected.tree.keys())}"
        ]
    faults = []
    for name, gradient in gradients.items():
        if case.one_tree and gradient.tobytes() != expected.tree[name].tobytes():
            faults.append(
                f"{name}: not the bits of one process, off by {np.abs(gradient - expected.tree[name]).max():.2g}"
            )
        if case.is_split:
            continue
        allowed = bound(case, expected.roundoff[name]) * expected.magnitude[name] + 1e-300
        if (over := np.abs(gradient - expected.exact[name]) > allowed).any():
            faults.append(
                f"{name}: {over.sum()} of {over.size} elements are further from the exact sum than rounding allows"
            )
    return faults


def bound(case: Case, roundoff: float) -> float:
    k = case.micro_batches
    return (k + 1) * roundoff / (1 - k * roundoff)


def wide_distance(gradients: Arrays, expected: Expected) -> float:
    """Return the distance to the gradient in float64, relative to its norm."""
    norm = np.sqrt(sum(np.square(wide).sum() for wide in expected.wide.values()))
    return float(
        max(
            np.linalg.norm(gradients[name] - wide)
            for name, wide in expected.wide.items()
            if name in gradients
        )
        / norm
    )


def rounding_of(case: Case) -> str:
    if case.autocast:
        return "autocast"
    return max(case.dtypes, key=lambda name: torch.finfo(DTYPES[name]).eps)
