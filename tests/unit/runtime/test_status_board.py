"""The board: what a worker does, read by another process while it spins, is stopped or has been killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from lockstep.runtime.status_board import BODY, CHECK, PHASES, PLACE_BYTES, Board, Doing, look, whole

# Every record of it can be told from a torn one: step, phase, collective and bytes belong together.
SPIN = """
import sys
from pathlib import Path
from lockstep.runtime.status_board import PHASES, Board
board = Board(Path(sys.argv[1]))
board.enter("joining", generation=7)
n = 0
while True:
    n += 1
    board.enter(PHASES[n % len(PHASES)], n)
    board.collective(n << 32 | n)
"""


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process that does nothing but write, and its board."""
    path = tmp_path / "0.board"
    with subprocess.Popen([sys.executable, "-c", SPIN, str(path)]) as process:
        try:
            while not path.exists() or look(path).step < 100:
                assert process.poll() is None
                time.sleep(0.01)
            yield process, path
        finally:
            process.kill()


def belongs_together(doing: Doing, pid: int) -> bool:
    n, collective = doing.step, doing.collective
    return (
        (doing.pid, doing.generation, doing.phase) == (pid, 7, PHASES[n % len(PHASES)])
        and collective in (n - 1, n)
        and doing.collective_bytes == collective << 32 | collective
        and 0 <= doing.moved_s <= doing.since_s < 60
    )


def test_a_reader_never_sees_half_a_record(spinning: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = spinning
    begin, steps = time.monotonic(), set()
    while (passed_s := time.monotonic() - begin) < 0.3 or (len(steps) < 50 and passed_s < 3):
        doing = look(path)
        assert belongs_together(doing, process.pid), doing
        steps.add(doing.step)
    assert len(steps) > 2, "the writer moved between the looks"


def test_a_worker_that_is_stopped_or_killed_anywhere_leaves_a_whole_record(spinning: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, path = spinning
    for _ in range(50):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        first, second = look(path), look(path)
        assert belongs_together(first, process.pid) and first.step == second.step
        assert second.moved_s > first.moved_s
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    assert belongs_together(look(path), process.pid)


def test_a_torn_record_is_known_as_such() -> None:
    first, second = (body + CHECK.pack(crc32(body)) for body in (BODY.pack(n, 9, 1, n, n, 5, n, n, n, n, 0.5) for n in (4, 6)))
    assert whole(first) and whole(second) and not whole(bytes(PLACE_BYTES))
    for written in range(1, PLACE_BYTES):
        torn = second[:written] + first[written:]
        assert torn in (first, second) or not whole(torn)


def test_the_newest_record_counts_when_the_one_after_it_is_torn(tmp_path: Path) -> None:
    board = Board(tmp_path / "0.board")
    for step in (1, 2, 3):
        board.enter("forward", step)
    torn = bytearray((tmp_path / "0.board").read_bytes())
    newest = board._number % 2 * PLACE_BYTES
    torn[newest + 20] ^= 0xFF
    (tmp_path / "1.board").write_bytes(torn)
    assert look(tmp_path / "0.board").step == 3 and look(tmp_path / "1.board").step == 2


def test_phase_step_and_collective_are_what_the_worker_said(tmp_path: Path) -> None:
    path = tmp_path / "3.board"
    board = Board(path)
    assert (look(path).phase, look(path).pid, look(path).step) == ("starting", os.getpid(), 0)
    board.enter("joining", generation=2)
    board.collective(64)
    board.enter("forward", 118)
    doing = look(path)
    assert (doing.phase, doing.step, doing.generation, doing.collective, doing.collective_bytes) == ("forward", 118, 2, 1, 64)
    board.enter("joining", generation=3)
    assert look(path).collective == 0 and look(path).step == 118, "collectives are counted anew, the step is done again"


def test_a_collective_moves_the_worker_but_not_its_phase(tmp_path: Path) -> None:
    path = tmp_path / "0.board"
    board = Board(path)
    board.enter("reducing", 1)
    time.sleep(0.02)
    board.collective()
    doing = look(path)
    assert doing.since_s > 0.02 > doing.moved_s
    assert doing.after(5).since_s == doing.since_s + 5 and doing.after(5).moved_s == doing.moved_s + 5


def test_during_gives_back_the_phase_before_whatever_happens(tmp_path: Path) -> None:
    board = Board(tmp_path / "0.board")
    board.enter("updating", 5)
    with pytest.raises(OSError), board.during("saving"):
        with board.during("evaluating"):
            assert look(tmp_path / "0.board").phase == "evaluating"
        assert look(tmp_path / "0.board").phase == "saving"
        raise OSError
    assert (look(tmp_path / "0.board").phase, look(tmp_path / "0.board").step) == ("updating", 5)


def test_it_is_the_generations_first_step_until_the_next_begins(tmp_path: Path) -> None:
    path = tmp_path / "0.board"
    board = Board(path)
    seen = []
    for generation, step in [(1, 10), (None, 10), (None, 11), (2, None), (None, 11), (None, 12)]:
        board.enter("data", step, generation=generation)
        seen.append(look(path).first_step)
    assert seen == [True, True, False, True, True, False]


def test_the_median_step_leaves_out_what_was_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    board = Board(tmp_path / "0.board")
    for step, seconds in [(1, 2), (2, 2), (3, 100), (4, 2), (9, 2)]:  # a checkpoint after step 3, and a jump from 4 to 9
        board.enter("data", step)
        now[0] += 10**9
        board.enter("forward", step)
        now[0] += (seconds - 1) * 10**9
    assert look(tmp_path / "0.board").step_s == 2.0
    assert look(tmp_path / "0.board").since_s == 1.0


def test_a_new_worker_in_the_slot_is_not_disturbed_by_an_old_one(tmp_path: Path) -> None:
    old, new = Board(tmp_path / "0.board"), Board(tmp_path / "0.board")
    new.enter("joining", generation=9)
    old.enter("forward", 4)
    assert look(tmp_path / "0.board").generation == 9
    assert [path.name for path in tmp_path.iterdir()] == ["0.board"]


def test_without_an_agent_a_board_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = Board(None)
    with board.during("saving"):
        board.collective()
    assert board.phase == "starting" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"x" * 10, bytes(2 * PLACE_BYTES)])
def test_what_is_no_board_is_an_error_of_the_system(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "0.board").write_bytes(content)
    with pytest.raises(OSError, match=r"0\.board"):
        look(tmp_path / "0.board")


def test_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board, times = Board(tmp_path / "0.board"), {}
    for name, call in {
        "enter": lambda: board.enter("forward", 3),
        "collective": board.collective,
        "look": lambda: look(tmp_path / "0.board"),
    }.items():
        begin = time.perf_counter()
        for _ in range(1000):
            call()
        times[name] = (time.perf_counter() - begin) / 1000 * 1e6
    with capsys.disabled():
        print(" board: " + ", ".join(f"{name} {cost:.2f} us" for name, cost in times.items()), end=" ")
