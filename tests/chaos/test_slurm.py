"""Rendered batch files on a real Slurm: a lost node, a preemption, a requeue, nodes that join late.

Each node is a network namespace with its own slurmd (tests/support/slurm.py). Every run ends with the
bits of an undisturbed one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from support.fault_matrix import Reference
from support.hosts import SWITCH, TINY, Training, Truth, enter, nested, read_steps
from support.object_store import environment, s3_server
from support.slurm import SlurmCluster, why_no_slurm

from lockstep.checkpoint.commands import digest_line
from lockstep.cli.main import main
from lockstep.elastic.generation_log import GenerationLog

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 150


class Job:
    """A tiny run and its rendered batch file; `training` reads the state of the run.
    run: folder, or an address in an object store; then set `training` to the working copy of a node."""

    def __init__(self, folder: Path, cluster: SlurmCluster, nodes: str, run: str = "run") -> None:
        self.cluster, self.file = cluster, folder / "job.sbatch"
        self.training = Training(folder, steps=STEPS, start=())
        (folder / "tiny.toml").write_text(tomli_w.dumps(nested({"steps": STEPS, **TINY})))
        words = [
            "tiny.toml",
            "--nodes",
            nodes,
            "--workers",
            "1",
            "--run",
            run,
            "--out",
            "job.sbatch",
        ]
        assert main(["render", "slurm", *words]) == 0

    def submit(self, *options: str) -> str:
        return self.cluster.submit(self.file, *options)

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> float:
        return self.cluster.wait(lambda: self.training.step >= step, timeout_s, f"step {step}")

    def wait_for_members(self, count: int) -> None:
        """Wait until a generation of `count` workers has committed a step."""

        def trains() -> bool:
            step = self.training.step
            return (
                step > 0
                and len(self.training.newest.members) == count
                and step > self.training.newest.step
            )

        self.cluster.wait(trains, 120, f"a step of {count} workers")

    def kill_node(self, name: str) -> float:
        """Kill a node; return the seconds until a later generation has committed a step."""
        training = self.training
        before = training.newest
        self.wait_for_step(training.step + 5)
        self.cluster.kill_node(name)
        start_s = time.monotonic()
        self.cluster.wait(
            lambda: training.newest.number > before.number and training.step > training.newest.step,
            60,
            "the next step",
        )
        print(f"from the loss of {name} to the next step: {time.monotonic() - start_s:.2f} s")
        return time.monotonic() - start_s

    def assert_same_bits(self, truth: Truth) -> None:
        end = self.training.newest.end
        assert end and end.code == 0, self.training.report()
        self.assert_same_steps(truth)
        assert digest_line(self.training.run, None) == truth.digest

    def assert_same_steps(self, truth: Truth) -> None:
        assert read_steps(self.training.run) == truth.steps

    def log(self, number: str) -> str:
        return (self.file.parent / f"tiny-{number}.log").read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Three idle nodes; the test runs in its folder, and jobs find the command `lockstep`."""
    if why_not := why_no_slurm():
        pytest.skip(why_not)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with SlurmCluster(tmp_path / "slurm", 3) as cluster:
        yield cluster


def test_a_run_survives_lost_nodes(
    cluster: SlurmCluster, tmp_path: Path, reference: Reference
) -> None:
    job = Job(tmp_path, cluster, "1:3")
    number = job.submit()
    job.wait_for_members(3)
    assert statistics.median([job.kill_node(name) for name in ("n3", "n2")]) < 5
    assert cluster.wait_for_state(number, "COMPLETED", "FAILED")["ExitCode"] == "0:0", job.log(
        number
    )
    job.assert_same_bits(reference(STEPS))


def test_training_continues_without_the_node_of_the_batch_script(
    cluster: SlurmCluster, tmp_path: Path, reference: Reference
) -> None:
    job = Job(tmp_path, cluster, "2:3")
    number = job.submit()
    job.wait_for_members(3)
    assert job.kill_node(cluster.job(number)["BatchHost"]) < 5
    cluster.wait(lambda: job.training.newest.end is not None, 120, "the end of the run")
    job.assert_same_bits(reference(STEPS))
    cluster.wait_for_state(number, "CANCELLED")
    again = job.submit("--nodes=1")
    assert cluster.wait_for_state(again, "COMPLETED", "FAILED")["JobState"] == "COMPLETED", (
        "a complete run needs no minimum of nodes"
    )


def test_a_preempted_run_saves_is_queued_again_and_resumes(
    cluster: SlurmCluster, tmp_path: Path, reference: Reference
) -> None:
    """A job of a partition with a higher priority takes all nodes: Slurm sends USR1, with its grace time."""
    job = Job(tmp_path, cluster, "2:3")
    number = job.submit()
    job.wait_for_step(20)
    (tmp_path / "urgent.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=3 --partition=high\nsleep 2\n"
    )
    urgent = cluster.submit(tmp_path / "urgent.sbatch")
    cluster.wait_for_state(urgent, "COMPLETED")
    saved, end = job.training.step, job.training.newest.end
    assert end and end.code == 75 and 20 <= saved < STEPS, job.training.report()
    fields = cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout_s=300)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), job.log(number)
    assert job.training.events("began")[-1]["step"] == saved
    job.assert_same_bits(reference(STEPS))


def test_a_requeued_job_resumes(
    cluster: SlurmCluster, tmp_path: Path, reference: Reference
) -> None:
    job = Job(tmp_path, cluster, "2:3")
    number = job.submit()
    job.wait_for_step(20)
    cluster.run("scontrol", "requeue", number)
    fields = cluster.wait_for_state(number, "COMPLETED", "FAILED", timeout_s=300)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), job.log(number)
    job.assert_same_bits(reference(STEPS))


def test_a_node_joins_late_and_leaves_at_its_own_preemption(
    cluster: SlurmCluster, tmp_path: Path, reference: Reference
) -> None:
    job = Job(tmp_path, cluster, "2:3")
    number = job.submit("--nodes=2")
    job.wait_for_members(2)
    late = job.submit("--nodes=1")
    job.wait_for_members(3)
    cluster.run("scancel", "--batch", "--signal=USR1", late)
    assert cluster.wait_for_state(late, "PENDING", "COMPLETED", "FAILED")["Restarts"] == "1", (
        job.log(late)
    )
    job.wait_for_members(2)
    assert cluster.wait_for_state(number, "COMPLETED", "FAILED")["Restarts"] == "0", job.log(number)
    job.assert_same_bits(reference(STEPS))


def test_nodes_without_a_shared_disk_meet_in_a_store(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    address = "s3://runs/team/tiny"
    with s3_server(SWITCH, enter(cluster.network.switch)) as server:
        for name, value in environment(server, tmp_path / "copies").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("USER", "ada")
        job = Job(tmp_path, cluster, "2:3", address)
        number = job.submit()
        copies = tmp_path / "lockstep-ada"
        cluster.wait(
            lambda: len(list(copies.glob("n*/*/tiny/metrics.jsonl"))) == 3,
            120,
            "a working copy on each node",
        )
        batch_host = cluster.job(number)["BatchHost"]
        job.training.run = next(copies.glob(f"{batch_host}/*/tiny"))
        job.training.log = GenerationLog(job.training.run / "generations")
        job.wait_for_members(3)
        assert job.kill_node(next(name for name in cluster.names if name != batch_host)) < 10
        assert cluster.wait_for_state(number, "COMPLETED", "FAILED")["ExitCode"] == "0:0", job.log(
            number
        )
        truth = reference(STEPS)
        job.assert_same_steps(truth)
        digest = cluster.run(sys.executable, "-m", "lockstep", "checkpoint", "digest", address)
        assert digest.strip() == truth.digest


def test_a_stop_by_the_user_is_not_queued_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(tmp_path, cluster, "2:3")
    number = job.submit()
    job.wait_for_step(20)
    cluster.run(sys.executable, "-m", "lockstep", "launch", "--stop", "run", cwd=tmp_path)
    fields = cluster.wait_for_state(number, "COMPLETED", "FAILED", "PENDING")
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == (
        "FAILED",
        "75:0",
        "0",
    ), job.log(number)
