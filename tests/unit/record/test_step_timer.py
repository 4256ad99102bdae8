"""Step timer with a manual clock and rates computed by hand."""

from __future__ import annotations

import math
from typing import Any

import psutil
import pytest

from lockstep.record.step_timer import (
    StepTimer,
    flops_per_token,
    format_fields,
    peak_flops,
    peak_resident_bytes,
    step_fields,
)


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def a_step(timer: StepTimer, clock: Clock, tokens: int = 1000) -> dict[str, float]:
    with timer.timing("data"):
        clock.sleep(0.25)
    clock.sleep(1.0)
    timer.add("communication", 0.5)
    clock.sleep(0.5)
    with timer.timing("saving"):
        clock.sleep(0.125)
    with timer.timing("overhead"):
        clock.sleep(0.125)
    return timer.step(tokens)


def test_each_second_is_counted_once_and_categories_reset_at_each_step() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock, memory=lambda: {"memory_bytes": 7})
    for _ in range(3):
        values = a_step(timer, clock)
        assert values["seconds"] == 2.0
        assert values["data_seconds"] == 0.25
        assert values["communication_seconds"] == 0.5
        assert values["saving_seconds"] == values["overhead_seconds"] == 0.125
        assert values["tokens"] == 1000
        assert values["tokens_per_second"] == 500
        assert values["data_wait"] == 0.125 and values["exposed_communication"] == 0.25
        assert values["memory_bytes"] == 7
        assert "mfu" not in values, "the peak is unknown"


def test_time_between_two_steps_belongs_to_the_second() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    a_step(timer, clock)
    clock.sleep(3.0)
    assert a_step(timer, clock)["seconds"] == 5.0


def test_setup_before_the_start_is_not_training_time() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.timing("data"):
        clock.sleep(60.0)
    timer.start()
    assert a_step(timer, clock)["seconds"] == 2.0


def test_wait_that_raises_is_counted() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with pytest.raises(ConnectionError), timer.timing("communication"):
        clock.sleep(1.5)
        raise ConnectionError
    assert timer.step(0)["communication_seconds"] == 1.5


def test_first_step_is_dropped_once_there_is_another() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.sleep(100.0)
    assert timer.step(1000)["tokens_per_second"] == 10
    for _ in range(2):
        clock.sleep(1.0)
        values = timer.step(1000)
    assert values["tokens_per_second"] == 1000


def test_rate_covers_the_newest_steps_only() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock, window_steps=4)
    rates = []
    for seconds in [1.0] * 6 + [2.0] * 5:
        clock.sleep(seconds)
        rates.append(timer.step(100)["tokens_per_second"])
    assert rates[5] == 100 and rates[-1] == 50
    assert rates[7] == pytest.approx(400 / 6), "two fast and two slow steps"


def test_clock_that_does_not_advance() -> None:
    assert math.isfinite(StepTimer(clock=lambda: 1.0).step(10)["tokens_per_second"])


def test_flops_per_token() -> None:
    # Forward: 2 per parameter, 2 * width for scores, mixing per layer and position; backward twice.
    forward = 2 * 1000 + 2 * (2 * 8 * 4 + 2 * 8 * 4)
    assert flops_per_token(parameters=1000, layers=2, width=8, length=4) == forward + 2 * forward


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA GeForce RTX 3090 Ti", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L40", None, None),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", None, None),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("Tesla V100-PCIE-16GB", None, 14e12),
        ("Quadro P4000", None, 5.3e12),
        ("NVIDIA GH200 480GB", None, None),
        ("NVIDIA T400", None, None),
        ("AMD EPYC 7763 64-Core Processor", None, None),
        ("cpu", None, None),
    ],
)
def test_peak_flops_of_known_devices(name: str, bf16: float | None, fp32: float | None) -> None:
    assert peak_flops(name, "bf16") == (None if bf16 is None else pytest.approx(bf16))
    assert peak_flops(name, "fp32") == (None if fp32 is None else pytest.approx(fp32))


def test_peak_resident_bytes() -> None:
    resident_bytes = psutil.Process().memory_info().rss
    assert 0.9 * resident_bytes < peak_resident_bytes() < psutil.virtual_memory().total


VALUES = {
    "loss": 2.3141,
    "tokens_per_second": 41_234.0,
    "eta_s": 7.6,
    "mfu": 0.379,
    "exposed_communication": 0.031,
    "data_wait": 0.001,
    "memory_bytes": 61 * 2**30,
    "seconds": 0.1,
}


def line_of(step: int, total: int, columns: float = math.inf, **values: Any) -> str:
    return format_fields(step_fields(step, values, {}, total), {}, columns)


def test_a_line_has_what_a_step_has() -> None:
    assert (
        line_of(1200, 3000, **VALUES)
        == "step 1,200/3,000  loss 2.314  tok/s 41.2 k  eta 8 s  mfu 38%  exposed comm 3%  mem 61.0 GiB"
    )
    assert "alloc retries 3" in line_of(1200, 3000, **VALUES, allocator_retries=3)
    assert line_of(7, 10, loss=math.nan, data_wait=0.2) == "step  7/10  loss nan  data wait 20%"
    assert line_of(7, 7) == line_of(7, 7, exposed_communication=0.0) == "step 7/7"
    assert line_of(7, 7, loss=1.0, shares=(6, 2)) == "step 7/7  loss 1.000  shares 6+2"
    assert line_of(7, 7, loss=1000.5) == "step 7/7  loss 1000"
    assert line_of(7, 7, loss=1e-5, shares=()) == "step 7/7  loss 1.000e-05"


def test_columns_of_lines_are_aligned() -> None:
    widths: dict[str, int] = {}
    lines = [
        format_fields(step_fields(step, VALUES | {"loss": loss}, {"lr": lr}, 200), widths)
        for step, loss, lr in ((1, 28.999, 1e-05), (14, 0.084, 0.01), (200, 8.1, 0))
    ]
    assert [line.partition("  tok/s")[0] for line in lines] == [
        "step   1/200  loss 29.00  lr 1e-05",
        "step  14/200  loss 0.08400  lr  0.01",
        "step 200/200  loss   8.100  lr     0",
    ]


@pytest.mark.parametrize("columns", range(7, 110))
def test_a_line_has_whole_fields_and_the_number_of_those_that_do_not_fit(columns: int) -> None:
    line, whole = line_of(1200, 3000, columns, **VALUES), line_of(1200, 3000, **VALUES)
    fields = whole.split("  ")
    shown = line.split("  ")[:-1] if line != whole else fields
    assert len(line) <= columns and shown == fields[: len(shown)]
    left = len(fields) - len(shown)
    assert not left or line.endswith(f"+{left} more")
