"""In the style of nanoGPT, with Lockstep: lockstep run nanogpt_session.py --workers 2

Accumulation over 4 micro-batches, warmup and cosine decay, an evaluation every 12 steps.
"""

import math

import torch
from letters import Gpt, Sorting, make_optimizer

import lockstep


def rate(step: int) -> float:
    return min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / 96))


def main(out: str = "runs/nanogpt-session", steps: int = 96) -> None:
    dataset, validation, model = Sorting(), Sorting(128, seed=2), Gpt()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with lockstep.Session(out, micro_batches=4, save_every=12) as session:
        model, optimizer = session.prepare(model, optimizer)
        session.state(scheduler=scheduler)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for ids, targets in loader(step):
                session.backward(model(ids, targets))
            session.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            if step % 12 == 11:
                session.log(
                    step, validation=session.evaluate(lambda batch: model(*batch), validation)
                )


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
