"""Status board: read by another process while the worker spins, is stopped or was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from support.processes import SUPPORT

from lockstep.runtime.status_board import (
    BODY,
    CHECK,
    PHASES,
    RECORD_BYTES,
    Status,
    StatusBoard,
    read_status,
    valid_body,
)


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process that writes status records in a loop, and the path of its board."""
    path = tmp_path / "0.board"
    with subprocess.Popen(
        [sys.executable, str(SUPPORT / "write_statuses.py"), str(path)]
    ) as process:
        try:
            while not path.exists() or read_status(path).step < 100:
                assert process.poll() is None
                time.sleep(0.01)
            yield process, path
        finally:
            process.kill()


def is_consistent(status: Status, pid: int) -> bool:
    n, collective = status.step, status.collective
    return (
        (status.pid, status.generation, status.phase) == (pid, 7, PHASES[n % len(PHASES)])
        and collective in (n - 1, n)
        and status.collective_bytes == collective << 32 | collective
        and 0 <= status.moved_s <= status.since_s < 60
    )


def test_reader_never_sees_a_torn_record(spinning: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = spinning
    start_s, steps = time.monotonic(), set()
    while (passed_s := time.monotonic() - start_s) < 0.3 or (len(steps) < 50 and passed_s < 3):
        status = read_status(path)
        assert is_consistent(status, process.pid), status
        steps.add(status.step)
    assert len(steps) > 2, "the writer made no progress between the reads"


def test_stopped_or_killed_worker_leaves_a_valid_record(
    spinning: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, path = spinning
    for _ in range(50):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        first, second = read_status(path), read_status(path)
        assert is_consistent(first, process.pid) and first.step == second.step
        assert second.moved_s > first.moved_s
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert is_consistent(read_status(path), process.pid)


def test_torn_record_is_detected() -> None:
    first, second = (
        body + CHECK.pack(crc32(body))
        for body in (BODY.pack(n, 9, 1, n, n, 5, n, n, n, n, 0.5) for n in (4, 6))
    )
    assert valid_body(first) and valid_body(second) and not valid_body(bytes(RECORD_BYTES))
    for written in range(1, RECORD_BYTES):
        torn = second[:written] + first[written:]
        assert torn in (first, second) or not valid_body(torn)


def test_previous_record_is_read_when_the_newest_is_torn(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "0.board")
    for step in (1, 2, 3):
        board.enter("forward", step)
    torn = bytearray((tmp_path / "0.board").read_bytes())
    newest = board._number % 2 * RECORD_BYTES
    torn[newest + 20] ^= 0xFF
    (tmp_path / "1.board").write_bytes(torn)
    assert (
        read_status(tmp_path / "0.board").step == 3 and read_status(tmp_path / "1.board").step == 2
    )


def test_phase_step_and_collective_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "3.board"
    board = StatusBoard(path)
    assert (read_status(path).phase, read_status(path).pid, read_status(path).step) == (
        "starting",
        os.getpid(),
        0,
    )
    board.enter("joining", generation=2)
    board.enter_collective(64)
    board.enter("forward", 118)
    status = read_status(path)
    assert (
        status.phase,
        status.step,
        status.generation,
        status.collective,
        status.collective_bytes,
    ) == ("forward", 118, 2, 1, 64)
    board.enter("joining", generation=3)
    assert read_status(path).collective == 0 and read_status(path).step == 118, (
        "a new generation counts collectives from 0"
    )


def test_collective_resets_moved_s_but_not_since_s(tmp_path: Path) -> None:
    path = tmp_path / "0.board"
    board = StatusBoard(path)
    board.enter("reducing", 1)
    time.sleep(0.02)
    board.enter_collective()
    status = read_status(path)
    assert status.since_s > 0.02 > status.moved_s
    assert (
        status.after(5).since_s == status.since_s + 5
        and status.after(5).moved_s == status.moved_s + 5
    )


def test_during_restores_the_previous_phase(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "0.board")
    board.enter("updating", 5)
    with pytest.raises(OSError), board.during("saving"):
        with board.during("evaluating"):
            assert read_status(tmp_path / "0.board").phase == "evaluating"
        assert read_status(tmp_path / "0.board").phase == "saving"
        raise OSError
    assert (read_status(tmp_path / "0.board").phase, read_status(tmp_path / "0.board").step) == (
        "updating",
        5,
    )


def test_first_step_of_a_generation(tmp_path: Path) -> None:
    path = tmp_path / "0.board"
    board = StatusBoard(path)
    seen = []
    for generation, step in [(1, 10), (None, 10), (None, 11), (2, None), (None, 11), (None, 12)]:
        board.enter("data", step, generation=generation)
        seen.append(read_status(path).first_step)
    assert seen == [True, True, False, True, True, False]


def test_median_step_ignores_outliers_and_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    board = StatusBoard(tmp_path / "0.board")
    for step, seconds in [
        (1, 2),
        (2, 2),
        (3, 100),
        (4, 2),
        (9, 2),
    ]:  # a checkpoint after step 3, and a jump from 4 to 9
        board.enter("data", step)
        now[0] += 10**9
        board.enter("forward", step)
        now[0] += (seconds - 1) * 10**9
    assert read_status(tmp_path / "0.board").step_s == 2.0
    assert read_status(tmp_path / "0.board").since_s == 1.0


def test_new_worker_is_not_disturbed_by_an_old_one_in_its_slot(tmp_path: Path) -> None:
    old, new = StatusBoard(tmp_path / "0.board"), StatusBoard(tmp_path / "0.board")
    new.enter("joining", generation=9)
    old.enter("forward", 4)
    assert read_status(tmp_path / "0.board").generation == 9
    assert [path.name for path in tmp_path.iterdir()] == ["0.board"]


def test_board_without_agent_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    board = StatusBoard(None)
    with board.during("saving"):
        board.enter_collective()
    assert board.phase == "starting" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"x" * 10, bytes(2 * RECORD_BYTES)])
def test_invalid_board_is_an_os_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "0.board").write_bytes(content)
    with pytest.raises(OSError, match=r"0\.board"):
        read_status(tmp_path / "0.board")


def test_a_call_takes_microseconds(tmp_path: Path) -> None:
    board, times = StatusBoard(tmp_path / "0.board"), {}
    for name, call in {
        "enter": lambda: board.enter("forward", 3),
        "enter_collective": board.enter_collective,
        "read_status": lambda: read_status(tmp_path / "0.board"),
    }.items():
        times[name] = (
            min(timeit.repeat(call, timer=time.process_time, number=200, repeat=5)) / 200 * 1e6
        )
    assert max(times.values()) < 200, f"microseconds: {times}"
