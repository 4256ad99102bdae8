"""A tokenizer that one worker trains and all workers use.

    lockstep run examples/learn/shared_tokenizer.py                  trained once
    lockstep run examples/learn/shared_tokenizer.py --shared false   each worker trains its own

The second command is refused: the ids of the workers differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep

VOCABULARY = 200
NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")


def read_lines() -> list[str]:
    return [
        f"{first} and {second} are {i + j}"
        for i, first in enumerate(NAMES)
        for j, second in enumerate(NAMES)
    ]


def train_tokenizer(lines: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


# --8<-- [start:once]
def open_tokenizer(lines: Sequence[str], folder: str) -> Tokenizer:
    """Return the tokenizer in `folder`. The first worker trains it, the others wait."""

    def trained() -> Iterator[str]:
        print(f"training a tokenizer on {len(lines)} lines")
        yield train_tokenizer(lines).to_str()

    return Tokenizer.from_str(lockstep.index_dataset(trained(), folder)[0])


# --8<-- [end:once]


class Lines(Dataset[Tensor]):
    """The ids of each line, of one length."""

    def __init__(self, lines: Sequence[str], tokenizer: Tokenizer, length: int = 12) -> None:
        rows = [tokenizer.encode(line).ids[:length] for line in lines]
        self.ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Tensor:
        return self.ids[i]


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        states, _ = self.rnn(self.ids(ids[:, :-1]))
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), ids[:, 1:].flatten())


def main(out: str = "runs/tokenizer", steps: int = 30, shared: bool = True) -> None:
    torch.manual_seed(0)
    lines = read_lines()
    model = NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with lockstep.Session(out, micro_batches=4) as session:
        if shared:
            tokenizer = open_tokenizer(lines, f"{out}/tokenizer")
        else:
            tokenizer = train_tokenizer(lines[session.world.rank :: session.world.size])
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Lines(lines, tokenizer), batch_size=32)
        for step in session.steps(steps):
            for ids in loader(step):
                session.backward(model(ids))
            optimizer.step()
            session.log(step, loss=session.loss)


if __name__ == "__main__":
    lockstep.launch(main, workers=2)
