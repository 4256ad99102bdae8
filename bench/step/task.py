"""The input and output of a contestant.

    python CONTESTANT.py RUN.json DATA ANSWER        in each of the two processes, with the environment that torchrun gives

RUN.json is a run as Lockstep resolves it: model, batch, optimizer, precision, steps. DATA is a corpus as Lockstep prepares it: a tokenizer
and token ids. ANSWER is a folder; process r leaves ANSWER/r.json there: seconds, target tokens and pairs of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.saved_run import from_json
from lockstep.config.schema import RunConfig


@dataclass(frozen=True)
class Task:
    run: RunConfig
    data: Path
    answer: Path
    rank: int
    size: int


def read_task() -> Task:
    """Read the task from the command line, and rank and size from the environment."""
    run, data, answer = map(Path, sys.argv[1:4])
    return Task(
        from_json(json.loads(run.read_text())).run,
        data,
        answer,
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )


@dataclass
class Stopwatch:
    """Seconds from the end of one step to the end of the next, and what this process trained in between."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    since: float = field(default_factory=time.perf_counter)

    def step(self, tokens: int, pairs: int) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.since)
        self.tokens.append(tokens)
        self.pairs.append(pairs)
        self.since = now

    def write(self, task: Task) -> None:
        """Leave this process's answer."""
        answer = {"seconds": self.seconds, "tokens": self.tokens, "pairs": self.pairs}
        (task.answer / f"{task.rank}.json").write_text(json.dumps(answer))
