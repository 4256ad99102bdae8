"""The package graph: which package imports which, and whether every import points downward.

    python tools/packages.py [SRC/lockstep]

Prints one line per package, lowest layer first, with the packages it imports and the number of
import statements. Exits with code 1 when an import points upward or a layer contains a cycle.
Imports inside functions and under `TYPE_CHECKING` count too.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

# Lowest first. A package may import from its own layer and from those listed before it.
LAYERS = (
    ("errors", "units", "files", "log", "layout", "tensor_slice"),
    ("network",),
    ("record",),
    ("data",),
    ("runtime",),
    ("object_store",),
    ("elastic",),
    ("agent",),
    ("checkpoint",),
    ("remote",),
    ("parallel",),
    ("unsaved",),
    ("training",),
    ("history",),
    ("session",),
    # Up to here the core, all that a user's loop loads. Recipes and tools stand on it.
    ("config", "report"),
    ("render", "corpus"),
    ("models",),
    ("generation",),
    ("tasks",),
    ("planner",),
    ("recipes", "doctor", "drill", "frameworks"),
    ("cli", "__main__"),
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
CORE = [package for package, level in LEVEL.items() if level <= LEVEL["session"]]

# (importing, imported package): "module -> module" of each
Imports = dict[tuple[str, str], list[str]]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    top = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "src/lockstep"
    paths = modules(top)
    trees = {name: ast.parse(path.read_text(), str(path)) for name, path in paths.items()}
    imports = package_imports(trees)
    print(*graph_lines(trees, imports), sep="\n")
    problems = find_problems(trees, imports)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def modules(top: Path) -> dict[str, Path]:
    """Return the modules below the package folder `top`, by dotted name without `lockstep.`.

    Without the root `__init__.py`: it imports modules of all layers, each on first use.
    """
    paths = {path.relative_to(top).with_suffix(""): path for path in sorted(top.rglob("*.py"))}
    return {
        ".".join(part for part in name.parts if part != "__init__"): path
        for name, path in paths.items()
        if str(name) != "__init__"
    }


def package_imports(trees: dict[str, ast.Module]) -> Imports:
    imports: Imports = defaultdict(list)
    for importer, tree in trees.items():
        for node in ast.walk(tree):
            for imported in imported_modules(node, trees):
                source, target = importer.partition(".")[0], imported.partition(".")[0]
                if source != target:
                    imports[source, target].append(f"{importer} -> {imported}")
    return imports


def imported_modules(node: ast.AST, known: dict[str, ast.Module]) -> set[str]:
    """Return the modules of Lockstep that an import statement names.

    Names of the public API are not modules: `from lockstep import Session` gives none.
    """
    names: set[str] = set()
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise SyntaxError(f"relative import of {node.module!r}: write it as an absolute one")
        names = {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name.removeprefix("lockstep.") for name in names if name.startswith("lockstep.")}
    return {name if name in known else name.rpartition(".")[0] for name in names} - {""}


def find_problems(trees: dict[str, ast.Module], imports: Imports) -> list[str]:
    """Return one line for each package without a layer, upward import, and cycle within a layer."""
    unknown = {name.partition(".")[0] for name in trees} - set(LEVEL)
    problems = [
        f"package {package} has no layer: add it to LAYERS and to docs/architecture.md"
        for package in sorted(unknown)
    ]
    for (source, target), statements in sorted(imports.items()):
        if LEVEL.get(target, 0) > LEVEL.get(source, len(LAYERS)):
            problems += [f"upward import: {statement}" for statement in statements]
    for layer in LAYERS:
        left = set(layer)
        while leaves := {
            package for package in left if not any((package, other) in imports for other in left)
        }:
            left -= leaves
        if left:
            problems.append(f"import cycle among {', '.join(sorted(left))}")
    return problems


def graph_lines(trees: dict[str, ast.Module], imports: Imports) -> list[str]:
    files = Counter(name.partition(".")[0] for name in trees)
    lines = [
        f"{len(imports)} package arrows, "
        f"{sum(map(len, imports.values()))} imports; lowest layer first"
    ]
    for level, layer in enumerate(LAYERS):
        for package in (package for package in layer if files[package]):
            targets = sorted(
                (target for source, target in imports if source == package),
                key=lambda target: LEVEL.get(target, 0),
            )
            arrows = ", ".join(f"{target} {len(imports[package, target])}" for target in targets)
            count = f"{files[package]:3} file" + "s" * (files[package] > 1)
            lines.append(f"{level:2}  {package:13}{count}" + f"  -> {arrows}" * bool(arrows))
    return lines


def repeated_class_names(trees: Iterable[ast.Module]) -> list[str]:
    counts = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in counts.items() if count > 1)


if __name__ == "__main__":
    raise SystemExit(main())
