"""Data as users of Accelerate and Fabric usually load it: a map-style data set, batches of like length, padding to the longest of a batch.

The batches follow torchtext's BucketIterator: a new permutation each epoch, pools of 100 batches sorted by length (target, then source),
cut under the token budget that Lockstep's run has, in random order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from lockstep.corpus.encoded_pairs import EncodedPairs
from lockstep.corpus.loaders import PairLoader
from lockstep.corpus.tokenizer import PAD

AT_ONCE = 1000
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tokens_in_step(
    loader: PairLoader, step: int, micro_batches: Iterable[int] | None = None
) -> int:
    """Return the number of target tokens of the step, END included; of these micro-batches only if given."""
    numbers = range(loader.order.micro_batches) if micro_batches is None else micro_batches
    ids = np.concatenate([loader.order.ids(step, k) for k in numbers])
    return int(loader.pairs.lengths[ids, 1].sum())


class Translations(Dataset[Row]):
    """Source, target and labels of each pair as tensors, tokenized before the race."""

    def __init__(self, pairs: EncodedPairs) -> None:
        self.rows: list[Row] = []
        for first in range(0, len(pairs), AT_ONCE):
            lengths = pairs.lengths[first : first + AT_ONCE].tolist()
            ids = np.arange(first, first + len(lengths))
            sides = [
                torch.from_numpy(side)
                for side in pairs.gather(ids, len(ids), *pairs.lengths[ids].max(axis=0).tolist())
            ]
            for i, (source, target) in enumerate(lengths):
                self.rows.append((sides[0][i, :source], sides[1][i, :target], sides[2][i, :target]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return self.rows[i]


class LikeLengths(Sampler[list[int]]):
    """Batches of ids; process `rank` of `size` gets every size-th of them, all processes equally many."""

    def __init__(
        self,
        pairs: EncodedPairs,
        *,
        tokens: int,
        multiple: int,
        seed: int,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.source, self.target = pairs.lengths.T
        self.longer = pairs.lengths.max(axis=1)
        self.tokens, self.multiple, self.seed, self.rank, self.size = (
            tokens,
            multiple,
            seed,
            rank,
            size,
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        draw = np.random.default_rng((self.seed, self.epoch))
        self.epoch += 1
        order = draw.permutation(len(self.longer))
        pool = int(100 * self.tokens / self.longer.mean())
        batches = []
        for first in range(0, len(order), pool):
            part = order[first : first + pool]
            batches += self.cut(part[np.lexsort((self.source[part], self.target[part]))])
        whole = len(batches) - len(batches) % self.multiple
        shuffled = [batches[i] for i in draw.permutation(len(batches))[:whole]]
        return iter(shuffled[self.rank :: self.size])

    def cut(self, ids: np.ndarray) -> list[list[int]]:
        """Neighbours together, as many as fit the token budget."""
        batches: list[list[int]] = [[]]
        longest = 0
        for i in ids.tolist():
            longest = max(longest, int(self.longer[i]))
            if batches[-1] and longest * (len(batches[-1]) + 1) > self.tokens:
                batches.append([])
                longest = int(self.longer[i])
            batches[-1].append(i)
        return batches


def pad(rows: list[Row]) -> Row:
    """Rows as three (B, T) tensors, filled up to the longest."""
    source, target, labels = (
        pad_sequence(list(side), batch_first=True, padding_value=PAD)
        for side in zip(*rows, strict=True)
    )
    return source, target, labels
