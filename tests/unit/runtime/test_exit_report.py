"""Exit summaries: which failure came first, and which errors mean a lost peer."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.runtime.exit_report import (
    ExitReport,
    WorkerExit,
    error_summary,
    is_peer_loss,
    keep_user_frames,
    summarize_exits,
)

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


def exited(
    rank: int,
    code: int,
    at_s: float = 1.0,
    *,
    sent: tuple[int, ...] = (),
    report: ExitReport | None = None,
) -> WorkerExit:
    return WorkerExit(rank, 100 + rank, code, at_s, sent, report, f"logs/vm-{rank}.log")


def reported(
    code: int, at_s: float, text: str = "", *, finished: bool = False, lost: bool = False
) -> ExitReport:
    return ExitReport(code, at_s, text, finished=finished, lost_peers=lost)


@pytest.mark.parametrize("code", [0, 75, 130])
def test_common_exit_code_is_the_code_of_the_command(code: int) -> None:
    assert summarize_exits(
        [exited(rank, code, report=reported(code, 1, finished=True)) for rank in range(3)]
    ) == (code, "")


def test_earliest_failure_counts_not_the_earliest_consequence() -> None:
    exits = [
        exited(0, 76, 1.0, report=reported(76, 1.0, "PeersLostError: gone", lost=True)),
        exited(1, 3, 5.0, report=reported(3, 2.0, "DataError: later")),
        exited(2, 4, 6.0, report=reported(4, 1.5, "DivergedError: first")),
    ]
    code, text = summarize_exits(exits)
    assert code == 4
    assert text.splitlines()[:2] == ["rank 2 (pid 102) failed first:", "DivergedError: first"]
    assert text.splitlines()[3:] == [
        "rank 0 lost its peers",
        "rank 1 failed too: DataError: later (log: logs/vm-1.log)",
    ]


def test_error_raised_by_all_workers_is_shown_once() -> None:
    assert summarize_exits(
        [exited(r, 4, report=reported(4, r, "DivergedError: nan")) for r in range(3)]
    ) == (
        4,
        "DivergedError: nan",
    )


def test_worker_killed_from_outside_is_the_first_failure() -> None:
    code, text = summarize_exits(
        [exited(0, 76, 0.5, report=reported(76, 0.5, "lost", lost=True)), exited(1, -KILL, 0.9)]
    )
    assert code == 137
    for part in (
        "rank 1 (pid 101) was killed by SIGKILL",
        "logs/vm-1.log",
        "memory",
        "rank 0 lost its peers",
    ):
        assert part in text
    assert summarize_exits([exited(0, -64)])[0] == 192  # a signal without a name


def test_workers_killed_by_the_parent_are_not_failures() -> None:
    code, text = summarize_exits(
        [
            exited(0, -TERM, 0.1, sent=(TERM,)),
            exited(1, -KILL, 0.2, sent=(TERM, KILL)),
            exited(2, 5, 9.0),
        ]
    )
    assert code == 5
    assert "rank 2 (pid 102) exited with code 5 and left no error report" in text


def test_exit_0_while_others_train_is_a_failure() -> None:
    lost = exited(0, 76, report=reported(76, 1, "lost", lost=True))
    for report in (reported(0, 2), reported(0, 2, finished=True), None):
        code, text = summarize_exits([lost, exited(1, 0, 2.0, report=report)])
        assert code == 1
        assert text.startswith("LockstepError: rank 1 ")
        assert "rank 0 lost its peers" in text


def test_all_workers_lost_their_peers() -> None:
    code, text = summarize_exits(
        [
            exited(r, 76, report=reported(76, r, f"PeersLostError: rank {r}", lost=True))
            for r in range(3)
        ]
    )
    assert code == 76
    assert "PeersLostError: rank 0" in text and "ranks 1 and 2 lost their peers" in text


def test_finished_worker_killed_while_exiting_is_finished() -> None:
    exits = [
        exited(0, -TERM, sent=(TERM,), report=reported(75, 1, finished=True)),
        exited(1, 75, report=reported(75, 1, finished=True)),
    ]
    assert summarize_exits(exits) == (75, "")


def test_failed_worker_that_hung_while_exiting_has_its_reported_code() -> None:
    assert (
        summarize_exits(
            [exited(0, -KILL, sent=(TERM, KILL), report=reported(3, 1, "DataError: x"))]
        )[0]
        == 3
    )


def test_different_exit_codes_are_an_error() -> None:
    code, text = summarize_exits(
        [
            exited(0, 75, report=reported(75, 1, finished=True)),
            exited(1, 0, report=reported(0, 1, finished=True)),
        ]
    )
    assert code == 1
    assert "rank 0 with 75, rank 1 with 0" in text


def test_workers_that_did_not_stop_in_time_are_named() -> None:
    code, text = summarize_exits(
        [exited(0, -KILL, sent=(KILL,)), exited(1, 75)], asked=[TERM], grace_s=30
    )
    assert code == 128 + TERM
    assert "rank 0 did not stop within 30 s of SIGTERM" in text
    code, text = summarize_exits([exited(0, -INT), exited(1, -INT)], asked=[INT], grace_s=30)
    assert code == 130
    assert "before it could save" in text


GONE = [
    "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29091. This is typically caused by",
    "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:38561: Connection reset by peer. This is typically caused by",
    "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
    "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "Gloo connectFullMesh failed with [/x/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:43938$0",
    "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
]


@pytest.mark.parametrize("message", GONE)
def test_torch_messages_for_a_lost_peer_are_recognized(message: str) -> None:
    assert is_peer_loss(RuntimeError(message))
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            raise ValueError("step failed") from error
    except ValueError as error:
        assert is_peer_loss(error)


def test_other_errors_are_not_peer_loss() -> None:
    assert not is_peer_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_loss(
        RuntimeError("[/x/gloo/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4")
    )  # shapes differ: a bug
    assert not is_peer_loss(ConnectionResetError("Connection reset by peer"))  # a download, say
    assert not is_peer_loss(None)


def test_error_summary_drops_source_file_and_advice() -> None:
    assert error_summary(RuntimeError(GONE[0])) == "Connection closed by peer [127.0.0.1]:29091"
    assert error_summary(RuntimeError()) == "RuntimeError"


def function_in(file: str, body: str, **names: Any) -> Callable[[], None]:
    """Return a function whose code is in this file."""
    exec(compile(f"def call(): {body}", file, "exec"), names)
    call: Callable[[], None] = names["call"]
    return call


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        (["lockstep", "<frozen runpy>", "loop.py"], ["loop.py"]),
        (["loop.py", "lockstep", "loop.py"], ["loop.py", "loop.py"]),
        (["loop.py", "lockstep", "torch"], ["loop.py", "lockstep", "torch"]),
        (["lockstep", "torch"], ["lockstep", "torch"]),
    ],
)
def test_frames_of_lockstep_that_lead_to_the_user_are_dropped(
    files: list[str], kept: list[str]
) -> None:
    places = {
        "lockstep": str(sys.modules[keep_user_frames.__module__].__file__),
        "torch": "/usr/lib/python3/dist-packages/torch/nn.py",
        "loop.py": "/home/user/loop.py",
    }
    call = function_in(places.get(files[-1], files[-1]), "1 / 0")
    for file in files[-2::-1]:
        call = function_in(places.get(file, file), "inner()", inner=call)
    try:
        call()
    except ZeroDivisionError as error:
        error.__traceback__ = error.__traceback__.tb_next  # of this test
        keep_user_frames(error)
        shown = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert shown == [places.get(file, file) for file in kept]
