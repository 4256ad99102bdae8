"""Records of chats in four forms, loss masks by generation tags, and chats longer than a row."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from lockstep.config.resolve import resolve
from lockstep.config.schema import DataOptions
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.chats import (
    Chat,
    chat_samples,
    chats,
    encode,
    last_answer,
    parse_chat,
)
from lockstep.corpus.documents import source_of
from lockstep.errors import ConfigError, DataError

ASK, ANSWER = (
    {"role": "user", "content": "Which one?"},
    {"role": "assistant", "content": "The cat."},
)
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ (m.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen 3: tools, tool calls, and thoughts that later turns omit; the end of the turn and the line break are trained.
TAGGED = (
    "{%- if tools %}{{- '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}\n"
    "{%- for m in messages %}\n"
    "  {%- if m.role == 'assistant' %}\n"
    "    {{- '<|im_start|>assistant\n' }}\n"
    "    {%- generation -%}\n"
    "    {%- if loop.last and m.thought %}{{- '<think>' + m.thought + '</think>' }}{% endif %}\n"
    "    {{- m.content or '' }}\n"
    "    {%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{% endfor %}\n"
    "    {{- '<|im_end|>\n' }}\n"
    "    {%- endgeneration -%}\n"
    "  {%- else %}\n"
    "    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\n"
    "  {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def inner() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    texts = ["Which one? The cat. assistant user system tool " * 9]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in ("<|im_start|>", "<|im_end|>")
        ]
    )
    return tokenizer


def tokenizer_of(inner: tokenizers.Tokenizer, template: str) -> ChatTokenizer:
    return ChatTokenizer(
        inner, template, {}, frozenset([inner.token_to_id("<|im_end|>")]), Path("here")
    )


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def parsed(**record: Any) -> list[Any]:
    return parse_chat(record, "chats.jsonl, line 3").messages


# -- forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [SYSTEM, ASK, ANSWER], "prompt": "of the same chat"}, [SYSTEM, ASK, ANSWER]),
        ({"messages": [ASK, ANSWER], "system": "Be brief."}, [SYSTEM, ASK, ANSWER]),
        ({"messages": [SYSTEM, ASK, ANSWER], "system": "Be brief."}, [SYSTEM, ASK, ANSWER]),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Which one?"},
                    {"from": "gpt", "value": "The cat."},
                ],
                "system": "Be brief.",
            },
            [SYSTEM, ASK, ANSWER],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "observation", "value": "1"},
                    ANSWER,
                ]
            },
            [SYSTEM, {"role": "tool", "content": "1"}, ANSWER],
        ),
        ({"instruction": "Which one?", "input": "", "output": "The cat."}, [ASK, ANSWER]),
        (
            {"instruction": "Which", "input": "one?", "output": "The cat."},
            [{**ASK, "content": "Which\n\none?"}, ANSWER],
        ),
        ({"prompt": "Which one?", "completion": "The cat."}, [ASK, ANSWER]),
        (
            {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
            [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER],
        ),
        (
            {"messages": [{**ASK, "content": [text_part("Which "), text_part("one?")]}, ANSWER]},
            [ASK, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": [text_part("Which one?")]}, ANSWER]},
            [ASK, ANSWER],
        ),
    ],
)
def test_a_record_is_recognized_by_its_keys(record: dict[str, Any], messages: list[Any]) -> None:
    assert parsed(**record) == messages


@pytest.mark.parametrize(
    "record",
    [
        {"question": "Which one?", "answer": "The cat."},
        {
            "conversations": [
                {"from": "human", "value": "Which one?"},
                {"from": "bot-7", "value": "The cat."},
            ]
        },
        {"conversations": ["Which one?"]},
        {"instruction": "Which one?", "input": 3, "output": "The cat."},
        {"prompt": "Which one?", "completion": [ANSWER]},
        {"messages": {"user": "Which one?"}},
        {"messages": [ASK, ANSWER], "system": ["Be brief."]},
    ],
)
def test_a_record_of_another_form_is_refused_with_its_line_and_keys(record: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        parsed(**record)
    assert all(key in caught.value.what for key in record) and "line 3" in caught.value.where
    assert all(
        f'"{key}"' in caught.value.hint
        for key in ("messages", "conversations", "instruction", "completion")
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x.png"}},
        {"type": "text"},
        {**text_part("a"), "annotations": [1]},
    ],
)
def test_a_part_that_is_not_text_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(
        DataError, match=r'the content of a message has the part \{"type": '
    ) as caught:
        parsed(messages=[{**ASK, "content": [text_part("Look:"), part]}, ANSWER])
    assert "line 3" in caught.value.where


TWO_CHATS = [
    {"messages": [ASK, ANSWER]},
    {"messages": [SYSTEM, ASK, {**ANSWER, "tool_calls": [CALL]}]},
]


def write_array(folder: Path) -> list[Path]:
    (folder / "chats.json").write_text("\ufeff" + json.dumps(TWO_CHATS, indent=1))
    with gzip.open(folder / "more.json.gz", "wt") as file:
        file.write(json.dumps(TWO_CHATS))
    return [folder / "chats.json", folder / "more.json.gz"]


def write_parquet(folder: Path) -> list[Path]:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as arrow

    pyarrow.write_table(
        arrow.Table.from_pylist(TWO_CHATS), folder / "chats.parquet", row_group_size=1
    )
    return [folder / "chats.parquet"]


def write_dataset(folder: Path) -> list[Path]:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(TWO_CHATS).save_to_disk(folder / "set", num_shards=2)
    return [folder / "set"]


@pytest.mark.parametrize("write", [write_array, write_parquet, write_dataset])
def test_chats_are_read_from_other_files(
    write: Callable[[Path], list[Path]], tmp_path: Path
) -> None:
    """Arrow adds a null key to the chat without tool calls."""
    paths = write(tmp_path)
    data = DataOptions(kind="chat", train=tuple(map(str, paths)), held_out_share=0.0)
    assert [chat.messages for _, chat in chats(data, Counter())] == [
        record["messages"] for record in TWO_CHATS
    ] * len(paths)
    assert len(source_of(data)["train"]) == (2 if write is write_dataset else len(paths))


def write_splits(folder: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(TWO_CHATS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(folder / "set")
    return folder / "set"


def write_text(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            write_text("cut.json", json.dumps(TWO_CHATS)[:-9]),
            "starts as a JSON array, and is not one",
        ),
        (write_text("of.json", json.dumps([[ASK, ANSWER]])), "not a chat, but a list"),
        (
            write_text("damaged.parquet", "PAR1 and no more"),
            "damaged.parquet cannot be read after row 0",
        ),
        (write_text("damaged.arrow", "nothing"), "damaged.arrow cannot be read after row 0"),
        (write_splits, r"has the splits train, test[\s\S]*data\.train=.*set/train"),
        (lambda folder: folder, "is a folder, and no dataset"),
    ],
)
def test_files_without_chats_are_refused_in_their_own_words(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    data = DataOptions(kind="chat", train=(str(write(tmp_path)),))
    with pytest.raises(DataError, match=message):
        list(chats(data, Counter()))


def test_earlier_turns_of_an_alpaca_record_are_not_dropped() -> None:
    with pytest.raises(DataError, match="'history'"):
        parsed(instruction="Which one?", output="The cat.", history=[["a", "b"]])


# -- loss masks -------------------------------------------------------------------------------------------------------

TALK = [
    SYSTEM,
    ASK,
    {**ANSWER, "thought": "hm"},
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "süße 1"},
    {**ANSWER, "content": "größer: 42 ", "thought": "hm, 42"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_loss_mask_is_that_of_transformers(
    inner: tokenizers.Tokenizer, tools: list[Any] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=TAGGED, eos_token="<|im_end|>"
    )
    tokenizer = tokenizer_of(inner, TAGGED)
    expected = reference.apply_chat_template(
        TALK, tools=tools, return_assistant_tokens_mask=True, return_dict=True
    )
    ids, loss_mask = encode(tokenizer, Chat(list(TALK), "here", tools))
    assert (
        ids == expected["input_ids"]
        and list(map(int, loss_mask)) == expected["assistant_masks"]
        and 0 < sum(loss_mask) < len(ids)
    )
    trained = tokenizer.inner.decode(
        [token for token, trains in zip(ids, loss_mask, strict=True) if trains],
        skip_special_tokens=False,
    )
    assert (
        trained.count("<|im_end|>\n") == 3
        and "<think>hm, 42</think>größer: 42 " in trained
        and "<think>hm</think>" not in trained
    )
    prompt, answer = last_answer(tokenizer, {"messages": TALK, "tools": tools})
    assert (
        prompt == tokenizer.encode_chat(TALK[:-1], tools=tools)
        and tokenizer.decode(answer) == "<think>hm, 42</think>größer: 42 "
    )


def test_an_answer_of_weight_zero_is_not_trained_inside_tags(inner: tokenizers.Tokenizer) -> None:
    talk = [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER]
    ids, loss_mask = encode(tokenizer_of(inner, TAGGED), Chat(talk, "here"))
    first = ids.index(inner.token_to_id("<|im_end|>"), 1)
    assert (
        sum(loss_mask) == len(inner.encode("The cat.<|im_end|>\n").ids)
        and not any(loss_mask[: len(ids) // 2])
        and first < len(ids) // 2
    )
    twice = TAGGED.replace(
        "{{- m.content or '' }}", "{%- endgeneration -%}{%- generation -%}{{- m.content or '' }}"
    )
    with pytest.raises(
        DataError, match="marks 4 texts of 2 answers, of which some have the weight 0"
    ):
        encode(tokenizer_of(inner, twice), Chat(talk, "here"))


THOUGHT = {**ANSWER, "content": "<think>\nA dog?\n</think>\n\nThe cat."}
WITH_CALL = {**ANSWER, "tool_calls": [CALL]}


LAST_PART = "(m.content or '').split('</think>')[-1]"


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("(m.content or '')", "(CONTENT)"),
        TAGGED.replace("m.content or ''", "CONTENT"),
    ],
)
@pytest.mark.parametrize(
    ("content", "talk", "dropped"),
    [
        (LAST_PART, [ASK, THOUGHT], r"<think>\\nA dog\?"),
        (LAST_PART, [{**ASK, "content": "<think> A dog? </think> The cat."}, THOUGHT], "<think>"),
        (f"m.content if loop.last else {LAST_PART}", [ASK, THOUGHT, ASK, ANSWER], "<think>"),
        ("(m.content or '')[:7]", [{**ASK, "content": "Which"}, ANSWER], r"cat\."),
        ("m.content if not m.tool_calls else m.tool_calls | tojson", [ASK, WITH_CALL], "The cat"),
    ],
)
def test_a_part_of_an_answer_that_the_template_drops_is_refused(
    inner: tokenizers.Tokenizer, template: str, content: str, talk: list[Any], dropped: str
) -> None:
    tokenizer = tokenizer_of(inner, template.replace("CONTENT", content))
    with pytest.raises(
        DataError, match=f"drops a part of answer 2: .{dropped}|does not append answer 2"
    ):
        encode(tokenizer, Chat(list(talk), "here"))


def test_white_space_that_the_template_changes_is_accepted(inner: tokenizers.Tokenizer) -> None:
    tokenizer = tokenizer_of(
        inner, CHATML.replace("(m.content or '')", "(m.content | replace('\\n', ' ') | trim)")
    )
    ids, _ = encode(tokenizer, Chat([ASK, THOUGHT], "here"))
    assert "<think> A dog? </think>  The cat." in inner.decode(ids, skip_special_tokens=False)


END = "{{- '<|im_end|>\n' }}\n    "
TAG = "{%- endgeneration -%}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (TAGGED.replace(END + TAG, TAG + END), "eos token inside its generation tags"),
        (
            "{% macro all() %}" + TAGGED + "{% endmacro %}{{ all() | length }}",
            "changes the text of its generation tags",
        ),
        (
            "{% macro all() %}" + TAGGED + "{% endmacro %}{{ all() }}{{ all() | length }}",
            "changes the text of its generation tags",
        ),
    ],
)
def test_tags_that_would_train_something_else_are_refused(
    inner: tokenizers.Tokenizer, template: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        encode(tokenizer_of(inner, template), Chat([ASK, ANSWER], "here"))


def test_the_log_says_how_the_loss_mask_is_made(
    inner: tokenizers.Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = chats_in(tmp_path, [[ASK, ANSWER]])
    for template, words in (
        (CHATML, "the chat template has no generation tags"),
        (TAGGED, "the text in the generation tags"),
    ):
        with caplog.at_level(logging.INFO, "lockstep"):
            list(chat_samples(tokenizer_of(inner, template), data, 99, Counter()))
        assert words in caplog.messages[-1]


# -- chats longer than a row ------------------------------------------------------------------------------------------


def chats_in(folder: Path, chats: list[list[dict[str, Any]]], **options: Any) -> DataOptions:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return DataOptions(kind="chat", train=(str(path),), **{"held_out_share": 0.0, **options})


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["plain", "tagged"])
def test_long_chats_are_dropped_or_cut_and_counted(
    inner: tokenizers.Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    tokenizer = tokenizer_of(inner, template)
    long, short = [ASK, ANSWER] * 4, [ASK, ANSWER]
    endless = [{**ASK, "content": "Which one? " * 99}, ANSWER]
    ids, loss_mask = encode(tokenizer, Chat(list(long), "here"))
    two_turns = encode(tokenizer, Chat(list(long[:4]), "here"))
    length = len(two_turns[0]) + 6  # ends inside the third turn
    expected = {
        "drop": None,
        "right": (ids[: length + 1], loss_mask[: length + 1]),
        "message": two_turns,
    }
    for truncation, cut in expected.items():
        dropped: Counter[str] = Counter()
        caplog.clear()
        with caplog.at_level(logging.INFO, "lockstep"):
            data = chats_in(tmp_path, [long, short, endless], truncation=truncation)
            samples = [
                (sample.ids[0], sample.loss_mask)
                for sample in chat_samples(tokenizer, data, length, dropped)
            ]
        assert samples == [*([cut] if cut else []), encode(tokenizer, Chat(list(short), "here"))]
        assert dropped == {f"longer than a row of {length} tokens": 1 if cut else 2}
        assert [
            f"cut: 1 longer than a row of {length} tokens (data.truncation = {truncation})"
        ] * bool(cut) == caplog.messages[1:]


def test_a_held_out_chat_is_cut_after_an_answer(
    inner: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    tokenizer, long = tokenizer_of(inner, CHATML), [ASK, ANSWER] * 3
    length = len(encode(tokenizer, Chat(list(long[:2]), "here"))[0]) + 30
    data = chats_in(tmp_path, [[ASK, ANSWER]], truncation="right")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"messages": long}) + "\n")
    data = DataOptions(**{**vars(data), "validation": (str(held_out),)})
    [sample] = [
        sample
        for sample in chat_samples(tokenizer, data, length, Counter())
        if sample.split == "validation"
    ]
    kept = len(sample.record["messages"])
    assert (
        kept % 2 == 0
        and 0 < kept < 6
        and last_answer(tokenizer, sample.record)[1] == inner.encode("The cat.").ids
    )


def test_truncation_is_for_chats() -> None:
    with pytest.raises(ConfigError, match=r"pretrain does not support data\.truncation"):
        resolve(None, {"task": "pretrain", "data.kind": "stdlib", "data.truncation": "right"})


# As published with Qwen 3, without its tools: thoughts of turns before the last question are left
# out, and a last answer without them gets an empty one.
QWEN_3 = """{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = '' %}
        {%- if '</think>' in m.content %}
            {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
THINKS = {"role": "assistant", "content": "<think>\nA dog?\n</think>\n\nThe dog."}


def test_turns_that_qwen_3_rewrites_are_trained_as_they_are_generated(
    inner: tokenizers.Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each answer is trained once, behind the ids that precede it when it is generated."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=QWEN_3, eos_token="<|im_end|>"
    )
    tokenizer = tokenizer_of(inner, QWEN_3)
    talk = [SYSTEM, ASK, THINKS, ASK, ANSWER, ASK, THINKS]
    with caplog.at_level(logging.INFO, logger="lockstep"):
        samples = list(chat_samples(tokenizer, chats_in(tmp_path, [talk]), 500, Counter()))
    assert "split: 1 chats" in caplog.text
    assert len(samples) == 3
    for sample, end in zip(samples, (3, 5, 7), strict=True):
        whole = reference.apply_chat_template(talk[:end], return_dict=False)
        prompt = reference.apply_chat_template(
            talk[: end - 1], add_generation_prompt=True, return_dict=False
        )
        assert sample.ids == [whole] and whole[: len(prompt)] == prompt
        assert sample.loss_mask is not None
        line_break = len(inner.encode("\n").ids)  # behind the end of the turn
        count = len(whole) - len(prompt) - line_break
        assert sample.loss_mask == [False] * len(prompt) + [True] * count + [False] * line_break
        assert last_answer(tokenizer, sample.record)[0] == prompt
    answers = [inner.decode(last_answer(tokenizer, s.record)[1]) for s in samples]
    assert answers == [
        "<think>\nA dog?\n</think>\n\nThe dog.",
        "<think>\n\n</think>\n\nThe cat.",
        "<think>\nA dog?\n</think>\n\nThe dog.",
    ]


def test_answers_of_one_turn_that_are_not_rewritten_share_a_sample(
    inner: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    """Two answers with thoughts after one question, as with tools."""
    tokenizer = tokenizer_of(inner, QWEN_3)
    result = {"role": "tool", "content": "42"}
    talk = [ASK, ANSWER, ASK, THINKS, result, THINKS]
    samples = list(chat_samples(tokenizer, chats_in(tmp_path, [talk]), 500, Counter()))
    assert [len(sample.record["messages"]) for sample in samples] == [2, 6]
    weights = [message.get("weight") for message in samples[1].record["messages"]]
    assert weights == [None, 0, None, None, None, None]


WITH_REASONING = QWEN_3.replace("thought = ''", "thought = m.reasoning_content or ''")


def test_thoughts_of_earlier_turns_in_their_own_key_are_trained(
    inner: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    """The template leaves them out of the whole chat, but not of the turn that has them."""
    tokenizer = tokenizer_of(inner, WITH_REASONING)
    reasons = {**ANSWER, "reasoning_content": "A dog?"}
    chat = chats_in(tmp_path, [[ASK, reasons, ASK, reasons]])
    samples = list(chat_samples(tokenizer, chat, 500, Counter()))
    answers = [inner.decode(last_answer(tokenizer, s.record)[1]) for s in samples]
    assert answers == ["<think>\nA dog?\n</think>\n\n" + ANSWER["content"]] * 2


@pytest.mark.parametrize("is_tagged", [False, True])
def test_thoughts_that_no_trained_answer_has_are_refused(
    inner: tokenizers.Tokenizer, tmp_path: Path, is_tagged: bool
) -> None:
    """Those of an answer of weight 0; with tags those of any earlier answer."""
    template = WITH_REASONING
    first = {**ANSWER, "reasoning_content": "A dog?"}
    if is_tagged:
        template = template.replace("{{- '<|im_end|>", "{% generation %}{{- '<|im_end|>").replace(
            "im_end|>\\n' }}\n    {%- else", "im_end|>\\n' }}{% endgeneration %}\n    {%- else"
        )
    else:
        first["weight"] = 0
    chat = chats_in(tmp_path, [[ASK, first, ASK, ANSWER]])
    with pytest.raises(DataError, match="does not render 'reasoning_content' of message 2"):
        list(chat_samples(tokenizer_of(inner, template), chat, 500, Counter()))
