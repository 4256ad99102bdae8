"""Supervised fine-tuning: whole chats packed into rows; the loss covers the answers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lockstep.config.schema import RunConfig
from lockstep.data.text import prepare as data
from lockstep.data.text.chat_samples import chat_samples, chats
from lockstep.data.text.chat_template import renderer
from lockstep.data.text.chat_tokenizer import ChatTokenizer, optional_json
from lockstep.data.text.documents import source_of
from lockstep.data.tokenizer import CHAT_SPECIALS, CHAT_TEMPLATE
from lockstep.errors import DataError
from lockstep.files import write_atomic, write_json
from lockstep.models.llama_io import TOKENIZER
from lockstep.tasks.pretraining import tokenizer_of


def prepare(run: RunConfig, folder: Path) -> None:
    """For rank 0: prepare the tokenizer and the token streams of the run's chats."""
    texts = (m.get("content") or "" for split, chat in chats(run.data, Counter()) if split == "train" for m in chat.messages)
    tokenizer = with_template(tokenizer_of(run, folder, texts), folder / TOKENIZER)

    def samples(left_out: Counter[str]) -> Iterator[data.Sample]:
        return chat_samples(tokenizer, run.data, run.batch.seq_len, left_out)

    data.prepare(run, folder / "data", partial(source_of, run.data), tokenizer, samples)
    renderer.close()


def with_template(tokenizer: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """Return the tokenizer with a chat template: the one it has, or Llama 3's if it has those
    tokens. DataError otherwise."""
    if tokenizer.template:
        return tokenizer
    ids = {token: tokenizer.inner.token_to_id(token) for token in CHAT_SPECIALS}
    if missing := [token for token, number in ids.items() if number is None]:
        what = f"the tokenizer has no chat template, and lacks {', '.join(missing)}, which Llama 3's template needs"
        raise DataError(what, str(tokenizer.folder), "add a chat_template.jinja that uses its own tokens beside it")
    eos_ids = [*sorted(tokenizer.eos_ids), ids[CHAT_SPECIALS[-1]]]
    write_json(folder / "generation_config.json", optional_json(folder / "generation_config.json") | {"eos_token_id": eos_ids})
    write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
    return ChatTokenizer.load(folder, {})
