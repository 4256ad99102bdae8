"""The script before it is distributed: python one_process.py"""

import torch
from houses import Houses, make_model
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def main(steps: int = 192) -> None:
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
    step = 0
    while step < steps:
        for x, y in loader:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        print(f"step {step}  loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
