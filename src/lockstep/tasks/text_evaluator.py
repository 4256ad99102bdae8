"""Scoring a Llama: the loss of held-out text in nats a token and bits a byte; of chats the loss of answers, and how many are right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import Run
from lockstep.data.text.chat_samples import last_answer
from lockstep.data.text.chat_template import renderer
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.data.text.documents import in_groups
from lockstep.data.text.packing import IGNORED, PackedRows, batch_of, window
from lockstep.data.text.prepare import Prepared
from lockstep.data.text.token_stream import Ints, Stream
from lockstep.elastic.consensus import gather
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.generation.decoder import Decoder
from lockstep.generation.sampling import CONTEXT_TOKENS, Text, continuations
from lockstep.models.llama_io import Pretrained, load
from lockstep.tasks.evaluator import Question, Result, Split
from lockstep.units import show_count

BATCH_TOKENS = 4096  # positions that are scored together
ROWS = 32  # chats that are answered together


@dataclass(frozen=True)
class LlamaExam:
    """The exam of a run with `task = "pretrain"` or `"sft"`."""

    run: Run
    folder: Path
    data: Prepared

    @property
    def next(self) -> str:
        how = '"QUESTION" --chat' if self.run.task == "sft" else '"TEXT"'
        return f"lockstep generate {self.folder} {how}"

    def held_out(self, split: Split) -> int:
        return len(getattr(self.data, split))

    def load(self, step: int, asked: Question, device: torch.device) -> Pretrained:
        if asked.average or asked.beams != 1:
            what = f"a Llama is scored as it is at one step, greedy, not with average={asked.average}, beams={asked.beams}"
            raise UsageError(what, "command line, evaluate.beams", "leave both out")
        return load(self.folder, step, device=device)

    def steps(self, loaded: Pretrained) -> Sequence[int]:
        return (loaded.step,)

    def measure(self, loaded: Pretrained, asked: Question, world: World, stopped: Callable[[], str], *, most: int = 0) -> Result | None:
        began = time.monotonic()
        stream: Stream = getattr(self.data, asked.split)
        device, length = loaded.model.embedding.weight.device, self.run.batch.length
        rows = windows(stream, length)
        if self.run.task == "sft":
            packed = PackedRows(stream, length, seed=0)
            rows = map(packed.row, range(len(packed)))
        batches = in_groups(rows, max(1, BATCH_TOKENS // length), kind=lambda row: len(row[0]))
        losses: dict[int, tuple[float, int]] = {}
        for number, batch in enumerate(batches):
            if number % world.size == world.rank and not stopped():
                losses[number] = loss_of(loaded, batch, device)
        chats = self.data.records(asked.split) if self.run.task == "sft" else []
        chosen = chats[:most] if most else chats
        questions = [last_answer(self.data.tokenizer, chat) for chat in chosen]
        renderer.close()
        answers = answered(loaded, self.data.tokenizer, questions, world, stopped) if chosen else {}
        heard = gather(world, {"losses": list(losses.items()), "answers": list(answers.items()), "stopped": stopped()})
        if any(one["stopped"] for one in heard):
            return None
        nats = math.fsum(value for one in heard for _, (value, _) in one["losses"])
        tokens = sum(count for one in heard for _, (_, count) in one["losses"])
        loss = nats / max(1, tokens)
        record: dict[str, Any] = {
            "step": loaded.step,
            **vars(asked),
            "averaged": [loaded.step],
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "tokens": tokens,
        }
        samples: list[str] = []
        if self.run.task == "sft":
            found = {row: text for one in heard for row, text in one["answers"]}
            right = [told(self.data.tokenizer, *question) for question in questions]
            record |= {
                "chats": len(chosen),
                "exact_match": sum(found[i] == text for i, text in enumerate(right)) / max(1, len(right)),
            }
            samples = list(shown(chosen, found, right))
        else:
            size = self.data.bytes[asked.split]
            record |= {"bytes": size, "bits_per_byte": nats / math.log(2) / size}
        record["seconds"] = round(time.monotonic() - began, 3)
        return Result(record, samples, complete=len(chosen) == len(chats))

    def summary(self, record: dict[str, Any]) -> str:
        head = f"step {record['step']:,}  loss {record['loss']:.4f}  perplexity {record['perplexity']:.2f}"
        if "exact_match" in record:
            return f"{head}  exact {record['exact_match']:.1%}  ({record['split']}, {show_count(record['chats'])} chats, greedy)"
        return f"{head}  {record['bits_per_byte']:.4f} bits a byte  ({record['split']}, {show_count(record['bytes'])} bytes)"


def windows(stream: Stream, length: int) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Rows that score each token of a stream once, with at least half a row before it where its document has that much.

    A row begins half a row after the one before; what that one has scored is context, its labels IGNORED.
    """
    stride = length - length // 2
    scored = 0  # positions whose labels are scored already
    for begin in range(0, max(1, stream.tokens - 1), stride):
        tokens, labels, documents = window(stream, begin, length)
        if begin + len(tokens) <= scored:
            return
        labels[: scored - begin] = IGNORED
        scored = begin + len(tokens)
        yield tokens, labels, documents


@torch.inference_mode()
def loss_of(loaded: Pretrained, rows: list[tuple[Ints, Ints, Ints]], device: torch.device) -> tuple[float, int]:
    """(the sum of -log p over the labels that count, their number)."""
    batch = batch_of(rows, device)
    count = int((batch.labels != IGNORED).sum())
    return (float(loaded.model(batch.tokens, batch.labels, batch.documents)) if count else 0.0), count


def answered(
    loaded: Pretrained,
    tokenizer: ChatTokenizer,
    questions: Sequence[tuple[list[int], list[int]]],
    world: World,
    stopped: Callable[[], str],
) -> dict[int, str]:
    """This process's share of the greedy answers to prompts, by their numbers. `questions`: (prompt, right answer)."""
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i][0]), i))
    found: dict[int, str] = {}
    decoder = Decoder(loaded.model)
    for number, first in enumerate(range(0, len(order), ROWS)):
        if number % world.size != world.rank or stopped():
            continue
        batch = order[first : first + ROWS]
        texts = ["" for _ in batch]
        tokens = max(len(questions[i][1]) for i in batch) + 8  # a longer answer is wrong anyway
        for row, text in continuations(decoder, tokenizer, [questions[i][0] for i in batch], tokens=tokens):
            texts[row] += text
        found |= dict(zip(batch, texts, strict=True))
    return found


def told(tokenizer: ChatTokenizer, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text of an answer, as it would be told if the model wrote these ids."""
    text = Text(tokenizer, prompt[-CONTEXT_TOKENS:])
    return "".join([*map(text.add, answer), text.close()])


def shown(chats: Sequence[dict[str, Any]], found: dict[int, str], right: Sequence[str], count: int = 6) -> Iterator[str]:
    """A few answers, taken evenly, with the right one where it says something else."""
    for i in range(0, len(chats), max(1, -(-len(chats) // count))):
        yield ""
        yield f"  {chats[i]['messages'][-2]['content'] if len(chats[i]['messages']) > 1 else ''}"
        same = found[i].strip() == right[i].strip() and found[i] != right[i]  # spaces differ, and must be seen
        shown_right = repr(right[i]) if same else right[i].strip()
        yield f"  > {repr(found[i]) if same else found[i].strip()}" + ("" if found[i] == right[i] else f"   (right: {shown_right})")
