"""`lockstep launch --ray` on real Ray nodes, each in a network namespace: a killed node, bad inputs,
stop, and the death of the driver.

    LOCKSTEP_CHAOS=1 pytest -rP tests/chaos/test_ray.py     prints the time from a node's death to the next step
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.fault_matrix import Reference
from support.hosts import (
    Host,
    Network,
    Training,
    flags,
    living,
    read_steps,
    undisturbed,
    why_no_hosts,
)
from support.object_store import environment, s3_server
from support.stored_hosts import RUN
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line

pytest.importorskip("ray", reason="needs ray: pip install 'lockstep-train[ray]'")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
HEAD = "10.77.0.1:6379"
KILLS, MANY = 5, 100_000  # kills, and more steps than they take
CREDENTIALS = {name: value for name, value in environment("", "").items() if "KEY" in name}
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes
# Ray's own detection takes 15 s by default; it only decides when the replacement may start.
QUICK = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "500",
}


class Cluster:
    """Ray nodes in network namespaces; the head at the first host takes no work."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.logs, self.nodes = folder / "ray.log", list[subprocess.Popen[bytes]]()
        self.start(
            network.hosts[0], "--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"
        )
        wait_until(
            lambda: "Ray runtime started" in self.text,
            "the head node",
            60,
            report=lambda: self.text,
        )

    @property
    def text(self) -> str:
        return self.logs.read_text(errors="replace") if self.logs.exists() else ""

    def start(self, host: Host, *words: str, prefix: str = "") -> None:
        """Start a node. prefix: a shell command that runs first, in a mount namespace of the node."""
        words = (
            *(words or (f"--address={HEAD}", "--num-cpus=1")),
            f"--temp-dir={self.folder / host.name}",
        )
        common = [
            f"--node-ip-address={host.address}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--disable-usage-stats",
            "--block",
        ]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
        shell = ["unshare", "--mount", "sh", "-c", f'{prefix or ":"}; exec "$@"', "sh", *ray]
        with open(self.logs, "ab") as output:
            # Of a node alone: the credentials of a store, and where its copies are.
            environ = (
                os.environ
                | QUICK
                | CREDENTIALS
                | {"LOCKSTEP_STORE_CACHE": str(self.folder / f"copies-{host.name}")}
            )
            command = [*host.enter, *shell]
            self.nodes.append(
                subprocess.Popen(
                    command,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    start_new_session=True,
                    cwd=self.folder,
                )
            )

    def processes(self, host: Host) -> list[int]:
        network, pids = os.readlink(f"/proc/{host.holder}/ns/net"), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(entry / "ns/net") == network and int(entry.name) != host.holder:
                    pids.append(int(entry.name))
        return pids

    def kill(self, host: Host) -> None:
        """Kill every process of a host, as a power loss does."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for host in self.network.hosts:
            self.kill(host)
        for node in self.nodes:
            node.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two nodes of one CPU each; the fourth host is free."""
    if why_not := why_no_hosts():
        pytest.skip(why_not)
    folder = Path(
        tempfile.mkdtemp(prefix="ray", dir="/tmp")
    )  # short: its sockets have paths of at most 107 bytes
    with Network(4) as network:
        created = Cluster(network, folder)
        for host in network.hosts[1:3]:
            created.start(host)
        yield created
        created.close()
    shutil.rmtree(folder, ignore_errors=True)


class RayTraining(Training):
    """A run under Ray; `agents` has the driver alone."""

    def start_driver(
        self, cluster: Cluster, *words: str, address: str = HEAD, out: str = "run", **variables: str
    ) -> subprocess.Popen[bytes]:
        head = cluster.network.hosts[0]
        command = [
            *head.enter,
            sys.executable,
            "-m",
            "lockstep",
            "launch",
            "--ray",
            "--workers",
            "1",
            "--out",
            out,
        ]
        words = words or ("--nodes", "2")
        environ = {
            **os.environ,
            **variables,
            "RAY_ADDRESS": address,
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_TMP": str(self.folder),
        }
        with open(self.folder / "driver.out", "ab") as output:
            self.agents["ray"] = subprocess.Popen(
                [*command, *words, *flags(self.steps)],
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.agents["ray"]

    def host_of_rank(self, cluster: Cluster, rank: int) -> Host:
        address = self.newest.members[rank].address.rpartition(":")[0]
        return next(host for host in cluster.network.hosts if host.address == address)

    def assert_same(self, reference: Reference) -> None:
        truth = reference(self.steps)
        assert (
            digest_line(self.run, None) == truth.digest and read_steps(self.run) == truth.steps
        ), self.report()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[RayTraining]:
    created = RayTraining(tmp_path, cluster.network.hosts, workers=1, steps=40, start=())
    yield created
    created.close()


def test_nodes_meet_in_a_store_and_one_is_killed(
    cluster: Cluster, training: RayTraining, reference: Reference
) -> None:
    head, *nodes = cluster.network.hosts[:3]
    training.steps = 400
    with s3_server(head.address, head.enter) as server:
        settings = environment(server, training.folder / "driver")
        del settings["LOCKSTEP_STORE_CACHE"]  # else every node would have this folder
        driver = training.start_driver(
            cluster, out=RUN, **settings, XDG_CACHE_HOME=str(training.folder)
        )

        def steps_of(host: Host) -> list[tuple[int, float, float | None]]:
            return next(
                (
                    read_steps(path.parent)
                    for path in cluster.folder.glob(f"copies-{host.name}/*/hosts/metrics.jsonl")
                ),
                [],
            )

        report = (training.folder / "driver.out").read_text
        wait_until(
            lambda: any(len(steps_of(node)) > 8 for node in nodes),
            "step 8",
            process=driver,
            report=report,
        )
        cluster.kill(nodes[0])
        shutil.rmtree(cluster.folder / f"copies-{nodes[0].name}")
        cluster.start(nodes[0])  # Ray repeats its task there, with an empty disk
        assert driver.wait(200) == 0, report()
        assert "joined" in report() and CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in report()
        words = [*head.enter, sys.executable, "-m", "lockstep", "checkpoint", "digest", RUN]
        reader = os.environ | settings | {"LOCKSTEP_STORE_CACHE": str(training.folder / "reader")}
        assert (
            subprocess.check_output(words, env=reader, text=True).strip() == reference(400).digest
        )


def test_a_run_on_two_nodes_stops_resumes_and_has_the_bits_of_one_worker(
    cluster: Cluster, training: RayTraining, reference: Reference
) -> None:
    driver = training.start_driver(cluster)
    training.wait_for_step(8)
    assert len({member.address.rpartition(":")[0] for member in training.newest.members}) == 2
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 75, training.report()
    assert training.start_driver(cluster).wait(120) == 0, training.report()
    training.assert_same(reference)
    wait_until(lambda: not living(training.folder), "the end of all processes", 20)


def test_all_ends_with_a_killed_driver_and_the_same_command_resumes(
    cluster: Cluster, training: RayTraining, reference: Reference
) -> None:
    driver = training.start_driver(cluster)
    training.wait_for_step(12)
    driver.kill()
    driver.wait()
    wait_until(lambda: not living(training.folder), "the end of all processes", 30)
    assert training.start_driver(cluster).wait(120) == 0, training.report()
    training.assert_same(reference)


def test_killed_nodes_heal_like_hosts_and_replacements_join(
    cluster: Cluster, training: RayTraining
) -> None:
    training.steps, seconds = MANY, []
    driver = training.start_driver(cluster)
    training.wait_for_step(8)
    for kill in range(KILLS):
        before = training.newest
        host = training.host_of_rank(cluster, kill % 2)  # in turn the leader and the other one
        cluster.kill(host)
        seconds.append(training.wait_until_back(before, 1))
        one = training.newest
        cluster.start(host if kill else cluster.network.hosts[3])
        whole_s = training.wait_until_back(one, 2)
        print(
            f"kill {kill + 1}: next step after {seconds[-1]:.2f} s, both workers again after {whole_s:.1f} s, step {training.step}"
        )
    print(f"from a node's death to the next step: median {statistics.median(seconds):.2f} s")
    assert statistics.median(seconds) < 5
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 75, training.report()
    (training.folder / "undisturbed").mkdir()
    truth = undisturbed(training.folder / "undisturbed", training.step, optim__decay_steps=MANY)
    assert (
        digest_line(training.run, None) == truth.digest and read_steps(training.run) == truth.steps
    ), training.report()


def test_a_lost_node_without_a_replacement_does_not_hold_the_end(
    cluster: Cluster, training: RayTraining, reference: Reference
) -> None:
    driver = training.start_driver(cluster)
    training.wait_for_step(8)
    host = training.host_of_rank(cluster, 0)
    cluster.kill(host)
    started_s = time.monotonic()
    try:
        assert driver.wait(120) == 0, training.report()
        print(f"the run ended {time.monotonic() - started_s:.1f} s after the loss")
        training.assert_same(reference)
    finally:
        cluster.start(host)


def refused(training: RayTraining, cluster: Cluster, *words: str, address: str = HEAD) -> str:
    """Return what a launch that is refused prints; it must exit with 2 and start no worker."""
    assert training.start_driver(cluster, *words, address=address).wait(120) == 2, training.report()
    assert not list(training.run.glob("generations/*.json"))
    return (training.folder / "driver.out").read_text()


def test_fewer_nodes_than_asked(cluster: Cluster, training: RayTraining) -> None:
    text = refused(training, cluster, "--nodes", "7", "--wait", "2")
    found = re.search(
        r"(\d) of 7 Ray nodes have 1 CPU, after 2 s", text
    )  # nodes that start, or that a test killed, may be away
    assert found and "the cluster has 10.77.0." in text and "10.77.0.1 (" in text, text
    assert f"--nodes {max(1, int(found[1]))}" in text, text


def test_no_cluster_at_the_address(cluster: Cluster, training: RayTraining) -> None:
    text = refused(training, cluster, address="10.77.0.1:6380")
    assert (
        "no Ray cluster answers" in text
        and "RAY_ADDRESS=10.77.0.1:6380" in text
        and "Traceback" not in text
    ), text


def test_a_run_folder_that_a_node_does_not_see(cluster: Cluster, training: RayTraining) -> None:
    host = cluster.network.hosts[2]
    cluster.kill(host)
    cluster.start(host, prefix=f"mount -t tmpfs none {training.folder}")
    try:
        text = refused(training, cluster, "--nodes", "2")
        assert (
            f"the Ray node {host.address} does not see the run folder {training.run}" in text
            and "it does not exist there" in text
        ), text
    finally:
        cluster.kill(host)
        cluster.start(host)
