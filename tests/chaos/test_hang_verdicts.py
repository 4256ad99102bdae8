"""Injected hangs in real processes: each is reported correctly within 15 s, slow ranks are not.

The tests inject faults into the worker of slot 1 of a user's loop (hanging_loop.py) on three
workers, stop it, and compare its bits with an undisturbed run on one worker. The hang timeout is
3 s, so a verdict is due after about 6 s. fault_matrix/ injects a stopped worker and a cut
link under `lockstep train`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_loop import LoopResult, run_loop
from support.hanging_loop import EVALUATE_S, HANG_S, SAVE_EVERY
from support.hosts import Training, read_steps

from lockstep.checkpoint.commands import digest_line

LOOP = Path(__file__).parents[1] / "support" / "hanging_loop.py"
VERDICT_S = 15.0
STOPPED_S = 8.0  # far longer than elastic.heartbeat_timeout_s and `elastic.hang_timeout_s`
long = pytest.mark.long

# fault -> pattern of the verdict, or of the reason of the next generation; WHO: the worker.
FORWARD = r"WHO: in the forward pass of step \d+ for \d.*, at hanging_loop\.py:\d+ in run_fault: "
HANGS = {
    "sleep": FORWARD + r"`time\.sleep\(3600\)`; ranks \d and \d: waiting in ",
    "stop": r"/1: no heartbeat for 2\.5 s",
    "loader killed": r"DataLoader worker \(pid.* (exited unexpectedly|is killed by signal)",
    "loader stopped": FORWARD + r"`for _ in batches:`; ranks \d and \d: waiting in ",
    "skip": r"mismatched collectives: WHO: in the reduction of step (\d+) .*; ranks \d and \d .*: in "
    r"its own all_reduce of 12 B of step \1 for .*, at hanging_loop\.py:\d+ in train: `dist\.all_reduce\(",
    "shape": r"mismatched collectives: WHO: in .*; ranks \d and \d .*: in its own all_reduce of 12 B",
    "exit": r"/1: exited",
    "evaluate 3600": r"WHO: evaluating step \d+ for \d.*, at hanging_loop\.py:\d+ in train: `time\.sleep\(",
}


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    started = Training(tmp_path, workers=3, steps=1_000_000, script=f"{LOOP}:train")
    yield started
    started.close()


def seconds_until_reported(training: Training, fault: str) -> float:
    """Inject a fault into worker 1; return the seconds until it is reported."""
    before = training.newest
    victim, earlier = training.member(1), reported_reasons(training)
    who = re.escape(f"rank {before.rank_of(victim.id)} (host here, slot 1, pid {victim.pid})")
    started_s = time.monotonic()
    inject(training, fault, "collective" if fault in ("skip", "shape") else "trouble")

    def is_reported() -> bool:
        return any(
            re.search(HANGS[fault].replace("WHO", who), text)
            for text in reported_reasons(training) - earlier
        )

    training.wait(
        is_reported,
        30,
        what=f"the right report of {fault!r}, after {reported_reasons(training) - earlier},",
    )
    seconds = time.monotonic() - started_s
    training.wait_until_whole(before)
    return seconds


def inject(training: Training, fault: str, kind: str = "trouble") -> None:
    """Write the file of a fault atomically."""
    (training.run / "fault").write_text(fault)
    (training.run / "fault").rename(training.run / f"{kind}-1")


def reported_reasons(training: Training) -> Counter[str]:
    """Return the reported reasons of hangs, exits and generations so far."""
    events = [event["why"] for name in ("hang", "worker ended") for event in training.events(name)]
    return Counter(events + [record.reason for record in training.generations])


def check_bits(training: Training) -> None:
    """Stop the run, and compare its bits with an undisturbed run on one worker."""
    training.stop()
    assert set(training.end().values()) == {75}, training.report()
    folder, saved = training.folder / "undisturbed", training.step // SAVE_EVERY * SAVE_EVERY
    assert run_loop(LOOP, folder, 1, steps=training.step, pause_s=0.0) == LoopResult(0, "")
    assert read_steps(training.run) == read_steps(folder)
    assert digest_line(training.run, saved) == digest_line(folder, saved)
    training.assert_nothing_left()


@pytest.mark.parametrize(
    "faults",
    [pytest.param(("skip",), id="one"), pytest.param(tuple(HANGS), id="all eight", marks=long)],
)
def test_each_hang_is_reported(training: Training, faults: tuple[str, ...]) -> None:
    training.wait_for_step(30)
    seconds = {fault: seconds_until_reported(training, fault) for fault in faults}
    print("; ".join(f"{fault} {value:.1f} s" for fault, value in seconds.items()))
    assert max(seconds.values()) < VERDICT_S
    check_bits(training)


@pytest.mark.long
def test_slow_is_no_hang(training: Training) -> None:
    """Less than `hang_s` in a forward pass, longer in an evaluation and in torch.compile."""
    training.wait_for_step(30)
    before = training.newest
    for fault in (f"slow {0.6 * HANG_S}", f"evaluate {0.7 * EVALUATE_S}", f"compile {3 * HANG_S}"):
        step = training.step
        inject(training, fault)
        training.wait(lambda: not (training.run / "trouble-1").exists(), what=fault)
        training.wait_for_step(step + 5)
    assert training.newest == before and not training.events("hang")
    check_bits(training)


@long
def test_run_continues_after_all_its_processes_were_stopped(training: Training) -> None:
    """As when a laptop sleeps or a virtual machine is moved: no worker counts as silent."""
    training.wait_for_step(30)
    before, step = training.newest, training.step
    pids = [
        training.agents["here"].pid,
        training.forkserver(),
        *(process.pid for process in training.processes().values()),
    ]
    for number, pause_s in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause_s)
    training.wait_for_step(step + 50)
    assert training.newest == before and not training.events("hang")
    check_bits(training)
