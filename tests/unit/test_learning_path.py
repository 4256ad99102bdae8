"""The chapters of docs/learn: one order in the navigation, the index and the closing questions."""

from __future__ import annotations

import os
import re

from support.docs_commands import pages
from support.launching import ROOT

DOCS = ROOT / "docs"
LEARN = DOCS / "learn"


def test_each_chapter_ends_with_the_question_of_the_next_one() -> None:
    index = (LEARN / "index.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.+?) \|", index, re.MULTILINE)
    chapters = [os.path.relpath(LEARN / link, DOCS) for link, _ in rows]
    first, *rest = pages()[: len(rows) + 1]
    assert [first, *rest] == ["learn/index.md", *chapters], "mkdocs.yml and the index differ"
    following = [*zip(chapters[1:], (question for _, question in rows[1:]), strict=True)]
    last = ("loop.md", "How does my own loop train in this way?")
    for chapter, (target, question) in zip(chapters, [*following, last], strict=True):
        link = os.path.relpath(DOCS / target, (DOCS / chapter).parent)
        ending = (DOCS / chapter).read_text().rpartition("\n\n")[2]
        assert " ".join(ending.split()) == f"Next: [{question}]({link})", chapter


def test_the_scripts_on_one_slide_have_the_numbers_of_their_table() -> None:
    table = re.findall(r"^\| (\d+) \|", (LEARN / "script.md").read_text(), re.MULTILINE)
    assert table == [str(number) for number in range(1, 13)]
    for name in ("ddp_script.py", "session_script.py"):
        comments = re.findall(r"  # ([\d ]+)", (ROOT / "examples" / "learn" / name).read_text())
        numbers = {number for comment in comments for number in comment.split()}
        assert numbers == set(table), name
