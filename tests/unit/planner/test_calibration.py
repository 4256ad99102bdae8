"""The blocks of a run's model, timed with its micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.resolve import resolve
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.network.moves import Link
from lockstep.planner.calibration import calibrate, time_messages
from lockstep.planner.devices import Cluster
from lockstep.planner.step_cost import Workload, step_cost

TINY = {
    "data.pairs": 300,
    "data.held_out": 20,
    "tokenizer.vocab_size": 300,
    "batch.tokens": 128,
    "batch.micro_batches": 4,
}
TINY |= {"model.dim": 32, "model.ffn_dim": 64, "model.encoder_layers": 1, "model.decoder_layers": 2}


def test_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="and the plan is for H100"):
        calibrate(resolve(flags=TINY).run, tmp_path, "H100", [])


def test_blocks_are_timed_whole_and_as_a_rank_of_the_tensor_axis(tmp_path: Path) -> None:
    run = resolve(flags=TINY | {"compute.precision": "fp32"}).run
    model, timing = calibrate(run, tmp_path, "cpu", [2])
    kinds = {"embedding", "encoder", "encoder_norm", "decoder", "output"}
    assert timing.passes.keys() == {(kind, tensor) for kind in kinds for tensor in (1, 2)}
    assert (
        all(min(seconds) >= 0 for seconds in timing.passes.values())
        and timing.passes["decoder", 1][1] > 1e-5
    )
    assert (
        timing.passes["decoder", 1][0] > timing.passes["encoder_norm", 1][0] and timing.update_s > 0
    )
    assert [block.kind for block in model.blocks] == [
        "encoder",
        "encoder_norm",
        "decoder",
        "decoder",
    ] and 0 < model.tokens <= 128
    assert 0 <= timing.copy_s < 1e-6
    fast = Cluster(1, 1, "cpu", 1, Link(0, 1e12), Link(0, 1e12))
    step = step_cost(Workload(model, run, fast, timing), Layout())
    micro_s = sum(sum(timing.of(unit, 1)) for unit in model.units)
    assert (
        step.compute_s > 0
        and timing.accumulate_s >= 0
        and abs(step.compute_s - 4 * (micro_s + timing.accumulate_s)) < 1e-9
    )


def test_a_byte_between_two_processes_takes_less_than_a_memory_access() -> None:
    assert 1e-11 < time_messages() < 1e-7
