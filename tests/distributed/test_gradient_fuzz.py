"""Random models, loops and layouts have the summed gradients of one process, or are refused.

LOCKSTEP_CASES=2000 LOCKSTEP_SEED=0 pytest -s tests/distributed/test_gradient_fuzz.py -k random
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from support.gradient_fuzz.comparison import Result, check
from support.gradient_fuzz.fuzz_cases import Case, draw

CASES = int(os.environ.get("LOCKSTEP_CASES", "30"))
SEED = int(os.environ.get("LOCKSTEP_SEED", "0"))
AT_ONCE = 100


@pytest.mark.timeout(60 + 5 * CASES)
def test_random_models_and_loops_have_the_gradients_of_one_process() -> None:
    results: list[Result] = []
    for first in range(SEED, SEED + CASES, AT_ONCE):
        results += check([draw(seed) for seed in range(first, min(first + AT_ONCE, SEED + CASES))])
        faults = [result for result in results if result.faults]
        refused = sum(result.case.leave_out is not None for result in results)
        print(
            f"{len(results)} cases, {refused} with a layer left out of a micro-batch, {len(faults)} with faults",
            flush=True,
        )
    assert not faults, "\n".join(map(str, faults[:20]))


def several_workers(least: int, **values: object) -> list[Case]:
    """Return whole-replica cases on which a planted fault can have an effect.

    Not under autocast: float32 adds gradients of bfloat16 products exactly, in any order.
    """
    cases = [replace(draw(seed), autocast=False, **values) for seed in range(200)]
    cases = [
        case for case in cases if not {"llama", "dropout"} & {*case.kinds} and not case.leave_out
    ]
    return [case for case in cases if case.workers > 1 and case.micro_batches >= least][:8]


def test_lost_contribution_of_one_small_parameter_is_found() -> None:
    results = check(several_workers(3), "drop")
    assert len(results) == 8 and all(result.faults for result in results), [
        result.case for result in results if not result.faults
    ]


def test_sum_in_another_order_is_found_by_its_bits_alone() -> None:
    results = check(several_workers(5, after_step="none"), "order")
    assert len(results) == 8 and all(result.faults for result in results)
    assert all(
        "not the bits of one process" in fault
        for result in results
        for fault in result.faults
        if "losses" not in fault
    )


def test_same_seed_draws_the_same_case() -> None:
    assert [draw(seed) for seed in range(20)] == [draw(seed) for seed in range(20)]
    assert len({str(draw(seed)) for seed in range(20)}) == 20
