"""The rendered Compose file with a real image: hosts are killed, stop, and join late.

Needs podman, podman-compose and an image with this version of Lockstep, as the Dockerfile builds it:

    podman build -t lockstep:VERSION .    VERSION: of lockstep --version
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import TINY, Truth
from support.launching import run_command, run_lockstep
from support.waiting import wait_until

import lockstep
from lockstep.checkpoint.commands import digest_line

pytestmark = pytest.mark.long
IMAGE = os.environ.get("LOCKSTEP_TEST_IMAGE") or f"localhost/lockstep:{lockstep.__version__}"
STEPS = 1000


def why_no_compose() -> str:
    for program in ("podman", "podman-compose"):
        if not shutil.which(program):
            return f"no {program}"
    missing = subprocess.run(
        ["podman", "image", "exists", IMAGE], check=False, capture_output=True
    ).returncode
    return f"podman has no image {IMAGE}" if missing else ""


class Services:
    """The services of a Compose file, as podman runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"lockstep-{os.getpid()}"
        # podman-compose knows no configs: the run file is mounted.
        names = [f"host-{number}" for number in range(3)]
        mounted = {
            name: {"volumes": [f"{folder}/run.toml:/etc/lockstep/run.toml:ro"]} for name in names
        }
        (folder / "podman.yaml").write_text(json.dumps({"services": mounted}))

    def compose(self, *words: str) -> str:
        command = [
            "podman-compose",
            "-p",
            self.name,
            "-f",
            "compose.yaml",
            "-f",
            "podman.yaml",
            *words,
        ]
        done = run_command(command, cwd=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def members(self, host: str) -> list[str]:
        """Return the hosts of the newest generation, by rank, as `lockstep status` on a host lists them."""
        command = [
            "podman",
            "exec",
            f"{self.name}_{host}_1",
            "lockstep",
            "status",
            "/shared/run",
            "--json",
        ]
        done = run_command(command)
        return (
            [member["host"] for member in json.loads(done.stdout)["members"]]
            if done.returncode == 0
            else []
        )

    def wait_for_members(self, host: str, expected: set[str]) -> None:
        what = f"a generation of {expected}"
        wait_until(lambda: set(self.members(host)) == expected, what, 90)

    def exit_codes(self) -> dict[str, int]:
        """Wait for the end of all containers."""
        listed = subprocess.check_output(
            ["podman", "ps", "-a", "--filter", f"name={self.name}_", "--format", "{{.Names}}"],
            text=True,
        )
        return {
            name: int(subprocess.check_output(["podman", "wait", name], text=True, timeout=240))
            for name in listed.split()
        }

    @property
    def shared(self) -> Path:
        words = [
            "podman",
            "volume",
            "inspect",
            f"{self.name}_shared",
            "--format",
            "{{.Mountpoint}}",
        ]
        return Path(subprocess.check_output(words, text=True).strip())


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    if why_not := why_no_compose():
        pytest.skip(why_not)
    lines = [f"{key} = {value}" for key, value in TINY.items()]
    (tmp_path / "run.toml").write_text("\n".join([f"steps = {STEPS}", *lines]))
    words = [
        "render",
        "compose",
        "run.toml",
        "--nodes",
        "2:3",
        "--workers",
        "1",
        "--run",
        "/shared/run",
        "--image",
        IMAGE,
    ]
    done = run_lockstep(*words, "--out", "compose.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    created = Services(tmp_path)
    yield created
    created.compose("--profile", "more", "down", "-v", "-t", "0")


def test_hosts_of_a_compose_file_are_killed_stop_and_join(
    services: Services, reference: Callable[[int], Truth]
) -> None:
    services.compose("up", "-d")
    services.wait_for_members("host-0", {"host-0", "host-1"})
    services.compose("--profile", "more", "up", "-d")
    services.wait_for_members("host-0", {"host-0", "host-1", "host-2"})
    services.compose("kill", "-s", "KILL", "host-0")
    services.wait_for_members("host-1", {"host-1", "host-2"})
    services.compose("up", "-d", "host-0")
    services.wait_for_members("host-1", {"host-0", "host-1", "host-2"})
    services.compose("stop", "host-1")
    services.wait_for_members("host-0", {"host-0", "host-2"})
    assert set(services.exit_codes().values()) == {0}
    assert digest_line(services.shared / "run") == reference(STEPS).digest
