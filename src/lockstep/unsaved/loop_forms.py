"""The forms of statements that the analysis of a user's loop knows: the loop itself, values that
are set first, cleared or printed, files that it writes and reads, and the names of methods that
print, change or reset."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.units import words
from lockstep.unsaved.user_functions import last_name, own_nodes, root_name

PRINTS = words("""
    print pprint display info debug warning warn error critical exception log log_metrics
    add_scalar add_scalars add_histogram add_image add_text
    set_postfix set_postfix_str set_description
    write writerow writerows writelines plot savefig savetxt to_csv dump flush report log_dict
""")
PRINTERS = words("""
    plt wandb logger logging log writer tb pbar bar progress tqdm mlflow console stdout
""")
CLOCKS = words("""
    time perf_counter monotonic process_time time_ns perf_counter_ns now utcnow
    elapsed_time default_timer
""")
APPENDS = words("append extend")
MUTATORS = words("""
    appendleft extendleft add update setdefault insert push put rotate sort reverse subtract
    pop popleft popitem remove discard get_nowait send readline __next__
""")
RESETS = words("clear zero_ fill_ copy_ manual_seed seed set_state setstate seek")
EFFECTS = words("load_state_dict backward step learn fit save save_pretrained load")
ITERATION = ("__iter__", "__next__", "__getitem__", "__getitems__", "__len__")
VIEWS = words("""
    parameters named_parameters buffers named_buffers modules children state_dict
    values items zip enumerate
""")
GRADIENTS = words(".grad .data")
# What opens a file: (mode, which argument is the path); of methods of a path.
OPENERS = {
    **dict.fromkeys(("torch.load", "np.load", "numpy.load", "pd.read_csv", "np.loadtxt"), ("r", 0)),
    **dict.fromkeys(("np.save", "numpy.save", "np.savez", "np.savetxt"), ("w", 0)),
    "torch.save": ("w", 1),
}
PATH_METHODS = {"read_text": "r", "read_bytes": "r", "write_text": "w", "write_bytes": "w"}
PATHS = ("Path", "str", "fspath")
OTHER_OPENERS = ("os", "Image", "gzip")
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True)
class LoopPath:
    """A loop, and the statements behind it."""

    loop: Loop
    following: list[ast.stmt]


def find_loop(body: Sequence[ast.stmt], line: int) -> LoopPath | None:
    """Return the loop whose `for` line (or, of a `while`, whose body) holds the line."""
    around = [node for node in own_nodes(body) if isinstance(node, Loop) and line in lines_of(node)]
    if not around:
        return None
    loop = max(around, key=lambda node: node.lineno)
    return LoopPath(loop, list(_behind(body, lines_of(loop)[-1])))


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _behind(nodes: Iterable[ast.AST], line: int) -> Iterator[ast.stmt]:
    """Yield the statements behind a line, each with those in it."""
    for node in nodes:
        if isinstance(node, ast.stmt) and node.lineno > line:
            yield node
        elif not isinstance(node, ast.stmt) or lines_of(node)[-1] > line:
            yield from _behind(ast.iter_child_nodes(node), line)


def assignments(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value) of each variable that an assignment sets. If a value is unpacked and
    is no tuple itself, each target has the whole of it."""
    match target, value:
        case ast.Starred(inner), _:
            yield from assignments(inner, value)
        case ((ast.Tuple(targets) | ast.List(targets)), _):
            values = getattr(value, "elts", ())
            if len(values) != len(targets):
                values = [value] * len(targets)
            for element, part in zip(targets, values, strict=True):
                yield from assignments(element, part)
        case _:
            yield target, value


def filled_first(statement: ast.If) -> set[int]:
    """Return the ids of the targets of `if table is None: table = ...`."""
    match statement:
        case ast.If(ast.Compare(left=checked, ops=[ast.Is()]), orelse=[]):
            return {id(target) for target, _ in _set_in(statement) if is_same(target, checked)}
    return set()


def extremes(statement: ast.If) -> list[ast.expr]:
    """Return the targets of `if score > best: best = score`."""
    compared = [
        ast.unparse(side)
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    ]
    pairs = _set_in(statement)
    return [
        target for target, value in pairs if {*map(ast.unparse, (target, value))} <= {*compared}
    ]


def _set_in(statement: ast.If) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of the assignments that run if the test is true."""
    assigned = [node for node in statement.body if isinstance(node, ast.Assign)]
    return [(target, node.value) for node in assigned for target in node.targets]


def is_extreme(target: ast.expr, value: ast.expr) -> bool:
    """Return whether this is `best = max(best, score)`."""
    return any(
        isinstance(call, ast.Call)
        and last_name(call.func) in ("max", "min")
        and any(is_same(argument, target) for argument in call.args)
        for call in ast.walk(value)
    )


def is_same(first: ast.expr, second: ast.expr) -> bool:
    """Return whether two expressions are spelled alike."""
    return ast.unparse(first) == ast.unparse(second)


def chain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expression, and what it is an attribute, item or result of: of `a.b()` three."""
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def prints(callee: ast.expr) -> bool:
    """Return whether this is a function that prints or logs, or a method of an object that does."""
    return last_name(callee) in PRINTS or any(last_name(part) in PRINTERS for part in chain(callee))


def receiver_of(call: ast.Call) -> ast.expr | None:
    """Return `a.b` of `a.b.method()`."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def arguments_of(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def change_by(method: str) -> str:
    """Return how a method changes its object: "append", "assign" or "mutate"; "" if it does not."""
    if method in APPENDS:
        return "append"
    if method in RESETS:
        return "assign"
    is_in_place = method.endswith("_") and not method.endswith("__")  # of tensors
    return "mutate" if is_in_place or method in MUTATORS else ""


def is_range(node: ast.expr) -> bool:
    match node:
        case ast.Call(callee, arguments):
            name = last_name(callee)
            return name == "range" or (
                name == "enumerate" and bool(arguments) and is_range(arguments[0])
            )
    return False


def is_whole(target: ast.expr) -> bool:
    """Return whether an assignment to this replaces the whole variable: `x`, `a.x`, or `x[:]`."""
    match target:
        case ast.Subscript(slice=ast.Slice(None, None)):
            return True
    return isinstance(target, ast.Name | ast.Attribute)


def files_read_and_written(nodes: Iterable[ast.AST]) -> list[int]:
    """Return the lines that read a file whose path, as it is spelled, these statements also
    write."""
    calls = [call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    opened = [(spelled(path), mode, call.lineno) for call in calls for path, mode in _opened(call)]
    written = {path for path, mode, _ in opened if "w" in mode}
    return sorted({line for path, mode, line in opened if "r" in mode and path in written})


def _opened(call: ast.Call) -> Iterator[tuple[ast.expr, str]]:
    """Yield (path, "r", "w" or "rw") of the file that a call opens."""
    mode, position = OPENERS.get(ast.unparse(call.func), ("", 0))
    match call:
        case ast.Call(ast.Name("open"), [path, *arguments]):
            yield path, _mode(arguments, call)
        case ast.Call(ast.Attribute(path, method)) if method in PATH_METHODS:
            yield path, PATH_METHODS[method]
        case ast.Call(ast.Attribute(path, "open"), arguments) if (
            root_name(path) not in OTHER_OPENERS
        ):
            yield path, _mode(arguments, call)
        case ast.Call(_, arguments) if mode and len(arguments) > position:
            yield arguments[position], mode


def _mode(arguments: list[ast.expr], call: ast.Call) -> str:
    given = [*arguments[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    mode = str(given[0].value) if given and isinstance(given[0], ast.Constant) else "r"
    if "+" in mode:
        return "rw"
    return "w" if set(mode) & set("wax") else "r"


def spelled(path: ast.expr) -> str:
    """Return the text of a path: of Path("a") and open("a") the same."""
    match path:
        case ast.Call(callee, [inner]) if last_name(callee) in PATHS:
            return spelled(inner)
    return ast.unparse(path)
