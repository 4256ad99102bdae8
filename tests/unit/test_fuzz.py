"""Unusual values of every key and bytes in every input file: used as given, or refused by name."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import ODD_BYTES, ODD_TOML, ODD_WORDS, Tally, attempt

from lockstep.agent.hosts import read_hosts
from lockstep.config.resolve import resolve
from lockstep.config.saved_run import from_json, open_run, to_json
from lockstep.config.schema import DataOptions, Field, StringList, config_fields, flatten
from lockstep.corpus.chats import chats
from lockstep.corpus.documents import documents
from lockstep.corpus.files import read_input_lines
from lockstep.corpus.pairs import read_pairs

KEYS = config_fields()


def expected(field: Field, text: str) -> Any:
    """Convert a word for a key, independently of the tested code."""
    if field.default is True or field.default is False:
        return {"true": True, "1": True, "false": False, "0": False}[text]
    if field.type is StringList:
        return tuple(text.split(",")) if text else ()
    return text if isinstance(field.default, str) else float(text)


def nonsense(key: str, wanted: Any) -> Callable[[Any], str]:
    """Return a check of an accepted value: it must equal the given one, be finite, and survive JSON."""

    def why(resolved: Any) -> str:
        value = flatten(asdict(resolved.run))[key]
        if value != wanted or (isinstance(value, float) and not math.isfinite(value)):
            return f"{wanted!r} became {value!r}"
        text = json.dumps(to_json(resolved), ensure_ascii=False).encode()  # as run.json has it
        return "" if from_json(json.loads(text)) == resolved else "lost in run.json"

    return why


def test_every_key_uses_or_refuses_unusual_words() -> None:
    tally = Tally()
    for key in KEYS:
        for word in ODD_WORDS:
            for flags, environ in (
                ({key: word}, {}),
                ({}, {"LOCKSTEP_" + key.upper().replace(".", "_"): word}),
            ):
                outcome = attempt(
                    lambda flags=flags, environ=environ: resolve(None, flags, environ)
                )
                tally.judge(
                    f"{key}={word[:40]!r}",
                    outcome,
                    lambda run, key=key, word=word: nonsense(key, expected(KEYS[key], word))(run),
                )
                if outcome.code:
                    assert key in outcome.text and len(outcome.text) < 2000, outcome.text
    tally.check()


@pytest.mark.slow
def test_every_key_uses_or_refuses_unusual_values_of_a_run_file(tmp_path: Path) -> None:
    tally, path = Tally(), tmp_path / "run.toml"
    for key in KEYS:
        for text in ODD_TOML:
            path.write_text(f"{key} = {text}\n")
            outcome = attempt(lambda: resolve(path))
            given = {
                "true": True,
                "0": 0,
                "-1": -1,
                "1.5": 1.5,
                "99999999999999": 99999999999999,
                '""': () if KEYS[key].type is StringList else "",
                "[]": (),
            }.get(text)
            tally.judge(
                f"{key} = {text[:40]}",
                outcome,
                lambda run, key=key, given=given: nonsense(key, given)(run),
            )
            if outcome.code:
                assert key in outcome.text and len(outcome.text) < 2000, outcome.text
    tally.check()


def test_every_number_and_text_has_an_upper_bound() -> None:
    for key, field in KEYS.items():
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            beyond = min(field.lt, 2 * field.le)
            assert (
                attempt(lambda key=key, beyond=beyond: resolve(None, {key: repr(beyond)})).code == 2
            ), key
        elif isinstance(field.default, str | tuple):
            assert attempt(lambda key=key: resolve(None, {key: "x" * 5000})).code == 2, key


def read_all(path: Path, kind: Any) -> Any:
    """Read all documents of a file."""
    return list(documents(DataOptions(kind=kind, train=(str(path),), held_out_share=0.0)))


def lines(raw: bytes) -> list[str]:
    """Return the lines of a text, which end at "\\n" or "\\r\\n" only."""
    return [
        line.rstrip("\n").removesuffix("\r")
        for line in io.StringIO(raw.decode().removeprefix("\ufeff"), newline="\n")
    ]


# name -> (reader, valid content, independent reader or None)
READERS: dict[str, tuple[Callable[[Path], Any], bytes, Callable[[bytes], Any] | None]] = {
    "run.toml": (lambda path: resolve(path).run and None, b"steps = 3\n", None),
    "hosts.toml": (read_hosts, b'[[host]]\nname = "a"\nworkers = 1\n', None),
    "run.json": (lambda path: open_run(path.parent, None, {}, {}).run and None, b"", None),
    "pairs.txt": (
        lambda path: [a for a, _ in read_pairs([str(path), str(path)], "en", "it", "train")],
        b"a\n",
        lines,
    ),
    "pairs.txt.gz": (
        lambda path: [a for a, _ in read_pairs([str(path), str(path)], "en", "it", "train")],
        b"a\n",
        None,
    ),
    "pairs.tsv": (
        lambda path: read_pairs([str(path)], "en", "it", "train") and None,
        b"a\tb\n",
        None,
    ),
    "pairs.jsonl": (
        lambda path: read_pairs([str(path)], "en", "it", "train") and None,
        b'{"en": "a", "it": "b"}\n',
        None,
    ),
    "text.txt": (
        lambda path: "".join(d.text for _, d in read_all(path, "text")),
        b"a\n",
        lambda raw: raw.decode().removeprefix("\ufeff"),
    ),
    "text.jsonl": (
        lambda path: [d.text for _, d in read_all(path, "text")] and None,
        b'{"text": "a"}\n',
        None,
    ),
    "text.jsonl.gz": (
        lambda path: [d.text for _, d in read_all(path, "text")] and None,
        b'{"text": "a"}\n',
        None,
    ),
    "chats.jsonl": (
        lambda path: list(chats(DataOptions(kind="chat", train=(str(path),)), Counter())) and None,
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        None,
    ),
    "lines.txt": (read_input_lines, b"a\n", lines),
}


@pytest.mark.parametrize("name", READERS)
def test_every_input_file_is_read_unchanged_or_refused(tmp_path: Path, name: str) -> None:
    read, good, other = READERS[name]
    tally, path = Tally(), tmp_path / name
    for number, odd in enumerate(ODD_BYTES):
        for content in (odd, good + odd):
            for packed in (content, gzip.compress(content)) if name.endswith(".gz") else (content,):
                path.write_bytes(packed)
                outcome = attempt(lambda: read(path))

                def why(value: Any, content: bytes = content) -> str:
                    if other is None or (not content.strip() and not value):
                        return ""
                    return (
                        ""
                        if value == other(content)
                        else f"{content[:60]!r} became {str(value)[:60]!r}"
                    )

                tally.judge(f"{name}, odd bytes {number} {odd[:30]!r}", outcome, why)
                if outcome.code:
                    assert path.name in outcome.text and len(outcome.text) < 3000, outcome.text
    tally.check()
