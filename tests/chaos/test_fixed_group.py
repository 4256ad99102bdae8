"""Fixed groups as real processes (`evaluate --workers`, `generate --tensor`): exit codes, messages,
signals, kills, and leftovers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launching import TORCHRUN, lockstep_command, one_thread, run_command
from support.processes import SRC, SUPPORT, is_alive, processes_in, state_of
from support.waiting import wait_until

from lockstep.corpus.tokenizer import Tokenizer
from lockstep.models import hub
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LlamaConfig, config_to_hf

PROGRAM = SUPPORT / "fixed_group_program.py"


def environment(folder: Path) -> dict[str, str]:
    environ = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("LOCKSTEP_", "CUDA_"))
    }
    environ |= {
        "PYTHONPATH": f"{SRC}:{SUPPORT}",
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "LOCKSTEP_DEVICE": "cpu",
    }
    return environ


class GroupRun:
    """A fixed group under test, in its own folder. `process`: its agent."""

    def __init__(self, folder: Path, worker: str, **settings: Any) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        values = {"worker": worker, "workers": 2, "timeouts": {}} | settings
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(values)],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready(self, workers: int = 2) -> list[int]:
        """Wait until all workers are ready; return their pids."""
        files = [self.folder / f"ready-{rank}" for rank in range(workers)]
        wait_until(lambda: all(file.exists() for file in files) or self.process.poll() is not None)
        assert self.process.poll() is None, self.wait()
        return [int(file.read_text()) for file in files]

    def wait(self) -> tuple[int, str, str]:
        """Wait for the agent; return (exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=120)
        assert not list((self.folder / "tmp").iterdir()), "files are left in the temporary folder"
        return self.process.returncode, out, err


Start = Callable[..., GroupRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start fixed groups. At the end of the test, kill the processes left in its folder."""
    groups: list[GroupRun] = []

    def start_group(worker: str, **settings: Any) -> GroupRun:
        """worker: name of a function in tests/support/fixed_workers.py"""
        groups.append(GroupRun(tmp_path, worker, **settings))
        return groups[-1]

    yield start_group
    for pid in processes_in(tmp_path):  # only this test starts processes in its folder
        os.kill(pid, signal.SIGKILL)
    for group in groups:
        group.process.communicate()


# Exit codes and messages.


@pytest.mark.parametrize("code", [0, 75, 130])
def test_the_exit_code_is_the_one_that_all_workers_return(start: Start, code: int) -> None:
    returned, _, err = start(f"return_{code}", workers=3).wait()
    assert (returned, err) == (code, "")


def test_workers_get_the_size_of_their_group_and_only_rank_0_writes_to_the_terminal(
    start: Start,
) -> None:
    group = start("print_environment")
    assert group.wait() == (0, "out 0\n", "err 0\n")
    for rank in range(2):
        facts, sockets = json.loads((group.folder / f"environment-{rank}").read_text())
        assert facts == [rank, 2, 2, 2, 2, "127.0.0.1", False]
        assert sockets == [], "no descriptors of the agent"


def test_the_first_failure_is_printed_first_even_if_its_worker_exits_last(start: Start) -> None:
    code, out, err = start("rank_1_fails_first_and_exits_last", workers=3).wait()
    assert (code, out) == (1, "")
    assert re.match(r"rank 1 \(pid \d+\) failed first:\nTraceback", err)
    assert "ValueError: the loss is a fish" in err
    assert err.splitlines()[-1] == "ranks 0 and 2 lost their peers"
    assert "PeersLostError" not in err


def test_an_error_of_all_workers_is_printed_once_in_three_parts(start: Start) -> None:
    code, _, err = start("raise_data_error").wait()
    assert (code, err) == (3, "DataError: line 7 is torn\n  a.txt\n  fix it\n")


def test_a_worker_killed_by_a_signal_is_named_with_its_last_lines(start: Start) -> None:
    code, _, err = start("rank_1_is_killed", timeouts={"exit_s": 0.1}).wait()
    assert code == 137
    assert re.match(r"LockstepError: rank 1 \(pid \d+\) was killed by SIGKILL\n  .*memory", err)
    assert "  | output of rank 1" in err


def test_an_exit_without_a_report_is_described_by_the_last_lines_of_output(start: Start) -> None:
    code, _, err = start("unreported_exit_9_of_rank_1", timeouts={"exit_s": 0.1}).wait()
    assert code == 9
    assert "exited with code 9 and left no error report" in err and "| no such option" in err


def test_an_early_exit_with_code_0_is_a_failure(start: Start) -> None:
    code, _, err = start("unreported_exit_0_of_rank_1", timeouts={"exit_s": 0.2}).wait()
    assert code == 1
    assert "rank 1" in err and "exited early (code 0)" in err


def test_a_finished_worker_does_not_hurry_the_others(start: Start) -> None:
    code, _, err = start("rank_0_takes_longer", timeouts={"exit_s": 0.1}).wait()
    assert (code, err) == (0, "")


def test_a_failed_worker_that_hangs_at_exit_is_killed_and_its_failure_printed(start: Start) -> None:
    code, _, err = start("fail_and_hang", workers=1, timeouts={"failed_exit_s": 0.2}).wait()
    assert (code, err) == (3, "DataError: torn\n")


def test_child_processes_of_a_worker_are_killed_with_it(start: Start) -> None:
    group = start("leave_a_child_process")
    assert group.wait()[0] == 0
    assert processes_in(group.folder) == []


def test_an_implausible_number_of_workers_is_refused(start: Start) -> None:
    code, _, err = start("return_0", workers=60_000).wait()
    assert code == 2
    assert (
        err.startswith("UsageError: 60,000 workers on one machine\n") and len(err.splitlines()) == 3
    )


# Signals.


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_lets_all_workers_save_and_stop(start: Start, number: int, code: int) -> None:
    group = start("polite")
    group.ready()
    group.process.send_signal(number)
    assert group.wait() == (code, "", "")
    assert (group.folder / "saved-0").exists() and (group.folder / "saved-1").exists()


def test_a_second_sigint_kills_all_workers_and_exits_with_130(start: Start) -> None:
    group = start("deaf")
    pids = group.ready()
    group.process.send_signal(signal.SIGINT)
    wait_until(lambda: all((group.folder / f"received-{rank}").exists() for rank in range(2)))
    start_s = time.monotonic()
    group.process.send_signal(signal.SIGINT)
    code, _, err = group.wait()
    assert code == 130 and "killed all workers" in err
    assert time.monotonic() - start_s < 10
    assert not any(map(is_alive, pids))


def test_workers_that_do_not_stop_in_time_are_killed_and_named(start: Start) -> None:
    group = start("deaf", timeouts={"grace_s": 0.3})
    group.ready()
    group.process.send_signal(signal.SIGTERM)
    code, _, err = group.wait()
    assert code == 128 + signal.SIGTERM
    assert "ranks 0 and 1 did not stop within 0.3 s of SIGTERM" in err


def test_a_signal_before_the_workers_handle_signals_is_reported(start: Start) -> None:
    group = start("without_handlers")
    group.ready()
    group.process.send_signal(signal.SIGTERM)
    code, _, err = group.wait()
    assert code == 128 + signal.SIGTERM
    assert "was killed by SIGTERM before it could save and stop" in err


def test_a_killed_agent_leaves_no_orphans(start: Start) -> None:
    group = start("deaf", workers=3)
    pids = group.ready(3)
    group.process.kill()
    wait_until(lambda: not any(map(is_alive, pids)), timeout_s=10)


@pytest.mark.parametrize("processes", range(3))
def test_an_agent_killed_while_starting_leaves_no_orphans(start: Start, processes: int) -> None:
    group = start("without_handlers", workers=6)
    wait_until(lambda: len(processes_in(group.folder)) > 1 + processes)
    group.process.kill()
    group.process.communicate()
    wait_until(lambda: not processes_in(group.folder), timeout_s=10)


# With gloo.


def test_two_workers_join_a_world_and_leave_no_threads_or_sockets(start: Start) -> None:
    group = start("join_and_leave")
    code, out, err = group.wait()
    assert (code, err) == (0, "")
    assert out.startswith(f"cpu, 2 of 2 workers on {socket.gethostname()}: LOCKSTEP_DEVICE=cpu\n")
    assert "generation 1: rank 0 of 2 (start)" in out and "goodput" not in out
    for rank in range(2):
        assert (
            group.folder / f"world-{rank}"
        ).read_text() == f"2 {rank} 2 {socket.gethostname()} [3.0, 3.0, 3.0, 3.0]"


def test_a_failure_ends_peers_that_hang_in_gloo_or_are_stopped(start: Start) -> None:
    group = start("rank_1_fails_in_a_collective", workers=3, timeouts={"exit_s": 0.3})
    pids = group.ready(3)
    wait_until(lambda: state_of(pids[2]) == "T")
    (group.folder / "go").touch()
    code, _, err = group.wait()
    assert code == 1
    assert err.startswith(f"rank 1 (pid {pids[1]}) failed first:\nTraceback")
    assert "ValueError: ('boom'" in err
    assert not any(map(is_alive, pids))


def test_a_worker_killed_in_an_all_reduce_is_the_first_failure_and_the_other_lost_its_peers(
    start: Start,
) -> None:
    group = start("reduce_forever", timeouts={"exit_s": 30})
    pids = group.ready()
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = group.wait()
    assert code == 137
    assert err.startswith(f"LockstepError: rank 1 (pid {pids[1]}) was killed by SIGKILL")
    assert err.endswith("rank 0 lost its peers\n")


def test_under_torchrun_a_worker_reads_its_rank_from_the_environment(tmp_path: Path) -> None:
    command = [*TORCHRUN, SUPPORT / "fixed_workers.py", "join_and_leave"]
    done = run_command(command, cwd=tmp_path, env=one_thread(LOCKSTEP_DEVICE="cpu"))
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2, local rank 0 of 2, started by torchrun" in done.stdout
    for rank in range(2):
        assert (
            tmp_path / f"world-{rank}"
        ).read_text() == f"2 {rank} 2 {socket.gethostname()} [3.0, 3.0, 3.0, 3.0]"


# The command.


def test_generate_prints_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    config = LlamaConfig(300, 16, 1, 2, 2, 8, 24, 64)
    hub.write_hub(
        tmp_path / "llama",
        config_to_hf(config),
        dict(build_llama(config, device=torch.device("cpu"), seed=1).named_parameters()),
    )
    Tokenizer.train_on_documents(["a cat"] * 3, vocab_size=300, min_frequency=1).save_for_llama(
        tmp_path / "llama"
    )
    outputs = []
    for words in ([], ["--tensor", "2"]):
        command = lockstep_command("generate", "llama", "--tokens", "4", *words)
        done = run_command(command, cwd=tmp_path, env=environment(tmp_path), input="a cat\na\n")
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and len(outputs[0].splitlines()) == 2
    assert not list((tmp_path / "tmp").iterdir()), "files are left in the temporary folder"
