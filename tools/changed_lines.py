"""Count the lines that differ between the scripts of examples/compare, for docs/compare.md.

    python tools/changed_lines.py    print the tables of the page

Blank lines, comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "compare"
SCRIPTS = {
    "ddp.py": "torchrun and DistributedDataParallel",
    "with_accelerate.py": "Accelerate",
    "with_fabric.py": "Fabric",
    "with_session.py": "Lockstep",
}
PAIRS = {"tutorial": "PyTorch's DDP tutorial", "mingpt": "minGPT-ddp", "nanogpt": "nanoGPT"}


def code_lines(path: Path) -> list[str]:
    source = path.read_text()
    documented = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    first_statements = [node.body[0] for node in documented if ast.get_docstring(node) is not None]
    docstrings = {
        line
        for first in first_statements
        for line in range(first.lineno, (first.end_lineno or first.lineno) + 1)
    }
    numbered = enumerate(source.splitlines(), 1)
    return [
        line
        for number, line in numbered
        if line.strip() and not line.lstrip().startswith("#") and number not in docstrings
    ]


def changed(before: str, after: str) -> tuple[int, int]:
    """Return how many lines are (added, removed) between two scripts."""
    signs = [
        line[0] for line in difflib.ndiff(code_lines(FOLDER / before), code_lines(FOLDER / after))
    ]
    return signs.count("+"), signs.count("-")


def table() -> str:
    rows = [
        "| script | lines | from one process | from torchrun and DDP |",
        "| --- | --- | --- | --- |",
    ]
    for name, label in SCRIPTS.items():
        counts = [
            "+{} -{}".format(*changed(before, name)) if before != name else ""
            for before in ("one_process.py", "ddp.py")
        ]
        rows.append(
            f"| {label}, `{name}` | {len(code_lines(FOLDER / name))} | {counts[0]} | {counts[1]} |"
        )
    return "\n".join(rows)


def pair_table() -> str:
    rows = [
        "| in the style of | lines with Accelerate | lines with Lockstep |",
        "| --- | --- | --- |",
    ]
    for name, label in PAIRS.items():
        counts = [
            len(code_lines(FOLDER / f"{name}_{library}.py"))
            for library in ("accelerate", "session")
        ]
        rows.append(f"| {label}, `{name}_*.py` | {counts[0]} | {counts[1]} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(), pair_table(), sep="\n\n")
