"""Scoring checkpoints on held-out text, in a process of its own, exactly, and each of them once.

What is asked, translations or the loss of a text or answers, is the exam of the run's task (tasks/evaluator.py).

Once: RUN/evaluations.jsonl has one line for each (step, split, beams, average, lowercase). Whoever writes first looks,
under a lock, whether it is there, and cuts away a line that a killed process left torn. So an evaluator may be killed at
any moment and started again, or run twice.

Following: all committed checkpoints that have no line are scored, the oldest first, because it is the first that
retention will delete. RUN/best.json names the best on the validation split; it is a function of the lines.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.checkpoint.policy import show_steps
from lockstep.checkpoint.store import Store
from lockstep.config.schema import Run
from lockstep.elastic.consensus import gather, lead
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, DamagedFileError, LockstepError, UsageError
from lockstep.files import append_line, read_json, regular, write_json
from lockstep.models.load_translator import read_run
from lockstep.record.metrics import encode, last_newline, stream
from lockstep.record.tracker import Tracker
from lockstep.runtime.signals import Signals
from lockstep.tasks.evaluator import Exam, Question, Split
from lockstep.tasks.open import open_exam

log = logging.getLogger("lockstep")

LINES, BEST, FINISHED = "evaluations.jsonl", "best.json", "finished.json"
POLL_S = 1.0


@dataclass(frozen=True)
class Move:
    """What a following evaluator does next, and why."""

    do: Literal["evaluate", "wait", "end"]
    step: int
    why: str


# -- the command ------------------------------------------------------------------------------------------------------


def evaluate(
    folder: Path,
    world: World,
    *,
    step: int | None = None,
    split: Split = "validation",
    beams: int = 1,
    average: int = 0,
    lowercase: bool | None = None,
    follow: bool = False,
) -> str:
    """Collective. Score the checkpoint of `step` (default: the newest), or with `follow` all until the run is finished.

    average    N: the mean of the newest N checkpoints' weights, those of fewer if there are fewer; the line lists them
    lowercase  compare in lower case (default: as the run's tokenizer does)
    Gives the name of the signal that ended it, or "". Errors: UsageError, DataError, CheckpointError.
    """
    with Signals() as signals:
        stopped = await_run(folder, world, signals) if follow else ""
        if stopped:
            return stopped
        run = read_run(folder)
        asked = Question(split, beams, average, run.tokens.lowercase if lowercase is None else lowercase)
        exam = open_exam(run, folder)
        if not exam.held_out(split):
            what = f"nothing is held out for {split}: the run trains on all of its text"
            if not follow:
                raise UsageError(
                    what, f"data.held_out, data.held_out_share in {folder / 'run.json'}", "train with a validation set to score it"
                )
            log.info(what)
            return ""
        work = Work(folder, exam, world, asked, signals)
        stopped = work.follow() if follow else work.once(step)
        if world.leader:
            pass_on(folder, run)
        return stopped


def finish(folder: Path, run: Run, world: World) -> None:
    """Collective. What a training ends with: scores on the test split, some samples, and what can be done next."""
    exam = open_exam(run, folder)
    if run.evaluate.at_end and not exam.held_out("test"):
        log.info("nothing is held out for test: no score")
    elif run.evaluate.at_end:
        step = lead(world, lambda: existing(Store(folder / "checkpoints"), None))
        asked = Question("test", run.evaluate.beams, 0, run.tokens.lowercase)
        loaded = load_there(exam, step, asked, world)
        result = exam.measure(loaded, asked, world, lambda: "", most=run.evaluate.at_end)
        assert result is not None  # nobody asked it to stop
        if world.leader and result.complete:
            note(folder, result.record)
        if world.shows():
            print("\n".join(["", exam.summary(result.record), *result.samples]))
    if world.leader:
        write_json(folder / FINISHED, {"step": run.steps})
    if world.shows():
        score = f"   or   lockstep evaluate {folder}" if exam.held_out("validation") else ""
        print(f"\nnext: {exam.next}{score}", flush=True)


@dataclass
class Work:
    """An evaluator at work: its run's folder, what is asked in it, and the question."""

    folder: Path
    exam: Exam
    world: World
    asked: Question
    signals: Signals

    def once(self, step: int | None) -> str:
        """Collective. Score one checkpoint, unless its line is there; the signal that came between, or ""."""
        step = lead(self.world, lambda: existing(Store(self.folder / "checkpoints"), step))
        done = lead(self.world, lambda: find(self.folder, self.asked, step))
        if done is not None:
            log.info("%s (scored before)", self.exam.summary(done))
            return ""
        return self.score(load_there(self.exam, step, self.asked, self.world))

    def follow(self) -> str:
        """Collective. Score every checkpoint that has no line, and those to come, until the run is finished or a signal comes."""
        gone: set[int] = set()
        waiting = ""
        while True:
            move = Move(**lead(self.world, lambda: vars(self.look(gone))))
            stopped = agreed_stop(self.world, self.signals)
            if stopped or move.do == "end":
                log.info(stopped or move.why)
                return stopped
            if move.do == "wait":
                if move.why != waiting:
                    log.info(move.why)
                waiting = move.why
                continue
            loaded, problem = load(self.exam, move.step, self.asked, self.world)
            if loaded is None:
                gone.add(move.step)
                log.warning("step %d is left out: %s", move.step, problem)
            elif stopped := self.score(loaded):
                return stopped

    def look(self, gone: Collection[int]) -> Move:
        """For the leader: the next move. Sleeps a little before it answers "wait", so that the others wait for the answer."""
        store = Store(self.folder / "checkpoints")
        done = [record["step"] for record in stream(self.folder / LINES) if self.asked.of(record)]
        steps = read_run(self.folder).steps  # may have grown: a run can be trained further
        move = next_move(store.steps(), done, gone, steps, finished_step(self.folder))
        if move.do == "wait" and not self.signals.received:
            time.sleep(POLL_S)
        return move

    def score(self, loaded: Any) -> str:
        """Collective. Score a loaded model, write its line; the signal that came between (then nothing is written), or ""."""
        result = self.exam.measure(loaded, self.asked, self.world, lambda: self.signals.received)
        if result is None:
            return agreed_stop(self.world, self.signals)
        if self.world.leader:
            note(self.folder, result.record)
            log.info(self.exam.summary(result.record))
        return ""


def load(exam: Exam, step: int, asked: Question, world: World) -> tuple[Any | None, str]:
    """Collective. The model at `step` on every process, or on none and why: a checkpoint may be deleted at any moment."""
    loaded, problem = None, ""
    try:
        loaded = exam.load(step, asked, world.device)
    except LockstepError as error:
        problem = error.what
    heard = gather(world, [problem, list(exam.steps(loaded)) if loaded else []])
    problems = [text for text, _ in heard if text]
    if not problems and any(steps != heard[0][1] for _, steps in heard):
        problems = ["a checkpoint to average with was deleted meanwhile"]
    return (None, problems[0]) if problems else (loaded, "")


def load_there(exam: Exam, step: int, asked: Question, world: World) -> Any:
    """Collective. The model at `step`. CheckpointError when a process cannot read it."""
    loaded, problem = load(exam, step, asked, world)
    if loaded is None:
        raise CheckpointError(problem, f"step {step} of {exam.folder}", "see lockstep checkpoint verify")
    return loaded


def next_move(committed: Sequence[int], done: Collection[int], gone: Collection[int], last: int, finished: int) -> Move:
    """What a following evaluator does, given the steps that are committed, scored, and could not be read.

    last      the run's last step
    finished  the last step of a training that ended, 0 before
    """
    pending = [step for step in committed if step not in done and step not in gone]
    if pending:
        return Move("evaluate", pending[0], f"step {pending[0]} is the oldest of {len(pending)} that are not scored")
    if any(step >= last for step in (*done, *gone)):
        return Move("end", last, f"step {last}, the last one of the run, is scored")
    if finished >= last:
        return Move("end", last, f"the run ended at step {finished}, and all its checkpoints are scored")
    return Move("wait", 0, f"waiting for a checkpoint; scored so far: {show_steps(sorted(done))}")


def finished_step(folder: Path) -> int:
    """The step at which a training of the run ended; 0 while none has. DamagedFileError."""
    path = folder / FINISHED
    try:
        return int(read_json(path)["step"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{FINISHED} is damaged: {error}", str(path), "remove it; the end of a training writes it again") from error


def await_run(folder: Path, world: World, signals: Signals) -> str:
    """Collective. Wait for the first committed checkpoint of a run that may not have begun; the signal that came first, or ""."""
    store, said = Store(folder / "checkpoints"), False

    def begun() -> bool:
        if not store.steps():
            time.sleep(POLL_S)
        return bool(store.steps())

    while True:
        there = lead(world, begun)
        stopped = agreed_stop(world, signals)
        if there or stopped:
            return stopped
        if not said:
            log.info("waiting for the first checkpoint in %s", folder)
            said = True


def agreed_stop(world: World, signals: Signals) -> str:
    """Collective. The first signal that any process has received, or ""."""
    return next((name for name in gather(world, signals.received) if name), "")


def existing(store: Store, step: int | None) -> int:
    """`step`, or the newest. CheckpointError when it is not committed."""
    steps = store.steps()
    if step is None and steps:
        return steps[-1]
    if step is None or step not in steps:
        what = "there is no checkpoint yet" if step is None else f"there is no checkpoint of step {step}"
        raise CheckpointError(what, f"{store.folder}; {show_steps(steps)}", "see lockstep checkpoint list")
    return step


def pass_on(folder: Path, run: Run) -> None:
    """Send new lines to TensorBoard and Weights & Biases, unless a training is at work, whose tracker does."""
    if not run.track.tensorboard and run.track.wandb == "off":
        return
    try:
        with Tracker(
            folder, leader=True, from_step=None, tensorboard=run.track.tensorboard, wandb=run.track.wandb, project=run.track.project
        ) as tracker:
            tracker.forward_evaluations()
    except UsageError as error:
        log.debug("the training passes the evaluations on: %s", error.what)


# -- the lines --------------------------------------------------------------------------------------------------------


def find(folder: Path, asked: Question, step: int) -> dict[str, Any] | None:
    """The line that answers the question for `step`, if there is one."""
    return next((record for record in stream(folder / LINES) if record["step"] == step and asked.of(record)), None)


def note(folder: Path, record: dict[str, Any]) -> bool:
    """Write the line of an evaluation and name the best; False when such a line is there already, and nothing is done."""
    asked = Question(*(record[key] for key in vars(Question())))
    path = folder / LINES
    with locked(folder / "evaluations.lock"):
        if path.exists() and (whole := last_newline(path)) < path.stat().st_size:
            os.truncate(path, whole)
        if find(folder, asked, record["step"]) is not None:
            return False
        append_line(path, encode(record).decode().rstrip("\n"))
        if (best := best_of(list(stream(path)))) is not None:
            write_json(folder / BEST, best)
    return True


def best_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Which evaluation of the validation split is best: the highest BLEU, or share of right answers, where there is one; of equal ones the
    lowest loss, then the earliest."""
    validation = [record for record in records if record.get("split") == "validation"]
    by = next((key for key in ("bleu", "exact_match") if any(key in record for record in validation)), "loss")
    needed = ("step", by, "loss", *vars(Question()))
    validation = [record for record in validation if all(key in record for key in needed)]  # a damaged line is no candidate
    if not validation:
        return None
    best = min(validation, key=lambda r: (r["loss"] if by == "loss" else -r[by], r["loss"], r["step"]))
    return {"by": by, **{key: best[key] for key in dict.fromkeys(needed)}}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on `path`; the kernel lets go of it with the process, however that ends."""
    descriptor = regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
