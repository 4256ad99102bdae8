"""Prepare the documents or chats of a run: token streams, the tokenizer, the held-out text.

    RUN/tokenizer/           the tokenizer: trained here, or that of the model in llama.init_from
    RUN/data/train.*         a token stream (token_stream.py); the same for validation and test
    RUN/data/validation.jsonl, test.jsonl    the held-out documents or chats
    RUN/data/prepared.json   written last: settings, counts, the sha256 of every file

Rank 0 prepares once, with a few megabytes of memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.config.schema import RunConfig, TokenizerOptions
from lockstep.corpus.text.chat_tokenizer import ChatTokenizer
from lockstep.corpus.text.documents import SPLITS, Document, Split, in_groups, source_of
from lockstep.corpus.text.token_stream import TokenStream, TokenStreamWriter
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.data.manifest import (
    NOT_SHARED,
    FileDigests,
    matches_prepared,
    open_manifest,
    verify_files,
    write_manifest,
)
from lockstep.errors import DataError
from lockstep.files import open_unpublished, publish, remove_unpublished, sha256_file
from lockstep.log import log
from lockstep.units import format_bytes, format_count

TOKENIZER_CHARACTERS = 200_000_000  # of training text; more hardly changes a tokenizer
ENCODE_CHARACTERS = 4_000_000  # of text per call of the tokenizer


@dataclass(frozen=True)
class Sample:
    """An encoded document or chat."""

    split: Split
    ids: list[int]
    loss_mask: list[bool] | None  # which ids have a loss; None: all
    record: dict[str, Any]  # the line that is stored if the sample is held out
    bytes: int  # of text with a loss


@dataclass(frozen=True)
class PreparedText:
    """Prepared data. bytes: text with a loss, by split; fingerprints: "data" and "tokenizer"."""

    folder: Path
    tokenizer: ChatTokenizer
    train: TokenStream
    validation: TokenStream
    test: TokenStream
    bytes: dict[str, int]
    fingerprints: dict[str, str]

    def records(self, split: str) -> list[dict[str, Any]]:
        """Return the held-out documents {"name", "text"} or chats {"messages"}."""
        with open(self.folder / f"{split}.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def train_tokenizer(options: TokenizerOptions, texts: Iterable[str], folder: Path) -> None:
    texts = take_characters(texts, TOKENIZER_CHARACTERS)
    tokenizer = Tokenizer.train_on_documents(
        texts, vocab_size=options.vocab_size, min_frequency=options.min_frequency
    )
    tokenizer.save_for_llama(folder)
    log.info("tokenizer: %d entries (%d asked for)", tokenizer.vocab_size, options.vocab_size)


def prepare(
    run: RunConfig,
    folder: Path,
    tokenizer: ChatTokenizer,
    samples: Iterable[Sample],
    dropped: Counter[str],
    digests: FileDigests,
) -> None:
    """For rank 0: prepare the streams under `folder`. If they exist, only compare the settings.

    samples  read only if there are no streams
    dropped  samples dropped until then, by reason
    DataError: other data is in the folder, the source cannot be read, or a split is empty.
    """
    # The streams depend on their source and on these settings.
    data = {
        f"data.{k}": v
        for k, v in asdict(run.data).items()
        if k in ("kind", "column", "held_out_share", "pairs")
    }
    options = {
        f"tokenizer.{k}": v
        for k, v in asdict(run.tokenizer).items()
        if k in ("vocab_size", "min_frequency")
    }
    rows = {"batch.seq_len": run.batch.seq_len, "data.truncation": run.data.truncation}
    settings: dict[str, Any] = {
        "task": run.task,
        **data,
        **({} if run.llama.init_from else options),
        **(rows if run.task == "sft" else {}),
    }
    if matches_prepared(folder, settings, "source", lambda: source_of(run.data)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_unpublished(folder)
    text_bytes = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        records = {split: open_unpublished(folder / f"{split}.jsonl") for split in SPLITS[1:]}
        for file in records.values():
            stack.callback(publish, file)
        size = tokenizer.inner.get_vocab_size(with_added_tokens=True)
        writers = {
            split: TokenStreamWriter(folder, split, size, has_loss_mask=run.task == "sft")
            for split in SPLITS
        }
        for sample in samples:
            writers[sample.split].add(sample.ids, sample.loss_mask)
            text_bytes[sample.split] += sample.bytes
            if sample.split in records:
                records[sample.split].write(
                    f"{json.dumps(sample.record, ensure_ascii=False)}\n".encode()
                )
    optional = [
        split
        for split in SPLITS[1:]
        if not run.data.held_out_share and not getattr(run.data, split)
    ]  # held_out_share=0
    if empty := [
        split for split in SPLITS if not writers[split].documents and split not in optional
    ]:
        counts = (
            "; ".join(f"{count:,} {reason}" for reason, count in dropped.items())
            or "nothing was dropped"
        )
        hint = "increase data.held_out_share, give files for it, or train without it: data.held_out_share=0"
        hint = hint if empty[0] != "train" else "is this the right file or column?"
        raise DataError(
            f"the split {empty[0]} is empty: {counts}", f"data.kind={run.data.kind}", hint
        )
    files = [path for split in SPLITS for path in writers[split].close()] + [
        folder / f"{split}.jsonl" for split in SPLITS[1:]
    ]
    report = {
        s: {"documents": writers[s].documents, "tokens": writers[s].tokens, "bytes": text_bytes[s]}
        for s in SPLITS
    }
    for split, sizes in report.items():
        figures = f"{sizes['documents']:,} documents, {format_count(sizes['tokens'])} tokens, {format_bytes(sizes['bytes'])}"
        log.info("%s: %s", split, figures)
    for reason, count in dropped.items():
        log.info("dropped: %d %s", count, reason)
    facts = {"corpus": run.data.kind, "tokenizer": sha256_file(tokenizer.folder / "tokenizer.json")}
    write_manifest(
        folder, files, digests, **facts, asked=settings, report=report | {"left_out": dict(dropped)}
    )


def open_prepared(
    folder: Path, tokenizer: ChatTokenizer, digests: FileDigests = NOT_SHARED
) -> PreparedText:
    """Open the data under `folder` and verify every file: about 1 s per gigabyte. DataError."""
    manifest = open_manifest(folder, digests)
    text_bytes: dict[str, int] = {split: manifest["report"][split]["bytes"] for split in SPLITS}
    verify_files({tokenizer.folder / "tokenizer.json": manifest["tokenizer"]}, folder, digests)
    return PreparedText(
        folder,
        tokenizer,
        **{split: TokenStream.open(folder, split) for split in SPLITS},
        bytes=text_bytes,
        fingerprints={
            "data": json.dumps(manifest["files"], sort_keys=True),
            "tokenizer": manifest["tokenizer"],
        },
    )


def document_samples(
    tokenizer: ChatTokenizer, documents: Iterable[tuple[Split, Document]]
) -> Iterator[Sample]:
    """Yield each document with the prefix of the tokenizer and the end token."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    inner.encode_special_tokens = True
    prefix, end = list(inner.encode("").ids), end_of(tokenizer)
    if prefix[-1:] == [end]:
        prefix = prefix[:-1]  # this tokenizer appends the end token itself
    for batch in in_groups(documents, ENCODE_CHARACTERS, size=lambda item: len(item[1].text)):
        texts = [document.text for _, document in batch]
        for (split, document), encoding in zip(
            batch, inner.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            record = {"name": document.name, "text": document.text}
            yield Sample(
                split, [*prefix, *encoding.ids, end], None, record, len(document.text.encode())
            )


def end_of(tokenizer: ChatTokenizer) -> int:
    """Return the id that ends a document. DataError if the tokenizer has none."""
    eos_id = tokenizer.inner.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    if eos_id is None and len(tokenizer.eos_ids) == 1:
        eos_id = next(iter(tokenizer.eos_ids))
    if eos_id is None:
        raise DataError(
            "the tokenizer names no token that ends a text",
            str(tokenizer.folder),
            "set eos_token in tokenizer_config.json",
        )
    return int(eos_id)


def take_characters(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the first texts with `size` characters in total."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return
