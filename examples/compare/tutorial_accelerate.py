"""In the style of PyTorch's DDP tutorial, with Accelerate: torchrun --nproc-per-node 2 tutorial_accelerate.py"""

from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader
from tutorial import load_train_objects


class Trainer:
    def __init__(self, dataset, model, optimizer, batch_size, save_every, snapshot):
        batches = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=batches)
        loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.save_every, self.snapshot, self.epochs_run = save_every, snapshot, 0
        if snapshot.exists():
            self.accelerator.load_state(str(snapshot))
            self.epochs_run = int((snapshot / "epochs").read_text())

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(source), targets)
        self.accelerator.backward(loss)
        self.optimizer.step()
        return loss

    def run_epoch(self, epoch):
        self.loader.set_epoch(epoch)
        for source, targets in self.loader:
            loss = self.run_batch(source, targets)
        self.accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.5f}")

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if (epoch + 1) % self.save_every == 0:
                self.accelerator.save_state(str(self.snapshot))
                if self.accelerator.is_main_process:
                    (self.snapshot / "epochs").write_text(str(epoch + 1))
        self.accelerator.end_training()


def main(out="runs/tutorial-accelerate", epochs=4):
    dataset, model, optimizer = load_train_objects()
    Trainer(
        dataset, model, optimizer, batch_size=64, save_every=2, snapshot=Path(out) / "snapshot"
    ).train(epochs)


if __name__ == "__main__":
    main()
