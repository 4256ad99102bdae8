"""`lockstep doctor` on hosts with planted faults: each is named, on the right host, by a real run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.hosts import Network, why_no_hosts
from support.launching import lockstep_command, run_command
from support.object_store import environment, s3_server
from support.stored_hosts import RUN

import lockstep

GROUP = "/sys/fs/cgroup/memory/lockstep-doctor"
MISSING = {
    "control group": ""
    if os.path.exists("/sys/fs/cgroup/memory/cgroup.procs")
    else "no memory controller of version 1",
    "wrong clock": "" if shutil.which("faketime") else "no faketime: apt-get install faketime",
}
ADDRESSES_OF_ONE_HOST = {"a": "127.0.0.1", "b": "localhost"}
NVIDIA_SMI = "#!/bin/sh\necho 'NVIDIA H100, 550.54, 3 MiB'\n"


@dataclass
class Plan:
    """How the doctor starts on a host: a shell line before it, variables, another run folder."""

    before: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    out: str = "run"
    is_started: bool = True


@dataclass
class Hosts:
    network: Network
    folder: Path

    def write_list(self, **addresses: str) -> None:
        tables = [
            (host.name, addresses.get(host.name, host.address)) for host in self.network.hosts
        ]
        (self.folder / "hosts.toml").write_text(
            "".join(f'[[host]]\nname = "{n}"\naddress = "{a}"\nworkers = 2\n' for n, a in tables)
        )

    def examine(self, plans: dict[str, Plan], *words: str) -> tuple[dict[str, int], dict[str, str]]:
        """Return the exit codes and the reports of the hosts."""
        processes = {}
        for host in self.network.hosts:
            plan = plans.get(host.name, Plan())
            command = [
                *host.enter,
                "unshare",
                "--mount",
                "sh",
                "-c",
                f'{plan.before or ":"}; exec "$@"',
                "sh",
                sys.executable,
                "-m",
                "lockstep",
            ]
            command += [
                "doctor",
                "--hosts",
                "hosts.toml",
                "--host",
                host.name,
                "--out",
                plan.out,
                "--wait",
                "30",
                *words,
            ]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", **plan.environ}
            if plan.is_started:
                pipe = subprocess.PIPE
                processes[host.name] = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=environ,
                    stdout=pipe,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
        reports = {name: process.communicate(timeout=100)[0] for name, process in processes.items()}
        return {name: process.returncode for name, process in processes.items()}, reports


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    if why_not := why_no_hosts():
        pytest.skip(why_not)
    with Network(getattr(request, "param", 2)) as network:
        created = Hosts(network, tmp_path)
        created.write_list()
        yield created


def named(report: str) -> set[tuple[str, str, str]]:
    """Return (level, check, host) of each finding in a report."""
    return set(re.findall(r"^(warn|FAIL) (\w+) on (\w+): ", report, re.MULTILINE))


def test_a_run_can_start_on_hosts_without_a_fault(hosts: Hosts) -> None:
    codes, reports = hosts.examine({})
    assert codes == {"a": 0, "b": 0}, reports
    assert named(reports["a"]) == set() and "gloo over 2 hosts" in reports["a"], reports["a"]
    assert not list((hosts.folder / "run").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_several_faults_are_each_named_on_their_hosts(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    hosts.network.limit_rate(hosts.network.hosts[2], "20mbit")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    b = Plan(
        before="ulimit -n 64",
        environ={"ATEN_CPU_CAPABILITY": "default", "PATH": path, "GLOO_SOCKET_IFNAME": "lo"},
    )
    codes, reports = hosts.examine({"b": b, "c": Plan(out="elsewhere")})
    assert codes == {"a": 1, "b": 1, "c": 1}, reports
    wanted = {
        ("FAIL", "limits", "b"),
        ("FAIL", "versions", "b"),
        ("FAIL", "gpu", "b"),
        ("warn", "interface", "b"),
    }
    wanted |= {("FAIL", "folder", name) for name in "abc"} | {
        ("warn", "bandwidth", name) for name in "bc"
    }
    for report in reports.values():
        assert named(report) == wanted, report
    assert (
        "cpu is DEFAULT, but" in reports["a"]
        and "a file that c wrote does not appear here" in reports["a"]
    )
    assert "slow: host c, at best: 19" in reports["a"] or "Mbit/s to c" in reports["a"]


FAULTS = {
    "full disk": (
        {"b": Plan(before="mount -t tmpfs -o size=512k none run")},
        {("FAIL", "folder", "b")},
        "No space left on device",
    ),
    "read-only folder": (
        {"b": Plan(before="mount -t tmpfs -o ro none run")},
        {("FAIL", "folder", "b")},
        "Read-only file system",
    ),
    "no write permission": (
        {
            "b": Plan(
                before='chmod 500 run/doctor; set -- setpriv --bounding-set -dac_override,-dac_read_search "$@"'
            )
        },
        {("FAIL", "folder", "b")},
        "Permission denied",
    ),
    "locks of one host": (
        {"b": Plan(before="mount -t overlay -o lowerdir=empty,upperdir=run,workdir=work none run")},
        {("warn", "folder", "a")},
        "2 hosts hold the same file lock by flock(2), not one",
    ),
    "not started": (
        {"b": Plan(is_started=False)},
        {("FAIL", "ports", "b")},
        "connection refused at 10.77.0.2:",
    ),
    "address space": (
        {"b": Plan(before="ulimit -v 900000")},
        {("FAIL", "memory", "b")},
        "RLIMIT_AS",
    ),
    "control group": (
        {
            "b": Plan(
                before=f"mkdir -p {GROUP} && echo 900M > {GROUP}/memory.limit_in_bytes && echo $$ > {GROUP}/cgroup.procs"
            )
        },
        {("FAIL", "memory", "b")},
        f"limit from {GROUP}/memory.limit_in_bytes",
    ),
    "wrong clock": (
        {"b": Plan(before='set -- faketime -m -f "+90s" "$@"')},
        {("warn", "clock", "b")},
        "its clock is 90.0 s ahead of that of a",
    ),
    "no free ports": (
        {"b": Plan(before="sysctl -qw net.ipv4.ip_local_port_range='50000 50003'")},
        {("FAIL", "ports", "b")},
        "Address already in use",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(hosts: Hosts, fault: str) -> None:
    plans, wanted, words = FAULTS[fault]
    if needed := MISSING.get(fault):
        pytest.skip(needed)
    for name in ("run/doctor", "empty", "work"):
        (hosts.folder / name).mkdir(parents=True)
    codes, reports = hosts.examine(plans, "--wait", "6")
    if fault == "control group":
        os.rmdir(GROUP)
    is_fatal = any(level == "FAIL" for level, _, _ in wanted)
    assert set(codes.values()) == {int(is_fatal)} and words in reports["a"], reports["a"]
    # Without ports a host cannot connect either, so it names other hosts too.
    assert all(
        named(report) == wanted or (fault == "no free ports" and wanted < named(report))
        for report in reports.values()
    ), reports


@pytest.mark.long
def test_faults_of_an_object_store_are_named(hosts: Hosts) -> None:
    """No fault; then a host with another store; then one with a missing bucket."""
    a, b = hosts.network.hosts
    with s3_server(a.address, a.enter) as server, s3_server(b.address, b.enter) as other:
        plans = {
            host.name: Plan(
                out=RUN, environ=environment(server, hosts.folder / f"cache-{host.name}")
            )
            for host in (a, b)
        }
        codes, reports = hosts.examine(plans)
        assert codes == {"a": 0, "b": 0} and named(reports["a"]) == set(), reports
        assert reports["b"].count(f"{RUN}: storing 1 MiB") == 2, reports["b"]
        codes, reports = hosts.examine(
            {"a": plans["a"], "b": replace(plans["b"], environ=environment(other, "cache"))}
        )
        assert codes == {"a": 1, "b": 1} and named(reports["a"]) == {
            ("FAIL", "folder", "a"),
            ("FAIL", "folder", "b"),
        }, reports
        assert "the hosts use different stores" in reports["a"]
        words = RUN.replace("runs/", "absent/")
        codes, reports = hosts.examine({"a": plans["a"], "b": replace(plans["b"], out=words)})
        assert (
            codes == {"a": 1, "b": 1}
            and named(reports["b"]) == {("FAIL", "folder", "b")}
            and "NoSuchBucket" in reports["b"]
        ), reports
        listed = [
            *b.enter,
            sys.executable,
            "-c",
            "import sys; from urllib.request import urlopen; print(urlopen(sys.argv[1]).read())",
        ]
        assert "probes" not in subprocess.check_output([*listed, f"{server}/runs"], text=True), (
            "each host removes its probes"
        )


@pytest.mark.long
def test_other_code_on_a_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "lockstep"
    shutil.copytree(Path(lockstep.__file__).parent, copy)
    (copy / "units.py").write_text((copy / "units.py").read_text() + "# changed\n")
    codes, reports = hosts.examine({"b": Plan(environ={"PYTHONPATH": str(copy.parent)})})
    assert codes == {"a": 1, "b": 1} and ("FAIL", "versions", "b") in named(reports["a"]), reports[
        "a"
    ]
    assert re.search(r"lockstep is .*, sources \w+, but .* on a", reports["a"])


@pytest.mark.long
@pytest.mark.parametrize("cut", ["packets dropped", "disconnected", "no route"])
def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, cut: str) -> None:
    a, b = hosts.network.hosts
    if cut == "packets dropped":
        hosts.network.drop_packets(b, a)
    elif cut == "disconnected":
        hosts.network.disconnect(b)
    else:
        subprocess.run([*a.enter, "ip", "route", "add", "prohibit", b.address], check=True)
    codes, reports = hosts.examine({}, "--wait", "5")
    assert codes["a"] == 1 and ("FAIL", "ports", "b") in named(reports["a"]), reports["a"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("addresses", "code", "words"),
    [
        ({"b": "127.0.0.1"}, 1, "cannot reach the loopback address 127.0.0.1"),
        ({"b": "10.77.0.9"}, 2, "cannot listen at 10.77.0.9:"),
    ],
)
def test_a_wrong_address_is_named(
    hosts: Hosts, addresses: dict[str, str], code: int, words: str
) -> None:
    hosts.write_list(**addresses)
    codes, reports = hosts.examine({}, "--wait", "5")
    assert codes == {"a": 1, "b": code} and words in reports["b"], reports


def test_two_hosts_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text('[[host]]\nname = "a"\nworkers = 1\n' * 2)
    command = lockstep_command("doctor", "--hosts", "hosts.toml")
    done = run_command(command, cwd=tmp_path)
    assert done.returncode == 2 and "several hosts are named a" in done.stderr


def test_two_names_that_share_an_address_are_named(tmp_path: Path) -> None:
    tables = [
        f'[[host]]\nname = "{name}"\naddress = "{address}"\nworkers = 1\n'
        for name, address in ADDRESSES_OF_ONE_HOST.items()
    ]
    (tmp_path / "hosts.toml").write_text("".join(tables))
    command = lockstep_command(
        "doctor", "--hosts", "hosts.toml", "--host", "a", "--wait", "5", "--out", "run"
    )
    done = run_command(command, cwd=tmp_path)
    assert done.returncode == 1 and ("FAIL", "ports", "b") in named(done.stdout), done.stdout
    assert (
        "does not answer a: host a answers, so two names share an address, at localhost:"
        in done.stdout
    )
    assert not {check for _, check, _ in named(done.stdout)} & {"folder", "group"}, done.stdout
