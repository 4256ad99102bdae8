"""The answers of docs/questions.md as scripts: each is put into the loop of the page.

A line of an answer replaces the line of the loop that does the same (LINES). Others are inserted
where they are. "..." means the lines of the loop between its neighbors. Lines above a "..." that
comes first are those of the module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from support.launching import ROOT

SCRIPT = (ROOT / "examples" / "questions.py").read_text()
PAGE = (ROOT / "docs" / "questions.md").read_text()
REST = "..."
LINES = (
    r"def train",
    r"dataset = make",
    r"model = \w+\(",
    r"optimizer\w* = torch",
    r"with .*lockstep\.Session",
    r"model, .* = session\.prepare",
    r"loader = session\.loader",
    r"for step in",
    r"for .* in (loader|session\.micro_batches)\(step",
    r"session\.backward",
    r"\(?(optimizer|scaler).*\.step\(",
)


def blocks_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


LOOP = blocks_of(PAGE)[0]


def answers() -> dict[str, list[str]]:
    """Return the Python blocks of each question."""
    parts = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: blocks_of(part) for part in parts}


def number_of(line: str) -> int | None:
    """Return which line of the loop this line replaces."""
    found = [number for number, start in enumerate(LINES) if re.match(start, line.strip())]
    return found[0] if found else None


def depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def script_of(answer: str) -> str:
    """Return the script of the page with the lines of an answer."""
    loop, lines, module = LOOP.splitlines(), answer.splitlines(), []
    first = next(line for line in lines if number_of(line) is not None)
    if REST in lines[: lines.index(first)]:
        module = lines[: lines.index(REST)]
        lines = lines[lines.index(REST) + 1 :]
    shift = depth(loop[number_of(first) or 0]) - depth(first)
    body = merge(loop, [" " * shift * bool(line) + line for line in lines])
    before, after = SCRIPT.split(LOOP)
    return "\n".join([before, *module, "", *body, after])


def merge(loop: Sequence[str], lines: Sequence[str]) -> list[str]:
    """Return the loop with these lines, which are indented as it is."""
    merged: list[str] = []
    following = 0  # line of the loop
    rest: int | None = 0  # where its lines up to the next one belong; None: they are replaced
    for line in lines:
        number = number_of(line)
        if line.strip() == REST:
            rest = len(merged)
            continue
        if number is not None and number >= following:
            if rest is not None:
                merged[rest:rest] = loop[following:number]
            following = number + 1
            rest = None
        merged.append(line)
    return merged + list(loop[following:])
