"""`lockstep replay`: compute a step of a run once more, and compare it with the record."""

import argparse
import sys

from lockstep.errors import UsageError
from lockstep.history.replay import are_comparable, recorded_steps, replay
from lockstep.history.request import Replay
from lockstep.report.run_data import require_run

UNNAMED = (
    "code, arguments, versions and processor are those of that checkpoint, so a file that the loop "
    "reads has changed, or the loop draws numbers that no checkpoint holds"
)


def main(args: argparse.Namespace, rest: list[str]) -> int:
    require_run(args.folder)
    number = args.micro_batch
    looks = args.debug or args.dump is not None
    if number is not None and not looks:
        raise UsageError(
            f"--micro-batch {number} alone does nothing",
            "command line",
            "add --debug or --dump DIR",
        )
    number = number or 0
    recorded = recorded_steps(args.folder, args.step)[-1]
    if number >= (count := len(recorded.get("losses", [0]))):
        raise UsageError(
            f"step {args.step} has no micro-batch {number}",
            f"--micro-batch; its record has {count} losses",
            f"give --micro-batch 0 to {count - 1}",
        )
    if args.dump:
        args.dump.mkdir(parents=True, exist_ok=True)
    request = Replay(
        folder="",
        step=args.step,
        observes=args.dump is not None,
        dumped=number if args.dump else None,
        dump=str(args.dump.resolve()) if args.dump else "",
        stops_at=number if args.debug else None,
    )
    done = replay(args.folder, request, sys.executable, from_start=args.from_start)
    first = done.first + 1
    steps = f"step {args.step}" if first == args.step else f"steps {first} to {args.step}"
    since = f"the checkpoint of step {done.first}" if done.first else "the start of the run"
    if difference := done.difference():
        print(f"{steps}, from {since}: not as recorded\n  {difference}")
        # A resume names what has changed in code and machine.
        named = [line for line in done.output.splitlines() if "other bits" in line]
        for line in named or [UNNAMED] * bool(done.first):
            print(f"  {line}")
        return 1
    digests = sum(map(are_comparable, done.recorded, done.computed))  # others are of other slices
    print(f"{steps}, from {since}: all losses and {digests} digests equal the record")
    return 0
