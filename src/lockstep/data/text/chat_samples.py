"""Chats as they are trained: which of their tokens are answers, exactly.

    chat    JSONL, plain or .gz: {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]} a line
    drills  questions made here by rule, each with one right answer, to try fine-tuning with: nothing to download

A chat is written by its model's own template and tokenized once, as a whole. Each answer must begin where it would when it is generated:
the ids of the chat up to there are the ids of the prompt. What is learnt of an answer ends with the token that ends a turn. What a
template does not write (tools, names, a role) is refused by its name.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lockstep.config import schema as config
from lockstep.data.order import mix
from lockstep.data.pairs.textfiles import json_in
from lockstep.data.text.chat_tokenizer import ChatTokenizer, Message
from lockstep.data.text.documents import Split, choose_split, files_of, records_of, splits_of
from lockstep.data.text.prepare import Sample
from lockstep.errors import DataError

log = logging.getLogger("lockstep")

SPLIT_TOKEN = "with an answer that begins inside a token"
CHATTED = datetime(2024, 7, 26)  # the day that a template which tells the day is given: Llama 3.1's own default


@dataclass(frozen=True)
class Chat:
    """The messages up to the last answer that is trained on, the source for messages to users, and the tools that the prompt lists."""

    messages: list[Message]
    where: str
    tools: list[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """The numbers of the messages that are learnt: a weight of 0 leaves an answer out."""
        return [number for number, m in enumerate(self.messages) if m["role"] == "assistant" and m.get("weight", 1)]


def chats(data: config.Data, left_out: Counter[str]) -> Iterator[tuple[Split, Chat]]:
    """Every chat with its split, as `documents` has it. Those without an answer are counted. DataError: a line is no chat."""
    named = splits_of(data)
    for split in named:
        found = drills(data.pairs) if data.kind == "drills" else read_chats(data, split)
        for chat in found:
            del chat.messages[max(chat.answers, default=-1) + 1 :]
            if not chat.messages:
                left_out["without an answer"] += 1
                continue
            chosen = choose_split(json.dumps(chat.messages), data.held_out_share) if split == "train" else split
            yield ("train" if split == "train" and chosen in named else chosen), chat


def read_chats(data: config.Data, split: Split) -> Iterator[Chat]:
    """The chats in the files of a split."""
    for path in files_of(data, split):
        yield from (chat_in(line, where) for where, line in records_of(path))


SHAPE_OF_A_CHAT = 'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
REFUSED = ("functions", "documents", "chat_template_kwargs", "weight")  # beside the messages; other keys there are notes


def chat_in(line: bytes, where: str) -> Chat:
    """The chat in a line of JSON. DataError when it is none. A key that is null or empty counts as absent."""
    found = json_in(line, where)
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(is_message(one) for one in messages):
        raise DataError(f"this is no chat: {line[:80].decode(errors='replace')!r}", where, SHAPE_OF_A_CHAT)
    if refused := [key for key in REFUSED if found.get(key)]:
        raise DataError(f"the chat has {refused[0]!r}, which is not read", where, "remove it; tools go into 'tools'")
    tools = found.get("tools") or None
    if not isinstance(tools, list | None):
        raise DataError(f"'tools' is {json.dumps(tools)[:80]}", where, "write a list of objects")
    kept: list[Message] = [
        {key: value for key, value in one.items() if key == "content" or value not in (None, "", [], {})} for one in messages
    ]
    for number, one in enumerate(kept, start=1):
        if one.get("weight", 1) not in (0, 1) or ("weight" in one and one["role"] != "assistant"):
            what = f"message {number} of role {one['role']!r} has the weight {json.dumps(one['weight'])}"
            raise DataError(what, where, "give an answer the weight 1 to learn it, 0 to leave it out, and no other message one")
    return Chat(kept, where, tools)


def is_message(one: Any) -> bool:
    """Only an answer that calls tools may have no text."""
    if not isinstance(one, dict) or not isinstance(one.get("role"), str):
        return False
    return isinstance(one.get("content"), str) or (
        one.get("content") is None and one["role"] == "assistant" and bool(one.get("tool_calls"))
    )


class SplitToken(DataError):
    """An answer that begins inside a token of the whole chat: generated, it would follow other ids than those it was trained behind."""


def refuse_unwritten(tokenizer: ChatTokenizer, chat: Chat) -> None:
    """DataError names what of a chat the template does not write, or would not be learnt: the model would learn something else."""

    def written(messages: list[Message], tools: list[Any] | None) -> str:
        try:
            return tokenizer.render(messages, answer=False, now=lambda: CHATTED, tools=tools)
        except DataError:
            return ""  # the template looks at what was taken away

    whole = tokenizer.render(chat.messages, answer=False, now=lambda: CHATTED, tools=chat.tools)
    without: list[tuple[str, list[Message], list[Any] | None]] = [("'tools'", chat.messages, None)] if chat.tools else []
    for number, message in enumerate(chat.messages):
        before, after = chat.messages[:number], chat.messages[number + 1 :]
        for key in message.keys() - {"role", "content", "weight"}:
            less = {other: value for other, value in message.items() if other != key}
            without.append((f"{key!r} of message {number + 1}", [*before, less, *after], chat.tools))
        if (text := (message.get("content") or "").strip()) and text not in whole:
            without.append((f"message {number + 1}, of role {message['role']!r}", [*before, *after], chat.tools))
    ends = [token for token in map(tokenizer.inner.id_to_token, sorted(tokenizer.ends)) if token]
    for number in chat.answers:
        if typed := [token for token in ends if token in (chat.messages[number].get("content") or "")]:
            what = f"answer {number + 1} contains {typed[0]!r}, the token that ends a turn: nothing behind it would be learnt"
            raise DataError(what, f"{chat.where}; {tokenizer.folder}", "remove it from the text; the template writes it")
    for what, messages, tools in without:
        if written(messages, tools) == whole:
            hint = "remove it from the chat, or use a model whose template writes it"
            raise DataError(f"the chat template does not write {what}", f"{chat.where}; {tokenizer.folder}", hint)


def encode(tokenizer: ChatTokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """(the ids of a chat up to the end of its last answer, which of them are learnt).

    DataError: the template does not write a longer chat as a continuation of a shorter one, or ends an answer with no token.
    SplitToken: the ids of the chat up to an answer are not those of the prompt that it would be generated from.
    """
    inner = tokenizer.inner
    whole = tokenizer.render(chat.messages[: max(chat.answers) + 1], answer=False, now=lambda: CHATTED, tools=chat.tools)
    encoding = inner.encode(whole, add_special_tokens=False)
    ids: list[int] = encoding.ids
    counts = [False] * len(ids)
    for number in chat.answers:
        prompt = tokenizer.render(chat.messages[:number], now=lambda: CHATTED, tools=chat.tools)
        until = tokenizer.render(chat.messages[: number + 1], answer=False, now=lambda: CHATTED, tools=chat.tools)
        if not until.startswith(prompt) or not whole.startswith(until):
            what = f"the chat template does not write answer {number + 1} behind what was said before it"
            raise DataError(what, f"{chat.where}; {tokenizer.folder}", "use a template that leaves earlier turns as they are")
        before = inner.encode(prompt, add_special_tokens=False).ids
        if ids[: len(before)] != before:
            near = whole[max(0, len(prompt) - 10) : len(prompt) + 10]
            what = f"answer {number + 1} begins inside a token: {near!r}"
            hint = "begin the answer with other characters, or use a template that ends its prompt with a special token or a line break"
            raise SplitToken(what, f"{chat.where}; {tokenizer.folder}", hint)
        inside = (place for place in range(len(before), len(ids)) if encoding.offsets[place][0] < len(until))
        end = next((place for place in inside if ids[place] in tokenizer.ends), None)
        if end is None:
            what = "the chat template ends an answer with no token that ends a turn"
            hint = "name that token in eos_token_id of generation_config.json, beside the tokenizer"
            raise DataError(what, f"{chat.where}; {tokenizer.folder}", hint)
        counts[len(before) : end + 1] = [True] * (end + 1 - len(before))
    return ids, counts


def last_answer(tokenizer: ChatTokenizer, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(the prompt, the last answer without its end) of a held-out chat, in the ids that it would be trained with."""
    chat = Chat(record["messages"], "a held-out chat", record.get("tools"))
    ids, counts = encode(tokenizer, chat)
    begin = len(tokenizer.encode_chat(chat.messages[:-1], now=lambda: CHATTED, tools=chat.tools))
    return ids[:begin], ids[begin : len(counts) - 1 - counts[::-1].index(True)]


def chat_samples(tokenizer: ChatTokenizer, data: config.Data, length: int, left_out: Counter[str]) -> Iterator[Sample]:
    """Each chat as it is trained; those that do not fit into a row of `length` are counted."""
    for split, chat in chats(data, left_out):
        refuse_unwritten(tokenizer, chat)
        try:
            ids, counts = encode(tokenizer, chat)
        except SplitToken as error:
            if not left_out[SPLIT_TOKEN]:
                log.warning("left out: %s (%s); %s", error.what, error.where, error.hint)
            left_out[SPLIT_TOKEN] += 1
            continue
        if len(ids) > length + 1:  # the last one is only predicted
            left_out[f"longer than a row of {length} tokens"] += 1
            continue
        size = sum(len((chat.messages[number].get("content") or "").encode()) for number in chat.answers)
        tools = {"tools": chat.tools} if chat.tools else {}
        yield Sample(split, ids, counts, {"messages": chat.messages, **tools}, size)


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
