"""Numerics fingerprint: every setting that changes the result of a product changes it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from lockstep.runtime import numerics

PROGRAM = Path(__file__).parents[1] / "support" / "print_fingerprint.py"


def test_setting_that_changes_products_changes_the_fingerprint() -> None:
    settings = [
        "ONEDNN_MAX_CPU_ISA=AVX2",
        "MKL_CBWR=AVX2",
        "MKL_CBWR=COMPATIBLE",
        "ATEN_CPU_CAPABILITY=default",
    ]
    commands = [
        [*prefix, sys.executable, str(PROGRAM)]
        for prefix in ([], *(["env", setting] for setting in settings))
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    (products, probes), *others = [
        process.communicate(timeout=120)[0].split(" ", 1) for process in processes
    ]
    for setting, (other_products, other_probes) in zip(settings, others, strict=True):
        assert (products == other_products) or (probes != other_probes), (
            f"{setting} changes products, but no probe shows it"
        )
    assert any(products != other for other, _ in others), (
        "none of the settings changes anything here"
    )


def test_probes_are_reproducible_leave_generators_alone_and_are_fast() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        first = numerics.fingerprint(torch.device("cpu"))
        numerics.probe_results.cache_clear()
        start_s = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            second = numerics.fingerprint(torch.device("cpu"))
        took_s = time.perf_counter() - start_s
        assert first == second and len([key for key in first if key.startswith("result of ")]) == 5
        assert numerics.fingerprint(torch.device("cpu"))["threads"] == "1"
        torch.set_num_threads(2)
        assert numerics.fingerprint(torch.device("cpu"))["threads"] == "2"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert took_s < 2.0, "15 ms on a quiet machine"


FORKED = """
import os, random
from lockstep.runtime.numerics import seed_unseeded_generators
reader, writer = os.pipe()
for seed in (None, 7):
    if not os.fork():
        if seed is not None:
            random.seed(seed)
        seed_unseeded_generators()
        os.write(writer, f"{random.random()} ".encode())
        os._exit(0)
    os.wait()
print(os.read(reader, 100).decode())
"""


def test_the_python_generator_of_a_forked_worker_is_seeded_unless_the_user_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, check=True
    )
    drawn = [float(text) for text in done.stdout.split()]
    assert drawn == [random.Random(0).random(), random.Random(7).random()]
