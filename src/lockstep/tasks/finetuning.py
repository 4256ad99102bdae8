"""Supervised fine-tuning: chats packed whole into rows, loss on the answers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lockstep.config.schema import Run
from lockstep.data.text import prepare as data
from lockstep.data.text.chat_samples import chat_samples, chats
from lockstep.data.text.chat_template import renderer
from lockstep.data.text.chat_tokenizer import ChatTokenizer, optional_json
from lockstep.data.text.documents import source_of
from lockstep.data.text.packing import PackedRows
from lockstep.data.tokenizer import CHAT_SPECIALS, CHAT_TEMPLATE
from lockstep.elastic.consensus import lead
from lockstep.elastic.world import World
from lockstep.errors import DataError
from lockstep.files import write_atomic, write_json
from lockstep.models.llama_io import TOKENIZER
from lockstep.tasks.pretraining import Language, tokenizer_of


def open_tuning(run: Run, folder: Path, world: World) -> Language:
    """Collective. The task of a run with `task = "sft"`; its data is prepared by rank 0 the first time."""
    lead(world, lambda: world.board.during("preparing")(prepare)(run, folder))
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, {})
    return Language.over(run, folder, world, tokenizer, lambda found: PackedRows(found.train, run.batch.length, seed=run.seed))


def prepare(run: Run, folder: Path) -> None:
    """For the leader: tokenizer and streams of the run's chats."""
    said = (m.get("content") or "" for split, chat in chats(run.data, Counter()) if split == "train" for m in chat.messages)
    tokenizer = with_template(tokenizer_of(run, folder, said), folder / TOKENIZER)

    def samples(left_out: Counter[str]) -> Iterator[data.Sample]:
        return chat_samples(tokenizer, run.data, run.batch.length, left_out)

    data.prepare(run, folder / "data", partial(source_of, run.data), tokenizer, samples)
    renderer.close()


def with_template(tokenizer: ChatTokenizer, folder: Path) -> ChatTokenizer:
    """The tokenizer with a chat template: its own, or Llama 3's where it has that one's tokens. DataError when it has neither."""
    if tokenizer.template:
        return tokenizer
    known = {token: tokenizer.inner.token_to_id(token) for token in CHAT_SPECIALS}
    if missing := [token for token, number in known.items() if number is None]:
        what = f"the tokenizer has no chat template, and not {', '.join(missing)}, which Llama 3's needs"
        raise DataError(what, str(tokenizer.folder), "put a chat_template.jinja beside it that uses its own tokens")
    ends = [*sorted(tokenizer.ends), known[CHAT_SPECIALS[-1]]]
    write_json(folder / "generation_config.json", optional_json(folder / "generation_config.json") | {"eos_token_id": ends})
    write_atomic(folder / "chat_template.jinja", CHAT_TEMPLATE)
    return ChatTokenizer.load(folder, {})
