"""Lockstep: lockstep run with_session.py --workers 2, or torchrun"""

import torch
from houses import Houses, make_model
from torch.nn.functional import mse_loss

import lockstep


def main(out: str = "runs/session", steps: int = 192) -> None:
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=8, save_every=32) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for x, y in loader(step):
                session.backward(mse_loss(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
