"""Translation: pairs of sentences from a prepared corpus, dealt by length, through an encoder and a decoder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config.schema import Run
from lockstep.data.order import BucketOrder, choose_shapes
from lockstep.data.pairs.loader import Loader, MicroBatch
from lockstep.data.pairs.prepare import Prepared, open_prepared, prepare
from lockstep.elastic.consensus import lead, refuse_mixed_start
from lockstep.elastic.world import World
from lockstep.models.build import on_meta, shape
from lockstep.models.translator import Translator, first_value
from lockstep.record.step_timer import flops_per_token

log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Translation:
    """The task of a run with `task = "translate"`."""

    run: Run
    corpus: Prepared
    loader: Loader

    @classmethod
    def open(cls, run: Run, folder: Path, world: World) -> Translation:
        """Collective. The task with its corpus, which rank 0 prepares the first time."""
        lead(world, lambda: world.board.during("preparing")(prepare)(run.data, run.tokens, folder / "data"))
        corpus = open_prepared(folder / "data")
        refuse_mixed_start(world, corpus.fingerprints)
        order = deal(run, corpus)
        return cls(run, corpus, Loader(corpus.train, order, world.device, fixed_shapes=run.compute.compile))

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
            parameters = sum(p.numel() for p in shape(model, self.corpus.tokenizer.size, "plain").parameters())
        return flops_per_token(parameters, model.encoder_layers + model.decoder_layers, model.width, self.length)

    def meta(self) -> Translator:
        return on_meta(self.run.model, self.corpus.tokenizer.size, self.loader.device.type, self.length)

    def first_value(self, name: str, shape: torch.Size) -> Tensor:
        return first_value(name, shape, self.run.seed)

    def saved(self, name: str) -> bool:
        return True

    def micro_batch(self, step: int, k: int) -> MicroBatch:
        return self.loader.micro_batch(step, k)

    def loss(self, model: Callable[..., Tensor], batch: MicroBatch) -> Tensor:
        return model(batch.source, batch.target, batch.labels, smoothing=self.run.optim.label_smoothing)

    def tokens(self, step: int) -> int:
        return self.loader.tokens(step)

    def epoch(self, step: int) -> float:
        return self.loader.order.epoch(step)


def deal(run: Run, corpus: Prepared) -> BucketOrder:
    """The order of the run's micro-batches, and a line that says which shapes they have."""
    longer = corpus.train.lengths.max(axis=1)
    shapes, reason = choose_shapes(longer, tokens=run.batch.tokens, shapes=run.batch.shapes)
    log.info(reason)
    return BucketOrder(longer, shapes, micro_batches=run.batch.micro_batches, seed=run.seed)
