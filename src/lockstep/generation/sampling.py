"""Continue texts with a Llama: prefill, then one token at a time with a cache of fixed size.

    prompts = [tokenizer.encode("Once upon")]
    for row, text in stream_continuations(tokenizer, prompts, sample_tokens(Decoder(model),
    prompts, tokens=50)):
        print(text, end="")

The rows of a batch may differ in length. Several processes may share a model: weights are split as
for training, without its hooks. Dimensions in the margin: B rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.generation.decoder import Decoder, KVCache
from lockstep.layout import Layout
from lockstep.log import log
from lockstep.models.llama import Llama
from lockstep.parallel.plans import ParallelPlan
from lockstep.parallel.tensor_parallel import tensor_slices
from lockstep.runtime.torch_private import inductor_freezing

StepFunction = Callable[[Tensor, KVCache, int], Tensor]
# The attended part of the cache grows in these steps; a compiled step attends to all of it.
WINDOW_STEP = 64
UNFINISHED = "\ufffd"  # decoded from an incomplete UTF-8 sequence
ROWS = 16  # texts of a batch
# Prompt tokens decoded with a continuation, whose first token may join the last one of the prompt.
CONTEXT_TOKENS = 8


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the next token."""

    temperature: float = 0.0  # divides the logits: higher is more varied; 0: greedy
    top_k: int = 0  # draw from the k most probable tokens; 0: all
    top_p: float = 1.0  # draw from the most probable tokens with this joint probability; 1: all
    seed: int = 0  # with the number of a row, determines its draws


GREEDY = SamplingParams()


def sample_next(logits: Tensor, draws: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the next tokens (B,), given logits (B, V) and uniform draws (B,) from [0, 1)."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    probability, words = (
        (logits.double() / sampling.temperature)
        .softmax(dim=-1)
        .sort(dim=-1, descending=True, stable=True)
    )
    if sampling.top_k:
        probability[:, sampling.top_k :] = 0.0
        probability /= probability.sum(dim=-1, keepdim=True)
    before = probability.cumsum(dim=-1) - probability  # (B, V): of the more probable tokens
    kept = probability.where(before < sampling.top_p, 0.0)  # always keeps the first
    until = kept.cumsum(dim=-1)
    rank = (until <= draws[:, None] * until[:, -1:]).sum(dim=-1, keepdim=True)
    # A draw so close to 1 that it is rounded up selects the last token that may be drawn.
    rank = rank.clamp(max=(kept > 0).sum(dim=-1, keepdim=True) - 1)
    return words.gather(1, rank)[:, 0]


@torch.inference_mode()
def sample_tokens(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: SamplingParams = GREEDY,
    step: StepFunction | None = None,
    capacity: int = 0,
    first: int = 0,
) -> Iterator[list[int]]:
    """Yield the next id of each of B prompts, `tokens` times, or until the caller stops.

    prompts   at least one id each
    step      a compiled `decoder.step`; None: `decoder.step`
    capacity  of the cache, if larger than prompt and tokens need
    first     the number of the first row, which its draws depend on
    """
    device = decoder.embedding.device
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    longest = max(map(len, prompts))
    rows = [torch.tensor(ids) for ids in prompts]
    padded = pad_sequence(rows, batch_first=True).to(device)  # (B, T)
    generators = [
        torch.Generator().manual_seed((sampling.seed * 2**20 + row) % 2**63)
        for row in range(first, first + len(prompts))
    ]
    cache = decoder.new_cache(len(prompts), max(capacity, longest + tokens))
    logits = decoder.prefill(padded, lengths, cache)
    for written in range(tokens):
        drawn = [torch.rand((), generator=g, dtype=torch.float64) for g in generators]
        draws = torch.stack(drawn).to(device)
        newest = sample_next(logits, draws, sampling)  # (B,)
        yield newest.tolist()
        if written + 1 < tokens:
            window = cache.capacity
            if not step:
                window = min(window, -(-(longest + written + 1) // WINDOW_STEP) * WINDOW_STEP)
            logits = (step or decoder.step)(newest, cache, window)


@dataclass
class TextStream:
    """Decode the text of one row as its tokens arrive; emitted text is never taken back."""

    tokenizer: ChatTokenizer
    before: Sequence[int]  # the last ids of the prompt
    stops: Sequence[str] = ()
    ids: list[int] = field(default_factory=list)
    emitted: int = 0  # characters
    ended: bool = False

    def add(self, token: int) -> str:
        """Add a token; return the new text, "" after the end of the row."""
        if self.ended:
            return ""
        if token in self.tokenizer.eos_ids:
            return self.close()
        self.ids.append(token)
        text = self.text()
        if cuts := [index for stop in self.stops if (index := text.find(stop)) >= 0]:
            self.ended = True
            return self.emit(text[: min(cuts)])
        if text.endswith(UNFINISHED):
            return ""
        return self.emit(text[: len(text) - stop_prefix_length(text, self.stops)])

    def close(self) -> str:
        last = "" if self.ended else self.emit(self.text())
        self.ended = True
        return last

    def text(self) -> str:
        whole = self.tokenizer.decode([*self.before, *self.ids])
        return whole[len(self.tokenizer.decode(self.before)) :]

    def emit(self, text: str) -> str:
        new = text[self.emitted :]
        self.emitted = max(self.emitted, len(text))
        return new


def stop_prefix_length(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the start of a stop text."""
    starts = (stop[:n] for stop in stops for n in range(1, len(stop)))
    return max((len(start) for start in starts if text.endswith(start)), default=0)


def stream_continuations(
    tokenizer: ChatTokenizer,
    prompts: Sequence[Sequence[int]],
    sampled: Iterable[Sequence[int]],
    stops: Sequence[str] = (),
) -> Iterator[tuple[int, str]]:
    """Yield (row, new text) of the `sampled` tokens, until each row has an end token or a stop
    text."""
    texts = [TextStream(tokenizer, ids[-CONTEXT_TOKENS:], stops) for ids in prompts]
    for newest in sampled:
        for row, token in enumerate(newest):
            if new := texts[row].add(token):
                yield row, new
        if all(text.ended for text in texts):
            break
    for row, text in enumerate(texts):
        if new := text.close():
            yield row, new


def generate(  # 9 parameters: the options of `lockstep generate`
    model: Llama,
    tokenizer: ChatTokenizer,
    texts: Sequence[str],
    *,
    tokens: int,
    sampling: SamplingParams = GREEDY,
    stops: Sequence[str] = (),
    chat: bool = False,
    compile: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield (number of the text, new text of its continuation), a batch of rows at a time.

    chat     each text is a user's message, its continuation the answer
    compile  torch.compile the step: takes a minute or more, pays off for long or many continuations
    group    that of `apply_tensor_parallel`; all its processes call this

    The decoder takes the model's weights; the model is unusable afterwards.
    UsageError: a number is out of range, a text has no token, or the model has too few positions.
    """
    check_sampling(tokens, sampling)
    prompts = encode_prompts(tokenizer, texts, model.config.vocab_size, chat=chat)
    longest = max(map(len, prompts), default=0) + tokens
    if longest > model.config.max_seq_len:
        positions = f"{model.config.max_seq_len:,} positions"
        raise UsageError(
            f"{longest:,} tokens with the prompt, and the model has {positions}",
            f"the longest prompt, and {tokens:,} new tokens",
            "shorten the prompt, or ask for fewer tokens",
        )
    rows = min(len(prompts), ROWS)
    decoder = Decoder(
        model, rows=rows, layout="plain" if compile else None, group=group, release=True
    )
    step = compile_step(decoder) if compile else None
    for first in range(0, len(prompts), ROWS):
        batch = prompts[first : first + ROWS]
        filled = list(batch)
        if compile:  # one graph for all batches
            filled += [batch[0]] * (rows - len(batch))
        sampled = sample_tokens(
            decoder,
            filled,
            tokens=tokens,
            sampling=sampling,
            step=step,
            capacity=longest if compile else 0,
            first=first,
        )
        stream = stream_continuations(tokenizer, filled, sampled, stops)
        yield from ((first + row, text) for row, text in stream if row < len(batch))


def encode_prompts(
    tokenizer: ChatTokenizer, texts: Sequence[str], vocab_size: int, *, chat: bool
) -> list[list[int]]:
    """Return the ids of each text. UsageError: no UTF-8, no token, or one that the model lacks."""
    prompts = []
    for number, text in enumerate(texts, start=1):
        where = f"prompt {number}"
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UsageError("a text is not valid UTF-8", where, "convert it first")
        message = {"role": "user", "content": text}
        ids = tokenizer.encode_chat([message]) if chat else tokenizer.encode(text)
        if not ids:
            raise UsageError("a prompt has no token to continue", where, "give a text")
        if max(ids) >= vocab_size:
            raise UsageError(
                f"the prompt has token {max(ids)}, the model only {vocab_size:,} tokens",
                str(tokenizer.folder),
                "use the tokenizer that the model was trained with",
            )
        prompts.append(ids)
    return prompts


def compile_step(decoder: Decoder) -> StepFunction:
    """Compile the step as one graph, at its first call, and log the time it took."""
    step = torch.compile(decoder.step, dynamic=False, fullgraph=True)
    seen: set[tuple[int, int]] = set()

    def timed(tokens: Tensor, cache: KVCache, window: int) -> Tensor:
        if (len(tokens), window) in seen:
            return step(tokens, cache, window)
        seen.add((len(tokens), window))
        start_s = time.perf_counter()
        with inductor_freezing(tokens.device.type == "cpu"):
            logits = step(tokens, cache, window)
        log.info(
            "compiled the step for %d rows of %d positions in %.0f s",
            len(tokens),
            window,
            time.perf_counter() - start_s,
        )
        return logits

    return timed


def check_sampling(tokens: int, sampling: SamplingParams) -> None:
    for name, value, valid, hint in (
        ("tokens", tokens, tokens >= 1, "1 or more"),
        (
            "temperature",
            sampling.temperature,
            0.0 <= sampling.temperature < float("inf"),
            "0 (greedy) or more",
        ),
        ("top-k", sampling.top_k, sampling.top_k >= 0, "1 or more, or 0 for all"),
        ("top-p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "more than 0, at most 1"),
    ):
        if not valid:
            raise UsageError(f"--{name} {value}", "command line", f"give {hint}")


def refuse_indivisible(plan: ParallelPlan, parts: int, where: str) -> None:
    """UsageError: the heads or the inner width cannot be split into `parts` equal parts."""
    limits = plan.layout_limits(1)
    if why := limits.problem_with(Layout(tensor=parts)):
        sizes = range(1, min(limits.tensor) + 1)
        valid = [str(size) for size in sizes if not limits.problem_with(Layout(tensor=size))]
        raise UsageError(why, where, f"give {' or '.join(valid)}")


def apply_tensor_parallel(model: Llama, runtime: ElasticRuntime, where: str) -> dist.ProcessGroup:
    """Collective. Split a model that every process has whole; return the group of its all-reduces.

    UsageError, which names the option `where`: the model cannot be split so.
    """
    plan, size = model.parallel_plan(), runtime.world.size
    refuse_indivisible(plan, size, where)
    slices = tensor_slices(model, plan, runtime.world.rank, size)
    for name, parameter in model.named_parameters():
        if not slices[name].is_whole:
            parameter.data = (
                slices[name].of(parameter.data).clone(memory_format=torch.contiguous_format)
            )  # frees the whole weight
    assert dist.group.WORLD is not None
    return dist.group.WORLD
