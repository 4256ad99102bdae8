"""A small loop whose loader is chosen by name: a token budget, a mixture with stages, an indexed
stream, a Hugging Face data set, or a collate function that leaves samples out.

RUN/disturb: as in session.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from session import disturb
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import lockstep


class Sequences(Dataset[Tensor]):
    """Sequences of 1 to 40 tokens, some replaced at random by their `offset`."""

    def __init__(self, size: int, offset: int) -> None:
        self.offset = offset
        self.lengths = torch.randint(
            1, 41, (size,), generator=torch.Generator().manual_seed(offset)
        ).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Tensor:
        tokens = (torch.arange(self.lengths[i]) * (i + self.offset)) % 30 + 1
        return tokens.masked_fill(torch.rand(len(tokens)) < 0.1, self.offset)


class Stream(IterableDataset[Tensor]):
    """The sequences without noise, as a stream."""

    def __iter__(self) -> Iterator[Tensor]:
        sequences = Sequences(200, 3)
        for i in range(len(sequences)):
            yield (torch.arange(sequences.lengths[i]) * (i + 3)) % 30 + 1


def pad(sequences: list[Any]) -> Tensor:
    """Pad with 0. Accepts rows of a Hugging Face data set, too."""
    tensors = [
        torch.as_tensor(row["tokens"] if isinstance(row, dict) else row) for row in sequences
    ]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def leave_long_ones_out(sequences: list[Tensor]) -> Tensor:
    """Return the first tokens of those with at least 10."""
    return torch.stack(
        [row[:10] for row in sequences if len(row) >= 10] or [torch.zeros(10, dtype=torch.int64)]
    )


def hugging_face_rows(streamed: bool) -> Any:
    import datasets  # takes seconds

    rows = datasets.Dataset.from_dict({"tokens": [row.tolist() for row in Stream()]})
    return rows.to_iterable_dataset(num_shards=2) if streamed else rows


def make_loader(session: lockstep.Session, kind: str, out: str, num_workers: int) -> Any:
    if kind == "tokens":
        sequences = Sequences(300, 3)
        return session.loader(
            sequences,
            tokens=160,
            lengths=sequences.lengths,
            collate_fn=pad,
            num_workers=num_workers,
        )
    if kind == "dropping":
        return session.loader(Sequences(200, 3), batch_size=24, collate_fn=leave_long_ones_out)
    dataset: Any = {
        "mixture": lambda: lockstep.Mixture(
            [Sequences(90, 3), Sequences(200, 5)], {0: [2, 1], 11: [1, 3], 19: [0, 1]}
        ),
        "indexed": lambda: lockstep.index_dataset(Stream(), Path(out).parent / "index"),
        "rows": lambda: hugging_face_rows(streamed=False),
        "streamed": lambda: lockstep.index_dataset(
            hugging_face_rows(streamed=True), Path(out).parent / "rows"
        ),
    }[kind]()
    return session.loader(dataset, batch_size=24, collate_fn=pad, num_workers=num_workers)


def train(
    out: str = "runs/loaders",
    kind: str = "tokens",
    steps: int = 24,
    micro_batches: int = 6,
    num_workers: int = 0,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(31, 8), nn.Dropout(0.1), nn.Linear(8, 31))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=10) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = make_loader(session, kind, out, num_workers)
        for step in session.steps(steps):
            for tokens in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                mask = tokens > 0
                loss = nn.functional.cross_entropy(
                    model(tokens)[mask], tokens[mask], reduction="sum"
                )
                if kind == "dropping":
                    session.backward(loss / mask.sum())
                else:
                    session.backward(loss, count=int(mask.sum()))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=1)
