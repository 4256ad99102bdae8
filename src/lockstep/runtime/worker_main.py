"""The main function of a worker: run it, and report to the agent how it ended."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, PeersLostError
from lockstep.files import write_atomic
from lockstep.runtime.exit_report import ExitReport, is_peer_loss
from lockstep.runtime.processes import now_s
from lockstep.runtime.signals import EXIT_INTERRUPTED
from lockstep.runtime.worker_env import EXIT_REPORT, exit_report_path, read_worker_env


def worker_main(function: Callable[[], int | None], about: Callable[[], Mapping[str, Any]] = dict) -> int:
    """Run `function()` and return the exit code; report failures to the agent, else on stderr.

    about  called at the end, returns further fields of the ExitReport
    """
    report, text = run_and_report(function)
    report = replace(report, **about())
    if not send_exit_report(report) and text:
        print(text, file=sys.stderr, flush=True)
    return report.code


def run_and_report(function: Callable[[], int | None]) -> tuple[ExitReport, str]:
    try:
        return ExitReport(function() or 0, now_s(), finished=True), ""
    except KeyboardInterrupt:
        return ExitReport(EXIT_INTERRUPTED, now_s(), finished=True), ""
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = error.code if isinstance(error.code, str) else ""
        return ExitReport(code, now_s(), text=text), text
    except LockstepError as error:
        lost = isinstance(error, PeersLostError)
        return ExitReport(error.exit_code, now_s(), str(error), traceback.format_exc(), lost_peers=lost), str(error)
    except BaseException as error:
        trace = traceback.format_exc()
        lost = is_peer_loss(error)
        return ExitReport(PeersLostError.exit_code if lost else 1, now_s(), trace, trace, lost_peers=lost), trace


def send_exit_report(report: ExitReport) -> bool:
    """Write the report to the agent's state folder. False without an agent, or if the disk is full."""
    worker_env = read_worker_env(os.environ)
    path = exit_report_path(Path(worker_env.state), worker_env.slot) if worker_env else os.environ.pop(EXIT_REPORT, "")
    try:
        if path:
            write_atomic(Path(path), report.to_line())
    except OSError:
        return False
    return bool(path)
