"""`lockstep doctor`: examine the hosts of a run before it starts."""

import argparse
import os

from lockstep.agent.hosts import start_by_ssh
from lockstep.cli.launch import find_hosts, own_name
from lockstep.cli.options import option_words
from lockstep.doctor.findings import findings, report
from lockstep.log import printable
from lockstep.object_store.address import parse_address
from lockstep.runtime.worker_env import SHARED_TERMINAL


def main(args: argparse.Namespace, rest: list[str]) -> int:
    run = str(parse_address(args.out) or args.out.resolve())
    hosts = find_hosts(args, None)
    if (args.ssh or hosts.ssh) and not args.host:
        words = ["doctor", "--out", run, *option_words(args, "hosts", "wait")]
        return start_by_ssh(hosts.host, lambda host: [*words, "--host", host.name])
    name, source = own_name(args)
    from lockstep.doctor.peers import examine  # after the refusals

    facts = examine(hosts.find(name, f"{source}; {args.hosts}"), hosts.host, run, args.wait)
    found = findings(facts)
    if os.environ.get(SHARED_TERMINAL) != "1" or facts[0].host == name:
        print(printable(report(facts, found)), flush=True)
    return int(any(finding.level == "FAIL" for finding in found))
