"""Two containers as two hosts: runc with its own process, mount, host name and network namespaces
each, and a run folder that both mount. One is killed, the run continues, it starts again and joins.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.fault_matrix import Reference, print_seconds
from support.hosts import Host, Network, Training, flags, read_steps, why_no_hosts
from support.launching import ROOT, lockstep_command

from lockstep.checkpoint.commands import digest_line

pytestmark = pytest.mark.long
STEPS = 300
READ_ONLY = ["rbind", "ro"]


def shown_paths() -> list[str]:
    """Return the folders of this machine that Python and Lockstep need, without those inside of others."""
    paths = {
        "/usr",
        "/etc",
        str(ROOT),
        sys.prefix,
        sys.base_prefix,
        *(path for path in sys.path if os.path.isdir(path)),
    }
    paths |= {os.path.realpath(path) for path in paths}
    return sorted(
        path for path in paths if not any(path.startswith(f"{other}/") for other in paths)
    )


def container_config(host: Host, command: list[str], shared: Path) -> dict[str, Any]:
    """Return the OCI configuration of a container with the network of `host` and a fresh /tmp."""
    binds = [
        {"destination": path, "source": path, "type": "bind", "options": READ_ONLY}
        for path in shown_paths()
    ]
    links = [f"/{name}" for name in ("bin", "lib", "lib64") if os.path.islink(f"/{name}")]
    assert links, "a Linux whose /bin is in /usr"
    return {
        "ociVersion": "1.0.2",
        "hostname": host.name,
        "root": {"path": "rootfs"},
        "process": {
            "args": command,
            "cwd": str(shared),
            "user": {"uid": 0, "gid": 0},
            "env": [f"PATH={os.environ['PATH']}", "HOME=/tmp", "OMP_NUM_THREADS=1"],
        },
        "mounts": [
            {"destination": "/proc", "source": "proc", "type": "proc"},
            {"destination": "/dev", "source": "tmpfs", "type": "tmpfs"},
            {
                "destination": "/dev/shm",
                "source": "tmpfs",
                "type": "tmpfs",
                "options": ["size=256m"],
            },
            {"destination": "/tmp", "source": "tmpfs", "type": "tmpfs"},
            *binds,
            {
                "destination": str(shared),
                "source": str(shared),
                "type": "bind",
                "options": ["rbind", "rw"],
            },
        ],
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in ("pid", "mount", "uts", "ipc")),
                {"type": "network", "path": f"/proc/{host.holder}/ns/net"},
            ]
        },
    }


class Containers(Training):
    """A run whose agents are process 1 of a container each."""

    def start_agent(self, host: Host) -> None:  # type: ignore[override]
        place = [
            "--nodes",
            f"1:{len(self.hosts)}",
            "--workers",
            str(self.workers),
            "--host",
            host.name,
            "--address",
            host.address,
        ]
        command = lockstep_command("launch", *place, "--out", "run", *flags(self.steps))
        bundle = self.folder.parent / f"bundle-{host.name}"
        shutil.rmtree(bundle, ignore_errors=True)
        (bundle / "rootfs").mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                (bundle / "rootfs" / name).symlink_to(os.readlink(f"/{name}"))
        (bundle / "config.json").write_text(
            json.dumps(container_config(host, command, self.folder))
        )
        with open(self.folder / f"{host.name}.out", "ab") as output:
            words = ["runc", "run", "--bundle", str(bundle), self.container(host)]
            self.agents[host.name] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def container(self, host: Host) -> str:
        return f"lockstep-test-{os.getpid()}-{host.name}"

    def kill_host(self, host: Host) -> None:
        """Kill the container, with all of its processes."""
        subprocess.run(["runc", "kill", self.container(host), "KILL"], check=True)
        self.agents[host.name].wait(20)
        subprocess.run(["runc", "delete", "--force", self.container(host)], check=True)

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(
                ["runc", "delete", "--force", self.container(host)],
                check=False,
                capture_output=True,
            )
        super().close()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    if why_not := ("" if shutil.which("runc") else "no runc") or why_no_hosts():
        pytest.skip(why_not)
    (tmp_path / "shared").mkdir()
    with Network(2) as network, ExitStack() as stack:
        created = Containers(tmp_path / "shared", network.hosts, workers=1, steps=STEPS)
        stack.callback(created.close)
        yield created


def test_a_killed_container_heals_like_a_host_and_joins_again(
    containers: Containers, reference: Reference
) -> None:
    containers.wait(
        lambda: containers.step > 0 and len(containers.newest.members) == 2, what="two containers"
    )
    containers.wait_for_step(containers.step + 3)
    before = containers.newest
    assert {member.host for member in before.members} == {"a", "b"} and {
        member.slot for member in before.members
    } == {0}
    lost = next(host for host in containers.hosts if host.name == before.members[0].host)
    containers.kill_host(lost)
    back_s = containers.wait_until_back(before, 1)
    one = containers.newest
    containers.start_agent(lost)
    print_seconds(back=back_s, whole=containers.wait_until_back(one, 2))
    truth = reference(STEPS)
    assert containers.end() == {"a": 0, "b": 0}, containers.report()
    assert (
        digest_line(containers.run, None) == truth.digest
        and read_steps(containers.run) == truth.steps
    ), containers.report()
