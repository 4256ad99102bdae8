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
from functools import cached_property
from pathlib import PurePath

Function = ast.FunctionDef | ast.AsyncFunctionDef


class UserFunction:
    """One function of the sources; the module itself is one, too, without a parent.

    owner    the class that it is a method of
    modules  names that the module imports
    """

    def __init__(
        self,
        node: Function | ast.Module,
        code: types.CodeType,
        modules: set[str],
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

    def variable(self, name: str) -> str:
        """Return the key of the variable that `name` is in this function."""
        scope: UserFunction | None = self
        while scope:
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
    def decorators(self) -> list[str]:
        return [ast.unparse(decorator) for decorator in getattr(self.node, "decorator_list", [])]

    @property
    def is_property(self) -> bool:
        return any("property" in decorator for decorator in self.decorators)

    @property
    def is_method(self) -> bool:
        """Whether its first parameter is the object that it is called on."""
        return self.owner is not None and "staticmethod" not in self.decorators


class UserFunctions:
    """All functions of some source files. sources: {file name: text}"""

    def __init__(self, sources: dict[str, str]) -> None:
        self.by_name: dict[str, list[UserFunction]] = defaultdict(list)
        self.by_line: dict[tuple[str, int], UserFunction] = {}  # the first line of code objects
        self.classes: dict[str, list[UserFunction]] = defaultdict(list)  # their __init__
        self.attributes: set[str] = set()  # that some function names
        self.memos: set[str] = set()  # attributes in which a data set keeps its samples
        self.stems = {PurePath(file).stem for file in sources}
        for file, text in sources.items():
            tree = ast.parse(text)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # in a notebook
            codes = codes_of(compile(tree, file, "exec", flags, dont_inherit=True))
            modules = {name for parts, name in imports_of(tree) if not parts & self.stems}
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


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """Return a code object and those inside it."""
    codes = [code]
    for outer in codes:  # grows
        codes += [part for part in outer.co_consts if isinstance(part, types.CodeType)]
    return codes


def imports_of(tree: ast.AST) -> Iterator[tuple[set[str], str]]:
    """Yield (all parts of the imported name, the variable that holds it)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                parts = {*module.split("."), *alias.name.split(".")}
                yield parts, (alias.asname or alias.name).partition(".")[0]


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
