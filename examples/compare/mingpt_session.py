"""In the style of minGPT-ddp, with Lockstep: lockstep run mingpt_session.py --workers 2"""

from letters import Gpt, Sorting, make_optimizer

import lockstep


def main(out: str = "runs/mingpt-session", steps: int = 96) -> None:
    dataset, model = Sorting(), Gpt()
    optimizer = make_optimizer(model)
    with lockstep.Session(out, micro_batches=4, save_every=12) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for ids, targets in loader(step):
                session.backward(model(ids, targets))
            session.clip_grad_norm_(1.0)
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
