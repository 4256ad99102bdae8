"""`lockstep evaluate`: score checkpoints, in one process or several."""

import argparse
import os
import sys

from lockstep import log
from lockstep.agent.agent import run_static_group
from lockstep.agent.forkserver import STATIC_PRELOAD, WorkerProgram
from lockstep.cli.start import refuse_other_worker_count
from lockstep.errors import UsageError
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.exit_report import worker_main
from lockstep.runtime.signals import STOP_EXIT_CODES


def main(args: argparse.Namespace, rest: list[str]) -> int:
    if args.lm_eval or args.include_path or args.chat:
        return score_with_lm_eval(args)
    rank_info, description = read_rank_info(os.environ)
    if rank_info is None:
        return run_static_group(
            WorkerProgram(("evaluate", *sys.argv[2:]), preload=STATIC_PRELOAD), args.workers or 1
        )
    refuse_other_worker_count(args.workers, rank_info.size, description)
    return worker_main(lambda: run_worker(args))


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
        what = f"--lm-eval, --include-path and --chat cannot be combined with {wrong[0]}"
        raise UsageError(
            what, "command line", "score with lm-eval alone: lockstep evaluate RUN --lm-eval TASKS"
        )
    from lockstep.tasks.evaluate import evaluate_with_lm_eval  # loads torch

    print(
        evaluate_with_lm_eval(
            args.folder, args.step, args.lm_eval, args.include_path, chat=args.chat
        )
    )
    return 0


def run_worker(args: argparse.Namespace) -> int:
    """Collective. Score in this worker."""
    # These load torch, which starting workers does not need.
    from lockstep.elastic.runtime import ElasticRuntime
    from lockstep.tasks.evaluate import evaluate

    with ElasticRuntime.join(threads=1) as runtime:
        log.set_up_logging(rank=runtime.world.rank)
        code = evaluate(
            args.folder,
            runtime,
            step=args.step,
            split=args.split,
            beams=args.beams,
            average=args.average,
            follow=args.follow,
        )
        return STOP_EXIT_CODES[code]
