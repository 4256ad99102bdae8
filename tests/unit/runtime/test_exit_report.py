"""Who failed first: the verdict over all ends, and what counts as a lost peer."""

from __future__ import annotations

import signal

import pytest

from lockstep.runtime.exit_report import Account, End, peers_lost, plainly, verdict
from lockstep.runtime.subprocesses import Limits, Times, next_signal

KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT


def end(rank: int, code: int, at_s: float = 1.0, *, sent: tuple[int, ...] = (), account: Account | None = None) -> End:
    return End(rank, 100 + rank, code, at_s, sent, account, f"logs/vm-{rank}.log")


def said(code: int, at_s: float, text: str = "", *, finished: bool = False, lost: bool = False) -> Account:
    return Account(code, at_s, text, finished=finished, lost_peers=lost)


@pytest.mark.parametrize("code", [0, 75, 130])
def test_a_code_that_all_workers_share_is_the_commands_code(code: int) -> None:
    assert verdict([end(rank, code, account=said(code, 1, finished=True)) for rank in range(3)]) == (code, "")


def test_the_earliest_failure_counts_and_not_the_earliest_consequence() -> None:
    ends = [
        end(0, 76, 1.0, account=said(76, 1.0, "PeersLostError: gone", lost=True)),
        end(1, 3, 5.0, account=said(3, 2.0, "DataError: later")),
        end(2, 4, 6.0, account=said(4, 1.5, "DivergedError: first")),
    ]
    code, text = verdict(ends)
    assert code == 4
    assert text.splitlines()[:2] == ["rank 2 (pid 102) failed first:", "DivergedError: first"]
    assert text.splitlines()[3:] == ["rank 0 lost its peers", "rank 1 failed too: DataError: later (log: logs/vm-1.log)"]


def test_one_error_that_all_raise_is_shown_once() -> None:
    assert verdict([end(r, 4, account=said(4, r, "DivergedError: nan")) for r in range(3)]) == (4, "DivergedError: nan")


def test_a_worker_killed_by_a_stranger_is_the_first_failure_with_128_and_its_signal() -> None:
    code, text = verdict([end(0, 76, 0.5, account=said(76, 0.5, "lost", lost=True)), end(1, -KILL, 0.9)])
    assert code == 137
    for part in ("rank 1 (pid 101) was ended by SIGKILL", "logs/vm-1.log", "memory", "rank 0 lost its peers"):
        assert part in text
    assert verdict([end(0, -64)])[0] == 192  # a signal without a name


def test_those_that_the_parent_ended_are_no_failures() -> None:
    code, text = verdict([end(0, -TERM, 0.1, sent=(TERM,)), end(1, -KILL, 0.2, sent=(TERM, KILL)), end(2, 5, 9.0)])
    assert code == 5
    assert "rank 2 (pid 102) ended with exit code 5, without a word" in text


def test_leaving_with_0_while_others_are_at_work_is_a_failure() -> None:
    lost = end(0, 76, account=said(76, 1, "lost", lost=True))
    for account in (said(0, 2), said(0, 2, finished=True), None):
        code, text = verdict([lost, end(1, 0, 2.0, account=account)])
        assert code == 1
        assert text.startswith("LockstepError: rank 1 ")
        assert "rank 0 lost its peers" in text


def test_when_all_only_lost_their_peers_the_code_says_so() -> None:
    code, text = verdict([end(r, 76, account=said(76, r, f"PeersLostError: rank {r}", lost=True)) for r in range(3)])
    assert code == 76
    assert "PeersLostError: rank 0" in text and "ranks 1 and 2 lost their peers" in text


def test_a_finished_worker_that_was_ended_on_its_way_out_is_finished() -> None:
    ends = [end(0, -TERM, sent=(TERM,), account=said(75, 1, finished=True)), end(1, 75, account=said(75, 1, finished=True))]
    assert verdict(ends) == (75, "")


def test_a_worker_that_failed_and_hung_on_its_way_out_has_the_code_it_said() -> None:
    assert verdict([end(0, -KILL, sent=(TERM, KILL), account=said(3, 1, "DataError: x"))])[0] == 3


def test_workers_that_disagree_how_it_ended_are_an_error() -> None:
    code, text = verdict([end(0, 75, account=said(75, 1, finished=True)), end(1, 0, account=said(0, 1, finished=True))])
    assert code == 1
    assert "rank 0 with 75, rank 1 with 0" in text


def test_workers_that_did_not_stop_in_time_are_named() -> None:
    code, text = verdict([end(0, -KILL, sent=(KILL,)), end(1, 75)], asked=[TERM], grace_s=30)
    assert code == 128 + TERM
    assert "rank 0 did not stop within 30 s of SIGTERM" in text
    code, text = verdict([end(0, -INT), end(1, -INT)], asked=[INT], grace_s=30)
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
def test_torchs_words_for_a_lost_peer_are_known(message: str) -> None:
    assert peers_lost(RuntimeError(message))
    try:
        try:
            raise RuntimeError(message)
        except RuntimeError as error:
            raise ValueError("step failed") from error
    except ValueError as error:
        assert peers_lost(error)


def test_other_errors_are_no_lost_peers() -> None:
    assert not peers_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not peers_lost(RuntimeError("[/x/gloo/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4"))  # shapes differ: a bug
    assert not peers_lost(ConnectionResetError("Connection reset by peer"))  # a download, say
    assert not peers_lost(None)


def test_a_torch_error_is_told_without_its_source_file_and_advice() -> None:
    assert plainly(RuntimeError(GONE[0])) == "Connection closed by peer [127.0.0.1]:29091"
    assert plainly(RuntimeError()) == "RuntimeError"


def test_who_lives_is_asked_to_end_then_ended_and_is_let_alone_without_a_reason() -> None:
    limits = Limits(grace_s=100, settle_s=5, end_s=10, early_s=30)
    assert next_signal(Times(), limits) is None
    assert next_signal(Times(asked_s=1), limits) == (101, KILL)
    assert next_signal(Times(asked_s=1, failed_s=2), limits) == (7, TERM)
    assert next_signal(Times(early_s=2), limits) == (32, TERM)
    assert next_signal(Times(failed_s=2, ending_s=7), limits) == (17, KILL)
