"""`lockstep doctor`: examine the hosts of a run before it starts."""

import argparse
import os
import socket
import sys
from pathlib import Path

from lockstep.agent.hosts import run_on_all_hosts, ssh_command
from lockstep.cli.launch import find_hosts
from lockstep.doctor.findings import findings, report
from lockstep.log import printable
from lockstep.object_store.address import parse_address
from lockstep.runtime.worker_env import SHARED_TERMINAL


def main(args: argparse.Namespace, rest: list[str]) -> int:
    run = str(parse_address(args.out) or args.out.resolve())
    name, source = (
        (args.host, "--host") if args.host else (socket.gethostname(), "hostname of this machine")
    )
    hosts = find_hosts(args, None, name, source)
    if (args.ssh or hosts.ssh) and not args.host:
        words = [
            sys.executable,
            "-m",
            "lockstep",
            "doctor",
            "--hosts",
            str(args.hosts),
            "--out",
            run,
            "--wait",
            str(args.wait),
        ]
        environ = {**os.environ, SHARED_TERMINAL: "1"}
        return run_on_all_hosts(
            [
                ssh_command(host, [*words, "--host", host.name], Path.cwd(), environ)
                for host in hosts.host
            ]
        )
    from lockstep.doctor.peers import examine  # after the refusals

    facts = examine(hosts.find(name, f"{source}; {args.hosts}"), hosts.host, run, args.wait)
    found = findings(facts)
    if os.environ.get(SHARED_TERMINAL) != "1" or facts[0].host == name:
        print(printable(report(facts, found)), flush=True)
    return int(any(finding.level == "FAIL" for finding in found))
