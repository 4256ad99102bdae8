"""Injected hangs in real processes: each gets the right words within 15 s, and what is only slow gets none.

One run of a user's own loop (hanging_loop.py) on three workers meets one trouble after the other, each in the worker of slot 1. It is
stopped in the end, and has the bits of a run of one worker that met none. `heal.hang_s` is 3 s here: a verdict is due after about 6 s.

A stopped worker and a cut link are met in test_fault_matrix.py too, there with the whole run of `lockstep train`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hanging_loop import EVALUATE_S, HANG_S, SAVE_EVERY
from support.hosts import Training, read_steps

from lockstep.checkpoint.commands import digest_line

LOOP = f"{Path(__file__).parents[1] / 'support' / 'hanging_loop.py'}:train"
VERDICT_S = 15.0
STOPPED_S = 8.0  # far longer than heal.silent_s and `heal.hang_s`
long = pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part of the hangs: LOCKSTEP_CHAOS=1")

# What is ordered of the worker, and what must be said of it (WHO): in the verdict, or in the reason of the next generation.
FORWARD = r"WHO has been in the forward pass of step \d+ for \d.*, at hanging_loop\.py:\d+ in suffer: "
HANGS = {
    "sleep": FORWARD + r"`time\.sleep\(3600\)`; ranks \d and \d have waited for it in ",
    "stop": r"/1: silent for 2\.5 s",
    "loader killed": r"DataLoader worker \(pid.* (exited unexpectedly|is killed by signal)",
    "loader stopped": FORWARD + r"`for _ in batches:`; ranks \d and \d have waited for it in ",
    "skip": r"not for the same thing: WHO has waited in the reduction of step (\d+) .*, while ranks \d and \d .* have waited in "
    r"its own all_reduce of 12 B in step \1 for .*, at hanging_loop\.py:\d+ in train: `dist\.all_reduce\(",
    "shape": r"not for the same thing: WHO has waited .*, while ranks \d and \d .* have waited in its own all_reduce of 12 B",
    "exit": r"/1: it has ended",
    "evaluate 3600": r"WHO has been evaluating step \d+ for \d.*, at hanging_loop\.py:\d+ in train: `time\.sleep\(",
}


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    started = Training(tmp_path, workers=3, steps=1_000_000, script=LOOP)
    yield started
    started.close()


def hang(one: Training, trouble: str) -> float:
    """Let worker 1 meet a trouble; seconds until the right words."""
    before = one.newest
    victim, said = one.member(1), told(one)
    who = re.escape(f"rank {before.rank_of(victim.id)} (host here, slot 1, pid {victim.pid})")
    began_s = time.monotonic()
    order(one, trouble, "collective" if trouble in ("skip", "shape") else "trouble")

    def right() -> bool:
        return any(re.search(HANGS[trouble].replace("WHO", who), text) for text in told(one) - said)

    one.wait(right, 30, what=f"the right words on {trouble!r}, after {told(one) - said},")
    seconds = time.monotonic() - began_s
    one.wait_until_whole(before)
    return seconds


def order(one: Training, trouble: str, part: str = "trouble") -> None:
    """Order it, in one piece."""
    (one.run / "order").write_text(trouble)
    (one.run / "order").rename(one.run / f"{part}-1")


def told(one: Training) -> Counter[str]:
    """What the run has said so far of hangs, ends and generations."""
    events = [event["why"] for name in ("hang", "worker ended") for event in one.events(name)]
    return Counter(events + [record.reason for record in one.generations])


def judge(one: Training) -> None:
    """Stop it where it is. One worker that meets nothing comes to the same bits there."""
    one.stop()
    assert set(one.end().values()) == {75}, one.story()
    folder, saved = one.folder / "undisturbed", one.step // SAVE_EVERY * SAVE_EVERY
    command = [sys.executable, "-m", "lockstep", "train", LOOP, "--workers", "1", "--out", str(folder), "--steps", str(one.step)]
    subprocess.run(command, check=True, capture_output=True)
    assert read_steps(one.run) == read_steps(folder)
    assert digest_line(one.run, saved) == digest_line(folder, saved)
    one.leaves_nothing()


@pytest.mark.parametrize("troubles", [pytest.param(("skip",), id="one"), pytest.param(tuple(HANGS), id="all eight", marks=long)])
def test_each_hang_gets_its_verdict(one: Training, troubles: tuple[str, ...]) -> None:
    one.wait_for_step(30)
    seconds = {trouble: hang(one, trouble) for trouble in troubles}
    print("; ".join(f"{trouble} {value:.1f} s" for trouble, value in seconds.items()))
    assert max(seconds.values()) < VERDICT_S
    judge(one)


def test_slow_is_no_hang(one: Training) -> None:
    """Nearly `hang_s` in a forward pass, and longer than that in an evaluation and in torch.compile, while the others wait."""
    one.wait_for_step(30)
    before = one.newest
    for trouble in (f"slow {0.8 * HANG_S}", f"evaluate {0.7 * EVALUATE_S}", f"compile {3 * HANG_S}"):
        step = one.step
        order(one, trouble)
        one.wait(lambda: not (one.run / "trouble-1").exists(), what=trouble)
        one.wait_for_step(step + 5)
    assert one.newest == before and not one.events("hang")
    judge(one)


@long
def test_a_run_that_was_stopped_as_a_whole_goes_on(one: Training) -> None:
    """As when a laptop sleeps, or a virtual machine is moved: nobody was silent, for nobody listened."""
    one.wait_for_step(30)
    before, step = one.newest, one.step
    everything = [one.agents["here"].pid, one.zygote(), *(sitter.pid for sitter in one.sitting().values())]
    for number, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.0)):
        for pid in everything:
            os.kill(pid, number)
        time.sleep(pause_s)
    one.wait_for_step(step + 50)
    assert one.newest == before and not one.events("hang")
    judge(one)
