"""The loop of a well-known tutorial on distributed translation training, reimplemented with its defaults.

Width 512, 6 + 6 layers, 8 heads, feed-forward 2048, dropout 0.1 (on the attention weights too), its layer norm, one WordLevel tokenizer
per language (words that occur twice), every sentence tokenized when it is fetched and padded to 350, batches of 8 pairs per process,
fp32, Adam at 1e-4, label smoothing 0.1, plain DistributedDataParallel over gloo, the loss read after every step.
Design: Vaswani et al. 2017, with the norm before each sublayer.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bench.step.task import Stopwatch, Task, read_task
from lockstep.corpus import pairs as corpus

WIDTH, HEADS, LAYERS, HIDDEN, DROPOUT, LENGTH, BATCH = 512, 8, 6, 2048, 0.1, 350, 8
UNKNOWN, PAD, BEGIN, END = range(4)


def word_tokenizer(texts: list[str]) -> Tokenizer:
    """Whole words that occur twice."""
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(
        special_tokens=["[UNK]", "[PAD]", "[SOS]", "[EOS]"], min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Bilingual(Dataset[dict[str, Tensor]]):
    """Pairs as padded ids with their masks, computed at each fetch."""

    def __init__(self, pairs: list[tuple[str, str]], source: Tokenizer, target: Tokenizer) -> None:
        self.pairs, self.source, self.target = pairs, source, target
        self.causal = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool).tril()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        source, target = (
            t.encode(text).ids
            for t, text in zip((self.source, self.target), self.pairs[i], strict=True)
        )
        encoder = fill([BEGIN, *source, END])
        decoder = fill([BEGIN, *target])
        return {
            "encoder": encoder,
            "decoder": decoder,
            "encoder_mask": (encoder != PAD)[None, None],  # (1, 1, S)
            "decoder_mask": (decoder != PAD)[None, None] & self.causal,  # (1, T, T)
            "label": fill([*target, END]),
        }


def fill(ids: list[int]) -> Tensor:
    return torch.tensor(ids + [PAD] * (LENGTH - len(ids)))


class Norm(nn.Module):
    """The tutorial's layer norm: its own four lines instead of torch's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.scale * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
            + self.bias
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part.view(part.shape[0], part.shape[1], HEADS, WIDTH // HEADS).transpose(
                1, 2
            )  # (B, H, T, E)
            for part in (self.query(x), self.key(memory), self.value(memory))
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = self.dropout(scores.masked_fill(~mask, -1e9).softmax(-1))  # (B, H, T, S)
        mixed = (weights @ value).transpose(1, 2).contiguous()
        return self.out(mixed.view(mixed.shape[0], -1, WIDTH))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = Norm(), nn.Dropout(DROPOUT)


class Layer(nn.Module):
    """An encoder layer, or a decoder layer when there is a memory to attend to."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.cross_attention = Attention() if decoder else None
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, WIDTH)
        )
        self.residuals = nn.ModuleList(Residual() for _ in range(3 if decoder else 2))

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        first, *middle, last = self.residuals
        y = first.norm(x)
        x = x + first.dropout(self.self_attention(y, y, mask))
        if self.cross_attention is not None:
            x = x + middle[0].dropout(self.cross_attention(middle[0].norm(x), memory, memory_mask))
        return x + last.dropout(self.feed_forward(last.norm(x)))


class Embedding(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, WIDTH), nn.Dropout(DROPOUT)
        place = torch.arange(LENGTH)[:, None] * torch.exp(
            torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH)
        )  # (T, D/2)
        self.register_buffer(
            "positions", torch.stack((place.sin(), place.cos()), -1).view(1, LENGTH, WIDTH)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * math.sqrt(WIDTH) + self.positions)


class Transformer(nn.Module):
    def __init__(self, source: int, target: int) -> None:
        super().__init__()
        self.source, self.target = Embedding(source), Embedding(target)
        self.encoder = nn.ModuleList(Layer(decoder=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(decoder=True) for _ in range(LAYERS))
        self.encoder_norm, self.decoder_norm, self.out = Norm(), Norm(), nn.Linear(WIDTH, target)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        memory = self.source(batch["encoder"])
        for layer in self.encoder:
            memory = layer(memory, batch["encoder_mask"])
        memory, x = self.encoder_norm(memory), self.target(batch["decoder"])
        for layer in self.decoder:
            x = layer(x, batch["decoder_mask"], memory, batch["encoder_mask"])
        return self.out(self.decoder_norm(x))  # (B, T, V)


def train(task: Task) -> Stopwatch:
    """Train the steps of the run; of all its other values only the corpus counts."""
    pairs = corpus.read_corpus(task.run.data).train
    source, target = (word_tokenizer([pair[side] for pair in pairs]) for side in (0, 1))
    data = Bilingual(pairs, source, target)
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer(source.get_vocab_size(), target.get_vocab_size()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-9)
    loss_of = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, shuffle=True))
    model.train()
    watch = Stopwatch()
    for batch in itertools.islice(loader, task.run.steps):
        logits = model(batch)
        loss = loss_of(logits.view(-1, logits.shape[-1]), batch["label"].view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        watch.step(int((batch["label"] != PAD).sum()), len(batch["label"]))
    return watch


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = read_task()
    train(task).write(task)
    dist.destroy_process_group()
