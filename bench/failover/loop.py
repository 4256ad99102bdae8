"""The loop of the other systems in the failover race: Lockstep's model, micro-batches and optimizer, and one line per step.

    steps.jsonl    {"rank": 1, "pid": 4711, "group": 0, "step": 57, "at_s": 103.27}

Each process appends lines. `group` changes when the set of processes changes; `at_s` is the clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext

import torch

from bench.step.batches import tokens_in_step
from bench.step.task import Task
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.corpus.loaders import PairLoader
from lockstep.models.translator import build_translator
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.tasks.optim import adamw
from lockstep.tasks.translation import make_order


class Trained:
    """A model, its optimizer and this process's share of every step; the share stays what it was when another process is gone."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        run = task.run
        corpus = open_prepared(task.data)
        order = make_order(run, corpus)
        self.task = task
        self.loader = PairLoader(corpus.train, order, torch.device("cpu"))
        self.model = build_translator(
            run.model,
            vocab_size=corpus.tokenizer.vocab_size,
            device=torch.device("cpu"),
            seed=run.seed,
            length=order.shapes[-1].length,
        )
        self.optimizer = adamw(self.model.named_parameters(), run.optim)
        self.mine = leaves_of_rank(task.rank, equal_shares(task.size, run.batch.micro_batches))

    def backward(self, model: torch.nn.Module, step: int) -> None:
        """Compute the gradients of a step; a `model` that reduces them does so in the last micro-batch."""
        run, tokens = self.task.run, tokens_in_step(self.loader, step)
        for k in self.mine:
            batch = self.loader.micro_batch(step, k)
            with nullcontext() if k == self.mine[-1] else getattr(model, "no_sync", nullcontext)():
                loss = model(
                    batch.source, batch.target, batch.labels, smoothing=run.optim.label_smoothing
                )
                (loss * (self.task.size / tokens)).backward()

    def clip(self) -> None:
        """Clip as the run's config does."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.run.optim.clip_norm)

    def note(self, step: int, group: int) -> None:
        """Record that `step` is committed."""
        line = {
            "rank": self.task.rank,
            "pid": os.getpid(),
            "group": group,
            "step": step,
            "at_s": time.monotonic(),
        }
        with open(self.task.answer / "steps.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
