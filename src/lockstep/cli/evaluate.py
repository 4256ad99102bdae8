"""`lockstep evaluate`: score checkpoints, in one process or several."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from lockstep.cli.start import run_in_group
from lockstep.errors import UsageError
from lockstep.runtime.signals import STOP_EXIT_CODES

if TYPE_CHECKING:
    from lockstep.elastic.runtime import ElasticRuntime


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.lm_eval or args.include_path or args.chat:
        return score_with_lm_eval(args)
    words = ("evaluate", *sys.argv[2:])
    return run_in_group(words, args.workers, lambda runtime: score(args, runtime))


def score_with_lm_eval(args: argparse.Namespace) -> int:
    """Print the scores of lm-eval. UsageError for options that it does not use."""
    others = {
        "--follow": args.follow,
        "--split": args.split != "validation",
        "--beams": args.beams > 1,
        "--average": args.average,
    }
    others |= {"--workers": (args.workers or 1) > 1, "no --lm-eval": not args.lm_eval}
    if wrong := [option for option, given in others.items() if given]:
        raise UsageError(
            f"--lm-eval, --include-path and --chat cannot be combined with {wrong[0]}",
            "command line",
            "score with lm-eval alone: lockstep evaluate RUN --lm-eval TASKS",
        )
    from lockstep.tasks.evaluate import evaluate_with_lm_eval  # loads torch

    print(
        evaluate_with_lm_eval(
            args.folder, args.step, args.lm_eval, args.include_path, chat=args.chat
        )
    )
    return 0


def score(args: argparse.Namespace, runtime: ElasticRuntime) -> int:
    """Collective. Score in this worker."""
    from lockstep.tasks.evaluate import evaluate  # loads torch

    options = {
        "step": args.step,
        "split": args.split,
        "beams": args.beams,
        "average": args.average,
        "follow": args.follow,
    }
    return STOP_EXIT_CODES[evaluate(args.folder, runtime, **options)]
