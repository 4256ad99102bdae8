"""In the style of PyTorch's DDP tutorial, with Lockstep: lockstep run tutorial_session.py --workers 2"""

from torch.nn.functional import mse_loss
from tutorial import load_train_objects

import lockstep


class Trainer:
    def __init__(self, session, dataset, model, optimizer, batch_size):
        self.session = session
        self.model, self.optimizer = session.prepare(model, optimizer)
        self.loader = session.loader(dataset, batch_size=batch_size)

    def run_step(self, step):
        for source, targets in self.loader(step):
            self.session.backward(mse_loss(self.model(source), targets))
        self.optimizer.step()

    def train(self, steps):
        for step in self.session.steps(steps):
            self.run_step(step)


def main(out: str = "runs/tutorial-session", steps: int = 128) -> None:
    dataset, model, optimizer = load_train_objects()
    with lockstep.Session(out, micro_batches=4, save_every=64) as session:
        Trainer(session, dataset, model, optimizer, batch_size=64).train(steps)


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
