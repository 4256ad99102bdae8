"""In the style of minGPT-ddp, with Accelerate: torchrun --nproc-per-node 2 mingpt_accelerate.py"""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from letters import Gpt, Sorting, make_optimizer
from torch.utils.data import DataLoader


def main(out: str = "runs/mingpt-accelerate", steps: int = 96) -> None:
    dataset, model = Sorting(), Gpt()
    optimizer = make_optimizer(model)
    batches = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=batches)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, checkpoint = 0, Path(out) / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        step = int((checkpoint / "step").read_text())
    while step < steps:
        loader.set_epoch(step // len(loader))
        for ids, targets in loader:
            loss = model(ids, targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        accelerator.print(f"step {step}  loss {loss.item():.5f}")
        accelerator.save_state(str(checkpoint))
        if accelerator.is_main_process:
            (checkpoint / "step").write_text(str(step))
    accelerator.end_training()


if __name__ == "__main__":
    main()
