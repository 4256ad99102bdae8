"""Loops with the habits of PyTorch scripts: each gives one sha256 in all cases, or is refused.

The short part trains each on 1 and 2 workers and resumes it with another number, in processes that
are forked without an agent. The long part is `lockstep drill` with 2 and 3 workers, one of them
killed and replaced (LOCKSTEP_CHAOS=1).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from support.launching import run_lockstep

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fork_loop import LoopResult, run_loop

from lockstep.checkpoint.commands import digest_line

LOOP = Path(__file__).parents[1] / "support" / "loops" / "habits.py"
STEPS = 6
long = pytest.mark.long

# What a refusal must name, by loop; "": the loop is supported and gives one sha256.
HABITS = {
    "scheduler": "",
    "ema": "",
    "scaler": "",
    "optimizers": "",
    "zero_grad": "zero_grad",
    "plain_backward": r"backward\(\) was not called",
    "dataloader": "micro-batch",
    "unseeded": "",
    "batchnorm": "",
    "diverges": "loss|norm",
    "unfreeze": "",
    "gradient_noise": "",
    "counts": "",
}


def assert_refused(result: LoopResult, names: str) -> None:
    """A refusal has exit code 2 or 4, three parts, and names what it refuses."""
    assert names and result.code in (2, 4), result
    first, *more = result.text.splitlines()
    assert (
        re.match(r"\w+Error: .", first)
        and len(more) >= 2
        and all(line.startswith("  ") for line in more)
    ), result.text
    assert re.search(names, result.text), result.text


@pytest.mark.parametrize("loop", HABITS)
def test_habit_gives_the_same_bits_on_every_number_of_workers_or_is_refused(
    loop: str, tmp_path: Path
) -> None:
    names = HABITS[loop]
    digests = set()
    runs = {"one": [(1, STEPS)], "two": [(2, STEPS)], "resumed": [(2, STEPS // 2), (1, STEPS)]}
    for name, starts in (runs | ({"four": [(4, STEPS)]} if loop == "counts" else {})).items():
        for workers, steps in starts:
            result = run_loop(LOOP, tmp_path / name, workers, habit=loop, steps=steps)
            if result.code:
                assert_refused(result, names)
                return
        digests.add(digest_line(tmp_path / name))
    assert len(digests) == 1 and digests.pop().startswith(f"step {STEPS} ") and not names


def test_stop_of_one_rank_ends_the_loop_of_all_after_one_more_step(tmp_path: Path) -> None:
    result = run_loop(LOOP, tmp_path, 2, habit="one_rank_stops", steps=9)
    assert result == LoopResult(0, "") and digest_line(tmp_path).startswith("step 4 ")


@long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("loop", HABITS)
def test_drill_of_a_habit_gives_the_same_bits_or_shows_the_refusal(
    loop: str, workers: int, tmp_path: Path
) -> None:
    names = HABITS[loop]
    words = ("drill", f"{LOOP}:train", "--habit", loop, "--workers", workers)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(tmp_path)}
    done = run_lockstep(*words, "--out", tmp_path / "drill", env=environ, timeout=280)
    if done.returncode:
        text = "\n".join(line.removeprefix("  ") for line in done.stderr.splitlines()[2:])
        assert_refused(LoopResult(done.returncode, text), names)
    else:
        assert "the same bits" in done.stdout and "NOT" not in done.stdout and not names, (
            done.stdout
        )
