"""docs/reference: the generated pages equal the code, and each key, option and exit code has a sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lockstep.config.schema import config_fields
from lockstep.errors import ERRORS_BY_NAME

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_equals_the_code(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == reference.PAGES[name](), "stale: python tools/reference.py"


def test_every_key_that_a_page_names_exists() -> None:
    others = {
        "tokenizer.json",
        "tokenizer.max_seq_len",
        "model.json",
        "model.lora_rank",
        "model.module",
        "model.safetensors",
    }
    sections, known = reference.SECTIONS.keys() - {""}, {*config_fields(), *others}
    for page in (ROOT / "docs").rglob("*.md"):
        named = re.findall(r"`(?:--)?([a-z]+\.[a-z_0-9]+)\b(?=[`= ])", page.read_text())
        unknown = [key for key in named if key.partition(".")[0] in sections and key not in known]
        assert not unknown, f"{page}: {unknown}"


def test_the_readme_has_a_script_of_the_examples() -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert (ROOT / "examples" / "sine.py").read_text().endswith(f'"""\n\n{script}')


def test_every_key_has_a_sentence_and_a_section() -> None:
    fields = config_fields()
    assert not [key for key, field in fields.items() if len(field.doc.split()) < 2]
    assert {key.rpartition(".")[0] for key in fields} == set(reference.SECTIONS)


def test_every_exit_code_of_an_error_has_a_row() -> None:
    assert {str(error.exit_code) for error in ERRORS_BY_NAME.values()} <= set(reference.EXIT_CODES)


def test_check_reports_a_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    assert reference.main([]) == 0 and reference.main(["--check"]) == 0
    (tmp_path / "config.md").write_text(
        (tmp_path / "config.md").read_text().replace("learning_rate", "rate")
    )
    assert reference.main(["--check"]) == 1
    assert "stale: docs/reference/config.md" in capsys.readouterr().out
