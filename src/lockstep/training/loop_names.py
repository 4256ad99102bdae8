"""Which variables and functions the names in the source of a user's loop mean."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from lockstep.training.loop_forms import VIEWS, chain, last_name, root_name
from lockstep.training.user_functions import UserFunction, UserFunctions, own_nodes

MAX_CANDIDATES = 6  # functions of one name
NUMBERS_OF_SESSION = {"loss", "step", "world"}
SESSION_METHODS = {"prepare", "state", "steps", "loader", "micro_batches"}


class Names:
    """The names in one function of the sources.

    aliases  {key of a variable: name of the function that is its value}
    fixed    keys of variables whose use is an effect by itself, such as the optimizer. It grows
    bound    names of the comprehensions and lambdas around
    """

    def __init__(
        self,
        functions: UserFunctions,
        function: UserFunction,
        aliases: dict[str, str],
        fixed: set[str],
        bound: frozenset[str] = frozenset(),
    ) -> None:
        self.functions = functions
        self.function = function
        self.aliases = aliases
        self.fixed = fixed
        self.bound = bound

    def inside(self, function: UserFunction, bound: frozenset[str] = frozenset()) -> Names:
        """Return the names in another function, or in a comprehension of this one."""
        return Names(self.functions, function, self.aliases, self.fixed, bound)

    def key(self, target: ast.AST) -> str:
        """Return the key of the variable that holds the target; "" without one."""
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        match target:
            case ast.Name(name):
                return "" if name in self.bound else self.function.variable(name)
            case ast.Attribute(_, name):
                return f".{name}"
        return ""

    def is_fixed(self, node: ast.AST) -> bool:
        keys = set(map(self.key, chain(node)))
        return not keys.isdisjoint(self.fixed) or any(
            key.endswith((":session", ".session")) for key in keys
        )

    def is_view(self, node: ast.AST) -> bool:
        """Return whether the value is, or consists of, parts of the trained state: model.head,
        model.parameters()."""
        match node:
            case ast.Call(callee) if last_name(callee) in VIEWS:
                named = [part for part in ast.walk(node) if last_name(part)]
                return any(map(self.is_view, named))
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return last_name(node) not in NUMBERS_OF_SESSION and self.is_fixed(node)
        return False

    def fix(self, targets: Sequence[ast.expr]) -> None:
        """Take the variables that are assigned here as parts of the trained state."""
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self.fixed |= {self.key(node)} - {""}

    def is_module(self, node: ast.expr) -> bool:
        """Return whether the expression is a module that is not one of the user's."""
        name = root_name(node)
        return (
            name in self.function.modules - self.functions.stems
            and self.function.variable(name) == f"global:{name}"
        )

    def candidates(self, callee: ast.expr) -> list[UserFunction]:
        """Return the functions that a call may mean."""
        functions, name = self.functions, last_name(callee)
        found: list[UserFunction] = []
        if isinstance(callee, ast.Name):
            key = self.function.variable(name)
            name = self.aliases.get(key, name)
            found = functions.classes.get(name) or [
                f for f in functions.by_name.get(name, ()) if key in self.aliases or not f.owner
            ]
        elif isinstance(callee, ast.Attribute) and not self.is_module(callee.value):
            found = functions.by_name.get(name, [])
            if not self.function.variable(root_name(callee)).startswith("global:"):
                # `model.train()` of an object is no function `train` of a file.
                found = [f for f in found if f.owner or (f.parent and f.parent.parent)]
        return found


def session_variables(names: Names) -> Iterator[str]:
    """Yield the keys of the Session, the model, the optimizers and the objects of session.state."""
    for function in names.functions.by_line.values():
        inside = names.inside(function)
        for node in own_nodes(function.body):
            yield from map(inside.key, _parts_of_session(node))


def _parts_of_session(node: ast.AST) -> Iterator[ast.expr]:
    call = node.value if isinstance(node, ast.Assign) else node
    match call:
        case ast.Call(ast.Attribute(session, method)) if method in SESSION_METHODS:
            if method in ("state", "steps") and "session" not in ast.unparse(session).lower():
                return
            yield session
            if method in ("prepare", "state"):
                yield from call.args
                yield from (keyword.value for keyword in call.keywords)
            if isinstance(node, ast.Assign) and method in ("prepare", "loader", "state"):
                for target in node.targets:
                    yield from getattr(target, "elts", [target])
