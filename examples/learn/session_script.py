"""The training of ddp_script.py with a Session. docs/learn/script.md explains the numbers.

lockstep run examples/learn/session_script.py --workers 2
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep

BATCH, MICRO_BATCHES, STEPS = 64, 8, 320


def main(out: str = "runs/script") -> None:
    torch.manual_seed(0)
    sizes = torch.rand(2048, 2) * 6
    prices = sizes @ torch.tensor([[0.773], [0.321]]) + 0.067
    dataset = TensorDataset(sizes, prices)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    session = lockstep.Session(out, micro_batches=MICRO_BATCHES, save_every=32)
    with session:  # 1 2 11 12
        model, optimizer = session.prepare(model, optimizer)  # 3
        loader = session.loader(dataset, batch_size=BATCH)  # 4 5 6

        for step in session.steps(STEPS):  # 11
            for x, y in loader(step):  # 7
                session.backward(mse_loss(model(x), y))  # 8
            optimizer.step()  # 9 10

        w1, w2, b = torch.cat([values.flatten() for values in model.parameters()])
        session.print(f"w1 {w1:.3f}  w2 {w2:.3f}  b {b:.3f}")


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
