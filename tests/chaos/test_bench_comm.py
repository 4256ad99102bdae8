"""`lockstep bench comm` between hosts whose links have a known rate."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.hosts import Network, why_no_hosts

RATES = {"a": 100, "b": 100, "c": 10}  # Mbit/s


@pytest.mark.long
def test_the_fitted_rate_is_that_of_the_link_and_the_slow_host_is_named(tmp_path: Path) -> None:
    if why_not := why_no_hosts():
        pytest.skip(why_not)
    with Network(3) as network:
        tables = [
            f'[[host]]\nname = "{host.name}"\naddress = "{host.address}"\nworkers = 1\n'
            for host in network.hosts
        ]
        (tmp_path / "hosts.toml").write_text("".join(tables))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(tmp_path)}
        agents = []
        for host in network.hosts:
            network.limit_rate(host, f"{RATES[host.name]}mbit")
            words = [
                "--hosts",
                "hosts.toml",
                "--host",
                host.name,
                "--out",
                "comm.json",
                "--sizes",
                "1 KiB, 64 KiB, 512 KiB",
            ]
            command = [*host.enter, sys.executable, "-m", "lockstep", "bench", "comm", *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes))  # type: ignore[call-overload]
        outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0, 0], outputs
    results = json.loads((tmp_path / "comm.json").read_text())
    # No message is faster than its link; a busy machine makes it slower.
    assert 0.5 < results["links"]["other_host"]["bytes_per_s"] / (100e6 / 8) < 1.1
    assert [link["hosts"] for link in results["slow"]] == [["c"]] and 0.5 < results["slow"][0][
        "bytes_per_s"
    ] / (10e6 / 8) < 1.1
    assert (
        sorted(results["hosts"]) == ["a", "b", "c"]
        and len(results["pairs"]) == 3
        and "same_host" not in results["links"]
    )
    for output, _ in outputs:
        assert "# engine, 3 ranks" in output and re.search(
            r"slow: host c, at best: [5-9]\.", output
        )
