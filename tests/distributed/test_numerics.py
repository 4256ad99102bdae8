"""Numerics fingerprint: every setting that changes the result of a product changes it."""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from lockstep.runtime import numerics


def test_setting_that_changes_products_changes_the_fingerprint() -> None:
    program = """
import torch
from lockstep.runtime import numerics
torch.set_num_threads(1)
left, right = (torch.rand(size, generator=torch.Generator().manual_seed(1)) for size in ((96, 700), (700, 48)))
results = [left @ right, left.bfloat16() @ right.bfloat16(), torch.nn.functional.gelu(left), left.log_softmax(-1)]
print(numerics.sha256_of(results), sorted(numerics.probe_results("cpu", 1).items()))
"""
    settings = ["ONEDNN_MAX_CPU_ISA=AVX2", "MKL_CBWR=AVX2", "MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=default"]
    commands = [[*prefix, sys.executable, "-c", program] for prefix in ([], *(["env", setting] for setting in settings))]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    (products, probes), *others = [process.communicate(timeout=120)[0].split(" ", 1) for process in processes]
    for setting, (other_products, other_probes) in zip(settings, others, strict=True):
        assert (products == other_products) or (probes != other_probes), f"{setting} changes products, but no probe shows it"
    assert any(products != other for other, _ in others), "none of the settings changes anything here"


def test_probes_are_reproducible_leave_generators_alone_and_are_fast() -> None:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        first = numerics.fingerprint(torch.device("cpu"))
        numerics.probe_results.cache_clear()
        began_s = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            second = numerics.fingerprint(torch.device("cpu"))
        took_s = time.perf_counter() - began_s
        assert first == second and len([key for key in first if key.startswith("result of ")]) == 5
        assert numerics.fingerprint(torch.device("cpu"))["threads"] == "1"
        torch.set_num_threads(2)
        assert numerics.fingerprint(torch.device("cpu"))["threads"] == "2"
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert took_s < 2.0, "15 ms on a quiet machine"
