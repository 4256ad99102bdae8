"""A loop that uses one feature of a Session, without or with the learners of DiLoCo.

feature  see `make_session`, `make_optimizers` and `prepare_options`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from prepared import Block
from session import disturb
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import lockstep

INNER_STEPS = 2
BAD_SAMPLE = 7


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 5))


def make_data(feature: str) -> TensorDataset:
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    if feature == "rollback":
        x[BAD_SAMPLE] = torch.nan
    return TensorDataset(x, torch.arange(96) % 5)


def make_session(feature: str, out: str) -> lockstep.Session:
    options: dict[str, Any] = {"micro_batches": 6, "save_every": INNER_STEPS}
    if feature == "rollback":
        options["on_divergence"] = "rollback"
    if feature == "mfu":
        options["mfu"] = True
    if feature == "track":
        options["track"] = ["tensorboard"]
    return lockstep.Session(out, **options)


def make_optimizers(feature: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if feature != "muon":
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def prepare_options(feature: str) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "bf16"},
        "checkpointed": {"activation_checkpoint": "full"},
        "compile": {"compile": True},
    }
    return options.get(feature, {})


def train(
    out: str = "runs/features", steps: int = 8, feature: str = "plain", learn: bool = False
) -> None:
    model = make_model()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    optimizers = [outer] if learn else make_optimizers(feature, model)
    average = AveragedModel(model) if feature == "average" else None
    data = make_data(feature)
    best = lockstep.Best(mode="max")
    stopping = lockstep.EarlyStopping(patience=100, mode="max")
    with make_session(feature, out) as session:
        options = prepare_options(feature)
        model, *optimizers = session.prepare(model, *optimizers, units="[123]", **options)
        if learn:
            inner = make_optimizers(feature, model)
            learners = session.learners(*inner, count=3, steps=INNER_STEPS)
        if average:
            session.state(average=average)
        if feature == "scores":
            session.state(best=best, stopping=stopping)
        loader = session.loader(data, batch_size=24)
        for step in session.steps(steps):
            for inner_step in learners(step) if learn else (step,):
                for x, y in loader(inner_step):
                    disturb(Path(out) / "disturb", session.runtime, inner_step)
                    session.backward(cross_entropy(model(x), y))
                session.clip_grad_norm_(1.0)
                for optimizer in inner if learn else ():
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.step()
            if average:
                average.update_parameters(model)
            if feature == "scores":
                score(session, step, model, data, best, stopping)


def score(
    session: lockstep.Session,
    step: int,
    model: nn.Module,
    data: TensorDataset,
    best: lockstep.Best,
    stopping: lockstep.EarlyStopping,
) -> None:
    def hits(batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).argmax(1) == batch[1]

    accuracy = float(session.gather(hits, data, batch_size=10).float().mean())
    loss = session.evaluate(lambda batch: cross_entropy(model(batch[0]), batch[1]), data)
    best.update(step, accuracy)
    stopping.update(accuracy)
    session.log(step, accuracy=accuracy, val_loss=loss)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
