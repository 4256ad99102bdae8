"""A second host starts a run in the folder of a paused one, without a list of hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forking import ForkedPopen
from support.hosts import Host, Network, flags, living
from support.launching import lockstep_command
from support.waiting import wait_until

from lockstep.elastic.generation_log import GenerationLog
from lockstep.record.metrics import iter_steps


class Start:
    """`lockstep launch` on one host. Each start has another working directory."""

    def __init__(self, host: Host, run: Path) -> None:
        self.run, self.folder = run, run.parent / host.name
        self.folder.mkdir()
        words = [
            "launch",
            "--host",
            host.name,
            "--workers",
            "1",
            "--out",
            str(run),
            *flags(100_000),
        ]
        self.output = self.folder / "out"
        with open(self.output, "ab") as output:
            self.agent = ForkedPopen(
                [*host.enter, *lockstep_command(*words)],
                cwd=self.folder,
                env={**os.environ, "LOCKSTEP_TMP": str(self.folder), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def send(self, number: int) -> None:
        """Send a signal to all processes of the host."""
        for pid in living(self.folder):
            os.kill(pid, number)

    @property
    def text(self) -> str:
        return self.output.read_text()


@pytest.fixture
def starts(network: Network, tmp_path: Path) -> Iterator[list[Start]]:
    """The start on the first host, which trains; the test adds the second one."""
    (tmp_path / "run").mkdir()
    started = [Start(network.hosts[0], tmp_path / "run")]
    yield started
    for start in started:
        start.send(signal.SIGKILL)
        start.agent.wait()


def steps_of(run: Path) -> int:
    return (
        max((line["step"] for line in iter_steps(run / "metrics.jsonl")), default=0)
        if (run / "metrics.jsonl").exists()
        else 0
    )


@pytest.mark.long
@pytest.mark.parametrize("resumes", [True, False])
def test_second_start_waits_while_a_paused_host_records_the_run(
    network: Network, starts: list[Start], resumes: bool
) -> None:
    first, run = starts[0], starts[0].run
    wait_until(lambda: steps_of(run) >= 3, timeout_s=60)
    first.send(signal.SIGSTOP)
    second = Start(network.hosts[1], run)
    starts.append(second)
    wait_until(
        lambda: (
            "another process records this run" in second.text or second.agent.poll() is not None
        ),
        timeout_s=100,
    )
    newest = GenerationLog(run / "generations").newest()
    assert second.agent.poll() is None and newest.number == 1, second.text
    step = steps_of(run)
    first.send(signal.SIGCONT if resumes else signal.SIGKILL)
    if resumes:
        assert second.agent.wait(60) == 2 and "another training is running on host a" in second.text
    wait_until(lambda: steps_of(run) > step + 3, timeout_s=60)
    (first if resumes else second).agent.send_signal(signal.SIGTERM)
    assert (first if resumes else second).agent.wait(60) == 75, first.text + second.text
