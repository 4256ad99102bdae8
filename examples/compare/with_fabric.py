"""Lightning Fabric: torchrun --nproc-per-node 2 with_fabric.py"""

from pathlib import Path

import torch
from houses import Houses, make_model
from lightning_fabric import Fabric
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def main(out: str = "runs/fabric", steps: int = 192) -> None:
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fabric = Fabric(devices="auto" if torch.cuda.is_available() else 2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(dataset, batch_size=64 // fabric.world_size, shuffle=True, drop_last=True)
    )
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpoint = Path(out) / "checkpoint.pt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    while state["step"] < steps:
        loader.sampler.set_epoch(state["step"] // len(loader))
        for x, y in loader:
            loss = mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
        fabric.print(f"step {state['step']}  loss {loss.item():.5f}")
        fabric.save(checkpoint, state)


if __name__ == "__main__":
    main()
