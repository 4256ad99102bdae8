"""The log file: whole, in order, and waited for by nobody."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.log import LET_OUT_S, let_out, set_up

log = logging.getLogger("lockstep")
COUNT, LINE = 2000, 100  # far more than a pipe holds


def test_who_logs_does_not_wait_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    disk = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # nobody reads it yet
    set_up(rank=1, file=path)
    for number in range(COUNT):
        log.info("%s", f"{number:0{LINE}}")
    began_s = time.monotonic()
    let_out()
    assert time.monotonic() - began_s >= LET_OUT_S, "all of it cannot have been written"
    os.set_blocking(disk, True)
    with open(disk) as lines:
        read = [next(lines) for _ in range(COUNT)]
        assert [line.rpartition("rank 1: ")[2] for line in read] == [f"{number:0{LINE}}\n" for number in range(COUNT)]
        set_up()


def test_what_is_said_reads_as_it_did_then_and_is_there_after_let_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, said = tmp_path / "log", ["one"]
    set_up(file=path)
    log.warning("%s", said)
    said.append("two")
    try:
        raise ValueError("an error on order")
    except ValueError:
        log.exception("it failed")
    let_out()
    text = path.read_text()
    assert "W rank 0: ['one']" in text and "E rank 0: it failed\nTraceback" in text and "ValueError: an error on order" in text
    assert capsys.readouterr().err.startswith("['one']\nit failed\nTraceback")


def test_a_process_that_ends_leaves_nothing_unwritten(tmp_path: Path) -> None:
    script = "import sys, logging; from pathlib import Path; from lockstep.log import set_up\nset_up(rank=1, file=Path(sys.argv[1]))\n"
    script += f"for number in range({COUNT}): logging.getLogger('lockstep').info('line %d', number)\nsys.exit(3)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "log")], check=False).returncode == 3
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [f"line {number}" for number in range(COUNT)]
