"""`lockstep watch` and the report at the end of a real run that loses a worker."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launching import OWN_LOOP, one_thread, run_lockstep, start_lockstep
from support.waiting import wait_until
from support.written_run import write_run_folder

from lockstep.elastic.control import run_status
from lockstep.record.events import read_events
from lockstep.record.metrics import read_metrics
from lockstep.runtime.sockets import reserve_port

SERVER = Path(__file__).parents[1] / "support" / "ssh_server.py"


def test_a_live_run_is_watched_and_ends_with_a_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_lockstep("train", OWN_LOOP, "--workers", "2", "--out", run, "--steps", "500")
    wait_until(
        lambda: len(read_metrics(run / "metrics.jsonl")) >= 3, "three steps", process=process
    )
    live = run_lockstep("watch", run).stdout
    assert re.search(r"2 workers on 1 host\n", live) and re.search(
        r"(?m)^1 +\S+ +1 +\d+ +worker +\d+ +[a-z]+ *$", live
    ), live
    os.kill(run_status(run)["members"][0]["pid"], signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert re.search(r"report: \S+/run/report.html: [\d.]+ KiB, 500 steps, in [\d.]+ s", output), (
        output
    )
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(1, 501))

    page = (run / "report.html").read_text()
    charts = [
        json.loads(data)
        for data in re.findall(r'<script type="application/json">(.*?)</script>', page)
    ]
    lost = next(event for event in read_events(run) if event["event"] == "regrouped")
    assert (
        charts[0]["marks"][0][0] == lost["step"]
        and charts[0]["x"] == [1, 500]
        and "killed by SIGKILL" in page
    )
    ended = run_lockstep("watch", run).stdout
    assert (
        "ended with exit code 0" in ended and "killed by SIGKILL" in ended and "step 500" in ended
    )


@pytest.mark.long
def test_a_run_of_another_launcher_ends_with_its_samples_in_the_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tiny = {
        "data.pairs": 1500,
        "data.held_out": 40,
        "tokenizer.vocab_size": 300,
        "batch.tokens": 128,
        "evaluate.at_end": 8,
        "steps": 2,
    }
    launcher = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    with reserve_port("127.0.0.1") as reserved:
        launcher["MASTER_PORT"] = str(reserved.getsockname()[1])
    words = [word for key, value in tiny.items() for word in (f"--{key}", value)]
    done = run_lockstep("train", "--out", run, *words, env=one_thread(**launcher))
    assert done.returncode == 0, done.stderr
    samples = json.loads((run / "samples.json").read_text())
    page = (run / "report.html").read_text()
    assert (
        samples["step"] == 2
        and all(html.escape(line) in page for line in samples["lines"])
        and len(samples["lines"]) > 6
    )


@pytest.fixture
def ssh_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address of this machine with an ssh server, and a client that knows its key."""
    asyncssh = pytest.importorskip("asyncssh")
    client = shutil.which("ssh")
    if not client or os.geteuid() != 0:
        pytest.skip("needs an ssh client, and root for port 22")
    for name in ("host", "user"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(tmp_path / name))
        key.write_public_key(str(tmp_path / f"{name}.pub"))
        (tmp_path / name).chmod(0o600)
    options = f"-i {tmp_path}/user -o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new -o LogLevel=ERROR"
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {client} -F none {options} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    address = "127.0.0.77"
    with subprocess.Popen(
        [sys.executable, str(SERVER), str(tmp_path), address], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout and server.stdout.readline() == b"listening\n"
        yield address
        server.kill()


def test_a_run_on_another_host_is_watched_by_ssh(ssh_host: str, tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "a run")
    start_s = time.monotonic()
    done = run_lockstep("watch", f"{ssh_host}:{run}")
    assert (
        done.returncode == 0 and "step 60 of 60" in done.stdout and time.monotonic() - start_s < 30
    ), done.stderr
    refused = run_lockstep("watch", f"{ssh_host}:{tmp_path}/absent")
    assert refused.returncode == 2 and "there is no such folder" in refused.stderr
