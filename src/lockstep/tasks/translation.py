"""Translation: sentence pairs, bucketed by length, and an encoder-decoder model.

Evaluation: loss on held-out pairs; BLEU, chrF and error rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from lockstep.config.schema import RunConfig
from lockstep.corpus.encoded_pairs import EncodedPairs, PreparedPairs, open_prepared, prepare
from lockstep.corpus.loaders import PairLoader, to_device
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
from lockstep.tasks.evaluator import EvalSpec, Evaluator, Split, TextGeneration
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
        device = runtime.world.device
        if run.model.attention == "auto":
            longest = order.shapes[-1].length
            log.info("attention %s: %s", *choose_attention(device.type, longest))
        if run.compute.compile:
            log.info("compiling %d shapes, each in the first step with it", len(order.shapes))
        loader = PairLoader(corpus.train, order, device, run.compute.compile)
        return cls(run, corpus, loader)

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
        layers = model.encoder_layers + model.decoder_layers
        return flops_per_token(parameters, layers, model.dim, self.length)

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

    def release(self) -> None:
        """Nothing is held: the values are drawn."""

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
class TranslationEvaluator(Evaluator):
    data: PreparedPairs

    @property
    def next_command(self) -> str:
        return f'lockstep translate {self.folder} "{self.run.data.source} text"'

    def load(self, step: int, spec: EvalSpec, device: torch.device) -> LoadedTranslator:
        return load_translator(self.folder, step, spec.average, device=device)

    def losses(
        self, loaded: LoadedTranslator, split: Split
    ) -> Iterator[Callable[[], tuple[float, int]]]:
        pairs: EncodedPairs = getattr(self.data, split)
        for numbers in batches_by_length(pairs.lengths.max(axis=1).tolist(), BATCH_TOKENS):
            yield partial(loss_of, loaded.model, pairs, numbers)

    def generation(
        self, loaded: LoadedTranslator, spec: EvalSpec, chosen: list[dict[str, Any]]
    ) -> TextGeneration:
        rows = loaded.tokenizer.encode([pair["source"] for pair in chosen])
        lengths = [len(row) + 1 for row in rows]

        def translate(numbers: list[int]) -> list[str]:
            source = pad_rows([rows[i] for i in numbers], loaded.model.embedding.weight.device)
            most = 2 * loaded.run.data.max_tokens
            ids = beam_search(loaded.model, source, beams=spec.beams, max_tokens=most)
            return loaded.tokenizer.decode(ids)

        batches = batches_by_length(lengths, max(1, BATCH_TOKENS // spec.beams))
        return TextGeneration([pair["target"] for pair in chosen], batches, translate)

    def scores(
        self, spec: EvalSpec, nats: float, texts: Sequence[str], references: Sequence[str]
    ) -> dict[str, Any]:
        language = self.run.data.target
        return {
            "pairs": len(texts),
            **score(texts, references, language=language, lowercase=spec.lowercase),
        }

    def sample(self, record: dict[str, Any], text: str, reference: str) -> Iterator[str]:
        source, target = self.run.data.source, self.run.data.target
        yield f"  {source}  {record['source']}"
        yield f"  {target}  {text}"
        if text != reference:
            yield f"  {'':{len(target)}}  (reference: {reference})"

    def summary(self, record: dict[str, Any]) -> str:
        search = "greedy" if record["beams"] == 1 else f"{record['beams']} beams"
        how = f"{record['split']}, {format_count(record['pairs'])} pairs, {search}"
        if len(record["averaged"]) > 1:
            how += f", mean of {len(record['averaged'])} checkpoints"
        return (
            f"step {record['step']:,}  loss {record['loss']:.4f}  BLEU {record['bleu']:.2f}  "
            f"chrF {record['chrf']:.2f}  exact {record['exact_match']:.1%}  "
            f"CER {record['cer']:.3f}  WER {record['wer']:.3f}  ({how})"
        )


@torch.inference_mode()
def loss_of(model: Translator, pairs: EncodedPairs, numbers: list[int]) -> tuple[float, int]:
    """Return the loss over the target tokens of some pairs, without label smoothing, and their
    number."""
    lengths = pairs.lengths[numbers]
    arrays = pairs.gather(np.array(numbers), len(numbers), *lengths.max(axis=0).tolist())
    nats = model(*to_device(arrays, model.embedding.weight.device))
    return float(nats), int(lengths[:, 1].sum())


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
    code = language.split("_")[0].split("-")[0]
    bleu = BLEU(lowercase=lowercase, tokenize=UNSPACED.get(code, "13a"))
    chrf = CHRF(lowercase=lowercase)
    scores: dict[str, float | str] = {
        "bleu": bleu.corpus_score(list(translations), [list(references)]).score,
        "chrf": chrf.corpus_score(list(translations), [list(references)]).score,
    }
    if lowercase:
        translations = [text.lower() for text in translations]
        references = [text.lower() for text in references]
    equal = sum(a == b for a, b in zip(translations, references, strict=True))
    return scores | {
        "cer": error_rate(translations, references),
        "wer": error_rate(list(map(str.split, translations)), list(map(str.split, references))),
        "exact_match": equal / len(references),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def error_rate(translations: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    edits = sum(Levenshtein.distance(a, b) for a, b in zip(translations, references, strict=True))
    return edits / max(1, sum(map(len, references)))
