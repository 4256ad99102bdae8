"""The scripts in files for Kubernetes and SkyPilot, run by hosts that are network namespaces.

No cluster starts them here, so the test replaces the mounted folders.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import yaml
from support.fault_matrix import Reference
from support.hosts import TINY, Host, Network, Training, living, nested

from lockstep.cli.main import main

pytestmark = pytest.mark.long
STEPS = 400  # enough for a pod that is started again on a busy machine


class Nodes:
    """Nodes that run one script, each with its own host name; `training` reads the state of the run."""

    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.folder, self.hosts = folder, hosts
        self.training = Training(folder, hosts, steps=STEPS, start=())
        self.processes = self.training.agents
        (folder / "run.toml").write_text(tomli_w.dumps(nested({"steps": STEPS, **TINY})))
        (folder / "hosts").write_text(
            "".join(f"{host.address} {host.name}\n" for host in self.hosts)
        )

    def script(self, target: str, nodes: str, capsys: pytest.CaptureFixture[str]) -> str:
        """Return the script in the rendered file, with the folders of this test."""
        assert (
            main(
                [
                    "render",
                    target,
                    str(self.folder / "run.toml"),
                    "--nodes",
                    nodes,
                    "--workers",
                    "1",
                    "--run",
                    "run",
                ]
            )
            == 0
        )
        *_, document = yaml.safe_load_all(capsys.readouterr().out)
        text = (
            document["run"]
            if target == "skypilot"
            else document["spec"]["template"]["spec"]["containers"][0]["args"][0]
        )
        for mounted in ("/etc/lockstep", "/tmp/lockstep", "/shared"):
            text = text.replace(mounted, str(self.folder))
        return str(text)

    def start(self, host: Host, script: str, **environ: str) -> None:
        prepare = f'hostname {host.name} && mount --bind {self.folder}/hosts /etc/hosts && exec bash -c "$0"'
        words = [*host.enter, "unshare", "--uts", "--mount", "--", "bash", "-c", prepare, script]
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with open(self.folder / f"{host.name}.out", "ab") as output:
            environ = {**os.environ, **path, "OMP_NUM_THREADS": "1", **environ}
            self.processes[host.name] = subprocess.Popen(
                words,
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Network) -> Iterator[Nodes]:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    created = Nodes(tmp_path, network.hosts[:2])
    yield created
    for pid in living(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_drained_pod_leaves_and_its_successor_joins(
    nodes: Nodes, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    script = nodes.script("kubernetes", "1:2", capsys)
    first, second = nodes.hosts
    nodes.start(first, script)
    nodes.start(second, script)
    training = nodes.training
    training.wait(lambda: training.step > 0 and len(training.newest.members) == 2, what="two pods")
    training.wait_for_step(training.step + 3)
    before = training.newest
    nodes.processes["b"].send_signal(signal.SIGTERM)
    assert nodes.processes["b"].wait(30) == 75, training.report()
    training.wait_until_back(before, 1)
    nodes.start(second, script)
    training.wait_until_back(training.newest, 2)
    training.assert_same_bits(reference(STEPS))


def test_nodes_of_skypilot_find_each_other(
    nodes: Nodes, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    script = nodes.script("skypilot", "2", capsys)
    nodes.training.hosts = [replace(host, name=host.address) for host in nodes.hosts]
    for host in nodes.hosts:
        nodes.start(host, script, SKYPILOT_NODE_RANK="0", SKYPILOT_NODE_IPS=f"{host.address}\n")
    nodes.training.assert_same_bits(reference(STEPS))
    assert {member.host for member in nodes.training.generations[0].members} == {
        host.address for host in nodes.hosts
    }
