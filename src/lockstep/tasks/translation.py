"""Translation: sentence pairs, bucketed by length, and an encoder-decoder model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config.schema import RunConfig
from lockstep.data.order import BucketOrder, choose_bucket_shapes
from lockstep.data.pairs.loader import PairBatch, PairLoader
from lockstep.data.pairs.prepare import PreparedPairs, open_prepared, prepare
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.models.build import translator_from_config, translator_on_meta
from lockstep.models.translator import Translator, init_param
from lockstep.record.step_timer import flops_per_token
from lockstep.tasks.on_host import digests_on_host

log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class TranslationTask:
    run: RunConfig
    corpus: PreparedPairs
    loader: PairLoader

    @classmethod
    def open(cls, run: RunConfig, folder: Path, runtime: ElasticRuntime) -> TranslationTask:
        """Collective. Return the task. Rank 0 prepares its corpus the first time."""
        digests, preparing = digests_on_host(runtime, folder), runtime.board.during("preparing")
        run_on_rank0(runtime, lambda: preparing(prepare)(run.data, run.tokenizer, folder / "data", digests))
        corpus = preparing(open_prepared)(folder / "data", digests)
        assert_equal_on_all_ranks(runtime, corpus.fingerprints)
        order = make_order(run, corpus)
        return cls(run, corpus, PairLoader(corpus.train, order, runtime.world.device, fixed_shapes=run.compute.compile))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        return self.corpus.fingerprints

    @property
    def length(self) -> int:
        return self.loader.order.shapes[-1].length

    @property
    def flops_per_token(self) -> float:
        model = self.run.model
        with torch.device("meta"):
            parameters = sum(p.numel() for p in translator_from_config(model, self.corpus.tokenizer.vocab_size, "plain").parameters())
        return flops_per_token(parameters, model.encoder_layers + model.decoder_layers, model.dim, self.length)

    def meta_model(self) -> Translator:
        return translator_on_meta(self.run.model, self.corpus.tokenizer.vocab_size, self.loader.device.type, self.length)

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        return init_param(name, shape, self.run.seed)

    def is_saved(self, name: str) -> bool:
        return True

    def loss(self, model: Callable[..., Tensor], batch: PairBatch) -> Tensor:
        return model(batch.source, batch.target, batch.labels, smoothing=self.run.optim.label_smoothing)


def make_order(run: RunConfig, corpus: PreparedPairs) -> BucketOrder:
    """Return the order of the run's micro-batches; log their shapes."""
    lengths = corpus.train.lengths.max(axis=1)
    shapes, reason = choose_bucket_shapes(lengths, tokens=run.batch.tokens, shapes=run.batch.buckets)
    log.info(reason)
    return BucketOrder(lengths, shapes, micro_batches=run.batch.micro_batches, seed=run.seed)
