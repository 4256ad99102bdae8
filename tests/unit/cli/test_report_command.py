"""`lockstep report`: the file that it writes, and what it refuses."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from support.launching import run_lockstep
from support.written_run import write_run_folder

from lockstep.cli.report import last_leader_host, write_at_end
from lockstep.elastic.generation_log import Generation, GenerationLog, Member, RunResult


def test_a_report_of_one_run_and_of_two(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run_folder(tmp_path / name)
    done = run_lockstep("report", "a", cwd=tmp_path)
    assert (
        done.returncode == 0
        and done.stdout.startswith("a/report.html: ")
        and "60 steps" in done.stdout
    )
    assert run_lockstep("report", "a", "--compare", "b", cwd=tmp_path).stdout.startswith(
        "a/compare.html: "
    )
    assert run_lockstep("report", "a", "--out", "c.html", cwd=tmp_path).returncode == 0
    assert all(
        (tmp_path / name).stat().st_size > 30_000
        for name in ("a/report.html", "a/compare.html", "c.html")
    )


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_is_not_regular_is_never_replaced(tmp_path: Path, kind: str) -> None:
    run, out = write_run_folder(tmp_path / "run"), tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(out)
    else:
        out.symlink_to("/dev/full")
    done = run_lockstep("report", run, "--out", out)
    assert done.returncode == 2, done.stderr
    assert (
        f"{out} cannot be written: out is a {'named ' * (kind == 'pipe')}{kind}, not a regular file"
        in done.stderr
    )
    assert out.is_fifo() or out.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run_folder(tmp_path)
    (tmp_path / "report.html").mkdir()
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        write_at_end(tmp_path)
        write_at_end(tmp_path / "absent")
    assert [record.levelname for record in caplog.records] == [
        "WARNING"
    ] and "was not written (IsADirectoryError" in caplog.text


def test_a_preempted_long_run_exits_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_folder(tmp_path)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    for limit, written in ((size - 1, False), (size, True)):
        monkeypatch.setattr("lockstep.cli.report.PREEMPTED_BYTES", limit)
        write_at_end(tmp_path, is_preempted=True)
        assert (tmp_path / "report.html").exists() == written


def test_the_host_of_the_last_rank_0_writes_the_report(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    (tmp_path / "generations").mkdir()
    log = GenerationLog(tmp_path / "generations")
    members = [Member(f"{host}/0/x", host, 0, 1, "127.0.0.1:1") for host in "ab"]
    assert last_leader_host(tmp_path) == ""
    log.propose(Generation(1, "t", tuple(members), "", 0, "started"))
    log.propose(Generation(2, "u", tuple(members[1:]), "", 9, "a/0: exited"))
    assert last_leader_host(tmp_path) == "b"
    log.record_end(RunResult(0), "the run ended", after=0)
    write_at_end(tmp_path, "a")
    assert last_leader_host(tmp_path) == "b" and not (tmp_path / "report.html").exists()
    write_at_end(tmp_path, "b")
    assert (tmp_path / "report.html").exists()
