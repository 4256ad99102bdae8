"""The tokenizer that comes with a pretrained model: text to ids and back, the form of a chat, the ids that end an answer.

The files are Hugging Face's: tokenizer.json (read by `tokenizers`), tokenizer_config.json, chat_template.jinja,
generation_config.json. A chat template is a program by a stranger: it runs in a process of its own (template.py), sees
the messages, the tools and the names of special tokens, and can reach nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.data.text.chat_template import TemplateError, renderer
from lockstep.errors import DataError
from lockstep.files import read_json, read_text

Message = Mapping[str, Any]  # {"role": "user", "content": "Hello"}, and what else the template writes: tool_calls, name


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template ("" if it has none), special tokens by role (bos_token, ...) and ends of an answer."""

    inner: tokenizers.Tokenizer
    template: str
    specials: Mapping[str, str]
    ends: frozenset[int]
    folder: Path

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTokenizer:
        """The tokenizer in `folder`; the model's config.json may name the ends too. DataError when it is absent or torn."""
        path = folder / "tokenizer.json"
        try:
            inner = tokenizers.Tokenizer.from_str(read_text(path))
        except FileNotFoundError:
            hint = "copy it beside the model; transformers' save_pretrained of a fast tokenizer writes it"
            raise DataError("the model has no tokenizer.json", str(folder), hint) from None
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise DataError(f"the tokenizer cannot be read: {error}", str(path), "copy the file again") from error
        inner.no_padding()
        inner.no_truncation()
        said = optional_json(folder / "tokenizer_config.json")
        specials = {name: spelled(token) for name, token in said.items() if name.endswith("_token") and spelled(token)}
        named = optional_json(folder / "generation_config.json").get("eos_token_id") or config.get("eos_token_id")
        by_word = inner.token_to_id(specials.get("eos_token", ""))
        ends = named if isinstance(named, list) else [by_word if named is None else named]
        if odd := [end for end in ends if not isinstance(end, int | None) or isinstance(end, bool)]:
            where = f"generation_config.json or config.json of {folder}"
            raise DataError(f"eos_token_id has {json.dumps(odd[0])[:80]}", where, "write a token id, or a list of them")
        return cls(inner, template_in(folder, said), specials, frozenset(end for end in ends if end is not None), folder)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the tokenizer puts before each one."""
        ids: list[int] = self.inner.encode(text).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Message], *, now: Callable[[], datetime] = datetime.now, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Ids of a chat up to where the answer begins."""
        ids: list[int] = self.inner.encode(self.render(messages, now=now, tools=tools), add_special_tokens=False).ids
        return ids

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        now: Callable[[], datetime] = datetime.now,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The chat as the template writes it; with `answer`, up to where the answer begins. DataError when it fails."""
        where = f"the chat template in {self.folder}"
        if not self.template:
            raise DataError("the tokenizer has no chat template", str(self.folder), "leave --chat out, or put a chat_template.jinja there")
        given = {"messages": [dict(message) for message in messages], "add_generation_prompt": answer, "tools": tools, **self.specials}
        try:
            return renderer.render(self.template, given, now())
        except TemplateError as error:
            raise DataError(f"the chat cannot be written: {error}", where, "see which roles and orders of messages it accepts") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens left out."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text


def template_in(folder: Path, said: Mapping[str, Any]) -> str:
    """The chat template: a file of its own, or the one in tokenizer_config.json (of several the one called default); "": none."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    found = said.get("chat_template") or optional_json(folder / "chat_template.json").get("chat_template") or ""
    if isinstance(found, list):
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}.get("default") or ""
    if not isinstance(found, str):
        what = f"chat_template is {json.dumps(found)[:80]}"
        raise DataError(what, str(folder / "tokenizer_config.json"), "write the template as a string")
    return found


def optional_json(path: Path) -> dict[str, Any]:
    """The object in the file; {} when there is no such file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path.name} cannot be read: {error}", str(path), "copy the file again") from error
    return value if isinstance(value, dict) else {}


def spelled(token: Any) -> str:
    """A special token, which tokenizer_config.json writes as a word or as an object; "" for what is none (add_bos_token: true)."""
    word = token.get("content") if isinstance(token, dict) else token
    return word if isinstance(word, str) else ""
