"""The tokenizer of a pretrained Llama: encoding, decoding, chat template, ids that end an answer.

Reads Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json. A chat template is untrusted code: it runs in a separate process
(chat_template.py) that gets only the messages, the tools and the names of the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.corpus.text.chat_template import TemplateError, renderer
from lockstep.errors import DataError
from lockstep.files import read_json, read_text

Message = Mapping[
    str, Any
]  # {"role": "user", "content": "Hello"}, and other keys that the template renders: tool_calls, name


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer, its chat template ("": none), special tokens (bos_token, ...) and eos ids."""

    inner: tokenizers.Tokenizer
    template: str
    special_tokens: Mapping[str, str]
    eos_ids: frozenset[int]
    folder: Path

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> ChatTokenizer:
        """Load the tokenizer in `folder`. config: a fallback for eos_token_id. DataError."""
        path = folder / "tokenizer.json"
        try:
            inner = tokenizers.Tokenizer.from_str(read_text(path))
        except FileNotFoundError:
            hint = "copy it beside the model; transformers' save_pretrained of a fast tokenizer writes it"
            raise DataError("the model has no tokenizer.json", str(folder), hint) from None
        except Exception as error:  # the library raises plain Exception for any error
            raise DataError(
                f"the tokenizer cannot be read: {error}", str(path), "copy the file again"
            ) from error
        inner.no_padding()
        inner.no_truncation()
        config_json = optional_json(folder / "tokenizer_config.json")
        tokens = {name: token for name, token in config_json.items() if name.endswith("_token")}
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in tokens.items()
        }
        special_tokens = {
            name: text for name, text in texts.items() if text and isinstance(text, str)
        }
        named = optional_json(folder / "generation_config.json").get("eos_token_id") or config.get(
            "eos_token_id"
        )
        default = inner.token_to_id(special_tokens.get("eos_token", ""))
        eos_ids = named if isinstance(named, list) else [default if named is None else named]
        if invalid := [
            number
            for number in eos_ids
            if not isinstance(number, int | None) or isinstance(number, bool)
        ]:
            where = f"generation_config.json or config.json of {folder}"
            raise DataError(
                f"eos_token_id has {json.dumps(invalid[0])[:80]}",
                where,
                "write a token id, or a list of them",
            )
        return cls(
            inner,
            read_template(folder, config_json),
            special_tokens,
            frozenset(eos_ids) - {None},
            folder,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, including the tokens that the tokenizer adds."""
        return list[int](self.inner.encode(text).ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], datetime] = datetime.now,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        return list[int](
            self.inner.encode(
                self.render(messages, now=now, tools=tools), add_special_tokens=False
            ).ids
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: Callable[[], datetime] = datetime.now,
        tools: Sequence[Any] | None = None,
        marked: bool = False,
    ) -> str:
        """Render the chat, by default up to the start of an answer. DataError if that fails.

        marked  surround the text of `{% generation %}` tags with MARKS
        """
        if not self.template:
            raise DataError(
                "the tokenizer has no chat template",
                str(self.folder),
                "remove --chat, or add a chat_template.jinja there",
            )
        chat = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
        }
        try:
            return renderer.render(
                self.template, chat | dict(self.special_tokens), now(), marked=marked
            )
        except TemplateError as error:
            hint = "check which roles and order of messages it accepts"
            raise DataError(
                f"the chat cannot be rendered: {error}", f"the chat template in {self.folder}", hint
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def read_template(folder: Path, config_json: Mapping[str, Any]) -> str:
    """Return chat_template.jinja, else the template in tokenizer_config.json, else ""."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    template = (
        config_json.get("chat_template")
        or optional_json(folder / "chat_template.json").get("chat_template")
        or ""
    )
    if isinstance(template, list):
        template = {
            str(entry.get("name")): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }.get("default") or ""
    if not isinstance(template, str):
        what = f"chat_template is {json.dumps(template)[:80]}"
        raise DataError(
            what, str(folder / "tokenizer_config.json"), "write the template as a string"
        )
    return template


def optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file, or {} if there is no file. DataError: unreadable."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path.name} cannot be read: {error}", str(path), "copy the file again"
        ) from error
    return value if isinstance(value, dict) else {}
