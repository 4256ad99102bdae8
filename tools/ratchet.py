"""Count what makes the code of src hard to read, and fail when it grows.

    python tools/ratchet.py            print them; exit code 1 when one is above tools/ratchet.json
    python tools/ratchet.py --record   write them to tools/ratchet.json

A token is a name, number, string or operator of Python's own tokenizer; comments, docstrings,
indents and line ends do not count. Packages may trade tokens; their sum must not rise. A change
that raises a figure on purpose records it, and says why in its commit.

A condition is the test of an `if`, a `while`, a conditional expression or a comprehension. It
chooses a kind when its text matches the pattern of that kind, outside of the files about it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
COLUMNS = 100
MAX_ATTRIBUTES = 15
MAX_METHODS = 25
MAX_LINES = 60
MAX_PARAMETERS = 7
MIN_TARGETS = 3  # of an assignment to a tuple
KINDS = {  # -> the text of a condition, and the files that are about this kind
    "static process group": (r"\.is_static|static_group|\bmembership\b(?!\.)", r"^$"),
    "bucket behind a run folder": (
        r"(parse|store)_address|is_stored|has_own_folder|is_shared_disk|STORE_FILE|RunBucket"
        r"|^(not )?(\w+\.)?(address|stored)($| and| or)",
        r"^(object_store|remote)/",
    ),
    "learners": (r"learner", r"learner|diloco|^(cli|config|recipes)/"),
}
MODELS = re.compile("bert|gpt|llama|qwen|translator", re.IGNORECASE)
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
REACHED = """
import sys, lockstep
lockstep.Session
print(sum(name.partition(".")[0] == "lockstep" for name in sys.modules))
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of the code. path: below the package lockstep"""

    path: str
    package: str
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path, top: Path) -> Source:
        parts = path.relative_to(top).parts
        text = path.read_text()
        package = parts[0] if len(parts) > 1 else "(top)"
        return cls("/".join(parts), package, text, ast.parse(text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(arguments)
    sources = read_sources(TOP / "src/lockstep")
    figures = figures_of(sources)
    figures["modules that lockstep.Session loads"] = modules_of_session()
    if options.record:
        RECORD.write_text(json.dumps(figures, indent=1) + "\n")
    before = json.loads(RECORD.read_text())
    print(*lines_of(tokens_by_package(sources), figures, before), sep="\n")
    risen = [name for name, value in figures.items() if value > before.get(name, 0)]
    for name in risen:
        print(f"error: {name}: {figures[name]:,}, was {before.get(name, 0):,}", file=sys.stderr)
    return 1 if risen else 0


def read_sources(top: Path) -> list[Source]:
    return [Source.read(path, top) for path in sorted(top.rglob("*.py"))]


def tokens_by_package(sources: list[Source]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for source in sources:
        tokens[source.package] += sum(1 for _ in code_tokens(source))
    return tokens


def figures_of(sources: list[Source]) -> dict[str, int]:
    """Return the figures that must not rise, by name."""
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    lines = [line for source in sources for line in source.text.splitlines()]
    return {
        "tokens": tokens_by_package(sources).total(),
        f"lines over {COLUMNS} columns": sum(len(line) > COLUMNS for line in lines),
        f"classes over {MAX_ATTRIBUTES} attributes": sum(
            len(attributes_of(node)) > MAX_ATTRIBUTES for node in classes
        ),
        f"classes over {MAX_METHODS} methods": sum(
            sum(isinstance(part, Function) for part in node.body) > MAX_METHODS for node in classes
        ),
        f"functions over {MAX_LINES} lines": sum(
            (node.end_lineno or node.lineno) - node.lineno >= MAX_LINES for node in functions
        ),
        f"functions over {MAX_PARAMETERS} parameters": sum(
            parameter_count(node) > MAX_PARAMETERS for node in functions
        ),
        f"assignments to tuples of {MIN_TARGETS} or more": sum(map(is_tuple_assignment, nodes)),
        "nested conditional expressions": sum(map(is_nested_conditional, nodes)),
        "names of models in parallel": sum(
            bool(MODELS.search(token.string))
            for source in sources
            if source.package == "parallel"
            for token in code_tokens(source)
        ),
        **{f"conditions on a kind: {kind}": conditions_on(kind, sources) for kind in KINDS},
    }


def conditions_on(kind: str, sources: list[Source]) -> int:
    """Return how many conditions choose this kind."""
    pattern, own_files = map(re.compile, KINDS[kind])
    others = [source for source in sources if not own_files.search(source.path)]
    texts = (ast.unparse(test) for source in others for test in tests_of(source.tree))
    return sum(bool(pattern.search(text)) for text in texts)


def tests_of(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def modules_of_session() -> int:
    """Return how many modules of the package `lockstep.Session` loads, in a new process."""
    command = [sys.executable, "-c", REACHED]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def code_tokens(source: Source) -> Iterator[tokenize.TokenInfo]:
    docstrings = set(docstring_starts(source.tree))
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in LAYOUT and token.start not in docstrings:
            yield token


def docstring_starts(tree: ast.Module) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function) or not node.body:
            continue
        if ast.get_docstring(node, clean=False) is not None:
            yield node.body[0].lineno, node.body[0].col_offset


def attributes_of(owner: ast.ClassDef) -> set[str]:
    """Return the names that a class assigns as `self.NAME`."""
    stored = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in stored
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def parameter_count(function: Function) -> int:
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether several values are assigned in one statement: `a, b, c = x, y, z`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    targets = node.targets[0]
    return isinstance(targets, ast.Tuple) and len(targets.elts) >= MIN_TARGETS


def is_nested_conditional(node: ast.AST) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def lines_of(
    tokens: Counter[str], figures: dict[str, int], before: dict[str, int]
) -> Iterator[str]:
    """Yield one line for each package and each figure."""
    for package, count in sorted(tokens.items()):
        yield f"{count:8,}  tokens of {package}"
    for name, value in figures.items():
        change = value - before.get(name, 0)
        yield f"{value:8,}  {name}" + f"  ({change:+,})" * bool(change)


if __name__ == "__main__":
    raise SystemExit(main())
