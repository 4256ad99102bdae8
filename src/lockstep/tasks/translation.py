"""Translation: sentence pairs, bucketed by length, and an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.schema import RunConfig
from lockstep.data.manifest import FileDigests
from lockstep.data.order import BucketOrder, choose_bucket_shapes
from lockstep.data.pairs.loader import PairLoader
from lockstep.data.pairs.prepare import PreparedPairs, open_prepared, prepare
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.log import log
from lockstep.models.build import choose_attention, translator_on_meta
from lockstep.models.translator import Translator, init_param
from lockstep.record.step_timer import flops_per_token


@dataclass(frozen=True)
class TranslationTask:
    """A translator and its sentence pairs. loader: the micro-batches of each step."""

    run: RunConfig
    corpus: PreparedPairs
    loader: PairLoader

    @classmethod
    def open(cls, run: RunConfig, folder: Path, runtime: ElasticRuntime, digests: FileDigests) -> TranslationTask:
        """Collective. Return the task. Rank 0 prepares its corpus the first time."""
        preparing = runtime.board.during("preparing")
        run_on_rank0(runtime, lambda: preparing(prepare)(run.data, run.tokenizer, folder / "data", digests))
        corpus = preparing(open_prepared)(folder / "data", digests)
        assert_equal_on_all_ranks(runtime, corpus.fingerprints)
        order = make_order(run, corpus)
        return cls(run, corpus, PairLoader(corpus.train, order, runtime.world.device, fixed_shapes=run.compute.compile))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes that must be equal on all ranks, by name."""
        return self.corpus.fingerprints

    @property
    def length(self) -> int:
        """Length of the longest sequence in a micro-batch."""
        return self.loader.order.shapes[-1].length

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations per trained token, forward and backward."""
        model = self.run.model
        parameters = sum(p.numel() for p in translator_on_meta(model, self.corpus.tokenizer.vocab_size, "cpu", self.length).parameters())
        return flops_per_token(parameters, model.encoder_layers + model.decoder_layers, model.dim, self.length)

    def meta_model(self) -> Translator:
        """Return a new model on the meta device, in training mode, with `requires_grad` set."""
        model, device_type = self.run.model, self.loader.device.type
        if model.attention == "auto":
            log.info("attention %s: %s", *choose_attention(device_type, self.length))
        return translator_on_meta(model, self.corpus.tokenizer.vocab_size, device_type, self.length)

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        """Return the full initial value of the parameter or buffer `name`, on the CPU, from (seed,
        name) alone, so that a rank can fill its shard."""
        return init_param(name, shape, self.run.seed)

    def is_saved(self, name: str) -> bool:
        """Whether checkpoints contain `name`. Other tensors keep their initial value."""
        return True

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """Return the sum of the losses of a `PairBatch`, 0-dim. Calls `model(...)` once."""
        return model(batch.source, batch.target, batch.labels, smoothing=self.run.optim.label_smoothing)


def make_order(run: RunConfig, corpus: PreparedPairs) -> BucketOrder:
    """Return the order of the run's micro-batches; log their shapes."""
    lengths = corpus.train.lengths.max(axis=1)
    shapes, reason = choose_bucket_shapes(lengths, tokens=run.batch.tokens, shapes=run.batch.buckets)
    log.info(reason)
    return BucketOrder(lengths, shapes, micro_batches=run.batch.micro_batches, seed=run.seed)
