"""Pre-training of a Llama, and going on with one, on documents laid end to end and cut into rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.config.schema import Run
from lockstep.data.manifest import MARKER
from lockstep.data.order import UniformOrder
from lockstep.data.text import prepare as data
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.data.text.documents import documents, held_inside, source_of
from lockstep.data.text.packing import CutRows, RowLoader, Rows, TextBatch
from lockstep.elastic.consensus import lead, refuse_mixed_start
from lockstep.elastic.world import World
from lockstep.errors import DataError
from lockstep.models.initial_weights import Beginning, write_model
from lockstep.models.llama_io import TOKENIZER, open_weights

log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Language:
    """A Llama and its rows; what tells pre-training from fine-tuning are the rows alone."""

    beginning: Beginning
    loader: RowLoader
    fingerprints: Mapping[str, str]

    @classmethod
    def over(cls, run: Run, folder: Path, world: World, tokenizer: ChatTokenizer, rows_of: Callable[[data.Prepared], Rows]) -> Language:
        """Collective. The task over the rows of prepared data."""
        prepared = data.open_prepared(folder / "data", tokenizer)
        beginning = Beginning.of(run, tokenizer.inner.get_vocab_size(with_added_tokens=True))
        fingerprints = prepared.fingerprints | {
            "start": lead(world, lambda: world.board.during("preparing")(write_model)(beginning, folder))
        }
        refuse_mixed_start(world, fingerprints)
        rows = rows_of(prepared)
        if not len(rows):
            what = f"the training text does not fill one row of {run.batch.length} tokens"
            raise DataError(what, f"{folder / 'data'}; batch.length", "lower it")
        k = run.batch.micro_batches
        order = UniformOrder(len(rows), k * (run.batch.tokens // run.batch.length), k, run.seed)
        return cls(beginning, RowLoader(rows, order, world.device), fingerprints)

    @property
    def length(self) -> int:
        return self.loader.rows.length

    @property
    def flops_per_token(self) -> float:
        return self.beginning.flops_per_token(self.length)

    def meta(self) -> nn.Module:
        return self.beginning.meta()

    def first_value(self, name: str, shape: torch.Size) -> Tensor:
        return self.beginning.first_value(name, shape)

    def saved(self, name: str) -> bool:
        return self.beginning.saved(name)

    def micro_batch(self, step: int, k: int) -> TextBatch:
        return self.loader.micro_batch(step, k)

    def loss(self, model: Callable[..., Tensor], batch: TextBatch) -> Tensor:
        return model(batch.tokens, batch.labels, batch.documents)

    def tokens(self, step: int) -> int:
        return self.loader.tokens(step)

    def epoch(self, step: int) -> float:
        return self.loader.order.epoch(step)


def open_pretraining(run: Run, folder: Path, world: World) -> Language:
    """Collective. The task of a run with `task = "pretrain"`; its data is prepared by rank 0 the first time."""
    lead(world, lambda: world.board.during("preparing")(prepare)(run, folder))
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, {})
    return Language.over(run, folder, world, tokenizer, lambda found: CutRows(found.train, run.batch.length))


def prepare(run: Run, folder: Path) -> None:
    """For the leader: tokenizer and streams of the run's documents."""
    inside = not (folder / "data" / MARKER).exists() and held_inside(run.data)
    if inside:
        log.info("too few documents to hold out whole ones: %g of each is for validation and for test", run.data.held_out_share)
    tokenizer = tokenizer_of(run, folder, (d.text for split, d in documents(run.data, inside) if split == "train"))

    def samples(_: Counter[str]) -> Iterator[data.Sample]:
        return data.document_samples(tokenizer, documents(run.data, inside))

    data.prepare(run, folder / "data", partial(source_of, run.data), tokenizer, samples)


def tokenizer_of(run: Run, folder: Path, texts: Iterable[str]) -> ChatTokenizer:
    """For the leader: the tokenizer of what the run starts from, or one trained on `texts`; its files are in the run's folder then."""
    start = open_weights(Path(run.llama.start)) if run.llama.start else None
    if not (folder / "data" / MARKER).exists():
        if start:
            data.carry_tokenizer(start.carried, folder / TOKENIZER)
        else:
            data.train_tokenizer(run, texts, folder / TOKENIZER)
    found = ChatTokenizer.load(folder / TOKENIZER, start.config if start else {})
    most = max(found.inner.get_vocab(with_added_tokens=True).values())
    if start and most >= start.shape.vocabulary:
        what = f"the tokenizer has ids up to {most:,}, the embedding of the model {start.shape.vocabulary:,} rows"
        hint = "resize it with transformers (model.resize_token_embeddings, save_pretrained), or remove the added tokens"
        raise DataError(what, f"{start.folder}; llama.start", hint)
    return found
