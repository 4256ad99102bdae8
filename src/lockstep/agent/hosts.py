"""The hosts file: the machines of a run. Every host uses the same file.

ssh = true               # start all hosts from one, by ssh; false: run the same command on each

[[host]]
name = "ada"             # unique; matched with the machine's own name, or with --host
address = "10.0.0.1"     # where other hosts reach it; by default its name
workers = 8
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.signals import STOP_SIGNALS
from lockstep.runtime.worker_env import SHARED_TERMINAL

FORMAT_HINT = (
    "write [[host]] tables with name, workers and, if it differs from the name, address; "
    "ssh = true starts all hosts from one"
)
# Beginnings of their names.
SENT_VARIABLES = ("LOCKSTEP_", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
SSH_FAILED = 255  # ssh's own exit code: host not reached, or connection lost (ssh(1))
# Used in file names, at most 255 bytes.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
# Used in an ssh command.
Address = Annotated[str, Field(pattern=r"^([A-Za-z0-9:][A-Za-z0-9.:_-]*)?$", max_length=253)]
MAX_WORKERS = 4096  # per host; the agent there applies a tighter limit, from its cores


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Host:
    """One machine; `address`: as other hosts reach it, "": its name."""

    name: Name
    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS, strict=True)]
    address: Address = ""

    @property
    def reached_at(self) -> str:
        return self.address or self.name

    def resolve(self) -> str:
        """Return its IP address. ConfigError if there is none, or others cannot reach it."""
        try:
            ip = str(socket.getaddrinfo(self.reached_at, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ConfigError(
                f"cannot resolve {self.reached_at} on {socket.gethostname()}: {error.strerror}",
                f"address of the host {self.name}",
                "write its IP address (ip -br addr shows it)",
            ) from None
        # Debian's /etc/hosts maps a machine's own name to 127.0.1.1
        if ip.startswith("127.") and ip != self.reached_at:
            raise ConfigError(
                f"{self.reached_at} is {ip} on {socket.gethostname()}, "
                "where other machines cannot reach it",
                f"address of the host {self.name}",
                "write its IP address in the network between the hosts (ip -br addr shows it)",
            )
        return ip


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Hosts:
    """All machines of a run; `ssh`: one command starts them all."""

    host: Annotated[list[Host], Field(min_length=1)]
    ssh: bool = False

    @property
    def workers(self) -> int:
        return sum(host.workers for host in self.host)

    def find(self, name: str, source: str) -> Host:
        """Return the host of that name. UsageError, which lists the known names, if there is
        none."""
        for host in self.host:
            if host.name == name:
                return host
        raise UsageError(
            f"unknown host {name!r}",
            source,
            f"set --host to one of {', '.join(host.name for host in self.host)}",
        )


def read_hosts(path: Path) -> Hosts:
    """Read a hosts file. ConfigError if it cannot be read or parsed."""
    try:
        return parse_hosts(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(
            f"no such hosts file: {path}", f"--hosts, relative to {Path.cwd()}", FORMAT_HINT
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a hosts file: {error}", f"--hosts {path}", FORMAT_HINT
        ) from None


def parse_hosts(values: Mapping[str, Any], source: str, hint: str = FORMAT_HINT) -> Hosts:
    """Return the hosts in parsed TOML. ConfigError, which lists every invalid value."""
    try:
        hosts = TypeAdapter(Hosts).validate_python(values)
    except ValidationError as error:
        problems = []
        for item in error.errors():  # ("host", 1, "name") -> "host 2 name"
            location = " ".join(
                str(part + 1 if isinstance(part, int) else part) for part in item["loc"]
            )
            problems.append(
                f"{location}: {item['msg'].replace('Unexpected keyword argument', 'unknown key')}"
            )
        raise ConfigError("; ".join(problems), source, hint) from None
    duplicates = [
        name for name, count in Counter(host.name for host in hosts.host).items() if count > 1
    ]
    if duplicates:
        raise ConfigError(
            f"several hosts are named {', '.join(duplicates)}",
            source,
            "give each host a unique name",
        )
    return hosts


# Start all hosts by ssh.


def ssh_command(
    host: Host, command: Sequence[str], cwd: Path, environ: Mapping[str, str]
) -> list[str]:
    """Return the ssh command that runs `command` on a host, in `cwd`, with LOCKSTEP_ variables and
    the address of an object store; its credentials, which `ps` would show, come from that host. The
    remote shell reads signal names from standard input and sends them: ssh cannot forward them."""
    variables = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(SENT_VARIABLES)
    ]
    # Without job control, a shell's background command reads /dev/null by default.
    signals = 'exec 3<&0; while read -r name; do kill -s "$name" $$; done <&3 >/dev/null 2>&1 &'
    line = (
        f"cd {shlex.quote(str(cwd))} && "
        f"{{ {signals} exec {shlex.join(['env', *variables, *command])} 3<&- </dev/null; }}"
    )
    return ["ssh", "-o", "BatchMode=yes", host.reached_at, line]


def start_by_ssh(hosts: Sequence[Host], words_of: Callable[[Host], Sequence[str]]) -> int:
    """Run `lockstep` with these words on each host by ssh; return one exit code."""
    environ = {**os.environ, SHARED_TERMINAL: "1"}
    python = (sys.executable, "-m", "lockstep")
    return run_on_all_hosts(
        [ssh_command(host, [*python, *words_of(host)], Path.cwd(), environ) for host in hosts]
    )


def run_on_all_hosts(commands: Sequence[Sequence[str]]) -> int:
    """Run the ssh commands and forward signals (main thread only); return one exit code."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            )
            for command in commands
        ]

        def forward_signal(number: int, frame: object) -> None:
            line = signal.Signals(number).name.removeprefix("SIG").encode() + b"\n"
            for process in processes:
                with suppress(BrokenPipeError):  # it has exited
                    assert process.stdin is not None
                    process.stdin.write(line)

        for number in STOP_SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, forward_signal))
        codes = [process.wait() for process in processes]
    return combined_exit_code([128 - code if code < 0 else code for code in codes])


def combined_exit_code(codes: Sequence[int]) -> int:
    """Return the first nonzero exit code of a host; ssh's own only if all hosts have that one."""
    reported = [code for code in codes if code != SSH_FAILED]
    return next((code for code in reported if code), 0) if reported else SSH_FAILED
