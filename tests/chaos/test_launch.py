"""The launcher and its workers as real processes: exit codes, messages, signals, kills, and
leftovers; the rendezvous.

Most workers are small scripts without torch; a few form gloo groups.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).parents[2] / "src"
NODE = socket.gethostname()
PARENT = """
import json, os, sys
from pathlib import Path
from lockstep.errors import LockstepError
from lockstep.runtime.subprocesses import LaunchLimits, launch
settings = json.loads(sys.argv[1])
assert "torch" not in sys.modules
exec(settings["first"])
try:
    folder = Path(settings["run_folder"]) if settings["run_folder"] else None
    command = settings["command"] or [sys.executable, "worker.py"]
    limits = LaunchLimits(**settings["limits"])
    sys.exit(launch(command, settings["workers"], run_folder=folder, port=settings["port"], environ=os.environ, limits=limits))
except LockstepError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
HEAD = """
import os, signal, sys, time
from pathlib import Path
from lockstep.errors import *
from lockstep.runtime.subprocesses import worker_main
rank = int(os.environ["RANK"])

def until(done):
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def ready():
    Path(f"ready-{rank}.tmp").write_text(str(os.getpid()))
    os.rename(f"ready-{rank}.tmp", f"ready-{rank}")
"""


class LauncherRun:
    """A launcher under test, in its own folder."""

    def __init__(self, folder: Path, body: str, **settings: Any) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(exist_ok=True)
        (folder / "worker.py").write_text(HEAD + textwrap.dedent(body))
        values = {"workers": 2, "run_folder": "run", "port": None, "command": None, "limits": {}, "first": ""} | settings
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "CUDA_"))}
        environ |= {"PYTHONPATH": str(SRC), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", "LOCKSTEP_DEVICE": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT, json.dumps(values)],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready(self, workers: int = 2) -> list[int]:
        """Wait until all workers are ready; return their pids."""
        files = [self.folder / f"ready-{rank}" for rank in range(workers)]
        wait_for(lambda: all(file.exists() for file in files) or self.process.poll() is not None)
        assert self.process.poll() is None, self.wait()
        return [int(file.read_text()) for file in files]

    def wait(self) -> tuple[int, str, str]:
        """Wait for the launcher; return (exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=120)
        assert not list((self.folder / "tmp").iterdir()), "files are left in the temporary folder"
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LauncherRun]]:
    """Start launchers. At the end of the test, kill the processes left in its folder."""
    started: list[LauncherRun] = []

    def start_launcher(body: str, **settings: Any) -> LauncherRun:
        started.append(LauncherRun(tmp_path, body, **settings))
        return started[-1]

    yield start_launcher
    for pid in in_folder(tmp_path):  # only this test starts processes in its folder
        os.kill(pid, signal.SIGKILL)
    for launcher in started:
        launcher.process.communicate()


def wait_for(done: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def pid_lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def in_folder(folder: Path) -> list[int]:
    """Return the pids of all processes whose working directory is `folder`."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder) and pid_lives(int(entry.name)):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


# Exit codes and messages.


@pytest.mark.parametrize("code", [0, 75, 130])
def test_the_launcher_returns_the_exit_code_that_all_workers_return(start: Callable[..., LauncherRun], code: int) -> None:
    returned, _, err = start(f"sys.exit(worker_main(lambda: {code}))", workers=3).wait()
    assert (returned, err) == (code, "")


def test_workers_get_torchruns_variables_and_only_rank_0_the_listening_socket(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        """
        import json
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "LOCKSTEP_RANK", "LOCKSTEP_SIZE"]
        links = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        sockets = [fd for fd, link in links.items() if "socket:" in link]
        print(json.dumps([[os.environ[name] for name in names], sockets, os.environ.get("LOCKSTEP_LISTEN_FD")]))
        """
    )
    code, out, _ = launcher.wait()
    assert code == 0
    values, sockets, listen_fd = json.loads(out)
    assert values == ["0", "2", "0", "2", "127.0.0.1", "0", "2"]
    assert sockets == [listen_fd]
    values, sockets, listen_fd = json.loads((launcher.folder / f"run/logs/{NODE}-1.log").read_text())
    assert values == ["1", "2", "1", "2", "127.0.0.1", "1", "2"]
    assert (sockets, listen_fd) == ([], None)


def test_rank_0_writes_to_the_terminal_and_others_to_their_logs(start: Callable[..., LauncherRun]) -> None:
    for turn in range(2):
        launcher = start(f"print('out', rank, {turn}); print('err', rank, file=sys.stderr)")
        assert launcher.wait() == (0, f"out 0 {turn}\n", "err 0\n")
    assert (launcher.folder / f"run/logs/{NODE}-1.log").read_text() == "out 1 0\nerr 1\nout 1 1\nerr 1\n"


def test_the_first_failure_is_printed_first_even_if_its_worker_exits_last(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        """
        import atexit
        def work():
            if rank == 1:
                atexit.register(lambda: until(Path("gone-0").exists))
                Path("failing").touch()
                raise ValueError("the loss is a fish")
            until(Path("failing").exists)
            atexit.register(lambda: Path("gone-0").touch())
            raise PeersLostError("Connection closed by peer") if rank == 0 else RuntimeError("[pair.cc:5] Connection closed by peer")
        sys.exit(worker_main(work))
        """,
        workers=3,
    )
    code, out, err = launcher.wait()
    assert (code, out) == (1, "")
    assert re.match(r"rank 1 \(pid \d+\) failed first:\nTraceback", err)
    assert "ValueError: the loss is a fish" in err
    assert err.splitlines()[-1] == "ranks 0 and 2 lost their peers"
    assert "PeersLostError" not in err
    assert "the loss is a fish" in (launcher.folder / f"run/logs/{NODE}-1.log").read_text()


def test_lockstep_errors_are_printed_in_three_parts_and_their_traceback_is_in_the_log(start: Callable[..., LauncherRun]) -> None:
    launcher = start("sys.exit(worker_main(lambda: (_ for _ in ()).throw(DataError('line 7 is torn', 'a.txt', 'fix it'))))")
    code, _, err = launcher.wait()
    assert (code, err) == (3, "DataError: line 7 is torn\n  a.txt\n  fix it\n")
    for rank in range(2):
        assert "Traceback" in (launcher.folder / f"run/logs/{NODE}-{rank}.log").read_text()


def test_a_worker_killed_by_a_signal_is_named_with_its_log_and_its_last_lines(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        """
        print("output of rank", rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
        limits={"settle_s": 0.1},
    )
    code, _, err = launcher.wait()
    assert code == 137
    assert re.match(r"LockstepError: rank 1 \(pid \d+\) was killed by SIGKILL\n  log: run/logs/.*-1.log\n  .*memory", err)
    assert "  | output of rank 1" in err


def test_an_exit_without_a_report_is_described_by_the_last_lines_of_output(start: Callable[..., LauncherRun]) -> None:
    code, _, err = start("if rank == 1: print('no such option'); sys.exit(9)", run_folder=None).wait()
    assert code == 9
    assert "exited with code 9 and left no error report" in err and "| no such option" in err


def test_an_early_exit_with_code_0_is_a_failure(start: Callable[..., LauncherRun]) -> None:
    code, _, err = start("if rank == 0: time.sleep(60)", limits={"early_s": 0.2}).wait()
    assert code == 1
    assert "rank 1" in err and "exited early (code 0)" in err


def test_a_finished_worker_does_not_hurry_the_leader(start: Callable[..., LauncherRun]) -> None:
    body = "sys.exit(worker_main(lambda: until(lambda: time.monotonic() > begun + 1) if rank == 0 else 0))"
    code, _, err = start("begun = time.monotonic()\n" + body, limits={"early_s": 0.1, "settle_s": 0.1}).wait()
    assert (code, err) == (0, "")


def test_a_failed_worker_that_hangs_at_exit_is_killed_and_its_failure_printed(start: Callable[..., LauncherRun]) -> None:
    body = """
    import threading
    def work():
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise DataError("torn")
    sys.exit(worker_main(work))
    """
    code, _, err = start(body, workers=1, limits={"settle_s": 0.1, "end_s": 0.2}).wait()
    assert (code, err) == (3, "DataError: torn\n")


def test_child_processes_of_a_worker_are_killed_with_it(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        sys.exit(worker_main(lambda: 0))
        """
    )
    assert launcher.wait()[0] == 0
    assert in_folder(launcher.folder) == []


# Errors before the start.


def test_a_busy_port_is_an_error_before_anything_starts(start: Callable[..., LauncherRun]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = start("Path('started').touch()", port=port)
        code, _, err = launcher.wait()
    assert code == 2
    assert err.splitlines()[0] == f"UsageError: port {port} is busy"
    assert len(err.splitlines()) == 3
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "0 workers"),
        ({"command": ["./no-such-program"]}, "cannot start ./no-such-program"),
        ({"run_folder": "worker.py"}, "cannot write"),
        ({"port": 70000}, "port 70000"),
    ],
)
def test_a_launch_that_cannot_start_is_a_usage_error(start: Callable[..., LauncherRun], settings: dict[str, Any], message: str) -> None:
    code, _, err = start("", **settings).wait()
    assert code == 2
    assert err.startswith("UsageError: ") and message in err and "Traceback" not in err


def test_a_given_port_is_the_master_port(start: Callable[..., LauncherRun]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = "import socket; print(os.environ['MASTER_PORT'], socket.socket(fileno=int(os.environ['LOCKSTEP_LISTEN_FD'])).getsockname())"
    assert start(body, workers=1, port=port).wait() == (0, f"{port} ('127.0.0.1', {port})\n", "")


# Signals.

POLITE = """
from lockstep.runtime.signals import StopSignals, stop_exit_code
with StopSignals() as signals:
    ready()
    until(lambda: signals.received)
Path(f"saved-{rank}").touch()
sys.exit(worker_main(lambda: stop_exit_code(signals.received)))
"""

DEAF = """
from lockstep.runtime.signals import StopSignals
with StopSignals() as signals:
    ready()
    until(lambda: signals.received)
    ready()
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_lets_all_workers_save_and_stop(start: Callable[..., LauncherRun], number: int, code: int) -> None:
    launcher = start(POLITE)
    launcher.ready()
    launcher.process.send_signal(number)
    assert launcher.wait() == (code, "", "")
    assert (launcher.folder / "saved-0").exists() and (launcher.folder / "saved-1").exists()


def test_a_second_sigint_kills_all_workers_and_exits_with_130(start: Callable[..., LauncherRun]) -> None:
    launcher = start(DEAF)
    pids = launcher.ready()
    for rank in range(2):
        (launcher.folder / f"ready-{rank}").unlink()
    launcher.process.send_signal(signal.SIGINT)
    launcher.ready()  # both have received the first one
    begun = time.monotonic()
    launcher.process.send_signal(signal.SIGINT)
    code, _, err = launcher.wait()
    assert code == 130 and "at once" in err
    assert time.monotonic() - begun < 5
    assert not any(map(pid_lives, pids))


def test_workers_that_do_not_stop_in_time_are_killed_and_named(start: Callable[..., LauncherRun]) -> None:
    launcher = start(DEAF, limits={"grace_s": 0.3})
    launcher.ready()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, err = launcher.wait()
    assert code == 128 + signal.SIGTERM
    assert "ranks 0 and 1 did not stop within 0.3 s of SIGTERM" in err


def test_a_signal_before_the_worker_handles_signals_is_reported(start: Callable[..., LauncherRun]) -> None:
    launcher = start("ready(); time.sleep(60)")
    launcher.ready()
    launcher.process.send_signal(signal.SIGTERM)
    code, _, err = launcher.wait()
    assert code == 128 + signal.SIGTERM
    assert "was killed by SIGTERM before it could save and stop" in err


def test_a_killed_launcher_leaves_no_orphans(start: Callable[..., LauncherRun]) -> None:
    launcher = start(DEAF, workers=3)
    pids = launcher.ready(3)
    launcher.process.kill()
    wait_for(lambda: not any(map(pid_lives, pids)), timeout_s=10)


@pytest.mark.parametrize("turn", range(3))
def test_a_launcher_killed_while_starting_leaves_no_orphans(start: Callable[..., LauncherRun], turn: int) -> None:
    launcher = start("time.sleep(60)", workers=6)
    wait_for(lambda: len(in_folder(launcher.folder)) > 1 + turn)  # some workers have forked, not all
    launcher.process.kill()
    launcher.process.communicate()
    wait_for(lambda: not in_folder(launcher.folder), timeout_s=10)


def test_a_launcher_killed_between_fork_and_prctl_leaves_no_orphans(start: Callable[..., LauncherRun]) -> None:
    """The worker kills its parent just before its call of prctl, which is then too late."""
    first = """
import ctypes, signal, time, lockstep.runtime.subprocesses
real, parent = ctypes.CDLL(None), os.getpid()
class Late:
    def prctl(self, *words):
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
        real.prctl(*words)
        open("tied", "w").close()
lockstep.runtime.subprocesses.ctypes = type("Ctypes", (), {"CDLL": lambda name: Late()})
"""
    launcher = start("Path('began').touch(); time.sleep(60)", first=first)
    assert launcher.wait()[0] == -signal.SIGKILL
    wait_for(lambda: not in_folder(launcher.folder), timeout_s=10)
    assert (launcher.folder / "tied").exists() and not (launcher.folder / "began").exists()


@contextmanager
def run_script(folder: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(HEAD.replace('int(os.environ["RANK"])', "0") + textwrap.dedent(body))
    environ = os.environ | {"PYTHONPATH": str(SRC)}
    with subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_second_sigint_ends_a_process_that_hangs_in_compiled_code(tmp_path: Path) -> None:
    """It waits for a mutex that its own thread holds: no Python handler runs, as in a blocked
    collective.
    """
    body = """
    import ctypes
    from lockstep.runtime.signals import StopSignals
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    with StopSignals():
        ready()
        libc.pthread_mutex_lock(mutex)
    """
    with run_script(tmp_path, body) as process:
        wait_for((tmp_path / "ready-0").exists)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_signals_restores_all_handlers_and_forked_children_can_be_terminated(tmp_path: Path) -> None:
    body = """
    import threading
    from lockstep.runtime.signals import StopSignals
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    descriptors = len(os.listdir("/proc/self/fd"))
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(1)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signals.received == "SIGUSR1", signals.received
    assert before == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    assert threading.active_count() == 1
    assert descriptors == len(os.listdir("/proc/self/fd"))
    assert signal.set_wakeup_fd(-1) == -1
    print("done")
    """
    with run_script(tmp_path, body) as process:
        assert process.communicate(timeout=30)[0] == "done\n"


# With gloo.

JOIN = """
import logging, threading
import torch, torch.distributed as dist
from lockstep.elastic.world import World
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
"""


def test_two_workers_join_a_world_and_leave_no_threads_or_sockets(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        JOIN
        + textwrap.dedent("""
        def work():
            threads = len(os.listdir("/proc/self/task"))
            with World.join(threads=1, timeout_s=60) as world:
                ones = torch.ones(4) * (world.rank + 1)
                dist.all_reduce(ones)
                print(world.rank, world.size, world.leader, world.local_leader, world.host, world.device)
                print(torch.get_num_threads(), ones.tolist())
            until(lambda: len(os.listdir("/proc/self/task")) == threads)
            links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
            assert not [link for link in links if "socket:" in link], links
            print("left")
        sys.exit(worker_main(work))
        """)
    )
    code, out, err = launcher.wait()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("rank 0 of 2, local rank 0 of 2, started by lockstep; rendezvous at 127.0.0.1:")
    assert "cpu, 1 thread: LOCKSTEP_DEVICE=cpu; gloo on lo" in lines[0]
    assert lines[1:] == [f"0 2 True True {NODE} cpu", "1 [3.0, 3.0, 3.0, 3.0]", "left"]
    log = (launcher.folder / f"run/logs/{NODE}-1.log").read_text()
    assert log == f"1 2 False False {NODE} cpu\n1 [3.0, 3.0, 3.0, 3.0]\nleft\n"


def test_a_failure_ends_peers_that_hang_in_gloo_or_are_stopped(start: Callable[..., LauncherRun]) -> None:
    """Rank 0 waits in gloo for rank 2, which is stopped; rank 1 fails during a collective.

    No rank reacts to SIGTERM.
    """
    launcher = start(
        JOIN
        + textwrap.dedent("""
        from lockstep.runtime.signals import StopSignals
        def work():
            with World.join(threads=1, timeout_s=600) as world, StopSignals():
                if rank == 0:
                    ready()
                    dist.recv(torch.zeros(1), 2)
                ready()
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGSTOP)
                until(Path("go").exists)
                pending = dist.all_reduce(torch.ones(100_000), async_op=True)
                raise ValueError("boom")
        sys.exit(worker_main(work))
        """),
        workers=3,
        limits={"settle_s": 0.3, "end_s": 0.3},
    )
    pids = launcher.ready(3)
    wait_for(lambda: Path(f"/proc/{pids[2]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    (launcher.folder / "go").touch()
    code, _, err = launcher.wait()
    assert code == 1
    assert err.startswith(f"rank 1 (pid {pids[1]}) failed first:\nTraceback")
    assert "ValueError: boom" in err
    assert not any(map(pid_lives, pids))


def test_a_worker_killed_in_an_all_reduce_is_the_first_failure_and_the_other_lost_its_peers(start: Callable[..., LauncherRun]) -> None:
    launcher = start(
        JOIN
        + textwrap.dedent("""
        def work():
            with World.join(threads=1, timeout_s=600) as world:
                ready()
                while True:
                    dist.all_reduce(torch.ones(10000))
        sys.exit(worker_main(work))
        """)
    )
    pids = launcher.ready()
    os.kill(pids[1], signal.SIGKILL)
    code, _, err = launcher.wait()
    assert code == 137
    assert err.startswith(f"LockstepError: rank 1 (pid {pids[1]}) was killed by SIGKILL")
    assert err.endswith("rank 0 lost its peers\n")


def test_under_torchrun_a_worker_reads_its_rank_from_the_environment(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    body = """
    def work():
        with World.join(threads=1, timeout_s=60) as world:
            total = torch.tensor([world.rank + 1.0])
            dist.all_reduce(total)
            Path(f"answer-{world.rank}").write_text(f"{world.size} {world.local_rank} {world.local_size} {total.item()}")
    sys.exit(worker_main(work))
    """
    (tmp_path / "script.py").write_text(HEAD + JOIN + textwrap.dedent(body))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    environ |= {"PYTHONPATH": str(SRC), "LOCKSTEP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2, local rank 0 of 2, started by torchrun" in done.stdout
    assert [(tmp_path / f"answer-{rank}").read_text() for rank in range(2)] == ["2 0 2 3.0", "2 1 2 3.0"]


# Failing rendezvous: in this process, with threads as the other workers.


def rank_info(rank: int, size: int, port: int, **changed: Any) -> Any:
    from lockstep.runtime.environment import RankInfo

    return RankInfo(
        **(
            {
                "rank": rank,
                "size": size,
                "local_rank": 0,
                "local_size": 1,
                "master_addr": "127.0.0.1",
                "master_port": port,
                "launcher": "hand",
            }
            | changed
        )
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def rendezvous_in_threads(*infos: Any, timeout_s: float) -> list[BaseException | None]:
    """Return the error of each worker in a rendezvous; None: no error."""
    from lockstep.runtime.rendezvous import rendezvous

    errors: list[BaseException | None] = [None] * len(infos)
    stores: list[Any] = [None] * len(infos)  # keep rank 0's store alive until all are done, as a process does

    def join(index: int) -> None:
        try:
            stores[index] = rendezvous(infos[index], timeout_s, f"worker {index} of the test")
        except Exception as error:
            errors[index] = error

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(infos))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_missing_ranks_are_named_and_training_does_not_start() -> None:
    port = free_port()
    errors = rendezvous_in_threads(rank_info(0, 4, port), rank_info(2, 4, port), timeout_s=1.0)
    for error in errors:
        assert type(error).__name__ == "PeersLostError"
    assert any("2 of 4 workers arrived within 1 s: missing rank 1, 3" in str(error) for error in errors)


def test_a_duplicate_rank_is_an_error() -> None:
    port = free_port()
    errors = rendezvous_in_threads(rank_info(0, 2, port), rank_info(1, 2, port), rank_info(1, 2, port), timeout_s=20.0)
    assert errors[0] is None
    assert sorted(str(error).split("\n")[0] for error in errors[1:]) == ["None", "UsageError: another worker already has rank 1"]


def test_different_world_sizes_are_an_error() -> None:
    port = free_port()
    errors = rendezvous_in_threads(rank_info(0, 2, port), rank_info(1, 3, port), timeout_s=1.0)
    assert any("UsageError: different world sizes: " in str(error) for error in errors)


def test_an_unreachable_master_is_reported_with_its_address() -> None:
    port = free_port()
    (error,) = rendezvous_in_threads(rank_info(1, 2, port), timeout_s=0.3)
    assert f"PeersLostError: rank 1 cannot reach rank 0 at 127.0.0.1:{port}: [Errno 111] Connection refused" in str(error)
    (error,) = rendezvous_in_threads(rank_info(1, 2, port, master_addr="no-such-host.invalid"), timeout_s=0.3)
    assert "cannot reach rank 0 at no-such-host.invalid" in str(error)


def test_a_busy_master_port_is_reported_with_its_number() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (error,) = rendezvous_in_threads(rank_info(0, 2, port), timeout_s=0.3)
    assert f"UsageError: port {port} is busy" in str(error)


def test_a_descriptor_that_is_not_a_listening_socket_is_reported() -> None:
    reader, writer = os.pipe()
    (error,) = rendezvous_in_threads(rank_info(0, 2, 4000, listen_fd=reader), timeout_s=0.3)
    assert f"LOCKSTEP_LISTEN_FD={reader}" in str(error)
    os.close(reader)
    os.close(writer)


def test_gloo_uses_the_interface_of_the_route_and_never_loopback_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.errors import UsageError
    from lockstep.runtime.interfaces import choose_interface

    assert choose_interface({}, rank_info(0, 2, 1, local_size=2, master_addr="anywhere"))[0] == "lo"
    assert choose_interface({"GLOO_SOCKET_IFNAME": "eth7"}, rank_info(0, 2, 1)) == ("", "GLOO_SOCKET_IFNAME")
    with pytest.raises(UsageError, match="other machines cannot reach it"):
        choose_interface({}, rank_info(0, 2, 1))


@pytest.mark.parametrize(("address", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.1", "::")])
def test_the_store_listens_on_the_master_address_if_this_machine_has_it(address: str, bound: str) -> None:
    from lockstep.runtime.rendezvous import listen_on_master_port

    with socket.socket(fileno=listen_on_master_port(rank_info(0, 2, free_port(), master_addr=address))) as listening:
        found = listening.getsockname()[0]
    assert found == bound or (address == "localhost" and found == "::1") or (bound == "::" and found == "0.0.0.0")
