"""Prepared data in a run folder: token streams, the held-out samples as text, a manifest.

    RUN/data/train.*         a token stream (token_stream.py), or those of the two sides of pairs;
                             the same for validation and test
    RUN/data/validation.jsonl, test.jsonl    the held-out pairs, documents or chats
    RUN/data/prepared.json   written last: settings, counts, the sha256 of every file

Rank 0 prepares once; documents and chats need a few megabytes of memory.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import tokenizers

from lockstep.config.schema import DataOptions, RunConfig, TokenizerOptions
from lockstep.corpus import cache
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.corpus.documents import (
    SPLITS,
    Document,
    HashFiles,
    Split,
    content_of,
    in_groups,
    source_of,
)
from lockstep.corpus.token_stream import SHARD_TOKENS, TokenStream, TokenStreamWriter
from lockstep.corpus.tokenizer import Tokenizer
from lockstep.data.manifest import (
    NOT_SHARED,
    FileDigests,
    matches_prepared,
    open_manifest,
    read_manifest,
    verify_files,
)
from lockstep.errors import DataError
from lockstep.files import open_unpublished, publish, remove_unpublished
from lockstep.log import announcing, log
from lockstep.runtime.sources import fingerprint
from lockstep.units import format_bytes, format_count

TOKENIZER_CHARACTERS = 200_000_000  # of training text; more hardly changes a tokenizer
ENCODE_CHARACTERS = 4_000_000  # of text per call of the tokenizer

TokenizerT = TypeVar("TokenizerT")
SplitT = TypeVar("SplitT")


@dataclass(frozen=True)
class Sample:
    """An encoded document, chat or pair of sentences."""

    split: Split
    record: dict[str, Any]  # the line that is stored if the sample is held out
    ids: Sequence[list[int]]  # for each stream; empty: only the record is kept
    loss_mask: list[bool] | None = None  # which ids have a loss; None: all
    bytes: int = 0  # of text with a loss


@dataclass(frozen=True)
class Prepared(Generic[TokenizerT, SplitT]):
    """Prepared data. fingerprints: "data" and "tokenizer"; report: counts of the preparation."""

    folder: Path
    tokenizer: TokenizerT
    train: SplitT
    validation: SplitT
    test: SplitT
    fingerprints: dict[str, str]
    report: Any

    @classmethod
    def verified(
        cls,
        folder: Path,
        tokenizer_file: Path,
        load_tokenizer: Callable[[], TokenizerT],
        open_split: Callable[[Path, str], SplitT],
        digests: FileDigests,
    ) -> Any:
        """Open the data under `folder` and verify every file: about 1 s per gigabyte. DataError."""
        with announcing(f"verifying the prepared data in {folder}"):
            manifest = open_manifest(folder, digests)
        verify_files({tokenizer_file: manifest["tokenizer"]}, folder, digests)
        listed = json.dumps(manifest["files"], sort_keys=True)
        return cls(
            folder,
            load_tokenizer(),
            **{split: open_split(folder, split) for split in SPLITS},
            fingerprints={
                "data": hashlib.sha256(listed.encode()).hexdigest(),
                "tokenizer": manifest["tokenizer"],
            },
            report=manifest["report"],
        )

    def records(self, split: str) -> list[dict[str, Any]]:
        """Return the held-out pairs {"source", "target"}, documents {"name", "text"} or chats
        {"messages"}."""
        with open(self.folder / f"{split}.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]


PreparedText = Prepared[ChatTokenizer, TokenStream]


def train_tokenizer(options: TokenizerOptions, texts: Iterable[str], folder: Path) -> None:
    texts = take_characters(texts, TOKENIZER_CHARACTERS)
    with announcing(f"training a tokenizer of {options.vocab_size:,} entries"):
        tokenizer = Tokenizer.train_on_documents(
            texts, vocab_size=options.vocab_size, min_frequency=options.min_frequency
        )
    tokenizer.save_for_llama(folder)
    log.info("tokenizer: %d entries (%d asked for)", tokenizer.vocab_size, options.vocab_size)


def write_samples(
    folder: Path,
    samples: Iterable[Sample],
    vocab_size: int,
    *,
    sides: Sequence[str] = ("",),
    has_loss_mask: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> tuple[list[Path], dict[str, Any]]:
    """Write the streams and the held-out records of all splits. Return the files, and the number
    of documents, tokens and bytes of each split.

    sides  suffixes of the streams of a split
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_unpublished(folder)
    text_bytes = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        records = {split: open_unpublished(folder / f"{split}.jsonl") for split in SPLITS[1:]}
        for file in records.values():
            stack.callback(publish, file)
        writers = {
            split: [
                TokenStreamWriter(
                    folder,
                    split + side,
                    vocab_size,
                    has_loss_mask=has_loss_mask,
                    shard_tokens=shard_tokens,
                )
                for side in sides
            ]
            for split in SPLITS
        }
        for sample in samples:
            for writer, ids in zip(writers[sample.split], sample.ids, strict=False):
                writer.add(ids, sample.loss_mask)
            text_bytes[sample.split] += sample.bytes
            if sample.split != "train":
                line = json.dumps(sample.record, ensure_ascii=False)
                records[sample.split].write(f"{line}\n".encode())
    files = [path for split in SPLITS for writer in writers[split] for path in writer.close()]
    report: dict[str, Any] = {
        split: {
            "documents": writers[split][0].documents,
            "tokens": sum(writer.tokens for writer in writers[split]),
            "bytes": text_bytes[split],
        }
        for split in SPLITS
    }
    return [*files, *(folder / f"{split}.jsonl" for split in SPLITS[1:])], report


def prepare_once(
    folders: Mapping[str, Path],
    data: DataOptions,
    settings: dict[str, Any],
    write: Callable[[], Iterable[Path]],
    digests: FileDigests,
    *,
    model: Any = None,
    hashes: HashFiles | None = None,
) -> dict[str, Any] | None:
    """For rank 0: prepare data in `folders`, or take what another run has prepared from the same
    content. If data is there, only compare the settings. DataError.

    folders   "data", with the manifest, and further folders of the same preparation
    settings  what the files depend on, besides the source
    write     writes the files, and returns them; the manifest is the last one
    model     JSON values of the model that the files depend on, too
    hashes    how a later start compares the source: see `source_of`
    Returns the report of the preparation, if it was taken.
    """

    def facts() -> list[Any] | None:
        with announcing("hashing the source"):
            content = content_of(data, digests.of)
        return [settings, content, model, *versions()] if content else None

    if matches_prepared(folders["data"], settings, lambda: source_of(data, hashes)):
        return None
    entry = cache.entry_of(facts)
    if cache.take(entry, folders):
        log.info("data as another run has prepared it: %s", entry)
        report: dict[str, Any] = read_manifest(folders["data"])["report"]
        return report
    files = write()
    if entry == cache.entry_of(facts):  # else the source has changed meanwhile
        cache.keep(entry, folders, files, digests)
    return None


def versions() -> list[str]:
    """Return the versions of the code that prepares data."""
    libraries = [version(name) for name in ("tokenizers", "jinja2")]
    return [fingerprint()["lockstep"], sys.version, *libraries]


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Return what the streams of documents or chats depend on, besides their source."""
    keys = ["task", "data.kind", "data.column", "data.held_out_share", "data.pairs"]
    if not run.llama.init_from:
        keys += ["tokenizer.vocab_size", "tokenizer.min_frequency"]
    if run.task == "sft":
        keys += ["batch.seq_len", "data.truncation"]
    return {key: attrgetter(key)(run) for key in keys}


def log_report(report: dict[str, Any]) -> None:
    for split in SPLITS:
        sizes = report[split]
        log.info(
            "%s: %s documents, %s tokens, %s",
            split,
            f"{sizes['documents']:,}",
            format_count(sizes["tokens"]),
            format_bytes(sizes["bytes"]),
        )
    for reason, count in report["left_out"].items():
        log.info("dropped: %d %s", count, reason)


def refuse_empty_split(run: RunConfig, report: dict[str, Any], dropped: Counter[str]) -> None:
    """DataError: a split is empty that the run asks for."""
    for split in SPLITS:
        is_asked_for = run.data.held_out_share or getattr(run.data, split) or split == "train"
        if report[split]["documents"] or not is_asked_for:
            continue
        counts = "; ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        hint = "is this the right file or column?"
        if split != "train":
            hint = (
                "increase data.held_out_share, give files for it, or train without it: "
                "data.held_out_share=0"
            )
        raise DataError(
            f"the split {split} is empty: {counts or 'nothing was dropped'}",
            f"data.kind={run.data.kind}",
            hint,
        )


def open_prepared(
    folder: Path, tokenizer: ChatTokenizer, digests: FileDigests = NOT_SHARED
) -> PreparedText:
    """Open the documents or chats under `folder`, all of it verified. DataError."""
    file = tokenizer.folder / "tokenizer.json"
    opened: PreparedText = Prepared.verified(
        folder, file, lambda: tokenizer, TokenStream.open, digests
    )
    return opened


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
        encodings = inner.encode_batch_fast(texts, add_special_tokens=False)
        for (split, document), encoding in zip(batch, encodings, strict=True):
            ids = [*prefix, *encoding.ids, end]
            yield Sample(split, asdict(document), [ids], bytes=len(document.text.encode()))


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
