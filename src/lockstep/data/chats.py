"""Chats as they are trained: which of their tokens are answers, exactly.

    chat    JSONL, plain or .gz: {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]} a line
    drills  questions made here by rule, each with one right answer, to try fine-tuning with: nothing to download

A chat is written by its model's own template, once up to where an answer begins and once to where it ends. So an answer begins where it
would when it is generated, and what is learnt of it ends with the token that ends a turn; what a template writes behind that is not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lockstep import config
from lockstep.data.chat import ChatTokenizer, Message
from lockstep.data.documents import SPLITS, Split, choose_split, files_of, lines_of
from lockstep.data.llama import Sample
from lockstep.data.order import mix
from lockstep.errors import DataError

CHATTED = datetime(2024, 7, 26)  # the day that a template which tells the day is given: Llama 3.1's own default


@dataclass(frozen=True)
class Chat:
    """Its messages up to the last answer, and where it comes from, for people."""

    messages: list[Message]
    where: str


def chats(data: config.Data, left_out: Counter[str]) -> Iterator[tuple[Split, Chat]]:
    """Every chat with its split, as `documents` has it. Those without an answer are counted. DataError: a line is no chat."""
    named = [split for split in SPLITS if getattr(data, split)] if data.kind == "chat" else []
    for split in named or SPLITS[:1]:
        found = drills(data.pairs) if data.kind == "drills" else read_chats(data, split)
        for chat in found:
            while chat.messages and chat.messages[-1]["role"] != "assistant":
                chat.messages.pop()
            if not chat.messages:
                left_out["without an answer"] += 1
                continue
            chosen = choose_split(json.dumps(chat.messages), data.held_out_share) if split == "train" else split
            yield ("train" if split == "train" and chosen in named else chosen), chat


def read_chats(data: config.Data, split: Split) -> Iterator[Chat]:
    """The chats in the files of a split."""
    for path in files_of(data, split):
        for number, line in enumerate(lines_of(path), start=1):
            if line.strip():
                yield Chat(messages_in(line, f"{path}, line {number:,}"), f"{path}, line {number:,}")


def messages_in(line: bytes, where: str) -> list[Message]:
    """The messages in a line of JSON. DataError when it is none."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"this is no JSON: {error}", where, "one object a line") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(is_message(one) for one in messages):
        raise DataError(
            f"this is no chat: {line[:80].decode(errors='replace')!r}",
            where,
            'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        )
    return [{"role": one["role"], "content": one["content"]} for one in messages]


def is_message(one: Any) -> bool:
    return isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)


def encode(tokenizer: ChatTokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """(the ids of a chat up to the end of its last answer, which of them are learnt).

    DataError: the template does not write a longer chat as a continuation of a shorter one, or ends an answer with no token.
    """
    ids: list[int] = []
    counts: list[bool] = []
    written = ""
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(chat.messages[:number], now=lambda: CHATTED)
        whole = tokenizer.render(chat.messages[: number + 1], answer=False, now=lambda: CHATTED)
        if not prompt.startswith(written) or not whole.startswith(prompt):
            raise DataError(
                f"the chat template does not write answer {number + 1} behind what was said before it",
                f"{chat.where}; {tokenizer.folder}",
                "use a template that leaves earlier turns as they are",
            )
        before, answer = (
            tokenizer.inner.encode(text, add_special_tokens=False).ids for text in (prompt[len(written) :], whole[len(prompt) :])
        )
        end = next((place for place, token in enumerate(answer) if token in tokenizer.ends), None)
        if end is None:
            raise DataError(
                "the chat template ends an answer with no token that ends a turn",
                f"{chat.where}; {tokenizer.folder}",
                "name that token in eos_token_id of generation_config.json, beside the tokenizer",
            )
        ids += [*before, *answer]
        counts += [*[False] * len(before), *[True] * (end + 1), *[False] * (len(answer) - end - 1)]
        written = whole
    return ids, counts


def chat_samples(tokenizer: ChatTokenizer, data: config.Data, length: int, left_out: Counter[str]) -> Iterator[Sample]:
    """Each chat as it is trained; those that do not fit into a row of `length` are counted."""
    for split, chat in chats(data, left_out):
        ids, counts = encode(tokenizer, chat)
        if len(ids) > length + 1:  # the last one is only predicted
            left_out[f"longer than a row of {length} tokens"] += 1
            continue
        size = sum(len(m["content"].encode()) for m in chat.messages if m["role"] == "assistant")
        yield Sample(split, ids, counts, {"messages": chat.messages}, size)


# -- drills -----------------------------------------------------------------------------------------------------------


def drills(count: int) -> Iterator[Chat]:
    """`count` questions with their answers, the same ones always: which number is larger, what follows it, a small sum."""
    for number in range(count):
        kind, first, second = (mix(0xD811, number, place) for place in range(3))
        a, b = 10 + first % 90, 10 + second % 90
        question, answer = (
            (f"Which is larger, {a} or {b}?", str(max(a, b))),
            (f"What comes after {a}{b % 10}?", f"{10 * a + b % 10 + 1}."),
            (f"How much is {a} + {b % 10}?", f"{a} + {b % 10} = {a + b % 10}"),
        )[kind % 3]
        yield Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], f"drill {number}")
