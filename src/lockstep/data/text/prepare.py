"""From the documents or chats of a run to what its processes open: token ids in streams, the tokenizer, the held-out text.

    RUN/tokenizer/           the files of the tokenizer: trained here, or those of the model that the run starts from
    RUN/data/train.*         a stream of ids (stream.py); validation and test likewise
    RUN/data/validation.jsonl, test.jsonl    the held-out documents or chats themselves
    RUN/data/prepared.json   written last: what was asked for, counts, the sha256 of every file

The leader prepares once, holding a few megabytes at a time; what was cut short is done again.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from lockstep.config.schema import Run
from lockstep.data.manifest import MARKER, compare, read_marker, refuse_another
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.data.text.documents import SPLITS, Document, Split, in_groups
from lockstep.data.text.token_stream import Stream, Writer
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import DataError
from lockstep.files import sha256_file, write_json
from lockstep.units import show_bytes, show_count

log = logging.getLogger("lockstep")

TRAINED_ON_BYTES = 200_000_000  # of text: more does not change the words of a tokenizer
AT_ONCE_BYTES = 4_000_000  # of text are encoded together


@dataclass(frozen=True)
class Sample:
    """A document or a chat as it is trained. `record` is what is kept of a held-out one; `counts`: which ids are learnt, None: all."""

    split: Split
    ids: list[int]
    counts: list[bool] | None
    record: dict[str, Any]
    bytes: int  # of text that is learnt


@dataclass(frozen=True)
class Prepared:
    """Opened data. `bytes` of learnt text by split; `fingerprints` has "data" (every id) and "tokenizer"."""

    folder: Path
    tokenizer: ChatTokenizer
    train: Stream
    validation: Stream
    test: Stream
    bytes: dict[str, int]
    fingerprints: dict[str, str]

    def records(self, split: str) -> list[dict[str, Any]]:
        """The held-out documents {"name", "text"} or chats {"messages"}."""
        with open(self.folder / f"{split}.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def train_tokenizer(run: Run, texts: Iterable[str], folder: Path) -> None:
    """Train the tokenizer of a new Llama and leave its files in `folder`."""
    tokenizer = Tokenizer.train_on_documents(
        until(texts, TRAINED_ON_BYTES), vocabulary=run.tokens.vocabulary, min_frequency=run.tokens.min_frequency
    )
    tokenizer.save_for_llama(folder)
    log.info("tokenizer: %d entries (%d asked for)", tokenizer.size, run.tokens.vocabulary)


def prepare(
    run: Run,
    folder: Path,
    source: Callable[[], dict[str, Any]],
    tokenizer: ChatTokenizer,
    samples: Callable[[Counter[str]], Iterator[Sample]],
) -> None:
    """For the leader: have the streams ready under `folder`. Returns at once when they are there.

    source   tells what the samples are read from; compared when they are there already
    samples  gives them, and counts those that it leaves out by their reason
    DataError: other data is there, this cannot be read, or a split is empty.
    """
    asked = settings(run)
    if (folder / MARKER).exists():
        try:
            asked["source"] = source()
        except DataError as error:  # the text's files are gone, or seen from another folder, and the run has all that it needs
            log.warning("going on with the data that was prepared in %s; its text cannot be compared: %s", folder, error.what)
        refuse_another(read_marker(folder)["asked"], asked, folder)
        return
    asked["source"] = source()
    folder.mkdir(parents=True, exist_ok=True)
    left_out: Counter[str] = Counter()
    text_bytes = dict.fromkeys(SPLITS, 0)
    writers: dict[str, Writer] = {}
    with ExitStack() as held:
        records = {split: held.enter_context(open(folder / f"{split}.jsonl", "w", encoding="utf-8")) for split in SPLITS[1:]}
        for split in SPLITS:
            size = tokenizer.inner.get_vocab_size(with_added_tokens=True)
            writers[split] = Writer(folder, split, size, counted=run.task == "sft")
        for sample in samples(left_out):
            writers[sample.split].add(sample.ids, sample.counts)
            text_bytes[sample.split] += sample.bytes
            if sample.split in records:
                records[sample.split].write(json.dumps(sample.record, ensure_ascii=False) + "\n")
    unheld = [split for split in SPLITS[1:] if not run.data.held_out_share and not getattr(run.data, split)]  # training without them
    if empty := [split for split in SPLITS if not writers[split].documents and split not in unheld]:
        counted = "; ".join(f"{count:,} {reason}" for reason, count in left_out.items()) or "nothing was left out"
        hint = "raise data.held_out_share, name files for it, or train without: data.held_out_share=0"
        hint = hint if empty[0] != "train" else "is this the right file or column?"
        raise DataError(f"there is nothing in the split {empty[0]}: {counted}", f"data.kind={run.data.kind}", hint)
    files = [path for split in SPLITS for path in writers[split].close()] + [folder / f"{split}.jsonl" for split in SPLITS[1:]]
    report = {s: {"documents": writers[s].documents, "tokens": writers[s].tokens, "bytes": text_bytes[s]} for s in SPLITS}
    for split, one in report.items():
        figures = f"{one['documents']:,} documents, {show_count(one['tokens'])} tokens, {show_bytes(one['bytes'])}"
        log.info("%s: %s", split, figures)
    for reason, count in left_out.items():
        log.info("left out: %d %s", count, reason)
    write_json(
        folder / MARKER,
        {
            "corpus": run.data.kind,
            "tokenizer": sha256_file(tokenizer.folder / "tokenizer.json"),
            "asked": asked,
            "report": report | {"left_out": dict(left_out)},
            "files": {path.name: sha256_file(path) for path in files},
        },
    )


def settings(run: Run) -> dict[str, Any]:
    """What decides the streams besides their source, as it stands in the marker."""
    data = {f"data.{k}": v for k, v in asdict(run.data).items() if k in ("kind", "column", "held_out_share", "pairs")}
    tokens = {f"tokens.{k}": v for k, v in asdict(run.tokens).items() if k in ("vocabulary", "min_frequency")}
    longest = {"batch.length": run.batch.length} if run.task == "sft" else {}
    return {"task": run.task, **data, **({} if run.llama.start else tokens), **longest}


def open_prepared(folder: Path, tokenizer: ChatTokenizer) -> Prepared:
    """The data under `folder`, every file compared with its sha256: about a second a gigabyte. DataError when one is missing or damaged."""
    marker = read_marker(folder)
    expected = {folder / name: digest for name, digest in marker["files"].items()}
    expected[tokenizer.folder / "tokenizer.json"] = marker["tokenizer"]
    compare(expected, folder)
    streams = {split: Stream.open(folder, split) for split in SPLITS}
    return Prepared(
        folder,
        tokenizer,
        **streams,
        bytes={split: marker["report"][split]["bytes"] for split in SPLITS},
        fingerprints={"data": json.dumps(marker["files"], sort_keys=True), "tokenizer": marker["tokenizer"]},
    )


def carry_tokenizer(source: list[Path], folder: Path) -> None:
    """Copy the files of a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source:
        shutil.copyfile(path, folder / path.name)


# -- documents --------------------------------------------------------------------------------------------------------


def document_samples(tokenizer: ChatTokenizer, found: Iterable[tuple[Split, Document]]) -> Iterator[Sample]:
    """Each document between what its tokenizer puts before a text and its end mark; a special token's name in a text is only text."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    inner.encode_special_tokens = True
    begin, end = list(inner.encode("").ids), end_of(tokenizer)
    if begin[-1:] == [end]:
        begin = begin[:-1]  # a tokenizer that puts the end there by itself
    for batch in in_groups(found, AT_ONCE_BYTES, size=lambda one: len(one[1].text)):
        texts = [document.text for _, document in batch]
        for (split, document), encoding in zip(batch, inner.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            record = {"name": document.name, "text": document.text}
            yield Sample(split, [*begin, *encoding.ids, end], None, record, len(document.text.encode()))


def end_of(tokenizer: ChatTokenizer) -> int:
    """The id that ends a document. DataError when the tokenizer has none."""
    found = tokenizer.inner.token_to_id(tokenizer.specials.get("eos_token", ""))
    if found is None and len(tokenizer.ends) == 1:
        found = next(iter(tokenizer.ends))
    if found is None:
        raise DataError("the tokenizer names no token that ends a text", str(tokenizer.folder), "set eos_token in tokenizer_config.json")
    return int(found)


def until(texts: Iterable[str], size: int) -> Iterator[str]:
    """The first texts that have `size` characters together."""
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return
