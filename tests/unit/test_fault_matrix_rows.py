"""docs/fault-matrix.md and tests/chaos/fault_matrix name the same rows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_that_the_document_assigns_to_the_fault_matrix_has_a_test() -> None:
    rows = re.findall(
        r"^\| (\d+) \|.*\| ([^|]*) \|$",
        (ROOT / "docs" / "fault-matrix.md").read_text(),
        re.MULTILINE,
    )
    documented = {int(number) for number, tests in rows if re.search(r"\bFM\b", tests)}
    source = "".join(
        path.read_text() for path in (ROOT / "tests" / "chaos" / "fault_matrix").glob("test_*.py")
    )
    tested = {
        int(number)
        for number in re.findall(r'id="(\d+)-|def test_row_(\d+)_', source)
        for number in number
        if number
    }
    assert tested == documented
