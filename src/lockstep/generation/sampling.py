"""Continuations of texts by a Llama: prefill, then one token at a time with a cache of fixed size.

    for row, text in continuations(Decoder(model), tokenizer, [tokenizer.encode("Once upon")], tokens=50):
        print(text, end="")

The rows of a batch may have different lengths, and end when they end: what an ended row would say is thrown away.
Letters in the margin: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor

from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.errors import UsageError
from lockstep.generation.decoder import Cache, Decoder
from lockstep.models.llama import Llama

log = logging.getLogger("lockstep")
Step = Callable[[Tensor, Cache, int], Tensor]
PLACES = 64  # of the cache more are looked at whenever this many are full; a compiled step looks at all
UNFINISHED = "\ufffd"  # how a decoder shows a character whose last bytes are still to come
CONTEXT_TOKENS = 8  # of the prompt are decoded with a continuation: its first token may be joined to the last one before it


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature  0: the most probable one; logits are divided by it: higher is more varied
    top_k        only the k most probable ones; 0: all
    top_p        only the most probable ones that together have this probability (Holtzman et al. 2020); 1: all
    seed         the draws of a row follow from it and from the row's number
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


def choose(logits: Tensor, draws: Tensor, sampling: Sampling) -> Tensor:
    """The next tokens (B,) given logits (B, V) and a draw (B,) from [0, 1) for each row."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    probability, words = (logits.double() / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        probability[:, sampling.top_k :] = 0.0
        probability /= probability.sum(dim=-1, keepdim=True)
    before = probability.cumsum(dim=-1) - probability  # (B, V): that of the more probable ones
    kept = probability.where(before < sampling.top_p, 0.0)  # the first always stays
    until = kept.cumsum(dim=-1)
    rank = (until <= draws[:, None] * until[:, -1:]).sum(dim=-1, keepdim=True)
    # A draw so near to 1 that it is rounded up falls on the last one that may be drawn.
    rank = rank.clamp(max=(kept > 0).sum(dim=-1, keepdim=True) - 1)
    return words.gather(1, rank)[:, 0]


@torch.inference_mode()
def tokens_after(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling = GREEDY,
    step: Step | None = None,
    capacity: int = 0,
    first: int = 0,
) -> Iterator[list[int]]:
    """The next id of each of B prompts, `tokens` times. It does not end by itself before: whoever has enough stops asking.

    prompts  ids, at least one each
    step      None: `decoder.step`; else a compiled version of it, compiled once for each number of rows and capacity
    capacity  of the cache, when it is to be larger than prompt and tokens need
    first     the number of the first row, on which draws depend
    """
    device = decoder.embedding.device
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    longest = max(map(len, prompts))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts], device=device)  # (B, T)
    chances = [torch.Generator().manual_seed((sampling.seed * 2**20 + row) % 2**63) for row in range(first, first + len(prompts))]
    cache = decoder.start(len(prompts), max(capacity, longest + tokens))
    logits = decoder.prefill(padded, lengths, cache)
    for written in range(tokens):
        draws = torch.stack([torch.rand((), generator=chance, dtype=torch.float64) for chance in chances]).to(device)
        newest = choose(logits, draws, sampling)  # (B,)
        yield newest.tolist()
        if written + 1 < tokens and step:
            logits = step(newest, cache, cache.capacity)
        elif written + 1 < tokens:
            logits = decoder.step(newest, cache, min(cache.capacity, -(-(longest + written + 1) // PLACES) * PLACES))


@dataclass
class Text:
    """The text of one row as it grows. What is told once is never taken back."""

    tokenizer: ChatTokenizer
    before: Sequence[int]  # the last ids of the prompt
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    told: int = 0  # characters
    ended: bool = False

    def add(self, token: int) -> str:
        """What there is to tell after one more token; nothing when the row has ended, by this token or before."""
        if self.ended:
            return ""
        if token in self.tokenizer.ends:
            return self.close()
        self.ids.append(token)
        text = self.text()
        if cuts := [place for stop in self.stops if (place := text.find(stop)) >= 0]:
            self.ended = True
            return self.tell(text[: min(cuts)])
        return "" if text.endswith(UNFINISHED) else self.tell(text[: len(text) - held_back(text, self.stops)])

    def close(self) -> str:
        """What is left to tell when no more tokens come."""
        last = "" if self.ended else self.tell(self.text())
        self.ended = True
        return last

    def text(self) -> str:
        """The continuation alone."""
        whole, prompt = self.tokenizer.decode([*self.before, *self.ids]), self.tokenizer.decode(self.before)
        return whole[len(prompt) :]

    def tell(self, text: str) -> str:
        new = text[self.told :]
        self.told = max(self.told, len(text))
        return new


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may turn out to be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def continuations(
    decoder: Decoder,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling = GREEDY,
    stops: Sequence[str] = (),
    step: Step | None = None,
    capacity: int = 0,
    first: int = 0,
) -> Iterator[tuple[int, str]]:
    """(row, more of its text) as it comes, until each row has `tokens` tokens, one that ends it, or one of the texts `stops`."""
    texts = [Text(tokenizer, ids[-CONTEXT_TOKENS:], stops) for ids in prompts]
    for newest in tokens_after(decoder, prompts, tokens=tokens, sampling=sampling, step=step, capacity=capacity, first=first):
        for row, token in enumerate(newest):
            if told := texts[row].add(token):
                yield row, told
        if all(text.ended for text in texts):
            break
    for row, text in enumerate(texts):
        if told := text.close():
            yield row, told


# -- the command ------------------------------------------------------------------------------------------------------

ROWS = 16  # lines that are continued together


def generate(
    model: Llama,
    tokenizer: ChatTokenizer,
    texts: Sequence[str],
    *,
    tokens: int,
    sampling: Sampling = GREEDY,
    stops: Sequence[str] = (),
    chat: bool = False,
    compile: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[int, str]]:
    """(number of the text, more of its continuation), as `continuations` gives it, a few rows at a time.

    The model is used up: what writes takes its weights over, see Decoder.

    chat     each text is what a user says; its continuation is the answer
    compile  torch.compile the step: a minute or more first, for long continuations or many
    group    the processes that `tensor_plan` has cut the model over; all of them call this, and all get the same
    UsageError: a number is out of its range, a text has no token at all, or the model has no position for the last token.
    """
    check(tokens, sampling)
    if torn := [number for number, text in enumerate(texts) if any("\ud800" <= letter <= "\udfff" for letter in text)]:
        raise UsageError("a text holds bytes that are no UTF-8", f"prompt {torn[0] + 1}", "convert it first")
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text) for text in texts]
    if empty := [number for number, ids in enumerate(prompts) if not ids]:
        raise UsageError("there is nothing to continue: a prompt has no token", f"prompt {empty[0] + 1}", "give a text")
    if (most := max(map(max, prompts), default=0)) >= model.shape.vocabulary:
        what = f"the prompt has the token {most}, and the model has {model.shape.vocabulary:,}"
        raise UsageError(what, str(tokenizer.folder), "use the tokenizer that the model was trained with")
    if (longest := max(map(len, prompts), default=0) + tokens) > model.shape.context:
        what = f"{longest:,} tokens with the prompt, and the model has {model.shape.context:,} positions"
        raise UsageError(what, f"the longest prompt, and {tokens:,} new tokens", "shorten the prompt, or ask for fewer tokens")
    rows = min(len(prompts), ROWS)
    decoder = Decoder(model, rows=rows, layout="plain" if compile else None, group=group, release=True)
    step, capacity = (compiled(decoder), longest) if compile else (None, 0)
    for first in range(0, len(prompts), ROWS):
        batch = prompts[first : first + ROWS]
        filled = [*batch, *[batch[0]] * (rows - len(batch))] if compile else batch  # one graph for all of them
        found = continuations(
            decoder, tokenizer, filled, tokens=tokens, sampling=sampling, stops=stops, step=step, capacity=capacity, first=first
        )
        yield from ((first + row, text) for row, text in found if row < len(batch))


def compiled(decoder: Decoder) -> Step:
    """The step as one graph, compiled at its first call, which says how long that took. On a CPU the graph packs the weights for itself."""
    step = torch.compile(decoder.step, dynamic=False, fullgraph=True)
    seen: set[tuple[int, int]] = set()

    def timed(tokens: Tensor, cache: Cache, places: int) -> Tensor:
        if (len(tokens), places) in seen:
            return step(tokens, cache, places)
        seen.add((len(tokens), places))
        began_s = time.perf_counter()
        with torch._inductor.config.patch(freezing=tokens.device.type == "cpu"):
            logits = step(tokens, cache, places)
        log.info("the step is compiled for %d rows of %d places in %.0f s", len(tokens), places, time.perf_counter() - began_s)
        return logits

    return timed


def check(tokens: int, sampling: Sampling) -> None:
    """UsageError for what cannot be done."""
    for name, value, right, hint in (
        ("tokens", tokens, tokens >= 1, "1 or more"),
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < float("inf"), "0 (greedy) or more"),
        ("top-k", sampling.top_k, sampling.top_k >= 0, "1 or more, or 0 for all"),
        ("top-p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "more than 0, at most 1"),
    ):
        if not right:
            raise UsageError(f"--{name} {value}", "command line", f"give {hint}")
