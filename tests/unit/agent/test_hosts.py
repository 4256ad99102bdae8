"""The hosts file, starting all hosts by ssh, and the arguments of `lockstep launch`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes import SUPPORT

from lockstep.agent.hosts import (
    Host,
    Hosts,
    combined_exit_code,
    parse_hosts,
    read_hosts,
    run_on_all_hosts,
    ssh_command,
)
from lockstep.cli.main import main
from lockstep.errors import ConfigError, UsageError

TWO = {
    "host": [{"name": "ada", "address": "10.0.0.1", "workers": 2}, {"name": "bob", "workers": 3}]
}


def test_hosts_are_found_by_name() -> None:
    hosts = parse_hosts(TWO, "hosts.toml")
    assert hosts == Hosts([Host("ada", 2, "10.0.0.1"), Host("bob", 3)]) and hosts.workers == 5
    assert [host.reached_at for host in hosts.host] == ["10.0.0.1", "bob"] and hosts.host[
        0
    ].resolve() == "10.0.0.1"
    assert hosts.find("bob", "--host") == Host("bob", 3)
    with pytest.raises(
        UsageError, match=r"unknown host 'eve'\n  --host\n  set --host to one of ada, bob"
    ):
        hosts.find("eve", "--host")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "host: Field required"),
        ("host = []", "at least 1"),
        ("ssh = 'often'\n[[host]]\nname='a'\nworkers=1", "ssh: "),
        ("[[host]]\nname = 'a'", "host 1 workers: Field required"),
        ("[[host]]\nworkers = 2", "host 1 name: Field required"),
        ("[[host]]\nname = 'a'\nworkers = 0", "host 1 workers: .*greater than or equal to 1"),
        ("[[host]]\nname = 'a'\nworkers = true", "host 1 workers: .*valid integer"),
        ("[[host]]\nname = 'a'\nworkers = '2'", "host 1 workers: .*valid integer"),
        ("[[host]]\nname = '../a'\nworkers = 2", "host 1 name: "),
        ("[[host]]\nname = 'a'\naddress = '-oProxyCommand=x'\nworkers = 2", "host 1 address: "),
        ("[[host]]\nname = 'a'\nadress = 'x'\nworkers = 2", "host 1 adress: unknown key"),
        ("[[host]]\nname = 'a'\nworkers = 2\n" * 2, "several hosts are named a"),
        ("[[host]", "is not a hosts file"),
    ],
)
def test_an_invalid_hosts_file_is_refused_with_three_parts(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_hosts(path)
    assert caught.value.where.endswith(str(path)) and caught.value.hint
    with pytest.raises(ConfigError, match="no such hosts file"):
        read_hosts(tmp_path / "missing.toml")


def test_an_address_that_other_machines_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *words, **named: [(2, 1, 6, "", ("127.0.1.1", 0))]
    )
    with pytest.raises(ConfigError, match=r"ada is 127\.0\.1\.1 on"):
        Host("ada", 1).resolve()
    assert Host("ada", 1, "127.0.1.1").resolve() == "127.0.1.1"  # explicitly configured


def test_run_on_all_hosts_starts_each_host_and_forwards_signals(tmp_path: Path) -> None:
    """With a fake ssh that runs its last argument here, as sshd does there."""
    (tmp_path / "ssh").write_text('#!/bin/sh\neval "exec sh -c \\"\\$$#\\""\n')
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "a folder").mkdir()
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOCKSTEP_TEST": "it's forwarded",
    }
    with subprocess.Popen(
        [sys.executable, str(SUPPORT / "two_ssh_hosts.py")], cwd=tmp_path, env=environ
    ) as process:
        try:
            while not all(
                (tmp_path / "a folder" / f"{name}-it's forwarded").exists()
                for name in ("ada", "bob")
            ):
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 75
        finally:
            process.kill()


def test_the_ssh_command_is_one_argument_after_the_address() -> None:
    *words, line = ssh_command(
        Host("ada", 1, "10.0.0.1"),
        ["lockstep", "launch", "a b"],
        Path("/shared/my runs"),
        {"LOCKSTEP_X": "1", "Y": "2"},
    )
    assert words == ["ssh", "-o", "BatchMode=yes", "10.0.0.1"]
    assert (
        line.startswith("cd '/shared/my runs' && ")
        and "exec env LOCKSTEP_X=1 lockstep launch 'a b' " in line
        and "Y=2" not in line
    )


@pytest.mark.parametrize(
    ("codes", "combined"),
    [
        ((0, 3, 4), 3),
        ((0, 0), 0),
        ((255, 75, 75), 75),
        ((75, 255), 75),
        ((255, 0), 0),
        ((255, 255), 255),
    ],
)
def test_the_combined_exit_code_is_the_first_nonzero_one_of_a_host(
    codes: tuple[int, ...], combined: int
) -> None:
    assert combined_exit_code(codes) == combined
    assert (
        run_on_all_hosts([[sys.executable, "-c", f"raise SystemExit({code})"] for code in codes])
        == combined
    )


HOSTS = '[[host]]\nname = "ada"\naddress = "127.0.0.1"\nworkers = 2\n\n[[host]]\nname = "bob"\nworkers = 2\n'


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `launch` would start: ssh commands, or the minimum number of workers that the local
    agent waits for.
    """
    calls: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lockstep.agent.hosts.run_on_all_hosts", lambda commands: calls.extend(commands) or 0
    )
    monkeypatch.setattr(
        "lockstep.cli.launch.start_agent",
        lambda request, run, config: calls.append(config.env.min_workers) or 0,
    )
    Path("hosts.toml").write_text(HOSTS)
    Path("by-ssh.toml").write_text(f"ssh = true\n{HOSTS}")
    return calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stop run --workers 2", "--workers cannot be combined with --stop"),
        ("--stop run --with-evaluator", "--with-evaluator cannot be combined with --stop"),
        ("--stop run --steps 5", "--steps cannot be combined with --stop"),
        ("run.toml --stop run", "run.toml cannot be combined with --stop"),
        ("--hosts hosts.toml --ssh --host ada", "--ssh cannot be combined with --host ada"),
        ("--hosts hosts.toml --ssh --max 0", "--min 1 and --max 0 are invalid"),
        ("--hosts by-ssh.toml --min 5", "--min 5 exceeds the number of workers, 4"),
        ("--workers 2 --min 3", "--min 3 exceeds the number of workers, 2"),
    ],
)
def test_an_invalid_launch_is_refused_with_three_parts(
    launched: list[Any], capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["launch", *words.split()]) == 2
    what, where, hint = capsys.readouterr().err.splitlines()[-3:]
    assert message in what and where.strip() and hint.strip() and not launched


def test_a_host_started_by_ssh_gets_its_name_and_all_limits(launched: list[Any]) -> None:
    assert main(["launch", "--hosts", "by-ssh.toml", "--min", "2", "--max", "3"]) == 0
    assert [command[-1].partition(" --host ")[2].split()[0] for command in launched] == [
        "ada",
        "bob",
    ]
    assert all("--min 2 --max 3 " in command[-1] for command in launched)
    assert main(["launch", "--hosts", "by-ssh.toml", "--min", "2", "--host", "ada"]) == 0
    assert launched[2:] == [2]
