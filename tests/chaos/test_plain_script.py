"""An unchanged torchrun script under `lockstep run` and `lockstep launch`, on one host and on two:
one failure restarts all its processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.forking import ForkedPopen
from support.hosts import living
from support.launching import TORCHRUN, lockstep_command, run_command, run_lockstep
from support.waiting import wait_until

from lockstep.runtime.worker_env import running_workers, state_folder

SCRIPT = Path(__file__).parents[1] / "support" / "plain_ddp.py"
HOSTS = "".join(f'[[host]]\nname = "{name}"\naddress = "127.0.0.1"\nworkers = 1\n' for name in "ab")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    yield
    for pid in running_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def running_processes(folder: Path) -> list[int]:
    """Return the processes that this test started and that still run."""
    return [pid for pid in living(folder) if pid != os.getpid()]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_lockstep("run", SCRIPT, *words)


def report() -> list[str]:
    path = Path("report")
    return sorted(path.read_text().splitlines()) if path.exists() else []


def wait_for(condition: Callable[[], bool], what: str) -> None:
    wait_until(condition, what, report=lambda: str(report()))


def test_a_script_gets_the_environment_and_the_result_that_torchrun_gives_it() -> None:
    result = run("--workers", "2")
    assert result.returncode == 0, result.stderr
    ours = report()
    assert (
        ours[0].startswith("rank 0 finished with ")
        and ours[1] == "rank 0 of 2 local 0 restart 0 step 0 ours []"
    )
    for name in ("saved.pt", "report"):
        Path(name).unlink()
    run_command([*TORCHRUN, SCRIPT], check=True)
    assert report() == ours


@pytest.mark.parametrize("fail", ["kill", pytest.param("error", marks=pytest.mark.long)])
def test_all_restart_together_when_one_fails(fail: str) -> None:
    result = run("--workers", "2", "--fail", fail)
    assert result.returncode == 0, result.stderr
    restarted = [line for line in report() if "restart 1" in line]
    assert restarted == [
        f"rank {rank} of 2 local {rank} restart 1 step 10 ours []" for rank in (0, 1)
    ], report()
    assert len([line for line in report() if " finished with " in line]) == 2


def test_a_repeated_error_ends_the_run_with_its_traceback_and_code() -> None:
    result = run_lockstep("run", SCRIPT.with_name("failing_script.py"), "--workers", "2")
    assert result.returncode == 1 and "ValueError: a bad record" in result.stderr, result.stderr
    assert "failing_script.py of rank 1 exited with code 1" in result.stderr and len(report()) == 6
    assert "failing_script.py failed on 3 starts in a row (slot 1, exit code 1)" in result.stderr


def test_help_of_a_script_is_shown_once_and_starts_no_run(tmp_path: Path) -> None:
    result = run("--workers", "2", "-h")
    assert (
        result.returncode == 0
        and result.stdout.count("usage: plain_ddp.py") == 1
        and not result.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_help_of_a_main_function_lists_its_flags(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"
    file.write_text(
        "import lockstep\ndef main(lr: float = 0.1, *, name: str):\n    'Train it.'\nlockstep.launch(main, workers=2)\n"
    )
    for command in (
        [sys.executable, str(file), "--help"],
        lockstep_command("run", file, "--workers", "2", "-h"),
    ):
        result = run_command(command)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "Train it.\n\n  --lr (default: 0.1)\n  --name (required)\n"


def test_a_function_of_a_script_is_refused_with_the_command_that_takes_it() -> None:
    result = run_lockstep("run", f"{SCRIPT}:main")
    assert (
        result.returncode == 2
        and f"give {SCRIPT}; lockstep train takes FILE.py:FUNCTION" in result.stderr
    )


def test_a_wrong_argument_ends_the_run_at_once() -> None:
    result = run("--workers", "2", "--stepz", "4")
    assert (
        result.returncode == 2
        and "unrecognized arguments: --stepz 4" in result.stderr
        and not report()
    ), result.stderr


def test_a_signal_goes_to_the_script_and_ends_the_run(tmp_path: Path) -> None:
    process = ForkedPopen(
        lockstep_command("run", SCRIPT, "--workers", "2", "--steps", "1000000"),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(report()) == 2, "the start")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not running_processes(tmp_path)


@pytest.mark.long
def test_a_host_is_lost_and_comes_back_on_two_hosts(tmp_path: Path) -> None:
    Path("hosts.toml").write_text(HOSTS)

    def start(host: str) -> subprocess.Popen[bytes]:
        words = (
            "launch",
            "--hosts",
            "hosts.toml",
            "--host",
            host,
            "--min",
            "1",
            SCRIPT,
            "--steps",
            "400",
            "--pause",
            "0.05",
        )
        with open(f"{host}.log", "ab") as output:
            return ForkedPopen(
                lockstep_command(*words), stdout=output, stderr=output, start_new_session=True
            )

    agents = {host: start(host) for host in "ab"}
    wait_for(lambda: Path("saved.pt").exists(), "the first steps")
    assert [line for line in report() if "of 2" in line], report()
    agents["b"].kill()
    for worker in running_workers(state_folder(Path("runs/plain_ddp"), "b")).values():
        os.kill(worker.pid, signal.SIGKILL)
    agents["b"].wait()
    wait_for(lambda: any("of 1 local 0 restart 1" in line for line in report()), "a alone")
    agents["b"] = start("b")
    wait_for(
        lambda: len([line for line in report() if "of 2" in line and "restart 2" in line]) == 2,
        "both again",
    )
    Path("hurry").touch()
    for host, agent in agents.items():
        assert agent.wait(90) == 0, Path(f"{host}.log").read_text()
    assert len([line for line in report() if " finished with " in line]) == 2
