"""The forms of statements that the analysis of a user's loop knows: the loop itself, values that
are set first, cleared or printed, and the names of methods that print, change or reset."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lockstep.training.user_functions import Function, UserFunction, UserFunctions, own_nodes

PRINTS = {
    *(
        "print",
        "pprint",
        "display",
        "info",
        "debug",
        "warning",
        "warn",
        "error",
        "critical",
        "exception",
        "log",
        "log_metrics",
    ),
    *(
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "add_image",
        "add_text",
        "set_postfix",
        "set_postfix_str",
        "set_description",
    ),
    *(
        "write",
        "writerow",
        "writerows",
        "writelines",
        "plot",
        "savefig",
        "savetxt",
        "to_csv",
        "dump",
        "flush",
        "report",
        "log_dict",
    ),
}
PRINTERS = {
    "plt",
    "wandb",
    "logger",
    "logging",
    "log",
    "writer",
    "tb",
    "pbar",
    "bar",
    "progress",
    "tqdm",
    "mlflow",
    "console",
    "stdout",
}
CLOCKS = {
    *(
        "time",
        "perf_counter",
        "monotonic",
        "process_time",
        "time_ns",
        "perf_counter_ns",
        "now",
        "utcnow",
    ),
    *("elapsed_time", "default_timer"),
}
APPENDS = {"append", "extend"}
MUTATORS = {
    *(
        "appendleft",
        "extendleft",
        "add",
        "update",
        "setdefault",
        "insert",
        "push",
        "put",
        "rotate",
        "sort",
        "reverse",
        "subtract",
    ),
    *(
        "pop",
        "popleft",
        "popitem",
        "remove",
        "discard",
        "get_nowait",
        "send",
        "readline",
        "__next__",
    ),
}
RESETS = {
    "clear",
    "zero_",
    "fill_",
    "copy_",
    "manual_seed",
    "seed",
    "set_state",
    "setstate",
    "seek",
}
EFFECTS = {"load_state_dict", "backward", "step", "learn", "fit", "save", "save_pretrained", "load"}
ITERATION = ("__iter__", "__next__", "__getitem__", "__getitems__", "__len__")
VIEWS = {
    *(
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
        "modules",
        "children",
        "state_dict",
    ),
    *("values", "items", "zip", "enumerate"),
}
CONSTANTS = {
    "0",
    "0.0",
    "1",
    "1.0",
    "None",
    "False",
    "True",
    "[]",
    "{}",
    "set()",
    "list()",
    "dict()",
    "()",
}
GRADIENTS = {".grad", ".data"}
NUMBERS_OF_SESSION = {"loss", "step", "world"}
SESSION_METHODS = {"prepare", "state", "steps", "loader", "micro_batches"}


@dataclass(frozen=True)
class LoopPath:
    """A loop, and the statements behind it in each block around it, the innermost first."""

    loop: ast.For | ast.AsyncFor | ast.While
    following: tuple[Sequence[ast.stmt], ...]


def find_loop(body: Sequence[ast.stmt], line: int) -> LoopPath | None:
    """Return the loop whose `for` line (or, of a `while`, whose body) holds the line."""
    for i, statement in enumerate(body):
        if not statement.lineno <= line <= (statement.end_lineno or 0):
            continue
        if isinstance(statement, Function | ast.ClassDef):
            return None
        rest = body[i + 1 :]
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [
            part.body for name in ("handlers", "cases") for part in getattr(statement, name, [])
        ]
        for block in blocks:
            if (found := find_loop(block, line)) is not None:
                return LoopPath(found.loop, (*found.following, rest))
        if isinstance(statement, ast.For | ast.AsyncFor | ast.While):
            return LoopPath(statement, (rest,))
    return None


def filled_first(statement: ast.If) -> set[int]:
    """Return the ids of the targets of `if table is None: table = ...`."""
    test = statement.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Is) or statement.orelse:
        return set()
    checked = ast.unparse(test.left)
    targets = [
        target for node in statement.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return {id(target) for target in targets if ast.unparse(target) == checked}


def ends_constant(body: Sequence[ast.stmt], label: str) -> bool:
    """Return whether the last change of a variable in the body sets it to a constant, or clears
    it."""
    for statement in reversed(body):
        for node in own_nodes([statement]):
            if (
                isinstance(node, ast.Name | ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node) == label
            ):
                return (
                    isinstance(statement, ast.Assign)
                    and assigned_value(statement, label) in CONSTANTS
                )
            method = (
                node.func
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                else None
            )
            if method is not None and mutates(method.attr) and ast.unparse(method.value) == label:
                return isinstance(statement, ast.Expr) and method.attr in ("clear", "zero_")
    return False


def assigned_value(statement: ast.Assign, label: str) -> str:
    for target in statement.targets:
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        values = (
            statement.value.elts
            if isinstance(statement.value, ast.Tuple)
            else [statement.value] * len(targets)
        )
        for element, value in zip(targets, values, strict=False):
            if ast.unparse(element) == label:
                return ast.unparse(value)
    return ""


def session_variables(functions: UserFunctions) -> Iterable[str]:
    """Yield the keys of the Session, the model, the optimizers and the objects of session.state."""
    for function in {id(f): f for f in functions.by_line.values()}.values():
        for node in own_nodes(function.body):
            call = node.value if isinstance(node, ast.Assign) else node
            if (
                not isinstance(call, ast.Call)
                or not isinstance(call.func, ast.Attribute)
                or call.func.attr not in SESSION_METHODS
            ):
                continue
            if (
                call.func.attr in ("state", "steps")
                and "session" not in ast.unparse(call.func.value).lower()
            ):
                continue
            parts: list[ast.expr] = [call.func.value]
            if call.func.attr in ("prepare", "state"):
                parts += [*call.args, *(keyword.value for keyword in call.keywords)]
            if isinstance(node, ast.Assign) and call.func.attr in ("prepare", "loader", "state"):
                parts += [
                    element
                    for target in node.targets
                    for element in getattr(target, "elts", [target])
                ]
            yield from (key for part in parts if (key := key_of(part, function)))


def key_of(target: ast.expr, function: UserFunction, bound: Collection[str] = ()) -> str:
    """Return the key of the variable that holds the target; "" without one. bound: names of
    comprehensions."""
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    if isinstance(target, ast.Name):
        return "" if target.id in bound else function.variable(target.id)
    return f".{target.attr}" if isinstance(target, ast.Attribute) else ""


def root_name(node: ast.expr) -> str:
    """Return `a` of `a.b.c`; "" of other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(callee: ast.AST | None) -> str:
    return (
        callee.id
        if isinstance(callee, ast.Name)
        else callee.attr
        if isinstance(callee, ast.Attribute)
        else ""
    )


def names_in_chain(node: ast.expr) -> set[str]:
    names = set[str]()
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        node = node.func if isinstance(node, ast.Call) else node.value
    return names | {node.id} if isinstance(node, ast.Name) else names


def mutates(method: str) -> bool:
    is_in_place = method.endswith("_") and not method.endswith("__")  # of tensors
    return is_in_place or method in APPENDS | MUTATORS | RESETS


def is_range(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return last_name(node.func) == "range" or (
        last_name(node.func) == "enumerate" and bool(node.args) and is_range(node.args[0])
    )


def is_whole_slice(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Slice)
        and target.slice.lower is target.slice.upper is None
    )


def sides(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]
