"""The functions of a user's sources by name, with the scope of each variable. Nothing is imported
or run.

A variable has one key: "global:NAME", "FILE:LINE:NAME" for a local one of the function that is
defined there, and ".NAME" for an attribute of any object.
"""

from __future__ import annotations

import ast
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath

Function = ast.FunctionDef | ast.AsyncFunctionDef


class UserFunction:
    """One function of the sources; the module itself is one, too, without a parent.

    owner      the class that it is a method of
    modules    names under which the file imports modules: {name: it is one of the user's}
    is_method  its first parameter is the object that it is called on
    """

    def __init__(
        self,
        node: Function | ast.Module,
        code: types.CodeType,
        modules: dict[str, bool],
        parent: UserFunction | None = None,
        owner: ast.ClassDef | None = None,
    ) -> None:
        self.node = node
        self.name = code.co_name
        self.file = code.co_filename
        self.line = getattr(node, "lineno", 0)
        self.key = f"{self.file}:{self.line}"
        self.body = node.body
        self.modules = modules
        self.parent = parent
        self.owner = owner
        self.parameters = code.co_varnames[: code.co_argcount]
        self.locals = {*code.co_varnames, *code.co_cellvars} if parent else set()
        decorators = [*map(ast.unparse, getattr(node, "decorator_list", ()))]
        self.is_property = any("property" in decorator for decorator in decorators)
        self.is_method = owner is not None and "staticmethod" not in decorators

    def variable(self, name: str) -> str:
        """Return the key of the variable that `name` is in this function."""
        scope: UserFunction | None = self
        while scope:
            if name in scope.locals:
                return f"{scope.key}:{name}"
            scope = scope.parent
        return f"global:{name}"

    def key_of(self, target: ast.AST) -> str:
        """Return the key of the variable that holds the target; "" without one."""
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        match target:
            case ast.Name(name):
                return self.variable(name)
            case ast.Attribute(owner, name):
                return f"global:{name}" if self.modules.get(last_name(owner)) else f".{name}"
        return ""

    def is_foreign_module(self, node: ast.expr) -> bool:
        """Return whether the expression is a module that is not one of the user's."""
        name = root_name(node)
        return self.modules.get(name) is False and self.variable(name) == f"global:{name}"

    def is_value_of(self, variable: str) -> bool:
        """Return whether a variable of this function's name may hold it: not one of another
        function."""
        return variable.startswith("global:") or (
            self.parent is not None and variable == f"{self.parent.key}:{self.name}"
        )


class UserFunctions:
    """All functions of some source files. sources: {file name: text}"""

    def __init__(self, sources: dict[str, str]) -> None:
        self.by_name: dict[str, list[UserFunction]] = defaultdict(list)
        self.by_line: dict[tuple[str, int], UserFunction] = {}  # the first line of code objects
        self.classes: dict[str, list[UserFunction]] = defaultdict(list)  # their __init__
        self.attributes: set[str] = set()  # that some function names
        self.memos: set[str] = set()  # attributes in which a data set keeps its samples
        stems = {PurePath(file).stem for file in sources}
        for file, text in sources.items():
            tree = ast.parse(text)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # in a notebook
            codes = codes_of(compile(tree, file, "exec", flags, dont_inherit=True))
            modules: dict[str, bool] = {}
            for parts, last, name in imports_of(tree):
                if last in stems:
                    modules[name.rpartition(".")[2]] = True
                elif not parts & stems:
                    modules[name.partition(".")[0]] = False
            module = UserFunction(tree, codes[0], modules)
            self.by_line[file, 0] = module
            lines = {(code.co_name, code.co_firstlineno): code for code in codes}
            self._add_functions(tree.body, lines, module)
            named = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
            self.attributes |= {node.attr for node in named}
            self.memos |= set(_memos(tree))

    def _add_functions(
        self,
        body: list[ast.stmt],
        codes: dict[tuple[str, int], types.CodeType],
        parent: UserFunction,
        owner: ast.ClassDef | None = None,
    ) -> None:
        for node in own_nodes(body):
            if isinstance(node, Function):
                first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
                code = codes.get((node.name, first))
                if code is None:  # in a branch that the compiler leaves out
                    continue
                function = UserFunction(node, code, parent.modules, parent, owner)
                self.by_name[node.name].append(function)
                self.by_line[parent.file, first] = function
                if owner and node.name == "__init__":
                    self.classes[owner.name].append(function)
                self._add_functions(node.body, codes, function)
            elif isinstance(node, ast.ClassDef):
                self._add_functions(node.body, codes, parent, node)

    def candidates(
        self, callee: ast.expr, caller: UserFunction, aliases: dict[str, str]
    ) -> list[UserFunction]:
        """Return the functions that a call may mean.

        aliases  {key of a variable: name of the function that is its value}
        """
        name = last_name(callee)
        if isinstance(callee, ast.Name):
            key = caller.variable(name)
            name = aliases.get(key, name)
            named = self.by_name.get(name, ())
            return self.classes.get(name) or [f for f in named if key in aliases or not f.owner]
        if not isinstance(callee, ast.Attribute) or caller.is_foreign_module(callee.value):
            return []
        found = self.by_name.get(name, [])
        if caller.variable(root_name(callee)).startswith("global:"):
            return found
        # `model.train()` of an object is no function `train` of a file.
        return [f for f in found if f.owner or (f.parent and f.parent.parent)]


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """Return a code object and those inside it."""
    codes = [code]
    for outer in codes:  # grows
        codes += [part for part in outer.co_consts if isinstance(part, types.CodeType)]
    return codes


def imports_of(tree: ast.AST) -> Iterator[tuple[set[str], str, str]]:
    """Yield (all parts of the imported name, the last one, what the file writes for it)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                parts = alias.name.split(".")
                yield {*module.split("."), *parts}, parts[-1], alias.asname or alias.name


def _memos(tree: ast.Module) -> Iterator[str]:
    """Yield X of `if i not in self.X: self.X[i] = ...` in classes of data sets."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        if all(getattr(item, "name", "") != "__getitem__" for item in owner.body):
            continue
        for node in ast.walk(owner):
            match node:
                case ast.If(ast.Compare(ops=[ast.NotIn()], comparators=[ast.Attribute(_, name)])):
                    yield name


def own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes below these statements, without the bodies of functions and classes."""
    pending = [*body][::-1]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def root_name(node: ast.expr) -> str:
    """Return `a` of `a.b.c`; "" of other expressions."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(callee: ast.AST | None) -> str:
    """Return `c` of `a.b.c`, and of `c`; "" of other expressions."""
    match callee:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""
