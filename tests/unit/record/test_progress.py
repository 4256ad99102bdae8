"""Progress display: lines in a pipe, a bar on a terminal, silence of other processes of a host."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.record.progress import ProgressDisplay

SCRIPT = Path(__file__).parents[2] / "support" / "show_progress.py"


def run(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_pipe_gets_lines_at_the_interval_and_for_the_first_and_last_step() -> None:
    out, err = run(50, 3, 1000, 1).communicate()
    assert out == "".join(f"step {step}/50  loss 1.500\n" for step in (" 4", "50"))
    assert err == "ended\n"


def test_lines_are_flushed() -> None:
    with run(50, 0, 1000, 1, "wait") as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "step  1/50  loss 1.500\n", (
            "flushed: the run waits for input after step 20"
        )
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "step 50/50  loss 1.500\n"


def test_other_processes_of_a_host_show_nothing() -> None:
    out, err = run(50, 0, 0, 0).communicate()
    assert out == "" and err == "ended\n"


def test_run_continues_when_the_reader_exits() -> None:
    with run(50, 0, 0, 1, "wait") as process:
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        process.stdout.readline()
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.flush()
        errors = process.stderr.read()
        assert process.wait() == 0
    assert errors.count("standard output was closed") == 1 and errors.endswith("ended\n")


def test_terminal_gets_lines_above_a_bar() -> None:
    parent, child = pty.openpty()
    command = [sys.executable, str(SCRIPT), "50", "0", "0", "1"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=subprocess.DEVNULL, env=env
    )
    os.close(child)
    output = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # EIO on Linux when the other side is closed
            break
        if not part:
            break
        output += part
    os.close(parent)
    assert process.wait() == 0
    text = output.decode()
    assert "\x1b[" in text and "/50" in text, "a bar was drawn"
    for step in range(1, 51):
        assert f"step {step:>2}/50  loss 1.500" in text


def test_no_control_characters_without_a_bar() -> None:
    stream = io.StringIO()
    with ProgressDisplay(10, 0, lambda: True, every_s=1000, stream=stream) as progress:
        for step in range(1, 11):
            progress.step(step, {"loss": 2.0})
        progress.print_line("saved [step 10]")
    assert stream.getvalue().splitlines() == [
        *(f"step {step:>2}/10  loss 2.000" for step in (1, 10)),
        "saved [step 10]",
    ]
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(("step", "shown"), [(102, False), (999, False), (1000, True)])
def test_lines_are_due_at_the_first_step_the_interval_and_the_last_step(
    step: int, shown: bool
) -> None:
    stream = io.StringIO()
    with ProgressDisplay(1000, 100, lambda: True, every_s=1000, stream=stream) as progress:
        progress.step(101, {"loss": 2.0})
        progress.step(step, {"loss": 1.0})
    assert ("loss 1.000" in stream.getvalue()) is shown and "loss 2.000" in stream.getvalue()
