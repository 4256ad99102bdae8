"""In the style of nanoGPT, with Accelerate: torchrun --nproc-per-node 2 nanogpt_accelerate.py

Accumulation over 4 micro-batches, warmup and cosine decay, an evaluation every 12 steps.
"""

import math
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from letters import Gpt, Sorting, make_optimizer
from torch.utils.data import DataLoader


def rate(step: int) -> float:
    return min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / 96))


def main(out: str = "runs/nanogpt-accelerate", steps: int = 96) -> None:
    dataset, validation, model = Sorting(), Sorting(128, seed=2), Gpt()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=on_cpu,
        dataloader_config=batches,
        gradient_accumulation_steps=4,
        step_scheduler_with_optimizer=False,
    )
    loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
    held_out = DataLoader(validation, batch_size=64)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    accelerator.register_for_checkpointing(scheduler)
    step, checkpoint = 0, Path(out) / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        step = int((checkpoint / "step").read_text())
    while step < steps:
        loader.set_epoch(step // 12)
        for ids, targets in loader:
            with accelerator.accumulate(model):
                loss = model(ids, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather(model(ids, targets)[None]) for ids, targets in held_out]
        model.train()
        accelerator.print(
            f"step {step}  loss {loss.item():.5f}  validation {torch.cat(losses).mean().item():.5f}"
        )
        accelerator.save_state(str(checkpoint))
        if accelerator.is_main_process:
            (checkpoint / "step").write_text(str(step))
    accelerator.end_training()


if __name__ == "__main__":
    main()
