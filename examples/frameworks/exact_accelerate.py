"""An Accelerator on a Session: a loop in Accelerate's idiom, with the same bits on any number of
workers, through failures. A prototype (docs/framework-study.md).

    lockstep run examples/frameworks/exact_accelerate.py --workers 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep


class SessionAccelerator(Accelerator):  # type: ignore[misc, unused-ignore]
    """The batch size of the DataLoader counts the samples of a step over all workers. The loader
    yields this worker's micro-batches of `steps` steps, and those of a failed worker when a step
    is retried. `sync_gradients` is true after the last one, as in `accumulate`."""

    def __init__(self, session: lockstep.Session, steps: int) -> None:
        super().__init__(cpu=session.world.device.type == "cpu")
        self.session, self.steps = session, steps

    def prepare(self, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> Any:
        model, optimizer = self.session.prepare(model, optimizer)
        self.session.state(scheduler=scheduler)
        self.loader = self.session.loader(loader.dataset, batch_size=loader.batch_size)
        return (
            model,
            self.prepare_optimizer(optimizer),
            self.prepare_scheduler(scheduler),
            self._batches(),
        )

    def _batches(self) -> Iterator[Any]:
        for step in self.session.steps(self.steps):
            self.following = self.loader(step)
            self.batch = next(self.following)
            while self.batch is not None:
                yield self.batch

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Run the backward pass, and take the next micro-batch: without one, the workers have
        voted, and the step may be committed."""
        self.session.backward(loss)
        self.batch = next(self.following, None)
        self.gradient_state._set_sync_gradients(self.batch is None)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        return self.session.clip_grad_norm_(max_norm)

    @property
    def is_main_process(self) -> bool:
        return self.session.runtime.is_leader()

    def gather(self, tensor: Any) -> Any:
        raise lockstep.UsageError(
            "accelerator.gather would return the values of this worker alone",
            "SessionAccelerator",
            "give the function to session.gather or session.evaluate",
        )

    gather_for_metrics = reduce = save_state = load_state = gather


def main(out: str = "runs/exact_accelerate", steps: int = 200) -> None:
    torch.manual_seed(0)
    sizes = torch.rand(2000, 2)
    rows = TensorDataset(sizes, sizes @ torch.tensor([0.773, 0.321]))
    model: Any = nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0)
    )
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = CosineAnnealingLR(optimizer, steps)
    loader: Any = DataLoader(rows, batch_size=64)
    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        accelerator = SessionAccelerator(session, steps)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
