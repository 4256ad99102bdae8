"""Each figure of tools/ratchet.py counts its own kind, and a figure that rises fails."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools/ratchet.py"))


def figures_of(folder: Path, text: str) -> dict[str, int]:
    (folder / "a.py").write_text(text)
    figures: dict[str, int] = TOOL["figures_of"](TOOL["read_sources"](folder))
    return figures


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines over 100 columns", f"a = '{'x' * 100}'"),
        (
            "classes over 15 attributes",
            "class A:\n def f(self):\n" + "".join(f"  self.a{i} = 0\n" for i in range(16)),
        ),
        (
            "classes over 25 methods",
            "class A:\n" + "".join(f" def f{i}(self): 0\n" for i in range(26)),
        ),
        ("functions over 60 lines", "def f():\n" + " 0\n" * 60),
        ("functions over 7 parameters", "def f(a, b, c, d, e, f, g, *, h): 0"),
        ("assignments to tuples of 3 or more", "a, b, c = 1, 2, 3"),
        ("nested conditional expressions", "a = 1 if b else 2 if c else 3"),
        ("conditions on a kind: static process group", "a = b if runtime.is_static else c"),
        ("conditions on a kind: bucket behind a run folder", "while not address and a: b"),
        ("conditions on a kind: learners", "a = [b for b in c if self.learners]"),
    ],
)
def test_each_figure_counts_its_own_kind(tmp_path: Path, name: str, text: str) -> None:
    figures = figures_of(tmp_path, text)
    assert {key for key, value in figures.items() if value} == {"tokens", name}
    assert figures[name] == 1


def test_names_of_models_and_kinds_count_outside_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel/plans.py").write_text("def plan(model: LlamaModel): 'Of a Llama.'\n")
    (tmp_path / "parallel/learners.py").write_text("if learner: llama\n")
    figures = figures_of(tmp_path, "if membership.drains: llama\n")
    assert {key for key, value in figures.items() if value} == {
        "tokens",
        "names of models in parallel",
    }
    assert figures["names of models in parallel"] == 2


def test_tokens_leave_out_comments_and_docstrings(tmp_path: Path) -> None:
    text = '"""Head."""\ndef f(a):  # why\n    """Doc."""\n    return a\n'
    assert figures_of(tmp_path, text)["tokens"] == len(["def", "f", "(", "a", ")", ":"]) + 2


@pytest.mark.parametrize(("recorded", "code"), [(5, 0), (4, 0), (3, 1)])
def test_a_figure_above_its_record_fails(
    tmp_path: Path,
    recorded: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main: Any = TOOL["main"]
    (tmp_path / "src/lockstep").mkdir(parents=True)
    (tmp_path / "src/lockstep/a.py").write_text("a = -b\n")
    (tmp_path / "ratchet.json").write_text(json.dumps({"tokens": recorded}))
    places = {"TOP": tmp_path, "RECORD": tmp_path / "ratchet.json", "modules_of_session": int}
    for name, value in places.items():
        monkeypatch.setitem(main.__globals__, name, value)
    assert main([]) == code
    assert ("error: tokens: 4, was 3" in capsys.readouterr().err) == bool(code)


def test_a_session_is_counted_in_a_fresh_process() -> None:
    assert 1 < TOOL["modules_of_session"]() < 400
