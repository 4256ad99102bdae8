"""Unusual values and bytes, and a check of the outcome: success, or an error of three parts.

`attempt` calls a function in this process. `Commands` runs each `lockstep` command in a process
that is forked from one that has imported torch: 0.1 s per command instead of 3 s.

    with Commands(tmp_path) as commands:
        tally.judge("checkpoint import torn/", commands.run(["checkpoint", "import", "torn", "--out", "run"]))
    print(tally); assert not tally.faults
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import ERRORS_BY_NAME, LockstepError

# Maximum CPU time of a refusal, and of a command that works: it may have trained. Two hyperthreads of
# a busy core take twice the CPU time of one alone.
CPU_S, WORKING_CPU_S = 5.0, 20.0
HANG_S = 60.0

ODD_WORDS = (
    *(
        "",
        " ",
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "99999999999999",
        "9" * 5000,
        "true",
        "0x10",
    ),
    *("[1, 2]", "\udcff", "a\0b", "../../etc/passwd"),
)
ODD_TOML = (
    *(
        "true",
        "-1",
        "0",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "99999999999999",
        "9" * 400,
        '""',
        '"\\u0000"',
        '"' + "x" * 10_000 + '"',
    ),
    *("[]", '[""]', "[[1], [2]]", "1979-05-27T07:32:00Z"),
)
ODD_BYTES = (
    *(
        b"",
        b"\n",
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xef\xbb\xbf",
        b"\xef\xbb\xbfa\tb\n",
    ),
    *(
        "häßlich\n".encode("latin1"),
        "hello\n".encode("utf-16"),
        "hello\n".encode("utf-32"),
        b"\r\r\r",
        "a\u2028b\x0cc\x85d\n".encode(),
    ),
    *(
        ("e" + "\u0301" * 2000).encode(),
        "\u202eabc\u200b\n".encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"1e999999",
    ),
    *(
        b"NaN",
        b"null",
        b"true",
        b'""',
        b"[]",
        b"{}",
        b'{"text": 7}',
        b'{"text": "\\ud800"}',
        b'{"text": "\\u0000"}',
    ),
    *(
        b'{"messages": 7}',
        b'{"messages": [{"role": "assistant", "content": "\\udfff"}]}',
        b'{"messages": [{"role": [], "content": null}]}',
    ),
    *(
        b'{"translation": {"en": 1, "it": []}}',
        b"\x1f\x8b",
        gzip.compress(b"hello\n")[:-4],
        gzip.compress(b"\0" * 10_000_000),
    ),
    *(bytes(range(256)) * 4, b"a b " * 100_000, b'a = "[[host]]\nname = 7\n'),
)
assert (len(ODD_WORDS), len(ODD_TOML), len(ODD_BYTES)) == (16, 16, 40)


class Hang(BaseException):
    """The call exceeded its time limit."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case: exit code (None: it hung), output, CPU time, return value of a function."""

    code: int | None
    text: str = ""
    cpu_s: float = 0.0
    value: Any = None


@dataclass
class Tally:
    """Number of cases by outcome, and descriptions of the faults."""

    cases: int = 0
    worked: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    faults: dict[str, list[str]] = field(
        default_factory=lambda: {"traceback": [], "nonsense": [], "hang": []}
    )

    def judge(
        self, case: str, outcome: Outcome, nonsense: Callable[[Any], str] = lambda value: ""
    ) -> None:
        """Count a case. `nonsense` returns the fault of an accepted value, or ""."""
        self.cases += 1
        self.slowest_s = max(self.slowest_s, outcome.cpu_s)
        shown = f"{case}: {outcome.text[-600:]}"
        if outcome.code is None or outcome.cpu_s > (CPU_S if outcome.code else WORKING_CPU_S):
            self.faults["hang"].append(f"{shown} ({outcome.cpu_s:.1f} s)")
        elif outcome.code == 0 and "Traceback" not in outcome.text:
            self.worked += 1
            if why := nonsense(outcome.value):
                self.faults["nonsense"].append(f"{case}: {why}")
        elif why := fault_in(outcome.code, outcome.text):
            self.faults["traceback"].append(f"{why}: {shown}")
        else:
            self.refused += 1

    def __str__(self) -> str:
        counted = ", ".join(f"{len(cases)} {kind}" for kind, cases in self.faults.items())
        listed = "\n".join(
            f"{kind}: {text}" for kind, texts in self.faults.items() for text in texts[:20]
        )
        return f"{self.cases:,} cases: {self.worked:,} worked, {self.refused:,} refused; {counted}; slowest {self.slowest_s:.2f} s\n{listed}"

    def check(self) -> None:
        """Print the counts. AssertionError if there are faults."""
        print(self)
        assert not any(self.faults.values()), str(self)


def fault_in(code: int, text: str) -> str:
    """Return the fault of a printed error, or "": it needs three parts and its exit code."""
    if "Traceback" in text:
        return "a traceback"
    errors = list(re.finditer(rf"^({'|'.join(ERRORS_BY_NAME)}): (.+)((?:\n  .+)*)", text, re.M))
    if not errors:
        return f"exit code {code} and no error"
    name, _, more = errors[-1].groups()
    if code != ERRORS_BY_NAME[name].exit_code:
        return f"{name} with exit code {code}"
    return "" if more.count("\n") >= 2 else "fewer than three parts"


def attempt(call: Callable[[], Any]) -> Outcome:
    """Call a function in this process, with a time limit."""

    def give_up(number: int, frame: object) -> None:
        raise Hang

    before = {number: signal.signal(number, give_up) for number in (signal.SIGPROF, signal.SIGALRM)}
    started_s = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, 2 * CPU_S)
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        outcome = Outcome(0, value=call())
    except LockstepError as error:
        outcome = Outcome(error.exit_code, str(error))
    except Hang:
        outcome = Outcome(None)
    except BaseException as error:
        outcome = Outcome(1, f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    return Outcome(outcome.code, outcome.text, time.process_time() - started_s, outcome.value)


class Commands:
    """Runs `lockstep` commands in `folder`, each in a forked process; `train` without an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Commands:
        environ = {
            name: text for name, text in os.environ.items() if not name.startswith("LOCKSTEP_")
        }
        environ |= {
            "LOCKSTEP_TMP": str(self.folder),
            "LOCKSTEP_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            env=environ,
            cwd=self.folder,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        return self

    def run(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdin: Path | None = None,
    ) -> Outcome:
        """Run a command; return its exit code and output."""
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(
            json.dumps([list(argv), dict(environ or {}), str(stdin or os.devnull)]) + "\n"
        )
        self.server.stdin.flush()
        return Outcome(*json.loads(self.server.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()


# -- in the server process --------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork for each line of standard input; write [exit code, output, CPU seconds]."""
    import lockstep.cli.worker  # noqa: F401  torch and all else, before the fork

    for number, line in enumerate(sys.stdin):
        argv, environ, stdin = json.loads(line)
        shown = Path(f"shown-{number}.log")
        pid = os.fork()
        if not pid:
            run_command(argv, environ, stdin, shown)
        with deadline(pid) as late:
            used, status = resource.getrusage(resource.RUSAGE_CHILDREN), os.waitpid(pid, 0)[1]
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        code = None if late else os.waitstatus_to_exitcode(status)
        print(json.dumps([code, shown.read_text(errors="replace"), cpu_s]), flush=True)
        shown.unlink()


def run_command(argv: list[str], environ: dict[str, str], stdin: str, shown: Path) -> None:
    """Run a command in the forked process; never returns."""
    from lockstep.cli.main import main

    code = 1
    try:
        os.setsid()
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        output = os.open(shown, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        os.environ |= {
            **(
                alone | {"MASTER_PORT": free_port()}
                if argv[:1] in (["train"], ["evaluate"])
                else {}
            ),
            **environ,
        }
        sys.stdin, sys.argv = os.fdopen(0), ["lockstep", *argv]
        code = main(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        os._exit(code)


def free_port() -> str:
    """Return an unused port of 127.0.0.1."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@contextmanager
def deadline(pid: int) -> Iterator[list[int]]:
    """Kill a process after HANG_S; the yielded list then contains its pid."""
    late: list[int] = []

    def give_up(number: int, frame: object) -> None:
        late.append(pid)
        os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    yield late
    signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    serve()
