"""A command that a template forks is like one that the interpreter starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forking
from support.forking import ForkedPopen
from support.launching import lockstep_command, one_thread, run_lockstep, start_lockstep
from support.waiting import wait_until

pytestmark = pytest.mark.slow
KINDS = [subprocess.Popen, ForkedPopen]


@pytest.fixture(scope="module", autouse=True)
def template() -> None:
    if not forking.forks:
        pytest.skip("LOCKSTEP_NO_FORKS=1")
    forking.refresh_templates()


@pytest.mark.parametrize(
    "words", [["--version"], ["train", "--nope"], ["nothing"], ["status", "x"]]
)
def test_output_and_exit_code_are_those_of_a_started_command(words: list[str]) -> None:
    shown = []
    for kind in KINDS:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with kind(lockstep_command(*words), env=one_thread(), **pipes) as process:
            shown.append((*process.communicate(), process.returncode))
    assert shown[0] == shown[1]


def test_it_is_a_child_in_its_own_folder_and_session_and_dies_of_a_signal(tmp_path: Path) -> None:
    words = ("run", "waits.py", "--workers", "1", "--restart", "all")
    (tmp_path / "waits.py").write_text("open('here', 'w').close()\nimport time\ntime.sleep(60)")
    process = start_lockstep(*words, cwd=tmp_path, start_new_session=True)
    wait_until((tmp_path / "here").exists, process=process)
    assert os.getsid(process.pid) == process.pid
    assert Path(f"/proc/{process.pid}/cwd").resolve() == tmp_path
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_template_that_ended_is_replaced() -> None:
    ended = forking.templates[0].process
    assert ended
    ended.kill()
    ended.wait()
    assert run_lockstep("--version").returncode == 0
    assert forking.templates[0].process is not ended


def test_a_variable_that_the_interpreter_reads_starts_a_new_one() -> None:
    done = run_lockstep("--version", env=one_thread(PYTHONVERBOSE="1"))
    assert "import 'site'" in done.stderr and done.returncode == 0
    for name in ("TMPDIR", "MALLOC_ARENA_MAX"):
        words = lockstep_command("--version")
        assert not forking.templates[0].program(words, one_thread(**{name: "/tmp"}))


def test_commands_are_forked_without_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    template = forking.start_template()
    try:
        assert template.program(lockstep_command("--version"), one_thread())
    finally:
        template.end()


def test_a_switch_starts_all_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "forks", True)
    monkeypatch.setenv("LOCKSTEP_NO_FORKS", "1")
    forking.fork_commands()
    assert not forking.forks


def test_other_programs_are_started() -> None:
    with ForkedPopen([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        pass
    assert process.returncode == 7
