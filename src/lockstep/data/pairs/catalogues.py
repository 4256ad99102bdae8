"""Pairs from compiled gettext catalogues (.mo): the translated messages of installed programs.

The key of a message is its English text, so English needs no catalogue, and two other languages are
joined by (catalogue, key). Runs of white space become one space. Dropped pairs, by reason:
* fewer than MIN_WORDS English words: menu entries
* other placeholders (%s, %1$d, {name}, $name) in the translation
* a translation that equals the source
* plural messages with other than two forms, which cannot be aligned
* a repeated source text: programs share messages with different translations
"""

from __future__ import annotations

import difflib
import re
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lockstep.data.pairs.textfiles import Pairs
from lockstep.errors import DataError

LOCALES = Path("/usr/share/locale")
MIN_WORDS = 5
PLACEHOLDER = re.compile(
    r"%(?:\d+\$)?(?:\([^)]*\))?[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|q|j|z|t|L)?[diouxXeEfFgGaAcspnmq%]"
    r"|\{[^{}\s]*\}|\$\{?\w+\}?"
)
Messages = dict[tuple[str, str], str]  # (catalogue, English) -> the language's text


def read_catalogues(paths: Sequence[str], source: str, target: str) -> tuple[Pairs, dict[str, int]]:
    """Return the pairs, and the number of dropped pairs by reason. DataError.

    paths  .mo files, or folders with LANGUAGE/LC_MESSAGES/*.mo; empty: LOCALES. If neither language
           is English, folders only: a file does not contain its language
    """
    if source == target:
        raise DataError(f"source and target are both {source!r}", "data.source, data.target", "name two languages")
    left_out: Counter[str] = Counter()
    roots = [Path(path) for path in paths] or [LOCALES]
    sides = [None if language == "en" else collect(roots, language, left_out) for language in (source, target)]
    keys = sorted(set.intersection(*(set(side) for side in sides if side is not None)))
    if all(sides) and any(root.is_file() for root in roots):
        what = f"a .mo file does not contain its language, {source!r} or {target!r}"
        raise DataError(what, f"data.train={','.join(paths)}", "give folders with LANGUAGE/LC_MESSAGES/*.mo")
    pairs: Pairs = []
    seen: set[str] = set()
    for key in keys:
        a, b = (" ".join((key[1] if side is None else side[key]).split()) for side in sides)
        reason = drop_reason(" ".join(key[1].split()), a, b) or ("the same source again" if a in seen else "")
        if reason:
            left_out[reason] += 1
        else:
            seen.add(a)
            pairs.append((a, b))
    return pairs, dict(left_out)


def drop_reason(english: str, source: str, target: str) -> str:
    if len(english.split()) < MIN_WORDS:
        return f"fewer than {MIN_WORDS} words"
    if source == target:
        return "not translated"
    if sorted(PLACEHOLDER.findall(source)) != sorted(PLACEHOLDER.findall(target)):
        return "other placeholders"
    return ""


def find_catalogues(roots: Sequence[Path], language: str) -> list[Path]:
    paths = [root for root in roots if root.is_file()]
    paths += [path for root in roots for path in sorted((root / language / "LC_MESSAGES").glob("*.mo"))]
    if not paths:
        present = sorted({path.parent.parent.name for root in roots for path in root.glob("*/LC_MESSAGES/*.mo")})
        near = difflib.get_close_matches(language, present, n=3, cutoff=0.5)
        listed = f"nearest: {', '.join(near)}" if near else f"{len(present)} other languages found" if present else "no language found"
        what = f"no gettext catalogue for {language!r}"
        hint = "install the language's translations (on Debian: localepurge removes them), or give other folders in data.train"
        raise DataError(what, f"{', '.join(map(str, roots))}: {listed}", hint)
    return paths


def collect(roots: Sequence[Path], language: str, left_out: Counter[str]) -> Messages:
    messages: Messages = {}
    for path in find_catalogues(roots, language):
        for key, text in read_mo(path).items():
            english, translated = key.rpartition("\x04")[2].split("\0"), text.split("\0")  # context \x04 singular \0 plural
            if len(english) != len(translated):
                left_out["plurals that do not match"] += 1
                continue
            for message, translation in zip(english, translated, strict=True):
                if message:
                    messages[path.stem, message] = translation
    return messages


def read_mo(path: Path) -> dict[str, str]:
    """Return every message of a catalogue (GNU MO format). DataError if it is damaged."""
    try:
        content = path.read_bytes()
        order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}[content[:4]]
        count, keys_at, texts_at = struct.unpack_from(order + "III", content, 8)
        raw = []
        for i in range(count):
            sides = [struct.unpack_from(order + "II", content, at + 8 * i) for at in (keys_at, texts_at)]
            if any(at + length > len(content) for length, at in sides):
                raise ValueError(f"message {i} is beyond the end of the file")
            raw.append(tuple(content[at : at + length] for length, at in sides))
        header = next((text.decode("ascii", "replace") for key, text in raw if not key), "")
        charset = re.search(r"charset=([\w.-]+)", header)
        name = charset[1] if charset and charset[1] != "CHARSET" else "utf-8"
        return {key.decode(name): text.decode(name) for key, text in raw if key and text}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "data.train", "check the path") from None
    except (KeyError, struct.error, ValueError, LookupError) as error:
        raise DataError(f"{path} is not a valid gettext catalogue: {error!r}", "data.train", "remove it, or compile it again") from None
