"""The log file is complete and in order, and log calls do not wait for the disk."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.waiting import wait_until

from lockstep import log as log_module
from lockstep.errors import DataError
from lockstep.log import (
    FLUSH_TIMEOUT_S,
    announcing,
    erase_line,
    flush_log,
    printable,
    set_up_logging,
)

log = logging.getLogger("lockstep")
COUNT, LINE = 2000, 100  # far more than a pipe holds


def test_log_calls_do_not_wait_for_a_hung_disk(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    disk = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not read yet
    set_up_logging(rank=1, file=path)
    for number in range(COUNT):
        log.info("%s", f"{number:0{LINE}}")
    started_s = time.monotonic()
    flush_log()
    assert time.monotonic() - started_s >= FLUSH_TIMEOUT_S, "the pipe cannot hold all records"
    os.set_blocking(disk, True)
    with open(disk) as lines:
        read = [next(lines) for _ in range(COUNT)]
        assert [line.rpartition("rank 1: ")[2] for line in read] == [
            f"{number:0{LINE}}\n" for number in range(COUNT)
        ]
        set_up_logging()


def test_records_are_formatted_at_once_and_written_after_flush_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, argument = tmp_path / "log", ["one"]
    set_up_logging(file=path)
    log.warning("%s", argument)
    argument.append("two")
    try:
        raise ValueError("an error on order")
    except ValueError:
        log.exception("it failed")
    flush_log()
    text = path.read_text()
    assert (
        "W rank 0: ['one']" in text
        and "E rank 0: it failed\nTraceback" in text
        and "ValueError: an error on order" in text
    )
    assert capsys.readouterr().err.startswith("['one']\nit failed\nTraceback")


def test_all_records_are_written_at_exit(tmp_path: Path) -> None:
    script = (
        "import sys, logging; from pathlib import Path; from lockstep.log import set_up_logging\n"
    )
    script += "set_up_logging(rank=1, file=Path(sys.argv[1]))\n"
    script += f"for number in range({COUNT}): logging.getLogger('lockstep').info('line %d', number)\nsys.exit(3)"
    assert (
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "log")], check=False
        ).returncode
        == 3
    )
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        f"line {number}" for number in range(COUNT)
    ]


CLIPBOARD = "\x1b]52;c;bHMgfg==\x07"  # sets the clipboard of a terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLIPBOARD, "\ufffd]52;c;bHMgfg==\ufffd"),
        ("\x9b2J\x00\x7f", "\ufffd2J\ufffd\ufffd"),
        ("over\rwritten", "over\ufffdwritten"),
        ("\ud800", "\ufffd"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("two\r\nlines\tand é 👩\u200d🚀", "two\nlines\tand é 👩\u200d🚀"),
    ],
)
def test_control_characters_are_replaced(
    text: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printable(text) == shown
    assert str(DataError(text, text)) == f"DataError: {shown}\n  " + "\n  ".join(shown.splitlines())
    set_up_logging(file=tmp_path / "log")
    log.warning("%s", text)
    flush_log()
    assert capsys.readouterr().err == f"{shown}\n" and (tmp_path / "log").read_text().endswith(
        f": {shown}\n"
    )
    set_up_logging()


def test_a_phase_is_announced_once_while_it_lasts_and_only_if_it_takes_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "announced", set())
    monkeypatch.setattr(log_module, "ANNOUNCE_S", 0.05)
    with caplog.at_level(logging.INFO, "lockstep"):
        for _ in range(2):
            with announcing("packing 100%"):
                wait_until(lambda: "packing 100%" in log_module.announced, "the line")
        monkeypatch.setattr(log_module, "ANNOUNCE_S", 60.0)
        with announcing("a short phase"):
            pass
    assert [record.message for record in caplog.records] == ["packing 100%"]


def test_only_a_terminal_is_told_to_erase_the_bar_in_the_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert erase_line(is_terminal=True) == "\r\x1b[K" and not erase_line(is_terminal=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    set_up_logging()
    log.info("saved \x1b[2J")
    assert capsys.readouterr().err == "\r\x1b[Ksaved \ufffd[2J\n"
    monkeypatch.setenv("TERM", "dumb")
    assert not erase_line(is_terminal=True)
    monkeypatch.undo()
    set_up_logging()
