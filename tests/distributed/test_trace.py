"""A trace of real steps: a readable file, a complete log line, and no other steps."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.parallel.build_replica import build_replica
from lockstep.training.profiler import ProfiledSteps, Profiler, measure_matmul_flops


def profiled(runtime: ElasticRuntime, folder: Path) -> None:
    replica = build_replica(torch.nn.Linear(256, 256), micro_batches=2)
    with replica, Profiler(ProfiledSteps(2, 3), folder, runtime) as profiler:
        for step in range(4):
            for _ in replica.micro_batches(step):
                replica.backward(replica(torch.ones(64, 256)).sum())
            profiler.step(step + 1)


def test_two_ranks_write_a_trace_of_the_requested_steps(tmp_path: Path) -> None:
    run_ranks(profiled, 2, tmp_path)
    for rank in range(2):
        with gzip.open(tmp_path / "profile" / f"rank-{rank}.trace.json.gz", "rt") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert names.count("aten::linear") == 2, "one micro-batch of a rank in each of two steps"
        assert any(name.startswith("gloo:") for name in names), "the reducer thread is in it"


def test_run_that_ends_early_writes_its_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
    with (
        caplog.at_level(logging.INFO, "lockstep"),
        Profiler(ProfiledSteps(1, 9), tmp_path, runtime) as profiler,
    ):
        torch.ones(200, 200) @ torch.ones(200, 200)
        profiler.step(1)
    assert "steps 1..1: compute" in caplog.text and "peak memory" in caplog.text
    assert (tmp_path / "profile" / "rank-0.trace.json.gz").exists()


def test_measured_flops_are_those_of_the_fastest_product() -> None:
    assert 1e8 < measure_matmul_flops(torch.device("cpu"), torch.float32, seconds=0.1) < 1e13
