"""Pre-training of a Llama, or continued pre-training, on concatenated documents cut into rows."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from lockstep.config.schema import RunConfig
from lockstep.data.manifest import MANIFEST
from lockstep.data.order import UniformOrder
from lockstep.data.text import prepare as data
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.data.text.documents import documents, held_inside, source_of
from lockstep.data.text.packing import CutRows, PackedRows, RowLoader, TextBatch
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DataError
from lockstep.models.initial_weights import InitialWeights, write_model_json
from lockstep.models.llama_io import TOKENIZER, open_weights

log = logging.getLogger("lockstep")

Prepare = Callable[[RunConfig, Path], None]
RowsOf = Callable[[data.PreparedText], CutRows | PackedRows]


@dataclass(frozen=True)
class LanguageModelTask:
    """A Llama and its rows. Pre-training and fine-tuning differ only in the rows."""

    initial_weights: InitialWeights
    loader: RowLoader
    fingerprints: Mapping[str, str]

    @classmethod
    def open(cls, run: RunConfig, folder: Path, runtime: ElasticRuntime, prepare: Prepare, rows_of: RowsOf) -> Self:
        """Collective. Return the task over the rows of prepared data; rank 0 prepares it."""
        run_on_rank0(runtime, lambda: runtime.board.during("preparing")(prepare)(run, folder))
        tokenizer = ChatTokenizer.load(folder / TOKENIZER, {})
        prepared = data.open_prepared(folder / "data", tokenizer)
        initial_weights = InitialWeights.of(run, tokenizer.inner.get_vocab_size(with_added_tokens=True))
        start = run_on_rank0(runtime, lambda: runtime.board.during("preparing")(write_model_json)(initial_weights, folder))
        fingerprints = prepared.fingerprints | {"start": start}
        assert_equal_on_all_ranks(runtime, fingerprints)
        rows = rows_of(prepared)
        if not len(rows):
            what = f"the training text has fewer than {run.batch.seq_len} tokens, one row"
            raise DataError(what, f"{folder / 'data'}; batch.seq_len", "lower it")
        k = run.batch.micro_batches
        order = UniformOrder(len(rows), k * (run.batch.tokens // run.batch.seq_len), k, run.seed)
        return cls(initial_weights, RowLoader(rows, order, runtime.world.device), fingerprints)

    @property
    def length(self) -> int:
        return self.loader.rows.length

    @property
    def flops_per_token(self) -> float:
        return self.initial_weights.flops_per_token(self.length)

    def meta_model(self) -> nn.Module:
        return self.initial_weights.meta_model()

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        return self.initial_weights.init_param(name, shape)

    def is_saved(self, name: str) -> bool:
        return self.initial_weights.is_saved(name)

    def loss(self, model: Callable[..., Tensor], batch: TextBatch) -> Tensor:
        return model(batch.tokens, batch.labels, batch.documents)


def prepare(run: RunConfig, folder: Path) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's documents."""
    inside = not (folder / "data" / MANIFEST).exists() and held_inside(run.data)
    if inside:
        log.info("too few documents to hold out whole ones: a share of %g of each goes to validation and to test", run.data.held_out_share)
    tokenizer = tokenizer_of(run, folder, (d.text for split, d in documents(run.data, inside) if split == "train"))

    def samples(_: Counter[str]) -> Iterator[data.Sample]:
        return data.document_samples(tokenizer, documents(run.data, inside))

    data.prepare(run, folder / "data", partial(source_of, run.data), tokenizer, samples)


def tokenizer_of(run: RunConfig, folder: Path, texts: Iterable[str]) -> ChatTokenizer:
    """For rank 0: write the tokenizer of llama.init_from, or one trained on `texts`; return it."""
    start = open_weights(Path(run.llama.init_from)) if run.llama.init_from else None
    if not (folder / "data" / MANIFEST).exists():
        if start:
            (folder / TOKENIZER).mkdir(parents=True, exist_ok=True)
            for path in start.companions:
                shutil.copyfile(path, folder / TOKENIZER / path.name)
        else:
            data.train_tokenizer(run.tokenizer, texts, folder / TOKENIZER)
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, start.hf_config if start else {})
    largest = max(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    if start and largest >= start.config.vocab_size:
        what = f"the tokenizer has ids up to {largest:,}, the embedding of the model {start.config.vocab_size:,} rows"
        hint = "resize it with transformers (model.resize_token_embeddings, save_pretrained), or remove the added tokens"
        raise DataError(what, f"{start.folder}; llama.init_from", hint)
    return tokenizer
