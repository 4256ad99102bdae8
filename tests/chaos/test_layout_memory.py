"""A model that is too large for a worker: replicas fail and say which layout would fit; in that layout it trains."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from lockstep.checkpoint.commands import digest_line

# 89 million parameters: 1.4 GB of weights, gradients and means, 1.1 GB more while they are saved.
WIDE = {
    "steps": 2,
    "data.pairs": 3000,
    "data.held_out": 50,
    "data.max_tokens": 64,
    "tokens.vocabulary": 500,
    "model.width": 1024,
    "model.feed_forward": 4096,
    "batch.tokens": 64,
    "batch.micro_batches": 4,
    "evaluate.at_end": 0,
    "heal.hang_s": 120,
}
ROOM = 2_900_000_000  # beside what Python and torch take


def taken_by_torch() -> int:
    """Addresses that a worker has before it makes a model."""
    code = "import torch, lockstep.train; print(open('/proc/self/statm').read().split()[0])"
    pages = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=calm()).stdout
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def calm() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(folder: Path, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Train with so many bytes of addresses a process."""
    flags = [word for key, value in WIDE.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "lockstep", "train", "--out", str(folder), *flags, *words]

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return subprocess.run(command, capture_output=True, text=True, env=calm(), timeout=150, preexec_fn=bound, check=False)


def test_what_does_not_fit_says_what_would_and_that_trains(tmp_path: Path) -> None:
    limit = taken_by_torch() + ROOM
    failed = train(tmp_path / "whole", limit, "--workers", "1")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    told = re.search(
        r"OutOfMemoryError: no memory left.*\n.*allowed by RLIMIT_AS.*\n.*try ((?:--layout\.\w+ \d+ ?)+)", failed.stdout + failed.stderr
    )
    assert told, failed.stdout + failed.stderr
    done = train(tmp_path / "shards", limit, *told[1].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert digest_line(tmp_path / "shards").startswith("step 2 sha256")
