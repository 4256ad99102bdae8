"""The hosts of a run, in a file that is the same on all of them.

ssh = true               # one of them starts all by ssh; without it, start the same command on each

[[host]]
name = "ada"             # of its own; found by what the machine calls itself, or by --host
address = "10.0.0.1"     # where the others reach it; by default its name
workers = 8
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from lockstep.errors import ConfigError, UsageError
from lockstep.runtime.signals import STOPPING

FORM = "write [[host]] tables with name, workers and, where it is not the name, address; and ssh = true to start all from one"
NOT_REACHED = 255
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]  # it stands in names of files, of 255 bytes at most
Address = Annotated[str, Field(pattern=r"^([A-Za-z0-9:][A-Za-z0-9.:_-]*)?$", max_length=253)]  # it stands in a command of ssh
MOST_WORKERS = 4096  # of a host; the agent there knows its cores, and has a tighter bound


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Host:
    """One machine.

    workers  processes on it
    address  for the others; "": its name
    """

    name: Name
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS, strict=True)]
    address: Address = ""

    @property
    def reached_at(self) -> str:
        """Where the others reach it."""
        return self.address or self.name

    def resolve(self) -> str:
        """Its address in numbers, as this machine sees it. ConfigError when it has none, or one that no other machine can reach."""
        try:
            number = str(socket.getaddrinfo(self.reached_at, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise ConfigError(
                f"{self.reached_at} cannot be resolved on {socket.gethostname()}: {error.strerror}",
                f"address of the host {self.name}",
                "write its address in numbers (ip -br addr shows it)",
            ) from None
        if number.startswith("127.") and number != self.reached_at:  # Debian's /etc/hosts gives a machine's own name 127.0.1.1
            raise ConfigError(
                f"{self.reached_at} is {number} on {socket.gethostname()}, where other machines cannot reach it",
                f"address of the host {self.name}",
                "write its address in the network between the hosts (ip -br addr shows it)",
            )
        return number


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Hosts:
    """All machines of a run, and whether one of them starts all by ssh."""

    host: Annotated[list[Host], Field(min_length=1)]
    ssh: bool = False

    @property
    def workers(self) -> int:
        """On all machines together."""
        return sum(host.workers for host in self.host)

    def find(self, name: str, source: str) -> Host:
        """The host of that name. UsageError, with the names there are, when there is none."""
        for host in self.host:
            if host.name == name:
                return host
        raise UsageError(f"no host is called {name!r}", source, f"give --host one of {', '.join(host.name for host in self.host)}")


def read_hosts(path: Path) -> Hosts:
    """The hosts in a file. ConfigError when it cannot be read or is none."""
    try:
        return parse_hosts(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no hosts file {path}", f"--hosts, seen from {Path.cwd()}", FORM) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no hosts file: {error}", f"--hosts {path}", FORM) from None


def parse_hosts(values: Mapping[str, Any], source: str, hint: str = FORM) -> Hosts:
    """The hosts in the values of a file. ConfigError that names all that does not fit."""
    try:
        hosts = TypeAdapter(Hosts).validate_python(values)
    except ValidationError as error:
        wrong = [f"{place(one['loc'])}: {one['msg'].replace('Unexpected keyword argument', 'unknown key')}" for one in error.errors()]
        raise ConfigError("; ".join(wrong), source, hint) from None
    twice = [name for name, count in Counter(host.name for host in hosts.host).items() if count > 1]
    if twice:
        raise ConfigError(f"more than one host is called {', '.join(twice)}", source, "give each a name of its own")
    return hosts


def place(path: Sequence[int | str]) -> str:
    """A place in the file, for people: ("host", 1, "name") -> "host 2 name"."""
    return " ".join(str(part + 1 if isinstance(part, int) else part) for part in path)


# Starting all of them from one.


def ssh_command(host: Host, command: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> list[str]:
    """What runs `command` on a host, in the same folder and with our variables.

    The remote program is sent the signals whose names come in by standard input, a line each: ssh has no other way for them.
    """
    ours = [f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith("LOCKSTEP_")]
    # Without job control a shell's background command reads /dev/null, unless it is given another descriptor.
    signals = 'exec 3<&0; while read -r name; do kill -s "$name" $$; done <&3 >/dev/null 2>&1 &'
    line = f"cd {shlex.quote(str(cwd))} && {{ {signals} exec {shlex.join(['env', *ours, *command])} 3<&- </dev/null; }}"
    return ["ssh", "-o", "BatchMode=yes", host.reached_at, line]


def start_all(commands: Sequence[Sequence[str]]) -> int:
    """Run these commands, write the names of signals that come to their standard input, and wait; the exit code of them all.

    For the main thread.
    """
    with ExitStack() as held:
        started = [
            held.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)) for command in commands
        ]

        def pass_on(number: int, frame: object) -> None:
            line = signal.Signals(number).name.removeprefix("SIG").encode() + b"\n"
            for one in started:
                with suppress(BrokenPipeError):  # it has ended
                    assert one.stdin is not None
                    one.stdin.write(line)

        for number in STOPPING:
            held.callback(signal.signal, number, signal.signal(number, pass_on))
        codes = [one.wait() for one in started]
    return code_of_all([128 - code if code < 0 else code for code in codes])


def code_of_all(codes: Sequence[int]) -> int:
    """The first that is not 0, of those that hosts have said: 255 is ssh's own, for a host that it did not reach or lost (ssh(1))."""
    said = [code for code in codes if code != NOT_REACHED]
    return next((code for code in said if code), 0) if said else NOT_REACHED
