"""`lockstep diff`: where two runs part."""

import argparse
import sys
from pathlib import Path

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.fingerprints import changes, newest_facts, tolerated_changes
from lockstep.checkpoint.folder import committed_steps
from lockstep.errors import LockstepError, UsageError
from lockstep.history.diff import Side, distance, first_difference, locate
from lockstep.report.run_data import require_run


def main(args: argparse.Namespace, rest: list[str]) -> int:
    folders = (args.folder, args.other)
    for folder in folders:
        require_run(folder)
    for sentence in differing_values(*folders):
        print(sentence)
    last, step, what = first_difference(*folders)
    if not last and not step:
        names = f"metrics.jsonl of {args.folder} and {args.other}"
        raise UsageError("no step is in both records", names, "compare other runs")
    if not step:
        print(f"equal up to step {last}, the last one that both have recorded")
        return compare_checkpoints(*folders)
    print(f"equal up to step {last}" if last else "they differ from the first common step on")
    print(f"step {step}: {what}\nreplaying both runs up to it", flush=True)
    pythons = (args.python_a or sys.executable, args.python_b or sys.executable)
    a, b = (
        Side(folder, python, args.from_start)
        for folder, python in zip(folders, pythons, strict=True)
    )
    try:
        place = locate(a, b, step)
        print(f"they part in {place}")
        if place.tensor:
            print(f"  {distance(a, b, place)}")
    except LockstepError as error:
        print(f"the tensor is not known\n  {error}")
    return 1


def compare_checkpoints(a: Path, b: Path) -> int:
    """Compare the newest checkpoint that both runs have: it holds buffers and the state of the
    optimizers, which no record has. Return 1 if they differ."""
    common = set(committed_steps(a / "checkpoints")) & set(committed_steps(b / "checkpoints"))
    if not common:
        return 0
    ours, theirs = (digest_line(run, max(common)) for run in (a, b))
    if ours == theirs:
        return 0
    print(f"the checkpoints differ: {ours} in {a}, {theirs} in {b}")
    print("  losses and trained weights are equal: buffers or the state of the optimizer are not")
    return 1


def differing_values(a: Path, b: Path) -> list[str]:
    """Return the values that decide bits, and facts about code and machine, that differ between the
    newest checkpoints."""
    ours, theirs = ((newest_facts(run / "checkpoints") or (0, {}))[1] for run in (a, b))
    values = changes(ours.get("fingerprints", {}), theirs.get("fingerprints", {}))
    groups = zip(ours.get("constructed", []), theirs.get("constructed", []), strict=False)
    options = [f"optimizer: {change}" for pair in groups for change in changes(*pair)]
    return [*values, *dict.fromkeys(options), *tolerated_changes(ours, theirs)]
