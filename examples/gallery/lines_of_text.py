"""An IterableDataset made indexable: `plain` streams a file, `train` finds its lines by number.

A step's samples must be found by number, after a failure and a resume too. One pass over the file
gives the offset of each line; `Lines` then reads any of them.

Run: python examples/gallery/lines_of_text.py
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lockstep

WIDTH = 16


def write_file() -> Path:
    path = Path(tempfile.gettempdir()) / "lockstep-lines.txt"
    lines = "".join(f"{i} times {i} is {i * i}\n" for i in range(240))
    if not path.exists() or path.read_text() != lines:
        other = path.with_suffix(f".{os.getpid()}")  # each worker calls this
        other.write_text(lines)
        other.replace(path)
    return path


def encode(line: bytes) -> Tensor:
    return torch.tensor(list(line[:WIDTH].ljust(WIDTH)))


class Stream(IterableDataset[Tensor]):
    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Tensor]:
        with open(self.path, "rb") as file:
            yield from map(encode, file)


class Lines(Dataset[Tensor]):
    """The lines of a file by number."""

    def __init__(self, path: Path) -> None:
        self.path, self.starts = path, [0]
        with open(path, "rb") as file:
            self.starts += [file.tell() for _ in iter(file.readline, b"")][:-1]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Tensor:
        with open(self.path, "rb") as file:
            file.seek(self.starts[i])
            return encode(file.readline())


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.rnn, self.head = (
            nn.Embedding(256, 16),
            nn.GRU(16, 32, batch_first=True),
            nn.Linear(32, 256),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of the next bytes."""
        states, _ = self.rnn(self.bytes(ids[:, :-1]))
        return cross_entropy(self.head(states).flatten(0, 1), ids[:, 1:].flatten())


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = NextByte(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = loader or DataLoader(Stream(write_file()), batch_size=24, drop_last=True)
    while step < steps:
        for ids in loader:
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/lines_of_text", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Lines(write_file()), batch_size=24)
        for step in session.steps(steps):
            for ids in loader(step):
                session.backward(model(ids))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
