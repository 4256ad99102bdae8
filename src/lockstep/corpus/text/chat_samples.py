"""Training samples from chats: token ids, and a loss mask over exactly the answers.

    chat    JSONL or a JSON array, plain or .gz, Parquet, a dataset on disk; records in one of
            CHAT_FORMS
    drills  generated questions with one correct answer each, to try fine-tuning without a download

The chat template of the model renders a chat, which is tokenized as a whole. The ids before an
answer must equal the ids of its prompt at generation. The loss mask is the text in the template's
`{% generation %}` tags; without tags the answers, each with the token that ends its turn. A part
that the template does not render (tools, names, a role) is an error.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any

from lockstep.config import schema as config
from lockstep.corpus.pairs.textfiles import parse_json_line
from lockstep.corpus.text.chat_template import GENERATION, MARKS
from lockstep.corpus.text.chat_tokenizer import ChatTokenizer, Message
from lockstep.corpus.text.documents import Split, choose_split, files_of, splits_of
from lockstep.corpus.text.prepare import Sample
from lockstep.corpus.text.record_files import records_of
from lockstep.data.order import splitmix64
from lockstep.errors import DataError
from lockstep.log import log

SPLIT_TOKEN = "with an answer that starts inside a token"
RENDER_DATE = datetime(2024, 7, 26)  # date for templates that print one: the default of Llama 3.1


@dataclass(frozen=True)
class Chat:
    """A chat up to its last trained answer. where: source for messages; tools: for the prompt."""

    messages: list[Message]
    where: str
    tools: list[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages with a loss: answers, without those of weight 0."""
        return [
            number
            for number, m in enumerate(self.messages)
            if m["role"] == "assistant" and m.get("weight", 1)
        ]


def chats(data: config.DataOptions, dropped: Counter[str]) -> Iterator[tuple[Split, Chat]]:
    """Yield every chat with its split; drop and count chats without an answer. DataError."""
    named = splits_of(data)
    for split in named:
        records = (
            record
            for path in ([] if data.kind == "drills" else files_of(data, split))
            for record in records_of(path)
        )
        for chat in (
            drills(data.pairs)
            if data.kind == "drills"
            else (parse_chat(line, where) for where, line in records)
        ):
            del chat.messages[max(chat.answers, default=-1) + 1 :]
            if not chat.messages:
                dropped["without an answer"] += 1
                continue
            chosen = (
                choose_split(json.dumps(chat.messages), data.held_out_share)
                if split == "train"
                else split
            )
            yield ("train" if split == "train" and chosen in named else chosen), chat


CHAT_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, also from system, tool and observation',
    '{"instruction": "...", "input": "...", "output": "..."}; the input may be missing',
    '{"prompt": "...", "completion": "..."}, both texts or both lists of messages',
)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
SHAREGPT_ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}
UNSUPPORTED_KEYS = (
    "functions",
    "documents",
    "chat_template_kwargs",
    "weight",
    "history",
)  # of a chat; unknown keys are ignored


def messages_of(record: Any) -> list[Any] | None:
    """Return the messages of a record in one of CHAT_FORMS; None if its keys are of none."""
    system = record.get("system") if isinstance(record, dict) else None
    match record:
        case {"messages": [*messages]}:
            pass
        case {"conversations": [*turns]} if all(isinstance(turn, dict) for turn in turns):
            renamed = [
                {
                    {"from": "role", "value": "content"}.get(key, key): value
                    for key, value in turn.items()
                }
                for turn in turns
            ]
            messages = [
                turn | {"role": SHAREGPT_ROLES.get(str(turn.get("role")))} for turn in renamed
            ]
        case {"instruction": str(instruction), "output": str(output)} if isinstance(
            record.get("input") or "", str
        ):
            question = (
                f"{instruction}\n\n{given}" if (given := record.get("input")) else instruction
            )
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": output},
            ]
        case {"prompt": str(prompt), "completion": str(completion)}:
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
        case {"prompt": [*before], "completion": [*after]}:  # only the completion is trained
            is_answer = [
                isinstance(message, dict) and message.get("role") == "assistant"
                for message in before
            ]
            messages = [
                {**message, "weight": 0} if answer else message
                for message, answer in zip(before, is_answer, strict=True)
            ] + after
        case _:
            return None
    first = {"role": "system", "content": system}
    return [first, *messages] if system and messages[:1] != [first] else messages


def parse_chat(line: bytes, where: str) -> Chat:
    """Return the chat in a line of JSON. Null and empty keys count as absent. DataError."""
    record = parse_json_line(line, where)
    messages = messages_of(record)
    messages = messages and [with_text(message, where) for message in messages]
    if messages is None or not all(map(is_message, messages)):
        keys = (
            f"an object with the keys {', '.join(record) or 'none'}"
            if isinstance(record, dict)
            else f"a {type(record).__name__}"
        )
        what = f"not a chat, but {keys}: {line[:80].decode(errors='replace')!r}"
        raise DataError(what, where, "\n".join(["write one of these forms:", *CHAT_FORMS]))
    if unsupported := [key for key in UNSUPPORTED_KEYS if record.get(key)]:
        raise DataError(
            f"the chat has {unsupported[0]!r}, which is not supported",
            where,
            "remove it; tools go into 'tools'",
        )
    tools = record.get("tools") or None
    if not isinstance(tools, list | None):
        raise DataError(f"'tools' is {json.dumps(tools)[:80]}", where, "write a list of objects")
    cleaned: list[Message] = [
        {
            key: value
            for key, value in message.items()
            if key == "content" or value not in (None, "", [], {})
        }
        for message in messages
    ]
    for number, message in enumerate(cleaned, start=1):
        if message.get("weight", 1) not in (0, 1) or (
            "weight" in message and message["role"] != "assistant"
        ):
            what = f"message {number} of role {message['role']!r} has the weight {json.dumps(message['weight'])}"
            raise DataError(
                what, where, "set a weight only for answers: 1 to train on it, 0 to skip it"
            )
    return Chat(cleaned, where, tools)


def with_text(message: Any, where: str) -> Any:
    """Return a message whose content is a list of text parts with their text. DataError: other
    parts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return message
    texts = []
    for part in parts:
        more = [key for key, value in part.items() if key not in ("type", "text") and value]
        if part.get("type") != "text" or more or not isinstance(part.get("text"), str):
            what = f"the content of a message has the part {json.dumps(part)[:80]}"
            raise DataError(
                what,
                where,
                'only parts {"type": "text", "text": "..."} are read: remove the others',
            )
        texts.append(part["text"])
    return message | {"content": "".join(texts)} if texts else message


def is_message(value: Any) -> bool:
    """Whether a JSON value is a message. Only an answer that calls tools may have no text."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    calls_tools = (
        value.get("content") is None
        and value["role"] == "assistant"
        and bool(value.get("tool_calls"))
    )
    return isinstance(value.get("content"), str) or calls_tools


class SplitTokenError(DataError):
    """An answer starts inside a token of the chat: at generation, other ids would precede it."""


def render(tokenizer: ChatTokenizer, messages: list[Message], tools: list[Any] | None) -> str:
    return tokenizer.render(
        messages, add_generation_prompt=False, now=lambda: RENDER_DATE, tools=tools
    )


def refuse_unrendered(tokenizer: ChatTokenizer, chat: Chat) -> None:
    """DataError if the template does not render a part of the chat (its text is the same without),
    or an answer contains the end of a turn."""

    whole = render(tokenizer, chat.messages, chat.tools)
    without: list[tuple[str, list[Message], list[Any] | None]] = (
        [("'tools'", chat.messages, None)] if chat.tools else []
    )
    for number, message in enumerate(chat.messages):
        before, after = chat.messages[:number], chat.messages[number + 1 :]
        for key in message.keys() - {"role", "content", "weight"}:
            reduced = {other: value for other, value in message.items() if other != key}
            without.append(
                (f"{key!r} of message {number + 1}", [*before, reduced, *after], chat.tools)
            )
        if (text := (message.get("content") or "").strip()) and text not in whole:
            without.append(
                (
                    f"message {number + 1}, of role {message['role']!r}",
                    [*before, *after],
                    chat.tools,
                )
            )
    eos_tokens = [
        token for token in map(tokenizer.inner.id_to_token, sorted(tokenizer.eos_ids)) if token
    ]
    for number in chat.answers:
        if contained := [
            token for token in eos_tokens if token in (chat.messages[number].get("content") or "")
        ]:
            what = f"answer {number + 1} contains {contained[0]!r}, the token that ends a turn: the text after it would not be trained"
            raise DataError(
                what,
                f"{chat.where}; {tokenizer.folder}",
                "remove it from the text; the template adds it",
            )
    for what, messages, tools in without:
        try:
            is_rendered = render(tokenizer, messages, tools) != whole
        except DataError:  # the template needs the removed part
            is_rendered = True
        if not is_rendered:
            hint = "remove it from the chat, or use a model whose template renders it"
            raise DataError(
                f"the chat template does not render {what}",
                f"{chat.where}; {tokenizer.folder}",
                hint,
            )


def encode(tokenizer: ChatTokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return (ids, loss mask) of a chat up to the end of its last answer.

    DataError: the template writes only a part of an answer, it rewrites earlier turns and has no
    `{% generation %}` tags, or it does not end an answer with an eos token. SplitTokenError: the
    ids before an answer differ from the ids of its prompt.
    """
    inner, last = tokenizer.inner, max(chat.answers)
    whole = render(tokenizer, chat.messages[: last + 1], chat.tools)
    encoding = inner.encode(whole, add_special_tokens=False)
    ids: list[int] = encoding.ids
    loss_mask = [False] * len(ids)
    spans = tagged_spans(tokenizer, chat, whole) if GENERATION.search(tokenizer.template) else None
    starts, stops = [start for start, _ in encoding.offsets], [stop for _, stop in encoding.offsets]
    for first, stop in spans or ():
        span = slice(bisect_right(stops, first), bisect_left(starts, stop))
        loss_mask[span] = [True] * len(ids[span])
    for number in chat.answers:
        prompt = tokenizer.render(chat.messages[:number], now=lambda: RENDER_DATE, tools=chat.tools)
        turn = render(tokenizer, chat.messages[: number + 1], chat.tools)
        refuse_cut_answer(tokenizer, chat, number, turn, prompt)
        if not turn.startswith(prompt) or not whole.startswith(turn):
            if spans is not None and number < last:
                refuse_cut_answer(tokenizer, chat, number, whole, prompt)
                continue  # rewritten in later turns, and trained as the tags mark it there
            what = f"the chat template does not append answer {number + 1} to the turns before it"
            raise DataError(
                what,
                f"{chat.where}; {tokenizer.folder}",
                "use a template that does not rewrite earlier turns",
            )
        prompt_ids = inner.encode(prompt, add_special_tokens=False).ids
        if ids[: len(prompt_ids)] != prompt_ids:
            context = whole[max(0, len(prompt) - 10) : len(prompt) + 10]
            what = f"answer {number + 1} starts inside a token: {context!r}"
            hint = "start the answer with other characters, or use a template that ends its prompt with a special token or a line break"
            raise SplitTokenError(what, f"{chat.where}; {tokenizer.folder}", hint)
        answer = (i for i in range(len(prompt_ids), len(ids)) if starts[i] < len(turn))
        end = next((i for i in answer if ids[i] in tokenizer.eos_ids), None)
        if end is None or (spans is not None and number == last and not loss_mask[end]):
            what = (
                "the chat template does not end an answer with an eos token"
                + " inside its generation tags" * (end is not None)
            )
            hint = "set eos_token_id in the generation_config.json beside the tokenizer"
            raise DataError(what, f"{chat.where}; {tokenizer.folder}", hint)
        if spans is None:
            loss_mask[len(prompt_ids) : end + 1] = [True] * (end + 1 - len(prompt_ids))
    return ids, loss_mask


def refuse_cut_answer(
    tokenizer: ChatTokenizer, chat: Chat, number: int, rendered: str, prompt: str
) -> None:
    """DataError: `rendered` has only a part of the answer's text; white space may differ."""
    text = (chat.messages[number].get("content") or "").strip()
    if text in rendered.removeprefix(prompt):
        return
    before = render(
        tokenizer, chat.messages[:number], chat.tools
    )  # a prompt may end with words of the answer
    position = len(before) if rendered.startswith(before) else 0
    for word in re.finditer(r"\w+|[^\w\s]", text):
        found = rendered.find(word.group(), position)
        if found < 0:
            part = text[: word.end()].split()[-1] + text[word.end() :]
            what = f"the chat template drops a part of answer {number + 1}: {part[:60]!r} is not written"
            hint = "remove it from the chat, or use a template that writes it"
            raise DataError(what, f"{chat.where}; {tokenizer.folder}", hint)
        position = found + len(word.group())


def tagged_spans(tokenizer: ChatTokenizer, chat: Chat, whole: str) -> list[tuple[int, int]]:
    """Return first and last + 1 character of each text of `whole` in `{% generation %}` tags,
    without answers of weight 0. DataError."""
    messages = chat.messages[: max(chat.answers) + 1]
    marked = tokenizer.render(
        messages,
        add_generation_prompt=False,
        now=lambda: RENDER_DATE,
        tools=chat.tools,
        marked=True,
    )
    pieces = re.split(f"[{''.join(MARKS)}]", marked)
    bounds = list(accumulate(map(len, pieces)))[:-1]
    spans = list(zip(bounds[::2], bounds[1::2], strict=False))
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if "".join(pieces) != whole or (len(spans) != len(answers) > len(chat.answers)):
        what = "the chat template changes the text of its generation tags"
        if "".join(pieces) == whole:
            what = f"the chat template marks {len(spans)} texts of {len(answers)} answers, of which some have the weight 0"
        raise DataError(
            what,
            f"{chat.where}; {tokenizer.folder}",
            "remove the tags, or put one pair of them around each answer",
        )
    return (
        [span for span, number in zip(spans, answers, strict=True) if number in chat.answers]
        if len(spans) == len(answers)
        else spans
    )


def last_answer(tokenizer: ChatTokenizer, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return (prompt ids, ids of the last answer without its eos token) of a held-out chat."""
    chat = Chat(record["messages"], "a held-out chat", record.get("tools"))
    ids, _ = encode(tokenizer, chat)
    start = len(
        tokenizer.encode_chat(chat.messages[:-1], now=lambda: RENDER_DATE, tools=chat.tools)
    )
    return ids[:start], ids[
        start : next(i for i in range(start, len(ids)) if ids[i] in tokenizer.eos_ids)
    ]


def shortened(
    tokenizer: ChatTokenizer, chat: Chat, limit: int
) -> tuple[Chat, list[int], list[bool]] | None:
    """Return the chat up to its last answer that ends within `limit` tokens, with ids and loss
    mask; None if no answer does."""
    for number in reversed(chat.answers):
        shorter = Chat(chat.messages[: number + 1], chat.where, chat.tools)
        ids, loss_mask = encode(tokenizer, shorter)
        if len(ids) <= limit:
            return shorter, ids, loss_mask
    return None


def chat_samples(
    tokenizer: ChatTokenizer, data: config.DataOptions, length: int, dropped: Counter[str]
) -> Iterator[Sample]:
    """Yield each chat as a sample. Drop or cut those longer than a row of `length` tokens, and
    count them. A held-out chat is cut after an answer, since a part of an answer cannot be
    scored."""
    where = "the text in the generation tags of the chat template"
    log.info(
        "loss on %s",
        where
        if GENERATION.search(tokenizer.template)
        else "the answers: the chat template has no generation tags",
    )
    cut, limit = 0, length + 1  # the last id is only a label
    for split, chat in chats(data, dropped):
        refuse_unrendered(tokenizer, chat)
        try:
            ids, loss_mask = encode(tokenizer, chat)
        except SplitTokenError as error:
            if not dropped[SPLIT_TOKEN]:
                log.warning("dropped: %s (%s); %s", error.what, error.where, error.hint)
            dropped[SPLIT_TOKEN] += 1
            continue
        if len(ids) > limit:
            shorter = None if data.truncation == "drop" else shortened(tokenizer, chat, limit)
            if data.truncation == "right" and split == "train":
                shorter = chat, ids[:limit], loss_mask[:limit]
            if shorter is None or not any(shorter[2][1:]):
                dropped[f"longer than a row of {length} tokens"] += 1
                continue
            (chat, ids, loss_mask), cut = shorter, cut + 1
        size = sum(
            len((chat.messages[number].get("content") or "").encode()) for number in chat.answers
        )
        tools = {"tools": chat.tools} if chat.tools else {}
        yield Sample(split, ids, loss_mask, {"messages": chat.messages, **tools}, size)
    if cut:
        log.info(
            "cut: %d longer than a row of %d tokens (data.truncation = %s)",
            cut,
            length,
            data.truncation,
        )


def drills(count: int) -> Iterator[Chat]:
    """Yield `count` fixed questions with answers: compare two numbers, count by one, add."""
    for number in range(count):
        kind, first, second = (splitmix64(0xD811, number, i) for i in range(3))
        a, b = 10 + first % 90, 10 + second % 90
        question, answer = (
            (f"Which is larger, {a} or {b}?", str(max(a, b))),
            (f"What comes after {a}{b % 10}?", f"{10 * a + b % 10 + 1}."),
            (f"How much is {a} + {b % 10}?", f"{a} + {b % 10} = {a + b % 10}"),
        )[kind % 3]
        yield Chat(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            f"drill {number}",
        )
