"""`lockstep status`: list the members of a run."""

import argparse
import json

from lockstep.elastic.control import format_status, run_status
from lockstep.log import printable


def main(args: argparse.Namespace, rest: list[str]) -> int:
    status = run_status(args.folder)
    print(json.dumps(status, indent=1) if args.json else printable(format_status(status)))
    return 0
