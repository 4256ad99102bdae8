"""A script that opens a Session which needs another start than its text led to expect.

`lockstep run` and `lockstep launch` choose by the text of a script how its workers start (with
torchrun's variables, or under an agent that replaces one lost worker) and in which run folder. A
Session that finds another start ends it before it trains: it writes its folder to a file and
raises SystemExit. The worker reports a StartAgainError, and the command starts once more as the
error says.

    TORCHELASTIC_ERROR_FILE  path of that file, STATE/SLOT.session-PID with the pid of the worker.
                             It is set only where the user has not decided with --restart or --out.
                             torchrun sets this variable too, so a plain script sees none of ours;
                             torch.distributed.elastic may write its own JSON there
"""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.files import write_atomic
from lockstep.runtime.worker_env import WorkerEnv

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FOLDER = "folder of a Session"  # key in the file
OPTIONS = "give "  # before the options in the hint of a StartAgainError


class StartAgainError(UsageError):
    """Another start is needed. The hint holds its options, --restart one --out FOLDER."""

    @property
    def out(self) -> str:
        """The folder of the Session; "" if it is unknown (ElasticRuntime.join)."""
        return shlex.split(self.hint)[-1] if "--out" in self.hint else ""

    @property
    def options(self) -> str:
        return self.hint.removeprefix(OPTIONS)

    @classmethod
    def parse(cls, text: str) -> StartAgainError | None:
        """Return the error that a worker reported with `text`, if it is one."""
        match = re.fullmatch(rf"{cls.__name__}: (.+)\n *(.+)\n *({OPTIONS}.+)", text.strip())
        return cls(*match.groups()) if match else None


@dataclass(frozen=True)
class SessionStart:
    """How a worker of a script was started; a Session may ask for another start."""

    started: str  # with which options, for the message
    path: Path  # file that the Session writes

    @classmethod
    def of_worker(cls, worker_env: WorkerEnv, restart: str) -> SessionStart:
        path = Path(worker_env.state) / f"{worker_env.slot}.session-{os.getpid()}"
        path.unlink(missing_ok=True)
        return cls(f"this start: --restart {restart} --out {worker_env.folder}", path)

    def environ(self) -> dict[str, str]:
        """Return the variable for this process, or for its child process."""
        return {ERROR_FILE: str(self.path)}

    def check(self) -> None:
        """StartAgainError if a Session has asked for another start."""
        content: dict[str, object] = {}
        with suppress(OSError, ValueError):
            content = json.loads(self.path.read_text())
        if FOLDER not in content:
            return
        out = str(content[FOLDER])
        words = ["--restart", "one", *(["--out", out] if out else [])]
        raise StartAgainError(
            f"the script opens a Session in {out}"
            if out
            else "the script joins the workers with ElasticRuntime",
            self.started,
            OPTIONS + shlex.join(words),
        )


def ask_for_start(out: Path | None = None) -> None:
    """Ask for a start under an agent, in the folder `out`, and raise SystemExit. Return where the
    user has decided, and in other processes that the script starts: they are not workers of the
    run."""
    # With the pid of this process, or of the worker that runs the script as its child.
    path = os.environ.get(ERROR_FILE, "")
    if path.endswith((f".session-{os.getpid()}", f".session-{os.getppid()}")):
        write_atomic(Path(path), json.dumps({FOLDER: str(out.absolute()) if out else ""}))
        raise SystemExit(UsageError.exit_code)
