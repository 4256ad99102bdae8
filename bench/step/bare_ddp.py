"""A bare DistributedDataParallel loop over Lockstep's model and micro-batches: the time that PyTorch alone takes for the same step.

The same weights, order, loader, loss, AdamW, clipping and precision; DDP's built-in all-reduce, `no_sync()` before the last
micro-batch. It has no ordered sum, vote, metrics, progress display, signals or checkpoints.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.step.batches import tokens_in_step
from bench.step.task import Stopwatch, Task, read_task
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.corpus.loaders import PairLoader
from lockstep.models.translator import build_translator
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.tasks.optim import adamw, learning_rate, set_learning_rate
from lockstep.tasks.translation import make_order


def train(task: Task) -> Stopwatch:
    """Train the steps of the run."""
    run, device = task.run, torch.device("cpu")
    corpus = open_prepared(task.data)
    order = make_order(run, corpus)
    loader = PairLoader(corpus.train, order, device)
    model = build_translator(
        run.model,
        vocab_size=corpus.tokenizer.vocab_size,
        device=device,
        seed=run.seed,
        length=order.shapes[-1].length,
    )
    optimizer = adamw(model.named_parameters(), run.optim)
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=run.parallel.bucket_size(device.type) / 2**20,
        gradient_as_bucket_view=True,
    )
    mine = leaves_of_rank(task.rank, equal_shares(task.size, run.batch.micro_batches))
    watch = Stopwatch()
    for step in range(run.steps):
        tokens = tokens_in_step(loader, step)
        for k in mine:
            batch = loader.micro_batch(step, k)
            with nullcontext() if k == mine[-1] else ddp.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=run.compute.precision == "bf16"):
                    loss = ddp(
                        batch.source,
                        batch.target,
                        batch.labels,
                        smoothing=run.optim.label_smoothing,
                    )
                (
                    loss * (task.size / tokens)
                ).backward()  # DDP divides the sum by the number of processes
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip_norm)
        set_learning_rate(optimizer, learning_rate(step + 1, run.optim))
        optimizer.step()
        optimizer.zero_grad()
        here = [order.ids(step, k) for k in mine]
        watch.step(
            sum(int(corpus.train.lengths[ids, 1].sum()) for ids in here), sum(map(len, here))
        )
    return watch


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = read_task()
    train(task).write(task)
    dist.destroy_process_group()
