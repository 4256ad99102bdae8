"""Findings from the facts of hosts. Faults that a test can plant for real are in tests/chaos/test_doctor.py."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from lockstep.doctor.findings import Finding, HostFacts, PeerFacts, allows, findings, report
from lockstep.runtime.memory import cgroup_limits

FAST = 1e9


def hosts_of(*names: str) -> dict[str, HostFacts]:
    """Return the facts of healthy hosts on one network."""
    hosts = {}
    for index, name in enumerate(names):
        peers = {
            other: PeerFacts(at=f"{other}:1", source=f"10.0.0.{index}", bytes_per_s=FAST)
            for other in names
            if other != name
        }
        fingerprint = {"torch": "2.13.0", "lockstep": "0.1.0"}
        facts = HostFacts(
            name,
            8,
            fingerprint=fingerprint,
            versions={"python": "3.11.7"},
            address=f"10.0.0.{index}",
            interface="eth0",
        )
        is_first = index == 0
        facts = replace(facts, is_claimed=is_first, is_locked=is_first)
        hosts[name] = replace(facts, peers=peers, gpus=["H100"] * 8)
    return hosts


def change(hosts: dict[str, HostFacts], host: str, **values: object) -> dict[str, HostFacts]:
    return {**hosts, host: replace(hosts[host], **values)}  # type: ignore[arg-type]


def change_peer(
    hosts: dict[str, HostFacts], host: str, peer: str, **values: object
) -> dict[str, HostFacts]:
    return change(
        hosts, host, peers={**hosts[host].peers, peer: replace(hosts[host].peers[peer], **values)}
    )  # type: ignore[arg-type]


def test_healthy_hosts_have_no_finding() -> None:
    hosts = list(hosts_of("a", "b", "c").values())
    assert findings(hosts) == []
    assert report(hosts, []).endswith("\n\na run can start on these hosts")
    assert findings([HostFacts("alone")]) == []
    partly_known = HostFacts("alone", fingerprint={"torch": "2.13.0"})
    assert "torch 2.13.0" in report([partly_known], findings([partly_known]))


ABC = hosts_of("a", "b", "c")
OTHER_TORCH = {"torch": "2.12.0", "lockstep": "0.1.0"}
CASES = {
    "other torch": (
        change(ABC, "b", fingerprint=OTHER_TORCH),
        ("versions", "b", "FAIL"),
        "torch is 2.12.0, but 2.13.0 on a and c",
    ),
    "torch missing": (
        change(ABC, "b", errors={"versions": "ImportError: libcudart"}),
        ("versions", "b", "FAIL"),
        "libcudart",
    ),
    "other python": (
        change(ABC, "c", versions={"python": "3.12.1"}),
        ("versions", "c", "warn"),
        "python is 3.12.1, but 3.11.7 on a and b",
    ),
    "clock ahead": (
        change_peer(ABC, "a", "b", clock_s=3.5),
        ("clock", "b", "warn"),
        "3.5 s ahead of that of a",
    ),
    "clock behind": (
        change_peer(ABC, "a", "c", clock_s=-90.0),
        ("clock", "c", "warn"),
        "90.0 s behind that of a",
    ),
    "other network": (
        change_peer(ABC, "b", "c", source="192.168.0.7"),
        ("interface", "b", "warn"),
        "leave from 192.168.0.7, not from 10.0.0.1",
    ),
    "NCCL interface": (
        change(ABC, "b", variables={"NCCL_SOCKET_IFNAME": "docker0"}),
        ("interface", "b", "FAIL"),
        "docker0 is not eth0",
    ),
    "gloo interface": (
        change(ABC, "b", variables={"GLOO_SOCKET_IFNAME": "lo"}),
        ("interface", "b", "warn"),
        "lo is not eth0",
    ),
    "no GPU": (change(ABC, "b", gpus=[]), ("gpu", "b", "FAIL"), "no GPU here, but on other hosts"),
    "few GPUs": (
        change(ABC, "b", gpus=["H100"]),
        ("gpu", "b", "FAIL"),
        "8 workers, but torch sees 1 GPUs",
    ),
    "busy GPU": (
        change(ABC, "b", driver_gpus=["H100, driver 550.54, 70123 MiB used"]),
        ("gpu", "b", "warn"),
        "70123 MiB",
    ),
    "little space": (
        change(ABC, "b", free_bytes=1 << 30),
        ("folder", "b", "warn"),
        "1.0 GiB are free",
    ),
    "no space": (change(ABC, "b", free_bytes=1 << 20), ("folder", "b", "FAIL"), "1.0 MiB are free"),
    "slow disk": (change(ABC, "b", write_s=4.0), ("folder", "b", "warn"), "fsync took 4.0 s"),
    "file not seen": (
        change_peer(ABC, "b", "a", sees_file=False),
        ("folder", "b", "FAIL"),
        "a file that a wrote does not appear here",
    ),
    "two creators": (
        change(ABC, "b", is_claimed=True),
        ("folder", "a", "FAIL"),
        "2 hosts have created",
    ),
    "two locks": (change(ABC, "b", is_locked=True), ("folder", "a", "warn"), "2 hosts hold"),
    "little memory": (
        change(ABC, "b", memory_bytes=2 << 30, memory_source="cgroup"),
        ("memory", "b", "FAIL"),
        "256.0 MiB for each of 8",
    ),
    "few open files": (
        change(ABC, "b", open_files=200),
        ("limits", "b", "FAIL"),
        "200 open files are allowed, 224 are needed",
    ),
    "slow link": (
        change_peer(ABC, "b", "c", bytes_per_s=1e6),
        ("bandwidth", "b", "warn"),
        "between b and c: 8.0 Mbit/s; the median is 8.0 Gbit/s",
    ),
    "not reached": (
        change_peer(ABC, "b", "c", error="timed out"),
        ("ports", "c", "FAIL"),
        "does not answer b: timed out at c:1",
    ),
    "no group": (
        change(ABC, "b", errors={"group": "rank 1 could not connect"}),
        ("group", "b", "FAIL"),
        "could not connect",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_fault_is_one_finding_with_what_where_and_what_to_do(case: str) -> None:
    hosts, (check, host, level), words = CASES[case]
    (finding,) = findings(list(hosts.values()))
    assert (finding.check, finding.host, finding.level) == (
        check,
        host,
        level,
    ) and words in finding.what
    assert finding.where and finding.hint
    text = report(list(hosts.values()), [finding])
    assert f"\n{level}  {check}" in f"\n{text}" and str(finding) in text
    assert text.endswith(
        "keep a run from starting" if level == "FAIL" else "a run can start on these hosts"
    )


def test_a_host_that_reported_nothing_has_a_line() -> None:
    hosts = hosts_of("a", "b")
    alone = [change_peer(hosts, "a", "b", error="connection refused")["a"]]
    (finding,) = findings(alone)
    assert (
        finding.host == "b"
        and "nothing is known about it" in finding.what
        and "start lockstep doctor on b" in finding.hint
    )
    assert "FAIL  ports      b" in report(alone, [finding])


def test_facts_of_another_version_are_read() -> None:
    facts = hosts_of("a", "b")["a"]
    values = json.loads(json.dumps(asdict(facts)))
    read = TypeAdapter(HostFacts).validate_python
    assert read(values) == facts
    values["peers"]["b"]["new"] = values["new"] = 1
    del values["interface"]
    assert read(values) == replace(facts, interface="")


def test_a_failing_finding_decides_the_level_of_its_line() -> None:
    found = [Finding("folder", "a", level, "x", "y", "z") for level in ("FAIL", "warn")]
    assert "FAIL  folder     a" in report(
        [HostFacts("a")], found
    ) and "FAIL  folder     a" in report([HostFacts("a")], found[::-1])


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        (
            "4:memory:/job",
            {"memory/job/memory.limit_in_bytes": "1000", "memory/memory.limit_in_bytes": "9000"},
            1000,
        ),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "500"}, 500),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("3:cpu:/job", {"cpu/job/memory.max": "1"}, None),
    ],
)
def test_the_limit_of_the_control_group_counts(
    tmp_path: Path, line: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "own").write_text(f"{line}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert (
        min([bytes for bytes, _ in cgroup_limits(tmp_path / "own", tmp_path)], default=None)
        == limit
    )


@pytest.mark.parametrize(
    ("text", "interfaces"),
    [
        ("eth0", {"eth0", "eth01"}),
        ("eth", {"eth0", "eth1", "eth01"}),
        ("=eth0", {"eth0"}),
        ("^eth0,docker", {"eth1", "lo"}),
        ("lo,eth1:5", {"lo", "eth1"}),
    ],
)
def test_nccl_reads_the_variable_as_prefixes_exact_names_or_exclusions(
    text: str, interfaces: set[str]
) -> None:
    assert {
        name for name in ("eth0", "eth1", "eth01", "docker0", "lo") if allows(text, name)
    } == interfaces
