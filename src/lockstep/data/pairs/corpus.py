"""The text of a run: training, validation and test pairs from whichever source `data.kind` names, cleaned and counted.

    cldr         made here from Unicode CLDR; needs no download         data/pairs/cldr.py
    files        parallel text files                                    data/pairs/textfiles.py
    huggingface  a dataset of the hub or of a local folder              data/pairs/huggingface.py
    gettext      the message catalogues on this machine                 data/pairs/catalogues.py

Every pair that was read is either kept or counted under a reason in the report. A corpus that has no validation or test pairs gives up
some of its training pairs: those whose source text has the smallest hashes, so that equal sources lie on one side and the choice is the
same on every machine and in every order of the file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.config import schema as config
from lockstep.data.pairs import catalogues, cldr, textfiles
from lockstep.data.pairs.textfiles import Pairs
from lockstep.errors import ConfigError, DataError
from lockstep.files import sha256_file

SPLITS = ("train", "validation", "test")

# Which of the fields that name a place belong to which kind. Another one that is set would be lost silently, so it is refused.
FIELDS = {
    "cldr": (),
    "files": ("train", "validation", "test"),
    "huggingface": ("train", "validation", "test", "dataset", "subset"),
    "gettext": ("train",),
}


@dataclass(frozen=True)
class Report:
    """What became of the pairs that were read: read = kept + the sum of left_out."""

    read: int
    kept: dict[str, int]  # split -> pairs
    left_out: dict[str, int]  # reason -> pairs

    def line(self) -> str:
        """One line for the log."""
        kept = ", ".join(f"{count:,} {split}" for split, count in self.kept.items())
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        return f"{self.read:,} pairs read: {kept}; left out: {reasons or 'none'}"


@dataclass(frozen=True)
class Corpus:
    train: Pairs
    validation: Pairs
    test: Pairs
    fingerprint: str  # sha256 of every text in its place
    report: Report


def read(data: config.Data) -> Corpus:
    """The corpus that `data` names. ConfigError or DataError when it cannot be had as asked; see the readers."""
    refuse_idle(data)
    splits, left_out = read_splits(data)
    count = Counter(left_out)
    raw = sum(len(pairs) for pairs in splits.values()) + sum(count.values())
    cleaned = {split: clean(splits.get(split, []), count) for split in SPLITS}
    if not cleaned["train"]:
        found = f"{raw:,} pairs were read, none has text on both sides" if raw else "nothing was read"
        raise DataError(f"the training text is empty: {found}", place(data), "is this the right file, split or language?")
    for split in SPLITS[1:]:
        if split in splits and not cleaned[split]:
            raise DataError(f"the {split} text is empty", place(data), f"leave data.{split} out: pairs are then held out of training")
    missing = [split for split in SPLITS[1:] if split not in splits]
    cleaned["train"], *held = hold_out(cleaned["train"], data.held_out, parts=len(missing), where=place(data))
    cleaned.update(zip(missing, held, strict=True))
    report = Report(raw, {split: len(pairs) for split, pairs in cleaned.items()}, {k: n for k, n in count.items() if n})
    return Corpus(**cleaned, fingerprint=digest(cleaned), report=report)


def read_splits(data: config.Data) -> tuple[dict[str, Pairs], dict[str, int]]:
    """The splits that the corpus itself has, as they stand, and what its reader left out."""
    named: dict[str, Sequence[str]] = {split: getattr(data, split) for split in SPLITS}
    if data.kind == "cldr":
        made = cldr.pairs(data.source, data.target, limit=data.pairs, held_out=data.held_out)
        held = {"validation": made.validation, "test": made.test} if data.held_out else {}
        return {"train": made.train, **held}, made.left_out
    if data.kind == "files":
        given = {split: paths for split, paths in named.items() if paths or split == "train"}
        return {split: textfiles.read_pairs(paths, data.source, data.target, split) for split, paths in given.items()}, {}
    if data.kind == "gettext":
        found, left_out = catalogues.read_catalogues(data.train, data.source, data.target)
        return {"train": found}, left_out
    if not data.dataset:
        what = "data.kind=huggingface needs a dataset"
        raise ConfigError(what, place(data), "for example data.dataset=Helsinki-NLP/opus_books data.subset=en-it")
    several = [split for split, names in named.items() if len(names) > 1]
    if several:
        raise ConfigError(f"data.{several[0]} names several splits", place(data), "name one, or none")
    # `datasets` takes 1 to 4 s to import and pulls in pandas: only those who ask for it pay.
    reader = importlib.import_module("lockstep.data.pairs.huggingface")
    names = {split: "".join(given) for split, given in named.items()}
    return reader.read_dataset(data.dataset, data.subset, data.source, data.target, names), {}


def clean(pairs: Pairs, left_out: Counter[str]) -> Pairs:
    """The pairs with text on both sides, without white space around it; the others are counted."""
    stripped = [(a.strip(), b.strip()) for a, b in pairs]
    kept = [pair for pair in stripped if pair[0] and pair[1]]
    left_out["empty on one side"] += sum(bool(a) != bool(b) for a, b in stripped)
    left_out["empty on both sides"] += sum(not a and not b for a, b in stripped)
    return kept


def hold_out(pairs: Pairs, size: int, *, parts: int, where: str) -> tuple[Pairs, ...]:
    """(what stays, part 1, .. part `parts`): each part has `size` pairs, in the corpus's order.

    Source texts are taken in the order of their hashes. Pairs of equal source stay together; such a group that would overfill
    a part stays in training. DataError when the parts would take more than half of the pairs.
    """
    if 2 * parts * size > len(pairs):
        what = f"{len(pairs):,} pairs are too few to hold out {parts} times {size:,}"
        raise DataError(what, where, f"set data.held_out to {max(1, len(pairs) // (8 * parts)):,}, or name validation and test texts")
    groups = Counter(source for source, _ in pairs)
    taken: dict[str, int] = {}
    room = [size] * parts
    for source in sorted(groups, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest()) if parts else ():
        part = next((i for i, left in enumerate(room) if groups[source] <= left), None)
        if part is not None:
            taken[source] = part + 1
            room[part] -= groups[source]
        if not any(room):
            break
    split: tuple[Pairs, ...] = tuple([] for _ in range(parts + 1))
    for pair in pairs:
        split[taken.get(pair[0], 0)].append(pair)
    return split


def digest(splits: dict[str, Pairs]) -> str:
    """Hex sha256 over every text of every split, in order."""
    total = hashlib.sha256()
    for split in SPLITS:
        total.update(f"{split} {len(splits[split])}\n".encode())
        total.update("\n".join(f"{a}\t{b}" for a, b in splits[split]).encode())
    return total.hexdigest()


def fingerprint(data: config.Data) -> str:
    """Hex sha256 of what decides the corpus, without reading text into pairs where that can be.

    cldr: versions, CLDR data, options. files, gettext, local datasets: the bytes of the files. A dataset of the hub: its name and the
    options only, so that a prepared run needs no network to go on; `Corpus.fingerprint` holds for what was read.
    DataError when a file is gone.
    """
    total = hashlib.sha256(json.dumps({k: v for k, v in asdict(data).items() if k not in (*SPLITS, "dataset", "max_tokens")}).encode())
    if data.kind == "cldr":
        total.update(cldr.fingerprint(data.source, data.target, limit=data.pairs, held_out=data.held_out).encode())
    if data.kind == "huggingface" and not Path(data.dataset).is_dir():
        total.update(json.dumps([data.dataset, *(getattr(data, split) for split in SPLITS)]).encode())
    for split, path in files_of(data):
        try:
            total.update(f"{split} {path.name} {sha256_file(path)}\n".encode())
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", place(data), "is the path right?") from None
    return total.hexdigest()


def files_of(data: config.Data) -> list[tuple[str, Path]]:
    """(split, file) of every file that the corpus is read from, in a fixed order."""
    if data.kind == "files":
        return [(split, Path(path)) for split in SPLITS for path in getattr(data, split)]
    if data.kind == "huggingface" and Path(data.dataset).is_dir():
        return [("dataset", path) for path in sorted(Path(data.dataset).rglob("*")) if path.is_file()]
    if data.kind == "gettext":
        roots = [Path(place) for place in data.train] or [catalogues.LOCALES]
        return [(lang, path) for lang in (data.source, data.target) if lang != "en" for path in catalogues.find(roots, lang)]
    return []


def refuse_idle(data: config.Data) -> None:
    """ConfigError when a field is set that `data.kind` would not look at."""
    idle = [name for name in FIELDS["huggingface"] if name not in FIELDS[data.kind] and getattr(data, name)]
    if idle:
        kinds = [kind for kind, fields in FIELDS.items() if idle[0] in fields]
        raise ConfigError(f"data.kind={data.kind} has no use for data.{idle[0]}", place(data), f"set data.kind to {' or '.join(kinds)}")


def place(data: config.Data) -> str:
    """Where the corpus was to come from, for messages."""
    fields = {name: getattr(data, name) for name in ("kind", "source", "target", *FIELDS[data.kind])}
    return " ".join(f"data.{k}={v if isinstance(v, str) else ','.join(v)}" for k, v in fields.items() if v)
