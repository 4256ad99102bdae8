"""Real sentences that lie on most machines: the messages of installed programs, in compiled gettext catalogues (.mo).

They are read where they lie and belong to their programs; nothing of them is copied into the project. A message's key is its English
text, so English needs no catalogue, and two other languages meet over the key (catalogue, key).

What is kept is written for people and translates by itself:
* at least WORDS words of English, so that menu entries stay out;
* the same placeholders (%s, %1$d, {name}, $name) on both sides, in any order;
* a translation that differs from the original;
* of plural messages, the two forms of languages that have two (others cannot be matched form by form);
* each source text once: programs share messages and do not always agree on their translation.
Runs of white space become one space. All that is left out is counted.
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
WORDS = 5
PLACEHOLDER = re.compile(
    r"%(?:\d+\$)?(?:\([^)]*\))?[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|q|j|z|t|L)?[diouxXeEfFgGaAcspnmq%]"
    r"|\{[^{}\s]*\}|\$\{?\w+\}?"
)
Messages = dict[tuple[str, str], str]  # (catalogue, English) -> the language's text


def read_catalogues(places: Sequence[str], source: str, target: str) -> tuple[Pairs, dict[str, int]]:
    """Pairs from the machine's catalogues, and how many were left out by reason.

    places  .mo files, or folders that hold LANGUAGE/LC_MESSAGES/*.mo; none: /usr/share/locale. Where both languages need a catalogue
            (neither is English), only folders can tell which is which.
    DataError: no catalogue for a language, a damaged one.
    """
    if source == target:
        raise DataError(f"source and target are both {source!r}", "data.source, data.target", "name two languages")
    left_out: Counter[str] = Counter()
    roots = [Path(place) for place in places] or [LOCALES]
    sides = [None if language == "en" else collect(roots, language, left_out) for language in (source, target)]
    keys = sorted(set.intersection(*(set(side) for side in sides if side is not None)))
    if all(sides) and any(root.is_file() for root in roots):
        what = f"a .mo file does not say which of {source!r} and {target!r} it is"
        raise DataError(what, f"data.train={','.join(places)}", "name folders that hold LANGUAGE/LC_MESSAGES/*.mo")
    pairs: Pairs = []
    seen: set[str] = set()
    for key in keys:
        a, b = (" ".join((key[1] if side is None else side[key]).split()) for side in sides)
        reason = why_not(" ".join(key[1].split()), a, b) or ("the same source again" if a in seen else "")
        if reason:
            left_out[reason] += 1
        else:
            seen.add(a)
            pairs.append((a, b))
    return pairs, dict(left_out)


def why_not(english: str, source: str, target: str) -> str:
    """The reason to leave this pair out, or nothing. See the head of this file."""
    if len(english.split()) < WORDS:
        return f"fewer than {WORDS} words"
    if source == target:
        return "not translated"
    if sorted(PLACEHOLDER.findall(source)) != sorted(PLACEHOLDER.findall(target)):
        return "other placeholders"
    return ""


def find(roots: Sequence[Path], language: str) -> list[Path]:
    """The catalogues of a language, sorted. DataError when there is none."""
    found = [root for root in roots if root.is_file()]
    found += [path for root in roots for path in sorted((root / language / "LC_MESSAGES").glob("*.mo"))]
    if not found:
        there = sorted({path.parent.parent.name for root in roots for path in root.glob("*/LC_MESSAGES/*.mo")})
        near = difflib.get_close_matches(language, there, n=3, cutoff=0.5)
        listed = f"nearest: {', '.join(near)}" if near else f"{len(there)} other languages are there" if there else "no language is there"
        what = f"no gettext catalogue for {language!r}"
        hint = "install the language's translations (on Debian: localepurge removes them), or name other places in data.train"
        raise DataError(what, f"{', '.join(map(str, roots))}: {listed}", hint)
    return found


def collect(roots: Sequence[Path], language: str, left_out: Counter[str]) -> Messages:
    """All messages of a language."""
    messages: Messages = {}
    for path in find(roots, language):
        for key, text in read_mo(path).items():
            english, translated = key.rpartition("\x04")[2].split("\0"), text.split("\0")  # context \x04 singular \0 plural
            if len(english) != len(translated):
                left_out["plurals that do not match"] += 1
                continue
            for one, other in zip(english, translated, strict=True):
                if one:
                    messages[path.stem, one] = other
    return messages


def read_mo(path: Path) -> dict[str, str]:
    """Every message of a compiled catalogue (GNU gettext manual, "The Format of GNU MO Files"). DataError when it is damaged."""
    try:
        content = path.read_bytes()
        order = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}[content[:4]]
        count, keys_at, texts_at = struct.unpack_from(order + "III", content, 8)
        raw = []
        for i in range(count):
            sides = [struct.unpack_from(order + "II", content, at + 8 * i) for at in (keys_at, texts_at)]
            if any(at + length > len(content) for length, at in sides):
                raise ValueError(f"message {i} lies behind the end of the file")
            raw.append(tuple(content[at : at + length] for length, at in sides))
        header = next((text.decode("ascii", "replace") for key, text in raw if not key), "")
        charset = re.search(r"charset=([\w.-]+)", header)
        name = charset[1] if charset and charset[1] != "CHARSET" else "utf-8"
        return {key.decode(name): text.decode(name) for key, text in raw if key and text}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "data.train", "is the path right?") from None
    except (KeyError, struct.error, ValueError, LookupError) as error:
        raise DataError(f"{path} is no whole gettext catalogue: {error!r}", "data.train", "leave it out, or compile it again") from None
