"""Translation by greedy and beam search: in batches, one token at a time, with a cache.

Sentences are sorted by length to save padding; results are in input order. The limit of tokens
depends on the sentence alone, so a translation does not depend on its batch. When half of the
sentences of a batch are finished, their rows are dropped.

Dimensions in the margin: B sentences of a batch, K beams, S source positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.corpus.tokenizer import BEGIN, END, PAD, Tokenizer
from lockstep.models.translator import Translator

FIRST_CAPACITY = 32  # positions of a new cache; doubled when full


def max_lengths(source: Tensor, max_tokens: int) -> Tensor:
    """Return the token limit of each row's translation: (B, S) -> (B,)."""
    return (2 * (source != PAD).sum(dim=1) + 16).clamp(max=max_tokens)


@torch.inference_mode()
def beam_search(
    model: Translator,
    source: Tensor,
    *,
    beams: int,
    max_tokens: int = 256,
) -> list[list[int]]:
    """Return the ids of each row's best translation found with K beams, without END.

    source  (B, S): each row a sentence, END, PAD

    The best has the highest log-probability / tokens, counting END. A sentence is
    done when K of its translations are finished, or at its limit. One beam is greedy search.
    """
    search = BeamSearch(source, beams, max_lengths(source, max_tokens))
    cache = model.new_cache(model.encode(source), beams=beams, capacity=FIRST_CAPACITY)
    tokens = torch.full((len(source), beams), BEGIN, device=source.device)
    while True:
        if search.position == cache.capacity:
            cache.grow()
        log_p = model.step(tokens, cache).float().log_softmax(dim=-1)  # (B, K, V)
        tokens, parents = search.advance(log_p)
        remaining = [i for i, row in enumerate(search.rows) if not search.is_done(row)]
        if not remaining:
            return search.best()
        cache.reorder(parents)
        if 2 * len(remaining) <= len(search.rows):
            kept = torch.tensor(remaining, device=source.device)
            cache.keep_rows(kept)
            search.keep_rows(remaining, kept)
            tokens = tokens[kept]


class BeamSearch:
    """State of a beam search over B sentences: the beams and the finished translations."""

    def __init__(self, source: Tensor, beams: int, limit: Tensor) -> None:
        self.beams = beams
        self.limit = limit.tolist()
        self.rows = list(range(len(source)))  # sentence of each row of the batch
        self.finished: list[list[tuple[float, list[int]]]] = [[] for _ in self.rows]  # score, ids
        self.position = 0
        self.written = torch.full((len(source), beams, max(self.limit)), PAD, device=source.device)
        # Log-probabilities. All beams start equal: only the first counts, or all would find the
        # same.
        self.totals = torch.full((len(source), beams), float("-inf"), device=source.device)
        self.totals[:, 0] = 0.0

    def is_done(self, sentence: int) -> bool:
        is_at_limit = self.position >= self.limit[sentence]
        return is_at_limit or len(self.finished[sentence]) >= self.beams

    def advance(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens, parents) of the new beams, given the log-probabilities (B, K, V)."""
        _, beams, words = log_p.shape
        # Of the best 2K candidates at most K end, one per beam, so K remain.
        scored = self.totals[..., None] + log_p
        totals, flat = scored.flatten(1).topk(2 * beams, dim=1)  # (B, 2K)
        parents = flat // words
        tokens = flat % words
        for row, candidate in (tokens[:, :beams] == END).nonzero().tolist():
            if not self.is_done(self.rows[row]):
                self.finish(row, int(parents[row, candidate]), totals[row, candidate], 1)
        rank = torch.arange(2 * beams, device=flat.device) + 2 * beams * (tokens == END)
        order = rank.argsort(dim=1)[:, :beams]  # (B, K): the candidates that continue, best first
        tokens = tokens.gather(1, order)
        parents = parents.gather(1, order)
        self.totals = totals.gather(1, order)
        source = parents[..., None].expand(-1, -1, self.written.shape[2])
        self.written = self.written.gather(1, source)
        self.written[:, :, self.position] = tokens
        self.position += 1
        for row, sentence in enumerate(self.rows):
            if self.position == self.limit[sentence] and len(self.finished[sentence]) < self.beams:
                self.finish(row, 0, self.totals[row, 0], 0)
        return tokens, parents

    def finish(self, row: int, beam: int, log_probability: Tensor, ends: int) -> None:
        """Keep a translation; `ends` END tokens, which it does not contain, count."""
        ids = self.written[row, beam, : self.position].tolist()
        score = float(log_probability) / float(self.position + ends)
        self.finished[self.rows[row]].append((score, ids))

    def keep_rows(self, remaining: Sequence[int], kept: Tensor) -> None:
        self.rows = [self.rows[i] for i in remaining]
        self.written = self.written[kept]
        self.totals = self.totals[kept]

    def best(self) -> list[list[int]]:
        """Return the highest-scoring translation of each sentence; of equal ones the first."""
        return [max(finished, key=lambda pair: pair[0])[1] for finished in self.finished]


# -- texts -----------------------------------------------------------------------------------------


def batches_by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Batch rows of similar length, longest first: rows times longest is at most `tokens`.

    Equal lengths keep their order. A row longer than `tokens` is a batch alone.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Append END to each row and pad: (B, S) int64."""
    ended = [torch.tensor([*row, END]) for row in rows]
    return pad_sequence(ended, batch_first=True, padding_value=PAD).to(device)


def translate(
    model: Translator,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beams: int = 1,
    batch_tokens: int = 2048,
) -> list[str]:
    """Translate each text, in order; an empty text stays empty.

    beams         1: greedy; more: beam search of that width
    batch_tokens  of a batch: source tokens including padding, times beams
    """
    model.eval()
    rows = tokenizer.encode(list(texts))
    translations: list[list[int]] = [[] for _ in rows]
    filled = [i for i, row in enumerate(rows) if row]
    lengths = [len(rows[i]) + 1 for i in filled]
    for batch in batches_by_length(lengths, max(1, batch_tokens // beams)):
        chosen = [filled[i] for i in batch]
        source = pad_rows([rows[i] for i in chosen], model.embedding.weight.device)
        for i, ids in zip(chosen, beam_search(model, source, beams=beams), strict=True):
            translations[i] = ids
    return tokenizer.decode(translations)
