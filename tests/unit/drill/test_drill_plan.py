"""The plan of a drill: which faults, at which steps."""

from __future__ import annotations

from lockstep.drill.run import FAULTS, plan_faults


def test_a_plan_depends_on_its_seed_and_has_every_kind_before_any_repeats() -> None:
    assert (
        plan_faults(7, 20, 300, 3, 100)
        == plan_faults(7, 20, 300, 3, 100)
        != plan_faults(8, 20, 300, 3, 100)
    )
    assert {fault for _, fault in plan_faults(1, len(FAULTS), 300, 3, 100)} == set(FAULTS)
    assert "flip" not in {
        fault for _, fault in plan_faults(1, 12, 300, 2, 100)
    }  # two replicas cannot tell which of them differs
    assert {"flip", "stop"}.isdisjoint(
        fault for _, fault in plan_faults(1, 12, 300, 1, 100)
    )  # a lone worker is compared with no other
    steps = [step for step, _ in plan_faults(3, 9, 40, 3, 10)]
    assert steps == sorted(steps) and steps[0] >= 1 and steps[-1] < 37


def test_a_checkpoint_is_damaged_only_when_there_is_an_older_one() -> None:
    for seed in range(100):
        assert all(
            200 < step < 297
            for step, fault in plan_faults(seed, 7, 300, 3, 100)
            if fault == "checkpoint"
        )
        for every in (0, 20, 100):
            assert "checkpoint" not in {fault for _, fault in plan_faults(seed, 7, 40, 3, every)}
