"""Scoring a translator: the loss of held-out pairs, and BLEU and its like of its translations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import Run
from lockstep.data.pairs.encoded import EncodedPairs
from lockstep.data.pairs.prepare import Prepared
from lockstep.elastic.consensus import gather
from lockstep.elastic.world import World
from lockstep.generation.beam_search import batches_by_length, search_ids
from lockstep.models.load_translator import Loaded, load_for_use
from lockstep.tasks.evaluator import Question, Result, Split
from lockstep.tasks.scores import score
from lockstep.units import show_count

BATCH_TOKENS = 4096  # padded tokens that are scored or translated together


@dataclass(frozen=True)
class TranslationExam:
    """The exam of a run with `task = "translate"`."""

    run: Run
    folder: Path
    corpus: Prepared

    @property
    def next(self) -> str:
        return f'lockstep translate {self.folder} "{self.run.data.source} text"'

    def held_out(self, split: Split) -> int:
        return len(self.corpus.text(split))

    def load(self, step: int, asked: Question, device: torch.device) -> Loaded:
        return load_for_use(self.folder, step, asked.average, device=device)

    def steps(self, loaded: Loaded) -> Sequence[int]:
        return loaded.steps

    def measure(self, loaded: Loaded, asked: Question, world: World, stopped: Callable[[], str], *, most: int = 0) -> Result | None:
        began = time.monotonic()
        text = self.corpus.text(asked.split)
        chosen = text[:most] if most else text
        sources, right = [source for source, _ in chosen], [target for _, target in chosen]
        encoded = getattr(self.corpus, asked.split)
        rows = loaded.tokenizer.encode(sources)
        loss_batches = batches_by_length(encoded.lengths.max(axis=1).tolist(), BATCH_TOKENS)
        text_batches = batches_by_length([len(row) + 1 for row in rows], max(1, BATCH_TOKENS // asked.beams))
        losses: dict[int, float] = {}
        translated: dict[int, list[int]] = {}
        for number in range(world.rank, len(loss_batches), world.size):
            if not stopped():
                losses[number] = loss_of(loaded, encoded, loss_batches[number])
        for number in range(world.rank, len(text_batches), world.size):
            if not stopped():
                batch = text_batches[number]
                ids = search_ids(loaded.model, [rows[i] for i in batch], beams=asked.beams, max_tokens=2 * loaded.run.data.max_tokens)
                translated |= dict(zip(batch, ids, strict=True))
        # JSON's keys are text, so pairs are sent; a float's text is its shortest exact form.
        heard = gather(world, {"losses": list(losses.items()), "translated": list(translated.items()), "stopped": stopped()})
        if any(one["stopped"] for one in heard):
            return None
        by_row = {row: ids for one in heard for row, ids in one["translated"]}
        found = loaded.tokenizer.decode([by_row[row] for row in range(len(rows))])
        tokens = int(encoded.lengths[:, 1].sum())
        loss = math.fsum(value for one in heard for _, value in one["losses"]) / max(1, tokens)
        record = {
            "step": loaded.step,
            **vars(asked),
            "averaged": list(loaded.steps),
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "tokens": tokens,
            "pairs": len(sources),
            **score(found, right, language=loaded.run.data.target, lowercase=asked.lowercase),
            "seconds": round(time.monotonic() - began, 3),
        }
        return Result(record, samples(sources, found, right, self.run), complete=len(chosen) == len(text))

    def summary(self, record: dict[str, Any]) -> str:
        how = f"{record['split']}, {show_count(record['pairs'])} pairs, " + (
            "greedy" if record["beams"] == 1 else f"{record['beams']} beams"
        )
        mean = f", mean of {len(record['averaged'])} checkpoints" if len(record["averaged"]) > 1 else ""
        scores = f"loss {record['loss']:.4f}  BLEU {record['bleu']:.2f}  chrF {record['chrf']:.2f}  exact {record['exact_match']:.1%}"
        return f"step {record['step']:,}  {scores}  CER {record['cer']:.3f}  WER {record['wer']:.3f}  ({how}{mean})"


@torch.inference_mode()
def loss_of(loaded: Loaded, encoded: EncodedPairs, batch: Sequence[int]) -> float:
    """Sum of -log p over the target tokens of some pairs, END included; what was trained smoothed is not smoothed here."""
    lengths = encoded.lengths[batch].max(axis=0)
    arrays = encoded.gather(torch.tensor(batch).numpy(), len(batch), int(lengths[0]), int(lengths[1]))
    device = loaded.model.embedding.weight.device
    source, target, labels = (torch.from_numpy(array).to(device) for array in arrays)
    return float(loaded.model(source, target, labels))


def samples(sources: Sequence[str], found: Sequence[str], right: Sequence[str], run: Run, count: int = 6) -> list[str]:
    """A few translations, taken evenly from the split, with the reference where it says something else."""
    lines = []
    for i in range(0, len(found), -(-len(found) // count)):
        lines += ["", f"  {run.data.source}  {sources[i]}", f"  {run.data.target}  {found[i]}"]
        if found[i] != right[i]:
            lines.append(f"  {'':{len(run.data.target)}}  (reference: {right[i]})")
    return lines
