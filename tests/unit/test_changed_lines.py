"""The comparison page shows the counts that the scripts have now."""

import runpy
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_table_of_the_page_is_the_output_of_the_command() -> None:
    tool, page = (
        runpy.run_path(str(TOP / "tools/changed_lines.py")),
        (TOP / "docs/compare.md").read_text(),
    )
    assert tool["table"]() in page and tool["pair_table"]() in page
