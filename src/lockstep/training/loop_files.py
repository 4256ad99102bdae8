"""Files that a loop writes and reads again, from its source: state that no checkpoint holds."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

READS = {"read_text", "read_bytes"}  # of a path
WRITES = {"write_text", "write_bytes"}
LOADS = {
    ("torch", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("pd", "read_csv"),
    ("np", "loadtxt"),
}  # of a path as first argument
SAVES = {
    ("torch", "save"): 1,
    ("np", "save"): 0,
    ("numpy", "save"): 0,
    ("np", "savez"): 0,
    ("np", "savetxt"): 0,
}  # where the path is


def files_read_and_written(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines that read a file whose path, as it is spelled, these statements also
    write."""
    reads, writes = dict[str, int](), set[str]()
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                for path, mode in _opened(call):
                    if "r" in mode:
                        reads.setdefault(_spelled(path), call.lineno)
                    if "w" in mode:
                        writes.add(_spelled(path))
    return sorted({line for path, line in reads.items() if path in writes})


def _opened(call: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Yield (path, "r", "w" or "rw") of the file that a call opens."""
    function, arguments = call.func, call.args
    if isinstance(function, ast.Name) and function.id == "open" and arguments:
        yield arguments[0], _mode(arguments[1:], call)
    if not isinstance(function, ast.Attribute):
        return
    name = (function.value.id if isinstance(function.value, ast.Name) else "", function.attr)
    if function.attr in READS:
        yield function.value, "r"
    elif function.attr in WRITES:
        yield function.value, "w"
    elif name in LOADS and arguments:
        yield arguments[0], "r"
    elif name in SAVES and len(arguments) > SAVES[name]:
        yield arguments[SAVES[name]], "w"
    elif function.attr == "open" and name[0] not in ("os", "Image", "gzip"):
        yield function.value, _mode(arguments, call)


def _mode(arguments: list[ast.expr], call: ast.Call) -> str:
    given = [*arguments[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    mode = str(given[0].value) if given and isinstance(given[0], ast.Constant) else "r"
    if "+" in mode:
        return "rw"
    return "w" if set(mode) & set("wax") else "r"


def _spelled(path: ast.expr) -> str:
    """Return the text of a path: of Path("a") and open("a") the same."""
    if (
        isinstance(path, ast.Call)
        and len(path.args) == 1
        and ast.unparse(path.func).rpartition(".")[2] in ("Path", "str", "fspath")
    ):
        return _spelled(path.args[0])
    return ast.unparse(path)
