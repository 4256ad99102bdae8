"""A model too large for one worker: the error names a layout that fits, and there it trains."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import lockstep_command, run_command

from lockstep.checkpoint.commands import digest_line

# 89 million parameters: 1.4 GB of weights, gradients and moments, 1.1 GB more during a save.
WIDE = {
    "steps": 1,
    "data.pairs": 3000,
    "data.held_out": 50,
    "data.max_tokens": 64,
    "tokenizer.vocab_size": 500,
    "model.dim": 1024,
    "model.ffn_dim": 4096,
    "batch.tokens": 64,
    "batch.micro_batches": 4,
    "evaluate.at_end": 0,
    "elastic.hang_timeout_s": 120,
}
ROOM = 2_900_000_000  # beyond Python and torch


def taken_by_torch() -> int:
    """Return the address space of a worker before it builds a model."""
    code = (
        "import torch, lockstep.recipes.script; print(open('/proc/self/statm').read().split()[0])"
    )
    pages = run_command([sys.executable, "-c", code], check=True).stdout
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(folder: Path, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Train with this address space limit per process."""
    flags = [word for key, value in WIDE.items() for word in (f"--{key}", str(value))]
    command = lockstep_command("train", "--out", str(folder), *flags, *words)

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=one_thread(),
        timeout=150,
        preexec_fn=bound,
        check=False,
    )


@pytest.mark.long
def test_out_of_memory_error_names_a_layout_that_trains(tmp_path: Path) -> None:
    limit = taken_by_torch() + ROOM
    failed = train(tmp_path / "whole", limit, "--workers", "1")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    hint = re.search(
        r"OutOfMemoryError: out of memory.*\n.*the limit is .*RLIMIT_AS.*\n.*try ((?:--layout\.\w+ \d+ ?)+)",
        failed.stdout + failed.stderr,
    )
    assert hint, failed.stdout + failed.stderr
    assert "estimated: optimizer" in (tmp_path / "whole" / "oom" / "rank-0.txt").read_text()
    result = train(tmp_path / "shards", limit, *hint[1].split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert digest_line(tmp_path / "shards").startswith("step 1 sha256")
