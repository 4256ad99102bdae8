"""The functions of a user's sources by name, with the scope of each variable, from their syntax
trees. Nothing is imported or run.

A variable has one key: "global:NAME", "FILE:LINE:NAME" for a local one of the function that is
defined there, and ".NAME" for an attribute of any object.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class UserFunction:
    """One function of the sources; the module itself is one, too, without a node."""

    key: str
    name: str
    file: str
    body: list[ast.stmt]
    node: Function | None = None
    parent: UserFunction | None = None
    in_class: bool = False
    has_base: bool = False  # its class
    parameters: list[str] = field(default_factory=list)
    locals: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)  # names that the module imports

    def variable(self, name: str) -> str:
        """Return the key of the variable that `name` is in this function."""
        scope: UserFunction | None = self
        while scope and scope.node:
            if name in scope.locals:
                return f"{scope.key}:{name}"
            scope = scope.parent
        return f"global:{name}"

    def is_value_of(self, variable: str) -> bool:
        """Return whether a variable of this function's name may hold it: not one of another
        function."""
        return variable.startswith("global:") or (
            self.parent is not None and variable == f"{self.parent.key}:{self.name}"
        )

    @cached_property
    def is_property(self) -> bool:
        decorators = self.node.decorator_list if self.node else []
        return any("property" in ast.unparse(decorator) for decorator in decorators)

    @cached_property
    def is_static(self) -> bool:
        decorators = self.node.decorator_list if self.node else []
        return any(ast.unparse(decorator) == "staticmethod" for decorator in decorators)


class UserFunctions:
    """All functions of some source files. sources: {file name: text}"""

    def __init__(self, sources: dict[str, str]) -> None:
        self.by_name: dict[str, list[UserFunction]] = defaultdict(list)
        self.by_line: dict[tuple[str, int], UserFunction] = {}
        self.classes: dict[str, list[UserFunction]] = defaultdict(list)  # their __init__
        self.attributes: set[str] = set()  # that some function names
        self.memos: set[str] = set()  # attributes in which a data set keeps its samples
        stems = {PurePath(file).stem for file in sources}
        for file, text in sources.items():
            tree = ast.parse(text)
            module = UserFunction(f"{file}:0", "<module>", file, tree.body)
            module.modules = set(_imported_names(tree, stems))
            self.by_line[file, 0] = module
            self._add_functions(tree.body, module)
            named = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            self.attributes |= {node.attr for node in named}
            self.memos |= set(_memos(tree))

    def _add_functions(
        self, body: list[ast.stmt], parent: UserFunction, owner: ast.ClassDef | None = None
    ) -> None:
        for node in own_nodes(body):
            if isinstance(node, Function):
                self._add(node, parent, owner)
            elif isinstance(node, ast.ClassDef):
                self._add_functions(node.body, parent, node)
                self.classes[node.name] += [
                    f for f in self.by_name["__init__"] if f.node in node.body
                ]

    def _add(self, node: Function, parent: UserFunction, owner: ast.ClassDef | None) -> None:
        function = UserFunction(
            f"{parent.file}:{node.lineno}",
            node.name,
            parent.file,
            node.body,
            node,
            parent,
            owner is not None,
        )
        function.has_base = owner is not None and bool(owner.bases)
        function.modules = parent.modules
        arguments = node.args
        function.parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        more = [a.arg for a in (*arguments.kwonlyargs, arguments.vararg, arguments.kwarg) if a]
        function.locals = {*function.parameters, *more, *_assigned_names(node.body)}
        self.by_name[node.name].append(function)
        first_line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        self.by_line[parent.file, first_line] = self.by_line[parent.file, node.lineno] = function
        self._add_functions(node.body, function)


def _memos(tree: ast.Module) -> Iterator[str]:
    """Yield X of `if i not in self.X: self.X[i] = ...` in classes of data sets."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef) or not any(
            getattr(item, "name", "") == "__getitem__" for item in owner.body
        ):
            continue
        for node in ast.walk(owner):
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Compare)
                and isinstance(node.test.ops[0], ast.NotIn)
            ):
                cache = node.test.comparators[0]
                if isinstance(cache, ast.Attribute):
                    yield cache.attr


def own_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the nodes below these statements, without the bodies of functions and classes."""
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def _assigned_names(body: list[ast.stmt]) -> set[str]:
    names, elsewhere = set[str](), set[str]()
    for node in own_nodes(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            elsewhere |= set(node.names)
    return names - elsewhere


def _imported_names(tree: ast.Module, stems: set[str]) -> Iterator[str]:
    """Yield the names of imported modules, and of what comes from them, unless the user wrote
    them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            where = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if not {*where.split("."), alias.name} & stems:
                    yield (alias.asname or alias.name).partition(".")[0]
