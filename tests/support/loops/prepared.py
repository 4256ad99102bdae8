"""A model of blocks, prepared with a precision, compiled blocks or checkpointed activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lockstep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, states: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.up(self.norm(states)).relu(), 0.1, self.training)
        result: Tensor = states + self.out(inner)
        return result


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose bits would differ in bf16 and in autocast."""
    assert output.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    loss = cross_entropy(output, target) + 0.1 * (output @ output.T).square().mean()
    return loss


def train(
    out: str = "runs/prepared",
    steps: int = 4,
    precision: str = "",
    compile: bool = False,
    activation_checkpoint: str = "none",
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *[Block() for _ in range(3)], nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"precision": precision or None, "compile": compile}
    options["activation_checkpoint"] = activation_checkpoint
    dtypes = set[torch.dtype]()
    model[1].up.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    data = TensorDataset(torch.randn(48, 8), torch.arange(48) % 5)
    with lockstep.Session(out, micro_batches=6, save_every=2) as session:
        model, optimizer = session.prepare(model, optimizer, units="[123]", **options)
        loader = session.loader(data, batch_size=24)
        for step in session.steps(steps):
            for x, y in loader(step):
                session.forward_backward(x, y, loss_of)
            optimizer.step()
            score = session.evaluate(lambda batch: model(batch[0]).square().mean(), data)
            session.log(step, score=score)
        if session.layout.pipeline == 1:
            expected = torch.bfloat16 if precision == "bf16" else torch.float32
            assert dtypes == {expected}, dtypes


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
