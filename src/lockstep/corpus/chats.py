"""Training samples from chats: token ids, and a loss mask over exactly the answers.

    chat    JSONL or a JSON array, plain or .gz, Parquet, a dataset on disk; records in one of
            CHAT_FORMS
    drills  generated questions with one correct answer each, to try fine-tuning without a download

The chat template of the model renders a chat, which is tokenized as a whole. The ids before an
answer must equal the ids of its prompt at generation. The loss mask is the text in the template's
`{% generation %}` tags; without tags the answers, each with the token that ends its turn. A chat
whose earlier turns the template rewrites (without their thoughts, as Qwen 3) is several samples
then, each up to an answer as it is generated. A part that the template does not render (tools,
names, a role) is an error.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, product
from typing import Any

from lockstep.config import schema as config
from lockstep.corpus.chat_template import GENERATION, MARKS
from lockstep.corpus.chat_tokenizer import ChatTokenizer, Message
from lockstep.corpus.documents import Split, choose_split, files_of, splits_of
from lockstep.corpus.files import records_of
from lockstep.corpus.prepared import Sample
from lockstep.data.order import splitmix64
from lockstep.errors import DataError
from lockstep.log import log
from lockstep.units import shorten

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
        for chat in chats_of_split(data, split):
            del chat.messages[max(chat.answers, default=-1) + 1 :]
            if not chat.messages:
                dropped["without an answer"] += 1
            elif split != "train":
                yield split, chat
            else:
                chosen = choose_split(json.dumps(chat.messages), data.held_out_share)
                yield ("train" if chosen in named else chosen), chat


def chats_of_split(data: config.DataOptions, split: Split) -> Iterator[Chat]:
    if data.kind == "drills":
        yield from drills(data.pairs)
        return
    for path in files_of(data).get(split, ()):
        for where, record in records_of(path):
            yield parse_chat(record, where)


CHAT_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, '
    "also from system, tool and observation",
    '{"instruction": "...", "input": "...", "output": "..."}; the input may be missing',
    '{"prompt": "...", "completion": "..."}, both texts or both lists of messages',
)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
SHAREGPT_ROLES |= {role: role for role in ("user", "assistant", "system", "tool")}
# Of a chat; unknown keys are ignored.
UNSUPPORTED_KEYS = ("functions", "documents", "chat_template_kwargs", "weight", "history")
EMPTY: tuple[Any, ...] = (None, "", [], {})


def messages_of(record: Any) -> list[Any] | None:
    """Return the messages of a record in one of CHAT_FORMS; None if its keys are of none."""
    match record:
        case {"messages": [*messages]}:
            pass
        case {"conversations": [*turns]} if all(isinstance(turn, dict) for turn in turns):
            names = {"from": "role", "value": "content"}
            renamed = [{names.get(key, key): turn[key] for key in turn} for turn in turns]
            messages = [
                turn | {"role": SHAREGPT_ROLES.get(str(turn.get("role")))} for turn in renamed
            ]
        case {"instruction": str(question), "output": str(output)} if isinstance(
            given := record.get("input") or "", str
        ):
            messages = question_and_answer(f"{question}\n\n{given}" if given else question, output)
        case {"prompt": str(prompt), "completion": str(completion)}:
            messages = question_and_answer(prompt, completion)
        case {"prompt": [*before], "completion": [*after]}:  # only the completion is trained
            messages = [
                {**message, "weight": 0}
                if isinstance(message, dict) and message.get("role") == "assistant"
                else message
                for message in before
            ] + after
        case _:
            return None
    first = {"role": "system", "content": record.get("system")}
    return [first, *messages] if first["content"] and messages[:1] != [first] else messages


def question_and_answer(question: str, answer: str) -> list[Any]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def parse_chat(record: Any, where: str) -> Chat:
    """Return the chat of a record. Null and empty keys count as absent. DataError."""
    messages = messages_of(record)
    messages = messages and [with_text(message, where) for message in messages]
    if messages is None or not all(map(is_message, messages)):
        what = f"not a chat, but a {type(record).__name__}"
        if isinstance(record, dict):
            what = f"not a chat, but an object with the keys {', '.join(record) or 'none'}"
        raise DataError(
            f"{what}: {shorten(record)}",
            where,
            "\n".join(["write one of these forms:", *CHAT_FORMS]),
        )
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
        {key: message[key] for key in message if key == "content" or message[key] not in EMPTY}
        for message in messages
    ]
    for number, message in enumerate(cleaned, start=1):
        weights = (0, 1) if message["role"] == "assistant" else ()
        if "weight" in message and message["weight"] not in weights:
            weight = json.dumps(message["weight"])
            raise DataError(
                f"message {number} of role {message['role']!r} has the weight {weight}",
                where,
                "set a weight only for answers: 1 to train on it, 0 to skip it",
            )
    return Chat(cleaned, where, tools)


def with_text(message: Any, where: str) -> Any:
    """Return a message whose content is a list of text parts with their text. DataError: other
    parts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return message
    if not parts:
        return message
    for part in parts:
        keys = {key for key, value in part.items() if value} - {"type", "text"}
        if part.get("type") != "text" or keys or not isinstance(part.get("text"), str):
            raise DataError(
                f"the content of a message has the part {json.dumps(part)[:80]}",
                where,
                'only parts {"type": "text", "text": "..."} are read: remove the others',
            )
    return message | {"content": "".join(part["text"] for part in parts)}


def is_message(value: Any) -> bool:
    """Whether a JSON value is a message. Only an answer that calls tools may have no text."""
    match value:
        case {"role": str(), "content": str()}:
            return True
        case {"role": "assistant", "tool_calls": calls}:
            return value.get("content") is None and bool(calls)
    return False


class SplitTokenError(DataError):
    """An answer starts inside a token of the chat: at generation, other ids would precede it."""


class RewrittenTurnError(DataError):
    """The chat template renders an answer in another way when turns follow it."""


def render(
    tokenizer: ChatTokenizer,
    chat: Chat,
    end: int | None = None,
    *,
    prompt: bool = False,
    marked: bool = False,
) -> str:
    """Render the messages before number `end`; with `prompt`, up to the start of an answer."""
    return tokenizer.render(
        chat.messages[:end],
        add_generation_prompt=prompt,
        now=RENDER_DATE,
        tools=chat.tools,
        marked=marked,
    )


def problem(tokenizer: ChatTokenizer, chat: Chat, what: str, hint: str) -> DataError:
    return DataError(what, f"{chat.where}; {tokenizer.folder}", hint)


def text_of(message: Message) -> str:
    return str(message.get("content") or "")


def parts_of(chat: Chat, rendered: str) -> Iterator[tuple[str, int, Chat]]:
    """Yield (name, number of its message, the chat without it) of each part of a chat that a
    template may leave out."""
    if chat.tools:
        yield "'tools'", 0, replace(chat, tools=None)
    for number, message in enumerate(chat.messages):
        before, after = chat.messages[:number], chat.messages[number + 1 :]
        for key in message.keys() - {"role", "content", "weight"}:
            reduced = {other: value for other, value in message.items() if other != key}
            name = f"{key!r} of message {number + 1}"
            yield name, number, replace(chat, messages=[*before, reduced, *after])
        if text_of(message).strip() not in rendered:
            name = f"message {number + 1}, of role {message['role']!r}"
            yield name, number, replace(chat, messages=[*before, *after])


def unrendered_parts(tokenizer: ChatTokenizer, chat: Chat) -> dict[str, int]:
    """Return the names of the parts without which the text is the same, with the numbers of their
    messages."""
    whole = render(tokenizer, chat)
    unrendered = {}
    for name, number, without in parts_of(chat, whole):
        try:
            is_rendered = render(tokenizer, without) != whole
        except DataError:  # the template needs the removed part
            is_rendered = True
        if not is_rendered:
            unrendered[name] = number
    return unrendered


def refuse_unrendered(tokenizer: ChatTokenizer, chat: Chat) -> None:
    """DataError if the template renders a part of the chat neither in the whole nor up to any
    trained answer, or an answer contains the end of a turn."""
    eos_tokens = filter(None, map(tokenizer.inner.id_to_token, sorted(tokenizer.eos_ids)))
    for number, token in product(chat.answers, eos_tokens):
        if token in text_of(chat.messages[number]):
            raise problem(
                tokenizer,
                chat,
                f"answer {number + 1} contains {token!r}, the token that ends a turn: "
                "the text after it would not be trained",
                "remove it from the text; the template adds it",
            )
    unrendered = unrendered_parts(tokenizer, chat)
    if unrendered and not GENERATION.search(tokenizer.template):
        for number in chat.answers:  # trained as generated, in a part of the chat
            part = replace(chat, messages=chat.messages[: number + 1])
            missing = unrendered_parts(tokenizer, part)
            unrendered = {
                name: of for name, of in unrendered.items() if of > number or name in missing
            }
    for name in unrendered:
        raise problem(
            tokenizer,
            chat,
            f"the chat template does not render {name}",
            "remove it from the chat, or use a model whose template renders it",
        )


def encode(tokenizer: ChatTokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return (ids, loss mask) of a chat up to the end of its last answer.

    DataError: the template writes only a part of an answer, or it does not end an answer with an
    eos token. RewrittenTurnError: it rewrites earlier turns and has no `{% generation %}` tags.
    SplitTokenError: the ids before an answer differ from the ids of its prompt.
    """
    inner = tokenizer.inner
    last = max(chat.answers)
    whole = render(tokenizer, chat, last + 1)
    encoding = inner.encode(whole, add_special_tokens=False)
    ids: list[int] = encoding.ids
    loss_mask = [False] * len(ids)
    starts = [start for start, _ in encoding.offsets]
    stops = [stop for _, stop in encoding.offsets]
    spans = tagged_spans(tokenizer, chat, whole) if GENERATION.search(tokenizer.template) else None
    for first, stop in spans or ():
        span = slice(bisect_right(stops, first), bisect_left(starts, stop))
        loss_mask[span] = [True] * len(ids[span])
    for number in chat.answers:
        prompt = render(tokenizer, chat, number, prompt=True)
        turn = render(tokenizer, chat, number + 1)
        refuse_cut_answer(tokenizer, chat, number, turn, prompt)
        if not turn.startswith(prompt) or not whole.startswith(turn):
            if spans is not None and number < last:
                refuse_cut_answer(tokenizer, chat, number, whole, prompt)
                continue  # rewritten in later turns, and trained as the tags mark it there
            what = f"the chat template does not append answer {number + 1} to the turns before it"
            hint = "use a template that does not rewrite earlier turns"
            if turn.startswith(prompt):
                raise RewrittenTurnError(what, f"{chat.where}; {tokenizer.folder}", hint)
            raise problem(tokenizer, chat, what, hint)
        prompt_ids = inner.encode(prompt, add_special_tokens=False).ids
        if ids[: len(prompt_ids)] != prompt_ids:
            context = whole[max(0, len(prompt) - 10) : len(prompt) + 10]
            raise SplitTokenError(
                f"answer {number + 1} starts inside a token: {context!r}",
                f"{chat.where}; {tokenizer.folder}",
                "start the answer with other characters, or use a template that ends its prompt "
                "with a special token or a line break",
            )
        answer = (i for i in range(len(prompt_ids), len(ids)) if starts[i] < len(turn))
        end = next((i for i in answer if ids[i] in tokenizer.eos_ids), None)
        if end is None or (spans is not None and number == last and not loss_mask[end]):
            what = "the chat template does not end an answer with an eos token"
            what += " inside its generation tags" * (end is not None)
            raise problem(
                tokenizer,
                chat,
                what,
                "set eos_token_id in the generation_config.json beside the tokenizer",
            )
        if spans is None:
            loss_mask[len(prompt_ids) : end + 1] = [True] * (end + 1 - len(prompt_ids))
    return ids, loss_mask


def refuse_cut_answer(
    tokenizer: ChatTokenizer, chat: Chat, number: int, rendered: str, prompt: str
) -> None:
    """DataError: `rendered` has only a part of the answer's text; white space may differ."""
    text = text_of(chat.messages[number]).strip()
    if text in rendered.removeprefix(prompt):
        return
    before = render(tokenizer, chat, number)  # a prompt may end with words of the answer
    position = len(before) if rendered.startswith(before) else 0
    for word in re.finditer(r"\w+|[^\w\s]", text):
        found = rendered.find(word.group(), position)
        if found < 0:
            part = text[: word.end()].split()[-1] + text[word.end() :]
            raise problem(
                tokenizer,
                chat,
                f"the chat template drops a part of answer {number + 1}: {part[:60]!r}",
                "remove it from the chat, or use a template that writes it",
            )
        position = found + len(word.group())


def tagged_spans(tokenizer: ChatTokenizer, chat: Chat, whole: str) -> list[tuple[int, int]]:
    """Return first and last + 1 character of each text of `whole` in `{% generation %}` tags,
    without answers of weight 0. DataError."""
    end = max(chat.answers) + 1
    pieces = re.split(f"[{''.join(MARKS)}]", render(tokenizer, chat, end, marked=True))
    bounds = list(accumulate(map(len, pieces)))[:-1]
    spans = list(zip(bounds[::2], bounds[1::2], strict=False))
    roles = [message["role"] for message in chat.messages[:end]]
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    what = ""
    if "".join(pieces) != whole:
        what = "the chat template changes the text of its generation tags"
    elif len(spans) != len(answers) > len(chat.answers):
        what = (
            f"the chat template marks {len(spans)} texts of {len(answers)} answers, "
            "of which some have the weight 0"
        )
    if what:
        raise problem(
            tokenizer, chat, what, "remove the tags, or put one pair of them around each answer"
        )
    if len(spans) != len(answers):
        return spans
    return [span for span, number in zip(spans, answers, strict=True) if number in chat.answers]


def last_answer(tokenizer: ChatTokenizer, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return (prompt ids, ids of the last answer without its eos token) of a held-out chat."""
    chat = Chat(record["messages"], "a held-out chat", record.get("tools"))
    ids, _ = encode(tokenizer, chat)
    prompt = render(tokenizer, chat, -1, prompt=True)
    start = len(tokenizer.inner.encode(prompt, add_special_tokens=False).ids)
    stop = next(i for i in range(start, len(ids)) if ids[i] in tokenizer.eos_ids)
    return ids[:start], ids[start:stop]


Encoded = tuple[Chat, list[int], list[bool]]


def shortened(tokenizer: ChatTokenizer, chat: Chat, limit: int) -> Encoded | None:
    """Return the chat up to its last answer that ends within `limit` tokens, with ids and loss
    mask; None if no answer does."""
    for number in reversed(chat.answers):
        shorter = replace(chat, messages=chat.messages[: number + 1])
        ids, loss_mask = encode(tokenizer, shorter)
        if len(ids) <= limit:
            return shorter, ids, loss_mask
    return None


def parts_as_generated(tokenizer: ChatTokenizer, chat: Chat) -> list[Chat]:
    """Split a chat with rewritten turns: a part trains those of its answers that are rendered as
    they were generated, and the others are context."""
    parts = []
    left = chat.answers
    while left:
        whole = render(tokenizer, chat, left[-1] + 1)
        trained = [n for n in left if whole.startswith(render(tokenizer, chat, n + 1))]
        messages = [
            {**message, "weight": 0} if message["role"] == "assistant" else message
            for message in chat.messages[: left[-1] + 1]
        ]
        for number in trained:
            messages[number] = chat.messages[number]
        parts.append(replace(chat, messages=messages))
        left = [number for number in left if number not in trained]
    return parts[::-1]


def encode_parts(tokenizer: ChatTokenizer, chat: Chat, dropped: Counter[str]) -> Iterator[Encoded]:
    """Yield the chat, or the parts that it is trained in, each with ids and loss mask. Drop and
    count those with an answer that starts inside a token."""
    try:
        yield chat, *encode(tokenizer, chat)
    except SplitTokenError as error:
        if not dropped[SPLIT_TOKEN]:
            log.warning("dropped: %s (%s); %s", error.what, error.where, error.hint)
        dropped[SPLIT_TOKEN] += 1
    except RewrittenTurnError:
        for part in parts_as_generated(tokenizer, chat):
            yield from encode_parts(tokenizer, part, dropped)


def sample_of(split: Split, chat: Chat, ids: list[int], loss_mask: list[bool]) -> Sample:
    size = sum(len(text_of(chat.messages[number]).encode()) for number in chat.answers)
    record: dict[str, Any] = {"messages": chat.messages}
    if chat.tools:
        record["tools"] = chat.tools
    return Sample(split, record, [ids], loss_mask, size)


def chat_samples(
    tokenizer: ChatTokenizer, data: config.DataOptions, length: int, dropped: Counter[str]
) -> Iterator[Sample]:
    """Yield each chat as a sample. Drop or cut those longer than a row of `length` tokens, and
    count them. A held-out chat is cut after an answer, since a part of an answer cannot be
    scored."""
    where = "the answers: the chat template has no generation tags"
    if GENERATION.search(tokenizer.template):
        where = "the text in the generation tags of the chat template"
    log.info("loss on %s", where)
    cut = split_chats = 0
    limit = length + 1  # the last id is only a label
    for split, whole in chats(data, dropped):
        refuse_unrendered(tokenizer, whole)
        parts = list(encode_parts(tokenizer, whole, dropped))
        split_chats += len(parts) > 1
        for chat, ids, loss_mask in parts:
            if len(ids) > limit:
                shorter = None if data.truncation == "drop" else shortened(tokenizer, chat, limit)
                if data.truncation == "right" and split == "train":
                    shorter = chat, ids[:limit], loss_mask[:limit]
                if shorter is None or not any(shorter[2][1:]):
                    dropped[f"longer than a row of {length} tokens"] += 1
                    continue
                chat, ids, loss_mask = shorter
                cut += 1
            yield sample_of(split, chat, ids, loss_mask)
    if split_chats:
        log.info("split: %d chats whose earlier turns the template rewrites", split_chats)
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
        a = 10 + first % 90
        b = 10 + second % 90
        digit = b % 10
        forms = (
            (f"Which is larger, {a} or {b}?", str(max(a, b))),
            (f"What comes after {a}{digit}?", f"{10 * a + digit + 1}."),
            (f"How much is {a} + {digit}?", f"{a} + {digit} = {a + digit}"),
        )
        yield Chat(question_and_answer(*forms[kind % 3]), f"drill {number}")
