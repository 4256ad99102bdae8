"""Wait for a condition in a test, with a time limit and a message that names it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_until(
    condition: Callable[[], Any],
    what: str = "the condition",
    timeout_s: float = 120.0,
    *,
    process: subprocess.Popen[Any] | None = None,
    running: Callable[[], bool] = lambda: True,
    report: Callable[[], str] = str,
) -> float:
    """Wait until `condition()` is true; return the seconds that it took.

    process  must not exit before the condition is true
    running  returns whether the condition may still come true
    report   text for the AssertionError
    """
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() < start_s + timeout_s, (
            f"{what} did not happen within {timeout_s:g} s\n{report()}"
        )
        if process and process.poll() is not None and not condition():
            output = process.communicate()
            raise AssertionError(
                f"exit code {process.returncode} before {what}\n{output}\n{report()}"
            )
        assert running() or condition(), f"{what} did not happen before the end\n{report()}"
        time.sleep(0.005)
    return time.monotonic() - start_s
