"""The tokenizer of a pretrained Llama: encoding, decoding, chat template, ids that end an answer.

Reads Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json. A chat template is untrusted code: it runs in a separate process
(chat_template.py) that gets only the messages, the tools and the names of the special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.corpus.chat_template import TemplateError, renderer
from lockstep.corpus.tokenizer import read_tokenizer
from lockstep.errors import DataError
from lockstep.files import read_json, read_text

# {"role": "user", "content": "Hello"}, and other keys that the template renders: tool_calls, name
Message = Mapping[str, Any]


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
        hint = (
            "copy it beside the model; transformers' save_pretrained of a fast tokenizer writes it"
        )
        inner = read_tokenizer(folder / "tokenizer.json", hint)
        inner.no_padding()
        inner.no_truncation()
        config_json = optional_json(folder / "tokenizer_config.json")
        special_tokens: dict[str, str] = {}
        for name, token in config_json.items():
            text = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and text and isinstance(text, str):
                special_tokens[name] = text
        generation = optional_json(folder / "generation_config.json")
        named = generation.get("eos_token_id") or config.get("eos_token_id")
        if named is None:
            named = inner.token_to_id(special_tokens.get("eos_token", ""))
        eos_ids = named if isinstance(named, list) else [named]
        for number in eos_ids:
            if not isinstance(number, int | None) or isinstance(number, bool):
                raise DataError(
                    f"eos_token_id has {json.dumps(number)[:80]}",
                    f"generation_config.json or config.json of {folder}",
                    "write a token id, or a list of them",
                )
        template = read_template(folder, config_json)
        return cls(inner, template, special_tokens, frozenset(eos_ids) - {None}, folder)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, including the tokens that the tokenizer adds."""
        return list[int](self.inner.encode(text).ids)

    def encode_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> list[int]:
        prompt = self.render(messages, tools=tools)
        return list[int](self.inner.encode(prompt, add_special_tokens=False).ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        tools: Sequence[Any] | None = None,
        marked: bool = False,
    ) -> str:
        """Render the chat, by default up to the start of an answer. DataError if that fails.

        now     for templates that print a date; None: the time of this call
        marked  surround the text of `{% generation %}` tags with MARKS
        """
        if not self.template:
            raise DataError(
                "the tokenizer has no chat template",
                str(self.folder),
                "remove --chat, or add a chat_template.jinja there",
            )
        values = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            **self.special_tokens,
        }
        try:
            return renderer.render(self.template, values, now or datetime.now(), marked=marked)
        except TemplateError as error:
            raise DataError(
                f"the chat cannot be rendered: {error}",
                f"the chat template in {self.folder}",
                "check which roles and order of messages it accepts",
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=True))


def read_template(folder: Path, config_json: Mapping[str, Any]) -> str:
    """Return chat_template.jinja, else the template in tokenizer_config.json, else ""."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    older = optional_json(folder / "chat_template.json")
    template = config_json.get("chat_template") or older.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        template = named.get("default")
    if isinstance(template := template or "", str):
        return template
    raise DataError(
        f"chat_template is {json.dumps(template)[:80]}",
        str(folder / "tokenizer_config.json"),
        "write the template as a string",
    )


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
