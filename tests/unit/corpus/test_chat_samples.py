"""Chats with many tokenizers: training ids equal generation ids, and those of transformers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from lockstep.config.schema import DataOptions
from lockstep.corpus.chat_template import renderer
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.chats import (
    RENDER_DATE,
    Chat,
    SplitTokenError,
    chat_samples,
    chats,
    encode,
    last_answer,
    parse_chat,
    refuse_unrendered,
)
from lockstep.corpus.files import parse_json_line
from lockstep.corpus.tokenizer import CHAT_SPECIALS, Tokenizer
from lockstep.errors import DataError
from lockstep.tasks.language_model import answer_text

TEXT = [
    "the cat sat on the mat, two dogs lay on the log. [INST] </s> <|user|>\n<|assistant|>\n",
    "Ein Hund: süße Äpfel! <<SYS>>",
] * 9
SPECIALS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    *CHAT_SPECIALS,
    "<|begin_of_text|>",
]

TEMPLATES = {
    "llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}"
        "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama 3": (
        "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}
ENDS = {
    "llama 2": "</s>",
    "zephyr": "</s>",
    "chatml": "<|im_end|>",
    "llama 3": "<|eot_id|>",
    "mistral": "</s>",
}


def byte_level() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return inner


def metaspace(scheme: Any) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    inner.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>"], show_progress=False)
    )
    return inner


def legacy() -> tokenizers.Tokenizer:
    """As converted from sentencepiece by older releases (Llama 2, Zephyr): byte fallback."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    words = [word for text in TEXT for word in text.replace("\n", " ").split(" ")]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", *of_bytes], show_progress=False
    )
    inner.train_from_iterator(words, trainer)
    saved = json.loads(inner.to_str())
    saved["added_tokens"] = saved["added_tokens"][:1]  # bytes are words, not special tokens
    return tokenizers.Tokenizer.from_str(json.dumps(saved))


def unigram() -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return inner


MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "legacy": legacy,
    "unigram": unigram,
}


@pytest.fixture(scope="module", params=MAKERS)
def inner(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    tokenizer = MAKERS[request.param]()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return tokenizer


def tokenizer_with(inner: tokenizers.Tokenizer, template: str, end: str) -> ChatTokenizer:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(
        inner, template, specials, frozenset([inner.token_to_id(end)]), Path("here")
    )


TALK = [
    {"role": "user", "content": "the cat: süße?"},
    {"role": "assistant", "content": "on the mat."},
    {"role": "user", "content": "Ein Hund"},
    {"role": "assistant", "content": "the log, two dogs\n\n  and a cat"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_training_ids_equal_generation_ids(inner: tokenizers.Tokenizer, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizer_with(inner, TEMPLATES[name], ENDS[name])
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    ids, counts = encode(tokenizer, Chat(list(TALK), "here"))
    assert ids == reference.apply_chat_template(TALK)["input_ids"]
    for turn in (1, 3):
        prompt = tokenizer.encode_chat(TALK[:turn])
        assert (
            prompt
            == reference.apply_chat_template(TALK[:turn], add_generation_prompt=True)["input_ids"]
        )
        assert ids[: len(prompt)] == prompt and counts[len(prompt)] and not counts[len(prompt) - 1]
        answer = ids[
            len(prompt) : counts.index(False, len(prompt))
            if False in counts[len(prompt) :]
            else None
        ]
        assert answer[-1] in tokenizer.eos_ids and not set(answer[:-1]) & tokenizer.eos_ids
        text = answer_text(tokenizer, prompt, answer[:-1])
        assert text.strip() == TALK[turn]["content"], "the loss mask covers the whole answer"
        assert text[:1] == (" " if name == "llama 2" else TALK[turn]["content"][:1]), (
            "a space that belongs to the answer is trained and seen"
        )
    if "{% generation" in TEMPLATES[name]:
        mask = reference.apply_chat_template(
            TALK, return_assistant_tokens_mask=True, return_dict=True
        )["assistant_masks"]
        assert [bool(value) for value in mask] == counts
    assert last_answer(tokenizer, {"messages": TALK}) == (prompt, answer[:-1])


def test_an_answer_of_weight_zero_has_no_loss(tmp_path: Path) -> None:
    tokenizer = llama_tokenizer(tmp_path)
    talk = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]]
    (all_ids, all_counts), (ids, counts) = (
        encode(tokenizer, Chat(messages, "here")) for messages in (list(TALK), talk)
    )
    prompt = len(tokenizer.encode_chat(TALK[:3]))
    assert ids == all_ids and counts == [False] * prompt + all_counts[prompt:]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [*TALK[:3], {**TALK[3], "weight": 0}]}) + "\n")
    ((_, chat),) = chats(
        DataOptions(kind="chat", train=(str(path),), held_out_share=0.0), Counter()
    )
    assert chat.messages == TALK[:2]


def test_an_answer_that_starts_inside_a_token_is_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt ends with a space, which merges with the first letter of the answer."""
    with_specials = byte_level()
    with_specials.add_special_tokens(["</s>"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    bad = tokenizer_with(with_specials, template, "</s>")
    with pytest.raises(SplitTokenError, match="answer 2 starts inside a token: '"):
        encode(bad, Chat(list(TALK[:2]), "here"))
    path = tmp_path / "chats.jsonl"
    answers = ["the mat", "the log", "(the dog)"]
    path.write_text(
        "".join(
            json.dumps({"messages": [TALK[0], {"role": "assistant", "content": text}]}) + "\n"
            for text in answers
        )
    )
    left_out: Counter[str] = Counter()
    samples = list(
        chat_samples(
            bad, DataOptions(kind="chat", train=(str(path),), held_out_share=0.0), 99, left_out
        )
    )
    assert (
        len(samples) + left_out["with an answer that starts inside a token"] == 3
        and len(samples) < 2
    )
    assert "line 1" in caplog.text


# -- unrendered parts of a chat ----------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}<|end_header_id|>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)


def llama_tokenizer(folder: Path, template: str | None = None) -> ChatTokenizer:
    if not (folder / "tokenizer").exists():
        Tokenizer.train_on_documents(TEXT, vocab_size=340, min_frequency=2).save_for_llama(
            folder / "tokenizer"
        )
    if template:
        shutil.copytree(folder / "tokenizer", folder / "other", dirs_exist_ok=True)
        (folder / "other/chat_template.jinja").write_text(template)
    return ChatTokenizer.load(folder / ("other" if template else "tokenizer"), {})


def line(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"messages": list(messages), **fields}).encode()


def read_chat(chat: bytes, where: str) -> Chat:
    return parse_chat(parse_json_line(chat, where), where)


ASK, ANSWER = TALK[0], TALK[1]
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42"}


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (line(ASK, CALLING), "'tool_calls' of message 2"),
        (line(ASK, {**CALLING, "content": ""}), "'tool_calls' of message 2"),
        (line(ASK, ANSWER, tools=[{"name": "add"}]), "'tools'"),
        (line({**ASK, "name": "Ann"}, ANSWER), "'name' of message 1"),
        (line(ASK, {**ANSWER, "reasoning_content": "hm"}), "'reasoning_content' of message 2"),
    ],
)
def test_parts_that_the_template_does_not_render_are_refused(
    tmp_path: Path, chat: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=f"does not render {message}") as caught:
        refuse_unrendered(llama_tokenizer(tmp_path), read_chat(chat, "chats.jsonl, line 7"))
    assert "chats.jsonl, line 7" in caught.value.where


def test_an_answer_that_contains_the_end_of_a_turn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"answer 2 contains '<\|eot_id\|>'"):
        refuse_unrendered(
            llama_tokenizer(tmp_path),
            read_chat(line(ASK, {**ANSWER, "content": "say <|eot_id|> to end"}), "here"),
        )


def test_a_role_that_the_template_drops_is_refused(inner: tokenizers.Tokenizer) -> None:
    tokenizer = tokenizer_with(inner, TEMPLATES["zephyr"], "</s>")
    with pytest.raises(DataError, match="does not render message 2, of role 'tool'"):
        refuse_unrendered(tokenizer, read_chat(line(ASK, RESULT, ANSWER), "here"))


def test_rendered_parts_equal_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = llama_tokenizer(tmp_path, WITH_TOOLS)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "other")
    tools = [
        {
            "type": "function",
            "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    chat = read_chat(line({**ASK, "name": "Ann"}, CALLING, RESULT, ANSWER, tools=tools), "here")
    refuse_unrendered(tokenizer, chat)
    ids, counts = encode(tokenizer, chat)
    raw = [{**ASK, "name": "Ann"}, CALLING, RESULT, ANSWER]
    assert ids == reference.apply_chat_template(raw, tools=tools)["input_ids"]
    first = counts.index(True)
    assert (
        tokenizer.decode(ids[first : counts.index(False, first)])
        == '{"name": "add", "arguments": {"a": 1}}'
    ), "the call is trained"
    assert last_answer(tokenizer, {"messages": chat.messages, "tools": chat.tools})[
        0
    ] == tokenizer.encode_chat(raw[:3], tools=tools)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (line(ASK, {"role": "assistant", "content": None}), "not a chat"),
        (line({"role": "user"}, ANSWER), "not a chat"),
        (line(ASK, {**ANSWER, "weight": 0.5}), "weight 0.5"),
        (line({**ASK, "weight": 1}, ANSWER), "role 'user' has the weight 1"),
        (line(ASK, ANSWER, functions=[{}]), "'functions'"),
        (line(ASK, ANSWER, tools="add"), "'tools' is"),
        (line(ASK, {"role": "assistant", "content": "\ud800"}), "lone surrogate"),
        (b"\xff{}", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_malformed_chat_is_refused(chat: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_chat(chat, "here")


# -- templates are untrusted code ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 2 s",
        ),
        ("{{ 10 ** (10 ** 9) }}", "more than 2 s"),
        ("{{ 'a' * 10 ** 10 }}", "more than 1,024 MiB"),
        ("{{ 'a' * 10 ** 8 }}", "100,000,000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
@pytest.mark.slow
def test_a_template_beyond_a_limit_is_refused_and_the_next_one_works(
    tmp_path: Path, template: str, message: str
) -> None:
    bad = llama_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=message):
        bad.render(TALK)
    assert "the cat" in llama_tokenizer(tmp_path).render(TALK)


def test_rendering_survives_the_exit_of_its_process(tmp_path: Path) -> None:
    tokenizer = llama_tokenizer(tmp_path, "{{ strftime_now('%Y') }}{{ messages[0].content }}")
    assert tokenizer.render(TALK, now=RENDER_DATE) == "2024" + TALK[0]["content"]
    assert renderer.process
    renderer.process.kill()
    renderer.process.wait()
    assert tokenizer.render(TALK, now=datetime(2001, 1, 1)) == "2001" + TALK[0]["content"]
