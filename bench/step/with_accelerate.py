"""The same training as a user of Hugging Face Accelerate writes it: `prepare`, `accumulate`, `backward`, its bf16 mixed precision."""

from __future__ import annotations

import itertools

import torch
from accelerate import Accelerator, DataLoaderConfiguration
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
    k = run.batch.micro_batches
    accelerator = Accelerator(
        cpu=True,
        mixed_precision={"bf16": "bf16", "fp32": "no"}[run.compute.precision],
        gradient_accumulation_steps=k // task.size,
        dataloader_config=DataLoaderConfiguration(even_batches=False),  # batches of varying size
    )
    torch.manual_seed(run.seed)
    model = build_translator(
        run.model, vocab_size=corpus.tokenizer.vocab_size, device=accelerator.device, seed=run.seed
    )
    batches = LikeLengths(corpus.train, tokens=run.batch.tokens, multiple=k, seed=run.seed)
    loader = DataLoader(Translations(corpus.train), batch_sampler=batches, collate_fn=pad)
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
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    model.train()
    watch, tokens, pairs = Stopwatch(), 0, 0
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    while len(watch.seconds) < run.steps:
        source, target, labels = next(endless)
        with accelerator.accumulate(model):
            real = int((labels != PAD).sum())
            loss = model(source, target, labels, smoothing=run.optim.label_smoothing) / real
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), run.optim.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        tokens, pairs = tokens + real, pairs + len(labels)
        if accelerator.sync_gradients:
            watch.step(tokens, pairs)
            tokens = pairs = 0
    accelerator.end_training()
    return watch


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = read_task()
    train(task).write(task)
