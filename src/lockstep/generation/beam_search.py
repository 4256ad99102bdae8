"""Translation: greedy and beam search, in batches, one token at a time with a cache.

Sentences are sorted by length, so that a batch has little padding, and the results put back in the order of the input.
A sentence ends with its END, or at twice its source's length and a few tokens more: a limit of its own, so that its
translation does not depend on who shares its batch. When half of a batch has ended, the others go on without them.

Letters in the margin: B sentences of a batch, K beams, S source positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.data.tokenizer import BEGIN, END, PAD, Tokenizer
from lockstep.models.translator import Cache, Translator

FIRST_CAPACITY = 32  # positions of a new cache; doubled when they are full
Step = Callable[[Tensor, Cache], Tensor]


def limits(source: Tensor, max_tokens: int) -> Tensor:
    """How many tokens the translation of each row of (B, S) may have: (B,)."""
    return (2 * (source != PAD).sum(dim=1) + 16).clamp(max=max_tokens)


@torch.inference_mode()
def greedy(model: Translator, source: Tensor, *, max_tokens: int = 256, step: Step | None = None) -> list[list[int]]:
    """The most probable token, again and again: ids of each row's translation, without END.

    source  (B, S), each row a sentence, its END, PAD
    step    `model.step`, or a compiled version of it
    """
    limit = limits(source, max_tokens)
    cache = model.start(model.encode(source), beams=1, capacity=FIRST_CAPACITY)
    row = torch.arange(len(source), device=source.device)  # which sentence each row of the batch still is
    written = torch.full((len(source), int(limit.max())), PAD, device=source.device)
    tokens = torch.full((len(source), 1), BEGIN, device=source.device)
    alive = torch.ones(len(source), dtype=torch.bool, device=source.device)
    for position in range(written.shape[1]):
        if position == cache.capacity:
            cache.grow()
        tokens = (step or model.step)(tokens, cache).argmax(dim=-1)  # (B, 1)
        alive &= (tokens[:, 0] != END) & (position < limit[row])
        written[row, position] = tokens[:, 0].where(alive, PAD)
        left = int(alive.sum())
        if left == 0:
            break
        if 2 * left <= len(row) and step is None:
            stays = alive.nonzero()[:, 0]
            cache.keep(stays)
            row, tokens, alive = row[stays], tokens[stays], alive[stays]
    return [without_pad(ids) for ids in written.tolist()]


@torch.inference_mode()
def beam(
    model: Translator,
    source: Tensor,
    *,
    beams: int,
    length_penalty: float = 1.0,
    max_tokens: int = 256,
    step: Step | None = None,
) -> list[list[int]]:
    """The best translation that a beam of K finds: ids of each row's, without END. One beam is `greedy`.

    The best has the highest log-probability / tokens ** length_penalty, END counted. A sentence is done when K of its
    translations have ended; one that reaches its limit takes the best of what it has.
    """
    search = Search(source, beams, length_penalty, limits(source, max_tokens))
    cache = model.start(model.encode(source), beams=beams, capacity=FIRST_CAPACITY)
    tokens = torch.full((len(source), beams), BEGIN, device=source.device)
    while True:
        if search.position == cache.capacity:
            cache.grow()
        log_p = (step or model.step)(tokens, cache).float().log_softmax(dim=-1)  # (B, K, V)
        tokens, parents = search.advance(log_p)
        left = [i for i, row in enumerate(search.rows) if not search.done[row]]
        if not left:
            return search.best()
        cache.choose(parents)
        if 2 * len(left) <= len(search.rows) and step is None:
            stays = torch.tensor(left, device=source.device)
            cache.keep(stays)
            search.keep(left, stays)
            tokens = tokens[stays]


class Search:
    """The state of a beam search over B sentences: what the beams have written, and what has ended."""

    def __init__(self, source: Tensor, beams: int, length_penalty: float, limit: Tensor) -> None:
        self.beams, self.length_penalty, self.limit = beams, length_penalty, limit.tolist()
        self.rows = list(range(len(source)))  # which sentence each row of the batch still is
        self.ended: list[list[tuple[float, list[int]]]] = [[] for _ in self.rows]  # score, ids
        self.done = [False for _ in self.rows]
        self.position = 0
        self.written = torch.full((len(source), beams, max(self.limit)), PAD, device=source.device)
        # All beams begin alike: only the first may count, or all of them would find the same.
        self.totals = torch.full((len(source), beams), float("-inf"), device=source.device)  # log-probabilities
        self.totals[:, 0] = 0.0

    def advance(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Given the log-probabilities (B, K, V) of what comes next: (the tokens of the new beams, the beams they come from)."""
        beams, words = log_p.shape[1:]
        # At most K of the best 2K end, one for each beam, so K are left that go on.
        totals, flat = (self.totals[..., None] + log_p).flatten(1).topk(2 * beams, dim=1)  # (B, 2K)
        parents, tokens = flat // words, flat % words
        self.note_ended(totals, parents, tokens == END)
        behind = torch.arange(2 * beams, device=flat.device) + 2 * beams * (tokens == END)
        order = behind.argsort(dim=1)[:, :beams]  # (B, K): those that go on, best first
        tokens, parents, self.totals = tokens.gather(1, order), parents.gather(1, order), totals.gather(1, order)
        self.written = self.written.gather(1, parents[..., None].expand(-1, -1, self.written.shape[2]))
        self.written[:, :, self.position] = tokens
        self.position += 1
        self.note_limits()
        return tokens, parents

    def note_ended(self, totals: Tensor, parents: Tensor, ended: Tensor) -> None:
        """Keep those of the best K candidates that end here."""
        for row, place in ended[:, : self.beams].nonzero().tolist():
            sentence = self.rows[row]
            if not self.done[sentence]:
                ids = self.written[row, int(parents[row, place]), : self.position].tolist()
                self.ended[sentence].append((self.score(float(totals[row, place]), self.position + 1), ids))
                self.done[sentence] = len(self.ended[sentence]) >= self.beams

    def note_limits(self) -> None:
        """Close the sentences that have reached their limit."""
        for row, sentence in enumerate(self.rows):
            if self.position == self.limit[sentence] and not self.done[sentence]:
                cut = self.written[row, 0, : self.position].tolist()
                self.ended[sentence].append((self.score(float(self.totals[row, 0]), self.position), cut))
                self.done[sentence] = True

    def score(self, log_probability: float, tokens: int) -> float:
        return log_probability / float(tokens**self.length_penalty)

    def keep(self, left: Sequence[int], stays: Tensor) -> None:
        """Forget all rows of the batch but these; `stays` is `left` as a tensor."""
        self.rows = [self.rows[i] for i in left]
        self.written, self.totals = self.written[stays], self.totals[stays]

    def best(self) -> list[list[int]]:
        """The translation of the highest score of each sentence; of equal ones the first found."""
        return [max(found, key=lambda pair: pair[0])[1] for found in self.ended]


def without_pad(ids: list[int]) -> list[int]:
    """The ids before the first PAD."""
    return ids[: ids.index(PAD)] if PAD in ids else ids


# -- texts ------------------------------------------------------------------------------------------------------------


def batches_by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which rows go together: alike in length, the longest first, so that rows times the longest are at most `tokens`.

    Equal lengths keep their order. A row longer than `tokens` goes alone. A function of the lengths alone.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Each row with an END, filled up with PAD: (B, S) int64."""
    longest = max(map(len, rows)) + 1
    return torch.tensor([[*row, END, *[PAD] * (longest - 1 - len(row))] for row in rows], device=device)


def search_ids(
    model: Translator,
    rows: Sequence[Sequence[int]],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    max_tokens: int = 256,
    step: Step | None = None,
) -> list[list[int]]:
    """Translations of one batch of token ids, by beam search, or greedily with one beam."""
    source = pad_rows(rows, model.embedding.weight.device)
    if beams == 1:
        return greedy(model, source, max_tokens=max_tokens, step=step)
    return beam(model, source, beams=beams, length_penalty=length_penalty, max_tokens=max_tokens, step=step)


def translate(
    model: Translator,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    batch_tokens: int = 2048,
    max_tokens: int = 256,
    compile: bool = False,
) -> list[str]:
    """The translation of each text, in the order of the texts; an empty text stays empty.

    beams         1: greedy; more: beam search of that width
    batch_tokens  source tokens, padding included, times beams, that are translated together
    max_tokens    longest translation
    compile       torch.compile the decoder's step: half a minute first, for long lists of texts
    """
    model.eval()
    rows = tokenizer.encode(list(texts))
    step: Step | None = torch.compile(model.step, dynamic=True) if compile else None
    found: list[list[int]] = [[] for _ in rows]
    filled = [i for i, row in enumerate(rows) if row]
    for batch in batches_by_length([len(rows[i]) + 1 for i in filled], max(1, batch_tokens // beams)):
        chosen = [filled[i] for i in batch]
        translated = search_ids(
            model,
            [rows[i] for i in chosen],
            beams=beams,
            length_penalty=length_penalty,
            max_tokens=max_tokens,
            step=step,
        )
        for i, ids in zip(chosen, translated, strict=True):
            found[i] = ids
    return tokenizer.decode(found)
