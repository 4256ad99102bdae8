"""`lockstep evaluate`: score checkpoints on held-out data, each of them exactly once.

RUN/evaluations.jsonl has one line per (step, split, beams, average, lowercase). A writer appends it
with a lock, after truncating a partial line of a killed process, unless it exists: an evaluator can
be killed and restarted at any time, or run twice. RUN/best.json is computed from these lines.

--follow scores all committed checkpoints without a line, oldest first: retention deletes these
first.

With --lm-eval the library lm-eval scores a checkpoint: it loads a temporary export in the run
folder with transformers, so the scores are those of `lm_eval --model hf` on an export.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from lockstep.checkpoint.evaluations import BEST, EVALUATIONS, best_of
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.policy import choose_step, show_steps
from lockstep.config.schema import RunConfig
from lockstep.data.manifest import locked
from lockstep.elastic.collectives import (
    all_gather_json,
    gather_results,
    run_in_run_folder,
    run_on_rank0,
)
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import (
    CheckpointError,
    DamagedFileError,
    LockstepError,
    UsageError,
    missing_package,
)
from lockstep.files import read_json, write_json
from lockstep.log import log, printable
from lockstep.models.llama_io import CHECKPOINTS, export_run, is_llama_run, refuse_no_model
from lockstep.models.load_translator import read_run
from lockstep.record.metrics import append_json, iter_steps, last_newline
from lockstep.record.tracker import Tracker
from lockstep.remote.working_copy import fetch_checkpoint
from lockstep.runtime.signals import StopSignals
from lockstep.tasks.evaluator import EvalSpec, Evaluator, Split
from lockstep.tasks.open import open_evaluator

FINISHED = "finished.json"
SAMPLES = "samples.json"
POLL_S = 1.0


ActionKind = Literal["evaluate", "wait", "end"]


class NextAction(NamedTuple):
    kind: ActionKind
    step: int
    reason: str


def evaluate(
    folder: Path,
    runtime: ElasticRuntime,
    *,
    step: int | None = None,
    split: Split = "validation",
    beams: int = 1,
    average: int = 0,
    follow: bool = False,
) -> str:
    """Collective. Score the checkpoint of `step` (default: the newest), or with `follow` all until
    the run is finished. Return the name of the signal that stopped it, or "".

    average    N: score the mean of the weights of the newest N checkpoints, or of all if fewer
    UsageError, DataError, CheckpointError.
    """
    with StopSignals() as signals:
        if follow:

            def poll_for_checkpoint() -> NextAction:
                is_there = committed_steps(folder / "checkpoints") or finished_step(folder)
                reason = f"waiting for the first checkpoint in {folder}"
                return NextAction("evaluate" if is_there else "wait", 0, reason)

            _, stopped = wait_for_action(poll_for_checkpoint, runtime, signals)
            if stopped:
                return stopped
        run = read_run(folder)
        spec = EvalSpec(split, beams, average, run.tokenizer.lowercase)
        evaluator = open_evaluator(run, folder)
        if not evaluator.held_out(split):
            what = f"the run has no {split} split: it trains on all of its data"
            if not follow:
                raise UsageError(
                    what,
                    f"data.held_out, data.held_out_share in {folder / 'run.json'}",
                    "train with a validation set to score it",
                )
            log.info(what)
            return ""
        job = EvaluationJob(folder, evaluator, runtime, spec, signals)
        stopped = job.follow() if follow else job.score_once(step)
        if runtime.world.leader:
            forward_to_trackers(folder, run)
        return stopped


def evaluate_at_end(folder: Path, run: RunConfig, runtime: ElasticRuntime) -> None:
    """Collective. Score the test split after training; print samples and the next command."""
    evaluator = open_evaluator(run, folder)
    if run.evaluate.at_end and not evaluator.held_out("test"):
        log.info("the run has no test split: no score")
    elif run.evaluate.at_end:
        if runtime.membership.has_own_folder:
            step = run_on_rank0(runtime, lambda: fetch_checkpoint(folder))
            run_in_run_folder(runtime, lambda: fetch_checkpoint(folder, step))
        else:
            step = resolve_step(folder, None, runtime)
        spec = EvalSpec("test", run.evaluate.beams, 0, run.tokenizer.lowercase)
        loaded = load(evaluator, step, spec, runtime)
        result = evaluator.evaluate(loaded, spec, runtime, lambda: "", limit=run.evaluate.at_end)
        assert result is not None  # None only after a stop signal
        if runtime.world.leader and result.complete:
            append_record(folder, result.record)
        if runtime.world.leader and result.samples:
            write_json(folder / SAMPLES, {"step": step, "lines": result.samples})
        if runtime.shows_progress():
            print(printable("\n".join(["", evaluator.summary(result.record), *result.samples])))
    if runtime.world.leader:
        write_json(folder / FINISHED, {"step": run.steps})
    if runtime.shows_progress():
        score = f"   or   lockstep evaluate {folder}" if evaluator.held_out("validation") else ""
        print(f"\nnext: {evaluator.next_command}{score}", flush=True)


@dataclass
class EvaluationJob:
    folder: Path
    evaluator: Evaluator
    runtime: ElasticRuntime
    spec: EvalSpec
    signals: StopSignals

    def score_once(self, step: int | None) -> str:
        """Collective. Score one checkpoint unless it has a line. Return a stop signal, or ""."""
        step = resolve_step(self.folder, step, self.runtime)
        record = run_on_rank0(self.runtime, lambda: find_record(self.folder, self.spec, step))
        if record is not None:
            log.info("%s (scored before)", self.evaluator.summary(record))
            return ""
        return self.score(load(self.evaluator, step, self.spec, self.runtime))

    def follow(self) -> str:
        """Collective. Score all checkpoints without a line until the run is finished or a stop
        signal arrives. Return the signal, or ""."""
        unreadable: set[int] = set()
        while True:
            action, stopped = wait_for_action(
                lambda: self.poll(unreadable), self.runtime, self.signals
            )
            if stopped or action.kind == "end":
                log.info(stopped or action.reason)
                return stopped
            try:
                loaded = load(self.evaluator, action.step, self.spec, self.runtime)
            except CheckpointError as error:
                unreadable.add(action.step)
                log.warning("step %d is skipped: %s", action.step, error.what)
                continue
            if stopped := self.score(loaded):
                return stopped

    def poll(self, unreadable: Collection[int]) -> NextAction:
        """For rank 0: return the next action."""
        lines = filter(self.spec.matches, iter_steps(self.folder / EVALUATIONS))
        return next_action(
            committed_steps(self.folder / "checkpoints"),
            [line["step"] for line in lines],
            unreadable,
            read_run(self.folder).steps,  # may have grown since: a run can be extended
            finished_step(self.folder),
        )

    def score(self, loaded: Any) -> str:
        """Collective. Score a model and write its line, or return the signal that stopped it."""
        result = self.evaluator.evaluate(
            loaded, self.spec, self.runtime, lambda: self.signals.received
        )
        if result is None:
            return agreed_stop(self.runtime, self.signals)
        if self.runtime.world.leader:
            append_record(self.folder, result.record)
            log.info(self.evaluator.summary(result.record))
        return ""


def load(evaluator: Evaluator, step: int, spec: EvalSpec, runtime: ElasticRuntime) -> Any:
    """Collective. Return the model at `step`. CheckpointError on all ranks if one cannot read it: a
    checkpoint can be deleted while it is read."""
    models: list[Any] = []

    def read() -> list[int]:
        models.append(evaluator.load(step, spec, runtime.world.device))
        return list(models[0].steps)

    problem = ""
    try:
        steps = gather_results(runtime, read)
        if any(other != steps[0] for other in steps):
            problem = "a checkpoint of the average was deleted meanwhile"
    except LockstepError as error:
        problem = error.what
    if problem:
        raise CheckpointError(
            problem, f"step {step} of {evaluator.folder}", "see lockstep checkpoint verify"
        )
    return models[0]


def next_action(
    committed: Sequence[int],
    scored: Collection[int],
    unreadable: Collection[int],
    last: int,
    finished: int,
) -> NextAction:
    """Return the next action, given the steps that are committed, scored and unreadable, the last
    step of the run, and the step at which a training run has `finished` (0: none has)."""
    pending = [step for step in committed if step not in scored and step not in unreadable]
    if pending:
        return NextAction(
            "evaluate",
            pending[0],
            f"step {pending[0]} is the oldest of {len(pending)} that are not scored",
        )
    if any(step >= last for step in (*scored, *unreadable)):
        return NextAction("end", last, f"step {last}, the last one of the run, is scored")
    if finished >= last:
        return NextAction(
            "end", last, f"the run ended at step {finished}, and all its checkpoints are scored"
        )
    return NextAction(
        "wait", 0, f"waiting for a checkpoint; scored so far: {show_steps(sorted(scored))}"
    )


def finished_step(folder: Path) -> int:
    """Return the step at which a training run ended; 0 before that. DamagedFileError."""
    path = folder / FINISHED
    try:
        return int(read_json(path)["step"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{FINISHED} is damaged: {error}",
            str(path),
            "remove it; the next training run writes it again",
        ) from error


def wait_for_action(
    poll: Callable[[], NextAction], runtime: ElasticRuntime, signals: StopSignals
) -> tuple[NextAction, str]:
    """Collective. Poll on rank 0 until there is something to do. Return it, and the stop signal
    that arrived first, or ""."""

    def poll_and_sleep() -> NextAction:
        action = poll()
        if action.kind == "wait" and not signals.received:
            time.sleep(POLL_S)
        return action

    logged = ""
    while True:
        action = NextAction(*run_on_rank0(runtime, poll_and_sleep))
        stopped = agreed_stop(runtime, signals)
        if stopped or action.kind != "wait":
            return action, stopped
        if action.reason != logged:
            log.info(action.reason)
            logged = action.reason


def agreed_stop(runtime: ElasticRuntime, signals: StopSignals) -> str:
    """Collective. Return the stop signal of the first rank that received one, or ""."""
    return next((name for name in all_gather_json(runtime, signals.received) if name), "")


def resolve_step(folder: Path, step: int | None, runtime: ElasticRuntime) -> int:
    """Collective. Return `step`, or the newest step. CheckpointError if it is not committed."""
    checkpoints = folder / "checkpoints"
    return run_on_rank0(
        runtime, lambda: choose_step(step, committed_steps(checkpoints), checkpoints)
    )


def forward_to_trackers(folder: Path, run: RunConfig) -> None:
    """Send new lines to the trackers, unless an active training run does."""
    if not run.track.backends:
        return
    try:
        with Tracker(folder, leader=True, from_step=None, track=run.track.backends) as tracker:
            tracker.forward_evaluations()
    except UsageError as error:
        log.debug("the tracker of the training run forwards the evaluations: %s", error.what)


def find_record(folder: Path, spec: EvalSpec, step: int) -> dict[str, Any] | None:
    records = filter(spec.matches, iter_steps(folder / EVALUATIONS))
    return next((record for record in records if record["step"] == step), None)


def append_record(folder: Path, record: dict[str, Any]) -> bool:
    """Append a line and update best.json. Return False if the line exists already."""
    spec = EvalSpec(*(record[key] for key in vars(EvalSpec())))
    path = folder / EVALUATIONS
    with locked(folder / "evaluations.lock"):
        if path.exists() and (complete := last_newline(path)) < path.stat().st_size:
            os.truncate(path, complete)
        if find_record(folder, spec, record["step"]) is not None:
            return False
        append_json(path, record)
        if (best := best_of(list(iter_steps(path)))) is not None:
            write_json(folder / BEST, best)
    return True


def evaluate_with_lm_eval(
    folder: Path, step: int | None, tasks: str, include_path: Path | None, *, chat: bool
) -> str:
    """Score a checkpoint (None: the newest) and add a line to evaluations.jsonl; return a table.

    tasks  names, separated by commas; include_path: a folder of further tasks; chat: apply the
           template
    """
    if not is_llama_run(folder):
        refuse_no_model(folder)
        raise UsageError(
            f"{folder} is a Hugging Face model, not a run",
            str(folder),
            f"try lm_eval --model_args pretrained={folder}",
        )
    try:
        from lm_eval import simple_evaluate  # the extra [eval]
        from lm_eval.models import huggingface  # noqa: F401  imports transformers and accelerate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError as error:
        problem = f"cannot be imported: {error}"
        raise missing_package("lm-eval", "eval", "--lm-eval", problem) from error
    step = choose_step(step, committed_steps(folder / CHECKPOINTS), folder)
    manager = TaskManager(include_path=include_path and str(include_path))
    options = {
        "task_manager": manager,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "apply_chat_template": chat,
    }
    with TemporaryDirectory(prefix=".lm-eval-", dir=folder) as temporary:
        export_run(folder, step, Path(temporary) / "model")
        try:
            results = simple_evaluate(
                "hf",
                {"pretrained": f"{temporary}/model"},
                tasks.split(","),
                log_samples=False,
                **options,
            )
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"lm-eval failed: {error}",
                f"--lm-eval {tasks}",
                "list the tasks with lm_eval ls tasks",
            ) from error
    scores = {
        f"{task}/{name}": value
        for task, values in results["results"].items()
        for name, value in values.items()
        if name != "alias"
    }
    # No other line has this split, and the selection of the best step skips it.
    split = f"lm-eval {tasks}{' --chat' * chat}"
    append_record(folder, {"step": step, **vars(EvalSpec()), "split": split, **scores})
    return f"step {step:,}\n{make_table(results)}"
