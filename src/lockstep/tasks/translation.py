"""Translation: sentence pairs, bucketed by length, and an encoder-decoder model.

Evaluation: loss on held-out pairs; BLEU, chrF and error rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from lockstep.config.schema import RunConfig
from lockstep.corpus.pairs.encoded import EncodedPairs
from lockstep.corpus.pairs.loader import PairLoader
from lockstep.corpus.pairs.prepare import PreparedPairs, open_prepared, prepare
from lockstep.data.manifest import FileDigests
from lockstep.data.order import BucketOrder, choose_bucket_shapes
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_in_run_folder
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.generation.beam_search import batches_by_length, beam_search, pad_rows
from lockstep.log import log
from lockstep.models.kernels import choose_attention
from lockstep.models.load_translator import LoadedTranslator, load_translator
from lockstep.models.translator import Translator, init_param, translator_on_meta
from lockstep.record.step_timer import flops_per_token
from lockstep.tasks.evaluator import (
    EvalResult,
    EvalSpec,
    Split,
    batches_of_rank,
    loss_record,
    merge_results,
)
from lockstep.units import format_count


@dataclass(frozen=True)
class TranslationTask:
    """A translator and its sentence pairs. loader: the micro-batches of each step."""

    run: RunConfig
    corpus: PreparedPairs
    loader: PairLoader

    @classmethod
    def open(
        cls, run: RunConfig, folder: Path, runtime: ElasticRuntime, digests: FileDigests
    ) -> TranslationTask:
        """Collective. Return the task. Rank 0 prepares its corpus the first time."""
        preparing = runtime.board.during("preparing")
        run_in_run_folder(
            runtime, lambda: preparing(prepare)(run.data, run.tokenizer, folder / "data", digests)
        )
        corpus = preparing(open_prepared)(folder / "data", digests)
        assert_equal_on_all_ranks(runtime, corpus.fingerprints)
        order = make_order(run, corpus)
        if run.model.attention == "auto":
            longest = order.shapes[-1].length
            log.info("attention %s: %s", *choose_attention(runtime.world.device.type, longest))
        return cls(
            run,
            corpus,
            PairLoader(corpus.train, order, runtime.world.device, fixed_shapes=run.compute.compile),
        )

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
        parameters = sum(p.numel() for p in self.meta_model().parameters())
        return flops_per_token(
            parameters, model.encoder_layers + model.decoder_layers, model.dim, self.length
        )

    def meta_model(self) -> Translator:
        """Return a new model on the meta device, in training mode, with `requires_grad` set."""
        vocab_size, device_type = self.corpus.tokenizer.vocab_size, self.loader.device.type
        return translator_on_meta(self.run.model, vocab_size, device_type, self.length)

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        """Return the full initial value of the parameter or buffer `name`, on the CPU, from (seed,
        name) alone, so that a rank can fill its shard."""
        return init_param(name, shape, self.run.seed)

    def is_saved(self, name: str) -> bool:
        """Whether checkpoints contain `name`. Other tensors keep their initial value."""
        return True

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """Return the sum of the losses of a `PairBatch`, 0-dim. Calls `model(...)` once."""
        return model(
            batch.source, batch.target, batch.labels, smoothing=self.run.optim.label_smoothing
        )


def make_order(run: RunConfig, corpus: PreparedPairs) -> BucketOrder:
    """Return the order of the run's micro-batches; log their shapes."""
    lengths = corpus.train.lengths.max(axis=1)
    shapes, reason = choose_bucket_shapes(
        lengths, tokens=run.batch.tokens, shapes=run.batch.buckets
    )
    log.info(reason)
    return BucketOrder(lengths, shapes, micro_batches=run.batch.micro_batches, seed=run.seed)


BATCH_TOKENS = 4096  # tokens scored or translated per batch, including padding
# Languages written without spaces between words, and the tokenizer that sacrebleu needs for them.
UNSPACED = {
    "zh": "zh",
    "yue": "zh",
    "ja": "char",
    "th": "char",
    "lo": "char",
    "km": "char",
    "my": "char",
}


@dataclass(frozen=True)
class TranslationEvaluator:
    run: RunConfig
    folder: Path
    corpus: PreparedPairs

    @property
    def next_command(self) -> str:
        """A command that uses the trained model."""
        return f'lockstep translate {self.folder} "{self.run.data.source} text"'

    def held_out(self, split: Split) -> int:
        """Return the number of pairs, documents or chats in the split."""
        return len(self.corpus.text(split))

    def load(self, step: int, spec: EvalSpec, device: torch.device) -> LoadedTranslator:
        return load_translator(self.folder, step, spec.average, device=device)

    def evaluate(
        self,
        loaded: LoadedTranslator,
        spec: EvalSpec,
        runtime: ElasticRuntime,
        stopped: Callable[[], str],
        *,
        limit: int = 0,
    ) -> EvalResult | None:
        """Collective. Compute loss and scores on the held-out split; None after a stop signal.

        stopped  returns the name of a received stop signal, or ""
        limit    number of sentences or chats to generate for; 0: all. The loss always covers all
        """
        start_s = time.monotonic()
        text = self.corpus.text(spec.split)
        chosen = text[:limit] if limit else text
        sources, references = [source for source, _ in chosen], [target for _, target in chosen]
        encoded = getattr(self.corpus, spec.split)
        rows = loaded.tokenizer.encode(sources)
        loss_batches = batches_by_length(encoded.lengths.max(axis=1).tolist(), BATCH_TOKENS)
        text_batches = batches_by_length(
            [len(row) + 1 for row in rows], max(1, BATCH_TOKENS // spec.beams)
        )
        losses = {
            number: loss_of(loaded, encoded, batch)
            for number, batch in batches_of_rank(loss_batches, runtime, stopped)
        }
        translations: dict[int, list[int]] = {}
        for _, batch in batches_of_rank(text_batches, runtime, stopped):
            source = pad_rows([rows[i] for i in batch], loaded.model.embedding.weight.device)
            ids = beam_search(
                loaded.model, source, beams=spec.beams, max_tokens=2 * loaded.run.data.max_tokens
            )
            translations |= dict(zip(batch, ids, strict=True))
        results = merge_results(runtime, stopped, losses=losses, translations=translations)
        if results is None:
            return None
        texts = loaded.tokenizer.decode([results["translations"][row] for row in range(len(rows))])
        tokens = int(encoded.lengths[:, 1].sum())
        record = loss_record(spec, loaded.steps, results["losses"].values(), tokens) | {
            "pairs": len(sources),
            **score(texts, references, language=loaded.run.data.target, lowercase=spec.lowercase),
            "seconds": round(time.monotonic() - start_s, 3),
        }
        return EvalResult(
            record, samples(sources, texts, references, self.run), complete=len(chosen) == len(text)
        )

    def summary(self, record: dict[str, Any]) -> str:
        search = "greedy" if record["beams"] == 1 else f"{record['beams']} beams"
        how = f"{record['split']}, {format_count(record['pairs'])} pairs, {search}"
        mean = (
            f", mean of {len(record['averaged'])} checkpoints"
            if len(record["averaged"]) > 1
            else ""
        )
        scores = f"loss {record['loss']:.4f}  BLEU {record['bleu']:.2f}  chrF {record['chrf']:.2f}  exact {record['exact_match']:.1%}"
        return f"step {record['step']:,}  {scores}  CER {record['cer']:.3f}  WER {record['wer']:.3f}  ({how}{mean})"


@torch.inference_mode()
def loss_of(loaded: LoadedTranslator, encoded: EncodedPairs, batch: Sequence[int]) -> float:
    """Return the sum of -log p over the target tokens of a batch, without label smoothing."""
    lengths = encoded.lengths[batch].max(axis=0)
    arrays = encoded.gather(
        torch.tensor(batch).numpy(), len(batch), int(lengths[0]), int(lengths[1])
    )
    device = loaded.model.embedding.weight.device
    source, target, labels = (torch.from_numpy(array).to(device) for array in arrays)
    return float(loaded.model(source, target, labels))


def samples(
    sources: Sequence[str],
    texts: Sequence[str],
    references: Sequence[str],
    run: RunConfig,
    count: int = 6,
) -> list[str]:
    """Return lines with `count` evenly spaced translations, and the reference where it differs."""
    lines = []
    for i in range(0, len(texts), -(-len(texts) // count)):
        lines += ["", f"  {run.data.source}  {sources[i]}", f"  {run.data.target}  {texts[i]}"]
        if texts[i] != references[i]:
            lines.append(f"  {'':{len(run.data.target)}}  (reference: {references[i]})")
    return lines


def score(
    translations: Sequence[str],
    references: Sequence[str],
    *,
    language: str,
    lowercase: bool = False,
) -> dict[str, float | str]:
    """Return the scores of translations with one reference each.

    language     code of the target language; selects the tokenizer of BLEU
    bleu, chrf   0 to 100, by sacrebleu; the signatures record its settings
    cer, wer     edits in the corpus / characters or words of the references; may exceed 1
    exact_match  share of translations that equal their reference, 0 to 1
    ValueError if the lists differ in length or are empty.
    """
    from sacrebleu.metrics.bleu import BLEU  # 8 MiB that training does not need
    from sacrebleu.metrics.chrf import CHRF

    if len(translations) != len(references) or not translations:
        raise ValueError(f"{len(translations)} translations for {len(references)} references")
    bleu = BLEU(
        lowercase=lowercase, tokenize=UNSPACED.get(language.split("_")[0].split("-")[0], "13a")
    )
    chrf = CHRF(lowercase=lowercase)
    scores: dict[str, float | str] = {
        "bleu": bleu.corpus_score(list(translations), [list(references)]).score,
        "chrf": chrf.corpus_score(list(translations), [list(references)]).score,
    }
    if lowercase:
        translations, references = (
            [text.lower() for text in translations],
            [text.lower() for text in references],
        )
    return scores | {
        "cer": error_rate(translations, references),
        "wer": error_rate(
            [text.split() for text in translations], [text.split() for text in references]
        ),
        "exact_match": sum(a == b for a, b in zip(translations, references, strict=True))
        / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def error_rate(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    edits = sum(Levenshtein.distance(a, b) for a, b in zip(translations, references, strict=True))
    return edits / max(1, sum(map(len, references)))
