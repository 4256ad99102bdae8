"""Start this file on two hosts by ssh, and forward signals to it: test_hosts.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from lockstep.agent.hosts import Host, run_on_all_hosts, ssh_command


def run_on_host(name: str) -> None:
    """Create the file NAME-VALUE, with a value from the environment; exit with 75 on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    Path(f"{name}-{os.environ['LOCKSTEP_TEST']}").touch()
    time.sleep(60)


if len(sys.argv) > 1:
    run_on_host(sys.argv[1])
else:
    cwd = Path("a folder").resolve()
    program = [sys.executable, str(Path(__file__).resolve())]
    hosts = [Host("ada", 1), Host("bob", 1)]
    sys.exit(
        run_on_all_hosts(
            [ssh_command(host, [*program, host.name], cwd, os.environ) for host in hosts]
        )
    )
