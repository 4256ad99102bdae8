"""A training loop in plain torch: one process, one file, the model and the batches of a Lockstep run. Prints both losses.

    lockstep train recipes/llama-pretrain.toml --out RUN --steps 50; python -m bench.llama.bare_llama RUN --steps 50

It imports the model (models/llama.py), its initial weights and the prepared rows, and none of Lockstep's parallelism, optimizer or loop.
It adds micro-batches in sequence, where a run adds them in a tree, so the losses differ by rounding. With a second argument it writes
its seconds per step, for the race.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from lockstep.config.saved_run import from_json
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.loaders import CutRows, RowLoader
from lockstep.corpus.prepared import open_prepared
from lockstep.data.order import UniformOrder
from lockstep.models.llama import build_llama
from lockstep.models.llama_config import LlamaConfig
from lockstep.models.llama_io import read_model


def rate_at(update: int, peak: float, warmup: int, last: int) -> float:
    """A straight rise to the peak, then a straight fall to 0."""
    return (
        peak * update / warmup
        if update < warmup
        else peak * max(0.0, (last + 1 - update) / max(1, last + 1 - warmup))
    )


def main(folder: Path, steps: int, answer: Path | None) -> None:
    """Train and print `step loss norm` beside what the run's metrics say."""
    torch.set_num_threads(1)
    run = from_json(json.loads((folder / "run.json").read_text())).run
    assert run.task == "pretrain" and run.optim.schedule == "linear" and not run.llama.init_from, (
        "the recipe llama-pretrain.toml"
    )
    shape = read_model(folder).config
    assert isinstance(shape, LlamaConfig)
    model = build_llama(shape, device=torch.device("cpu"), seed=run.seed)
    data = open_prepared(folder / "data", ChatTokenizer.load(folder / "tokenizer", {}))
    rows, k_all = CutRows(data.train, run.batch.seq_len), run.batch.micro_batches
    order = UniformOrder(
        len(rows), k_all * (run.batch.tokens // run.batch.seq_len), k_all, run.seed
    )
    loader = RowLoader(rows, order, torch.device("cpu"))
    o = run.optim
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.epsilon
    )
    ours = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds, worst = [], 0.0
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        batches = [loader.micro_batch(step, k) for k in range(k_all)]
        tokens, total = sum(batch.count for batch in batches), 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=run.compute.precision == "bf16"):
                loss = model(batch.tokens, batch.labels, batch.documents)
            loss.backward()
            total += loss.item()
        for p in model.parameters():
            p.grad /= tokens
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step + 1, o.learning_rate, o.warmup_steps, o.decay_steps)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        line = f"step {step + 1}  loss {total / tokens:.6f}  norm {float(norm):.4f}"
        if step < len(ours):
            worst = max(worst, abs(ours[step]["loss"] - total / tokens))
            line += f"  run {ours[step]['loss']:.6f}  norm {ours[step]['norm']:.4f}"
        print(line, flush=True)
    print(f"largest difference of the losses over {min(steps, len(ours))} steps: {worst:.2e}")
    if answer:
        answer.write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--answer", type=Path)
    asked = parser.parse_args()
    main(asked.run, asked.steps, asked.answer)
