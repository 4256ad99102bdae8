"""The workers of test_agent.py: functions that an agent's workers run, by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import mark_ready
from waiting import wait_until

from lockstep.elastic.generation_log import Generation, GenerationLog, Member, RunResult
from lockstep.errors import CheckpointError, DivergedError, FencedError, PeersLostError, UsageError
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.signals import STOP_EXIT_CODES, StopSignals
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.worker_env import WorkerEnv, read_worker_env

PRELOADED = set(sys.modules)
report_fields: dict[str, Any] = {}
words: list[str] = []


def main(argv: list[str]) -> int:
    words.extend(argv[1:])
    worker: Callable[[], int] = globals()[argv[0]]
    return worker_main(worker, lambda: report_fields)


def worker_env() -> WorkerEnv:
    env = read_worker_env(os.environ)
    assert env is not None
    return env


def count_starts() -> int:
    """Return how many workers called this before."""
    path = Path("starts")
    starts = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (starts + 1))
    return starts


def polite() -> int:
    """Save and stop on the first stop signal."""
    slot = worker_env().slot
    with StopSignals() as signals:
        mark_ready(slot)
        wait_until(lambda: bool(signals.received))
    Path(f"saved-{slot}").touch()
    return STOP_EXIT_CODES[signals.received]


def deaf() -> int:
    """Ignore stop signals."""
    with StopSignals():
        mark_ready(worker_env().slot)
        time.sleep(60)
    return 0


def without_handlers() -> int:
    mark_ready(worker_env().slot)
    time.sleep(60)
    return 0


def slot_0_polite() -> int:
    return deaf() if worker_env().slot else polite()


def finish() -> int:
    return 0


def print_words() -> int:
    print(*words)
    return polite()


def print_slot() -> int:
    slot = worker_env().slot
    print("out", slot)
    print("err", slot, file=sys.stderr)
    return 0


def print_slot_and_wait() -> int:
    print("words of", worker_env().slot)
    return polite()


def slot_1_prints_when_told() -> int:
    """Print in slot 1 what a user's loop prints, between lines of the logger."""
    slot = worker_env().slot
    if slot == 1:
        print("before rank 0 was lost")
        mark_ready(1)
        wait_until(Path("go").exists)
        print("2026-11-26 02:05:49,120 W rank 1: a warning\n  with its second line")
        print("step 30 loss 0.5")
        Path("printed").touch()
    return polite()


def train_one_step() -> int:
    """Check that the real forkserver has loaded what an optimizer needs."""
    from lockstep.agent.forkserver import PRELOAD

    missing = set(PRELOAD) - PRELOADED
    assert not missing, missing
    import torch

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    return polite()


def slot_1_raises() -> int:
    if worker_env().slot == 1:
        report_fields["step"] = 7
        raise ValueError("the loss is a fish")
    return deaf()


def killed_itself(name: str, enter: Callable[[StatusBoard], None] = lambda board: None) -> int:
    """In slot 1: show a phase on the board, then die by the signal `name`."""
    slot = worker_env().slot
    if slot == 0:
        return polite()
    print("about to go", flush=True)
    enter(StatusBoard(Path(worker_env().state) / f"{slot}.board"))
    os.kill(os.getpid(), signal.Signals[name])
    return 0


def crash_in_step_12() -> int:
    return killed_itself("SIGSEGV", lambda board: board.enter("forward", 12))


def abort_before_the_first_step() -> int:
    return killed_itself("SIGABRT")


def killed_in_step_12() -> int:
    return killed_itself("SIGKILL", lambda board: board.enter("backward", 12))


def killed_while_joining() -> int:
    return killed_itself("SIGKILL", lambda board: board.enter("joining"))


def fail_at_the_start() -> int:
    raise ValueError("a wrong path")


def record_the_end() -> None:
    """Wait until all workers run, then record the end of the run, once."""
    env = worker_env()
    mark_ready(env.slot)
    wait_until(lambda: all(Path(f"ready-{slot}").exists() for slot in range(env.slots)))
    log = GenerationLog(Path(env.folder) / "generations")
    pids = [int(Path(f"ready-{slot}").read_text()) for slot in range(env.slots)]
    members = tuple(
        Member(f"here/{slot}/a", "here", slot, pid, "127.0.0.1:1") for slot, pid in enumerate(pids)
    )
    log.propose(Generation(1, "1", members, "", 0, "start"))
    log.propose(Generation(2, "2", (), "", 3, "done", end=RunResult(0)))


def raise_after_the_end() -> int:
    record_the_end()
    raise ValueError("too late")


def exit_3_after_the_end() -> int:
    record_the_end()
    sys.exit(3)


def slot_1_raises_when_told() -> int:
    if worker_env().slot == 0 or count_starts():
        return polite()
    mark_ready(1)
    wait_until(Path("go").exists)
    report_fields["step"] = 3
    raise ValueError("bad luck")


def fail_with_progress() -> int:
    starts = count_starts()
    report_fields["step"] = starts + 1
    if starts < 6:
        raise ValueError("bad luck")
    return 0


def fail_if_slot_1(error: type[UsageError | CheckpointError | DivergedError]) -> int:
    if worker_env().slot:
        raise error("it does not fit", "a.txt", "fix it")
    return polite()


def usage_error() -> int:
    return fail_if_slot_1(UsageError)


def checkpoint_error() -> int:
    return fail_if_slot_1(CheckpointError)


def diverged_error() -> int:
    return fail_if_slot_1(DivergedError)


def exit_early() -> int:
    sys.exit(0)


def lose_peers_four_times() -> int:
    starts = count_starts()
    if starts < 4:
        raise FencedError("left out") if starts % 2 else PeersLostError("gone")
    return 0


def fail_and_hang_once() -> int:
    report_fields["step"] = 1
    if not count_starts():
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("fish")
    return 0


def drained() -> int:
    report_fields["drained"] = True
    return 0


def refuse_its_config() -> int:
    mark_ready(worker_env().slot)
    wait_until(Path("go").exists)
    raise UsageError("threads=2", "run.toml", "make it 1")


def leave_child_processes() -> int:
    subprocess.Popen(["sleep", "60"])
    subprocess.Popen(
        ["sh", "-c", "sleep 0.3 & exec true"], start_new_session=True
    )  # outlives the worker for a moment
    return polite()


def slot_1_without_handlers() -> int:
    return without_handlers() if worker_env().slot else polite()


def print_environment() -> int:
    env = worker_env()
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in ("0", "3", "4", "5", "6", "7")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    print(
        json.dumps(
            [
                env.slot,
                env.slots,
                env.expected_workers,
                env.host,
                env.after_generation,
                env.agent_pid == os.getppid(),
                env.drain,
                links,
            ]
        )
    )
    assert os.getpgrp() == os.getsid(0) == os.getpid()
    return 0
