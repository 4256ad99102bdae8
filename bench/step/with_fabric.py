"""The same training as a user of Lightning Fabric writes it: `setup`, `no_backward_sync`, `backward`, its bf16-mixed precision."""

from __future__ import annotations

import itertools

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

from bench.step.batches import LikeLengths, Translations, pad
from bench.step.task import Stopwatch, Task, read_task
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.corpus.tokenizer import PAD
from lockstep.models.translator import build_translator
from lockstep.tasks.optim import learning_rate


def train(task: Task) -> Stopwatch:
    """Train the steps of the run."""
    run, corpus = task.run, open_prepared(task.data)
    each = run.batch.micro_batches // task.size
    fabric = Fabric(
        accelerator="cpu",
        devices=task.size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        precision={"bf16": "bf16-mixed", "fp32": "32-true"}[run.compute.precision],  # type: ignore[arg-type]
    )
    fabric.launch()
    fabric.seed_everything(run.seed, verbose=False)
    model = build_translator(
        run.model, vocab_size=corpus.tokenizer.vocab_size, device=fabric.device, seed=run.seed
    )
    batches = LikeLengths(
        corpus.train,
        tokens=run.batch.tokens,
        multiple=run.batch.micro_batches,
        seed=run.seed,
        rank=fabric.global_rank,
        size=fabric.world_size,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=run.optim.learning_rate,
        betas=(run.optim.beta1, run.optim.beta2),
        eps=run.optim.epsilon,
        weight_decay=run.optim.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step + 1, run.optim) / run.optim.learning_rate
    )
    wrapped, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(Translations(corpus.train), batch_sampler=batches, collate_fn=pad),
        use_distributed_sampler=False,
    )
    wrapped.train()
    watch = Stopwatch()
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(run.steps):
        tokens = pairs = 0
        for micro_batch in range(each):
            source, target, labels = next(endless)
            real = int((labels != PAD).sum())
            with fabric.no_backward_sync(wrapped, enabled=micro_batch < each - 1):
                loss = wrapped(source, target, labels, smoothing=run.optim.label_smoothing) / real
                fabric.backward(loss / each)
            tokens, pairs = tokens + real, pairs + len(labels)
        fabric.clip_gradients(wrapped, optimizer, max_norm=run.optim.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        watch.step(tokens, pairs)
    return watch


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = read_task()
    train(task).write(task)
