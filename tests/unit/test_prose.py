"""The prose check finds the old style, accepts the plain one, and reads every place where prose is."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from support.prose_rows import ROWS

TOP = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prose() -> dict[str, Any]:
    return runpy.run_path(str(TOP / "tools/prose.py"))


def test_nine_of_ten_old_sentences_are_found_and_no_plain_one(prose: dict[str, Any]) -> None:
    missed = [before for before, _ in ROWS if not prose["find"](before)]
    assert len(missed) <= 0.1 * len(ROWS), missed
    assert not {after: prose["find"](after) for _, after in ROWS if prose["find"](after)}


@pytest.mark.parametrize(
    "source",
    [
        '"""Nobody knows."""',
        'def f():\n    """Return it.\n\n    Nobody\n    knows.\n    """',
        "x = 1  # nobody knows",
        "# a comment that\n# nobody knows",
        'raise ValueError("the step that nobody knows")',
        'raise ValueError(f"rank {rank} is a rank that " "nobody knows")',
    ],
)
def test_docstrings_comments_and_messages_are_read_once(
    prose: dict[str, Any], tmp_path: Path, source: str
) -> None:
    path = tmp_path / "a.py"
    path.write_text(source)
    assert [name for _, text in prose["texts"](path) for name in prose["find"](text)] == [
        "vague actor"
    ]


def test_a_phrase_across_two_lines_is_found_and_code_is_not_read(
    prose: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "a.md"
    path.write_text(
        "The run is put\naway, `nobody` and [it](nobody.md).\n\n```\nnobody\n```\n\n* an item\n* nobody\n"
    )
    found = [(line, name) for line, text in prose["texts"](path) for name in prose["find"](text)]
    assert found == [(1, "without"), (9, "vague actor")]


def test_the_tree_is_within_the_limits(
    prose: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose["main"](["-q"]) == 0, capsys.readouterr().out
