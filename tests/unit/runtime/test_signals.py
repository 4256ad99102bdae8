"""Stop signals, each test in its own process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


def test_a_second_sigint_ends_a_process_that_hangs_in_compiled_code() -> None:
    command = [sys.executable, str(SUPPORT / "blocked_in_compiled_code.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
        finally:
            process.kill()


def test_all_handlers_are_restored_and_forked_children_can_be_terminated() -> None:
    command = [sys.executable, str(SUPPORT / "fork_under_stop_signals.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "done\n", done.stderr
