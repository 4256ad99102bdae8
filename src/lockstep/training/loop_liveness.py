"""Find the variables that carry a value from one step of a user's loop to later ones, in its
source.

A strong live-variable analysis: statements are walked backwards from the end of the loop's body,
and the functions of the user's sources are walked where they are called. A variable is live at the
head of the loop when a later step reads it before it is assigned, and the value reaches something
else than a line that is printed or logged: a loss, an update, a decision. Counters and lists that
are only printed, and values that each step assigns first, are not live.

Names decide which function a call means, and an attribute has one key for all objects, so the
result is a good guess, not a proof. It is meant for a warning.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from lockstep.training import loop_forms
from lockstep.training.user_functions import UserFunction, UserFunctions

MAX_EXPRESSIONS = 30_000  # 0.2 s; then calls are not followed any more
MAX_CALLS = 6  # nested
MAX_CANDIDATES = 6  # functions of one name
ROUNDS = 5  # of a loop, until its live variables are complete


@dataclass
class Change:
    """Where the body of the loop changes a variable."""

    label: str
    file: str
    line: int
    kinds: set[str] = field(default_factory=set)
    values: list[tuple[bool, frozenset[str]]] = field(
        default_factory=list
    )  # (reads a clock, variables) of each value


@dataclass(frozen=True)
class Context:
    """The continuation of the statements that are walked."""

    function: UserFunction
    after_return: frozenset[str] = frozenset()
    returns_count: bool = True
    after_break: frozenset[str] = frozenset()
    after_continue: frozenset[str] = frozenset()


@dataclass
class LoopVariables:
    """What the source tells about a loop. `live`: keys of the variables that later steps use."""

    live: set[str]
    changes: dict[str, Change]  # of live variables, by a statement of a known form
    assigned: set[str]  # all variables with such a statement, live or not
    reached: list[UserFunction]
    targets: set[str]  # names of `for` loops


class LoopLiveness:
    """One analysis. aliases: {key of a variable: name of the function that is its value};
    fixed: keys of variables whose use is an effect by itself, such as the optimizer."""

    def __init__(self, functions: UserFunctions, aliases: dict[str, str], fixed: set[str]) -> None:
        self.functions, self.aliases = functions, aliases
        self.fixed = fixed | set(loop_forms.session_variables(functions))
        self.stems = {PurePath(file).stem for file, _ in functions.by_line}
        self.returns_count, self.prints_count = True, False
        self.changes: dict[str, Change] = {}
        self.extremes: set[str] = set()
        self.targets: set[str] = set()  # of `for` loops
        self.lazy: set[int] = set()  # ids of targets that are assigned once, in their first use
        self.reached: dict[str, UserFunction] = {}
        self.loop: UserFunction | None = (
            None  # the function of the loop, which its body does not call
        )
        self._reset()

    def _reset(self) -> None:
        self.effects = 0  # so far: assignments of live variables, calls with an effect, jumps
        self.expressions = 0
        self.recording = False
        self.implicit = (
            False  # in a function that runs without a call by its name: forward, __getitem__
        )
        self.calling: list[UserFunction] = []
        self.bound: set[str] = set()  # names of the comprehensions and lambdas around
        self.walked: dict[tuple[str, bool, frozenset[str]], tuple[frozenset[str], bool]] = {}

    def run(self, function: UserFunction, line: int) -> LoopVariables | None:
        """Return the variables of the loop over session.steps in this line; None without one."""
        path = loop_forms.find_loop(function.body, line)
        if path is None:
            return None
        self.loop = function
        live = self._walk_loop(function, path)
        kept = {
            key
            for key in self.changes
            if key in live and not self._is_clock(key) and not self._is_lazy(key)
        }
        kept -= {
            key for key in kept if loop_forms.ends_constant(path.loop.body, self.changes[key].label)
        }
        self.returns_count = False
        in_loop = self._walk_loop(function, path)
        kept -= {
            key for key in kept if self.changes[key].kinds <= {"append"} and key not in in_loop
        }
        self.returns_count, self.prints_count = True, True
        kept |= self.extremes & self._walk_loop(function, path)
        changes = {
            key: self.changes[key] for key in sorted(kept, key=lambda key: self.changes[key].line)
        }
        targets = {key.rpartition(":")[2] for key in self.targets}
        return LoopVariables(live, changes, set(self.changes), list(self.reached.values()), targets)

    def _walk_loop(self, function: UserFunction, path: loop_forms.LoopPath) -> set[str]:
        self._reset()
        context = Context(function, returns_count=self.returns_count)
        after: set[str] = set()
        for statements in reversed(path.following):
            after = self.block(statements, after, context)
        self.recording = True
        return self._repeat(path.loop, after, context)

    # Statements. Each method takes what is live after the statement, and returns what is live
    # before.

    def block(self, statements: Sequence[ast.stmt], live: set[str], context: Context) -> set[str]:
        for statement in reversed(statements):
            walk = getattr(self, f"_{type(statement).__name__}", self._other)
            live = walk(statement, live, context)
        return live

    def _other(self, statement: ast.stmt, live: set[str], context: Context) -> set[str]:
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                self.expression(child, live, context, True)
        return live

    def _FunctionDef(
        self, statement: ast.FunctionDef, live: set[str], context: Context
    ) -> set[str]:
        live.discard(context.function.variable(statement.name))
        return live

    def _ClassDef(self, statement: ast.ClassDef, live: set[str], context: Context) -> set[str]:
        live.discard(context.function.variable(statement.name))
        return live

    def _Expr(self, statement: ast.Expr, live: set[str], context: Context) -> set[str]:
        if isinstance(statement.value, ast.Call):
            self.call(statement.value, live, context, False, bare=True)
        else:
            self.expression(statement.value, live, context, False)
        return live

    def _Assign(self, statement: ast.Assign, live: set[str], context: Context) -> set[str]:
        if self._is_view(statement.value, context):
            self._fix(statement.targets, context)
        wanted = self._store(statement.targets, statement.value, live, context)
        self.expression(statement.value, live, context, wanted)
        return live

    def _AnnAssign(self, statement: ast.AnnAssign, live: set[str], context: Context) -> set[str]:
        if statement.value:
            wanted = self._store([statement.target], statement.value, live, context)
            self.expression(statement.value, live, context, wanted)
        return live

    def _AugAssign(self, statement: ast.AugAssign, live: set[str], context: Context) -> set[str]:
        key = self._key(statement.target, context)
        fixed = not isinstance(statement.target, ast.Name) and self._is_fixed(
            statement.target, context
        )
        if not fixed:
            self._record(key, statement.target, context, "augment", statement.value)
        wanted = key in live or fixed
        self.effects += wanted
        self.expression(statement.value, live, context, wanted)
        return live

    def _Delete(self, statement: ast.Delete, live: set[str], context: Context) -> set[str]:
        self._store(statement.targets, None, live, context)
        return live

    def _Return(self, statement: ast.Return, live: set[str], context: Context) -> set[str]:
        self.effects += 1
        live = set(context.after_return)
        self.expression(statement.value, live, context, context.returns_count)
        return live

    def _Raise(self, statement: ast.Raise, live: set[str], context: Context) -> set[str]:
        self.effects += 1
        live = set()
        self.expression(statement.exc, live, context, False)
        return live

    def _Assert(self, statement: ast.Assert, live: set[str], context: Context) -> set[str]:
        self.effects += 1
        self.expression(statement.test, live, context, True)
        return live

    def _Break(self, statement: ast.Break, live: set[str], context: Context) -> set[str]:
        self.effects += 1
        return set(context.after_break)

    def _Continue(self, statement: ast.Continue, live: set[str], context: Context) -> set[str]:
        self.effects += 1
        return set(context.after_continue)

    def _If(self, statement: ast.If, live: set[str], context: Context) -> set[str]:
        before = self.effects
        self.lazy |= loop_forms.filled_first(statement)
        merged = self.block(statement.body, set(live), context) | self.block(
            statement.orelse, set(live), context
        )
        self._record_extremes(statement, context)
        self.expression(statement.test, merged, context, self.effects > before)
        return merged

    def _Match(self, statement: ast.Match, live: set[str], context: Context) -> set[str]:
        merged = set(live)
        for case in statement.cases:
            merged |= self.block(case.body, set(live), context)
            self.expression(case.guard, merged, context, True)
        self.expression(statement.subject, merged, context, True)
        return merged

    def _With(
        self, statement: ast.With | ast.AsyncWith, live: set[str], context: Context
    ) -> set[str]:
        live = self.block(statement.body, live, context)
        for item in reversed(statement.items):
            wanted = bool(item.optional_vars) and self._store(
                [item.optional_vars], None, live, context, record=False
            )
            self.expression(item.context_expr, live, context, wanted)
        return live

    _AsyncWith = _With

    def _Try(self, statement: ast.Try, live: set[str], context: Context) -> set[str]:
        live = self.block(statement.finalbody, live, context)
        whole = self.block(statement.orelse, set(live), context)
        whole = self.block(statement.body, whole, context)
        for handler in statement.handlers:
            whole |= self.block(handler.body, set(live), context)
        return whole

    _TryStar = _Try

    def _For(self, statement: ast.For | ast.AsyncFor, live: set[str], context: Context) -> set[str]:
        """A `for` loop is taken to have at least one turn: what it assigns is assigned after it."""
        after = self.block(statement.orelse, live, context)
        return self._repeat(statement, after, context)

    _AsyncFor = _For

    def _While(self, statement: ast.While, live: set[str], context: Context) -> set[str]:
        after = self.block(statement.orelse, live, context)
        return self._repeat(statement, after, context) | after

    def _repeat(
        self, loop: ast.For | ast.AsyncFor | ast.While, after: set[str], context: Context
    ) -> set[str]:
        if not isinstance(loop, ast.While) and self._mentions_fixed(loop.iter, context):
            self._fix([loop.target], context)
        if not isinstance(loop, ast.While):
            self.targets |= {
                self._key(node, context)
                for node in ast.walk(loop.target)
                if isinstance(node, ast.Name)
            }
        head, before, wanted = set[str](), self.effects, False
        for _ in range(ROUNDS):
            end = frozenset(after | head)
            start = self.block(
                loop.body,
                set(end),
                replace(context, after_break=frozenset(after), after_continue=end),
            )
            if isinstance(loop, ast.While):
                self.expression(loop.test, start, context, self.effects > before)
            else:
                wanted |= self._store([loop.target], None, start, context, record=False)
            if start <= head:
                break
            head |= start
        if isinstance(loop, ast.For | ast.AsyncFor):
            wanted |= self.effects > before
            self.expression(loop.iter, head, context, wanted)
            if wanted and not loop_forms.is_range(loop.iter):
                self._walk_named(loop_forms.ITERATION, head)
                self._walk_named(
                    [name for name in self.functions.by_name if "collate" in name], head
                )
        return head

    # Assignments.

    def _store(
        self,
        targets: Iterable[ast.expr | None],
        value: ast.expr | None,
        live: set[str],
        context: Context,
        *,
        record: bool = True,
    ) -> bool:
        """Assign to the targets. Return whether the value reaches something."""
        wanted = False
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                values = (
                    value.elts
                    if isinstance(value, ast.Tuple | ast.List)
                    and len(value.elts) == len(target.elts)
                    else None
                )
                for i, element in enumerate(target.elts):
                    wanted |= self._store(
                        [element], values[i] if values else value, live, context, record=record
                    )
                continue
            if isinstance(target, ast.Starred):
                target = target.value
            if target is not None:
                wanted |= self._store_one(target, value, live, context, record)
        self.effects += wanted
        return wanted

    def _store_one(
        self,
        target: ast.expr,
        value: ast.expr | None,
        live: set[str],
        context: Context,
        record: bool,
    ) -> bool:
        key = self._key(target, context)
        wanted = key in live
        fixed = not isinstance(target, ast.Name) and self._is_fixed(target, context)
        wanted |= fixed
        whole = isinstance(target, ast.Name | ast.Attribute) or loop_forms.is_whole_slice(target)
        if whole:
            live.discard(key)
        if isinstance(target, ast.Subscript):
            self.expression(target.slice, live, context, wanted)
        if record and not fixed:
            kind = "lazy" if id(target) in self.lazy else "assign" if whole else "append"
            self._record(key, target, context, kind, value)
            self._record_extreme_call(key, target, value)
        return wanted

    def _record(
        self, key: str, target: ast.expr, context: Context, kind: str, value: ast.expr | None = None
    ) -> None:
        if not self.recording or not key or key in loop_forms.GRADIENTS:
            return
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        change = self.changes.setdefault(
            key, Change(ast.unparse(target), context.function.file, target.lineno)
        )
        if change.file == context.function.file:
            change = self.changes[key] = replace(change, line=min(change.line, target.lineno))
        change.kinds.add(kind)
        change.values.append(self._inputs(value, context))

    def _record_extreme_call(self, key: str, target: ast.expr, value: ast.expr | None) -> None:
        """Record `best = max(best, score)`."""
        calls = (node for node in ast.walk(value) if isinstance(node, ast.Call)) if value else ()
        for call in calls:
            own = any(ast.unparse(argument) == ast.unparse(target) for argument in call.args)
            if own and loop_forms.last_name(call.func) in ("max", "min"):
                self.extremes.add(key)

    def _record_extremes(self, statement: ast.If, context: Context) -> None:
        """Record `if score > best: best = score`."""
        compared = [
            ast.unparse(side)
            for node in ast.walk(statement.test)
            if isinstance(node, ast.Compare)
            for side in loop_forms.sides(node)
        ]
        for node in statement.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if (
                    isinstance(node, ast.Assign)
                    and ast.unparse(target) in compared
                    and ast.unparse(node.value) in compared
                ):
                    self.extremes.add(self._key(target, context))

    def _inputs(self, value: ast.expr | None, context: Context) -> tuple[bool, frozenset[str]]:
        nodes = list(ast.walk(value)) if value else []
        reads_clock = any(
            isinstance(node, ast.Call) and loop_forms.last_name(node.func) in loop_forms.CLOCKS
            for node in nodes
        )
        keys = {
            self._key(node, context) for node in nodes if isinstance(node, ast.Name | ast.Attribute)
        }
        return reads_clock, frozenset(keys)

    def _is_clock(self, key: str, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether all values of a variable come from a clock."""
        if key not in self.changes or key in seen:
            return False
        for reads_clock, inputs in self.changes[key].values:
            others = inputs & self.changes.keys() - {key}
            if not reads_clock and not (
                others and all(self._is_clock(other, seen | {key}) for other in others)
            ):
                return False
        return True

    def _is_lazy(self, key: str) -> bool:
        """Return whether a variable is only filled once, with values that no step changes."""
        change = self.changes[key]
        inputs = frozenset[str]().union(*(keys for _, keys in change.values))
        return change.kinds == {"lazy"} and not inputs & (
            self.changes.keys() | self.fixed | self.targets
        )

    # Expressions.

    def expression(
        self, node: ast.AST | None, live: set[str], context: Context, wanted: bool
    ) -> None:
        """Add what the expression reads, if its value is wanted, and the effects of its calls."""
        self.expressions += 1
        if isinstance(node, ast.Call):
            self.call(node, live, context, wanted, bare=False)
        elif isinstance(node, ast.Name):
            if wanted and node.id not in self.bound:
                key = context.function.variable(node.id)
                live.add(key)
                passed_on = [
                    f
                    for f in self.functions.by_name.get(node.id, ())
                    if not f.in_class and f.is_value_of(key)
                ]
                self._walk_all(passed_on, live, True)  # called elsewhere
        elif isinstance(node, ast.Attribute):
            if wanted:
                live.add(f".{node.attr}")
                self._walk_all(
                    [f for f in self.functions.by_name.get(node.attr, ()) if f.is_property],
                    live,
                    True,
                )
            self.expression(node.value, live, context, wanted)
        elif isinstance(node, ast.NamedExpr):
            wanted |= self._store([node.target], node.value, live, context)
            self.expression(node.value, live, context, wanted)
        elif isinstance(node, ast.Lambda):
            self._with_bound({a.arg for a in node.args.args}, [node.body], live, context, wanted)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            names = {
                n.id
                for part in node.generators
                for n in ast.walk(part.target)
                if isinstance(n, ast.Name)
            }
            self._with_bound(names, list(ast.iter_child_nodes(node)), live, context, wanted)
        elif isinstance(node, ast.Yield | ast.YieldFrom):
            self.effects += 1
            self.expression(node.value, live, context, True)
        elif node is not None:
            for child in ast.iter_child_nodes(node):
                self.expression(child, live, context, wanted)

    def _with_bound(
        self,
        names: set[str],
        nodes: Sequence[ast.AST],
        live: set[str],
        context: Context,
        wanted: bool,
    ) -> None:
        before = self.bound
        self.bound = before | names
        for node in nodes:
            self.expression(node, live, context, wanted)
        self.bound = before

    def call(
        self, node: ast.Call, live: set[str], context: Context, wanted: bool, *, bare: bool
    ) -> None:
        name, receiver = (
            loop_forms.last_name(node.func),
            node.func.value if isinstance(node.func, ast.Attribute) else None,
        )
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not wanted and (
            name in loop_forms.PRINTS or loop_forms.names_in_chain(node.func) & loop_forms.PRINTERS
        ):
            self._read(arguments, live, context, self.prints_count)
            return
        if name in loop_forms.CLOCKS and not arguments:
            return
        followed = self._follow(node, live, context, wanted)
        if name == "next" and receiver is None and node.args:
            self._mutate(node.args[0], arguments, live, context, wanted, "mutate")
            self._walk_named(("__next__",), live)
        elif (
            receiver is not None
            and loop_forms.mutates(name)
            and not self._is_module(receiver, context)
        ):
            kind = (
                "append"
                if name in loop_forms.APPENDS
                else "reset"
                if name in loop_forms.RESETS
                else "mutate"
            )
            self._mutate(receiver, arguments, live, context, wanted, kind)
        elif not followed:
            self._call_unknown(node, arguments, live, context, wanted, bare)

    def _mutate(
        self,
        target: ast.expr,
        arguments: Sequence[ast.expr],
        live: set[str],
        context: Context,
        wanted: bool,
        kind: str,
    ) -> None:
        """`target.append(argument)`: the arguments reach what the target reaches."""
        key = self._key(target, context)
        fixed = self._is_fixed(target, context) or not key
        reaches = wanted or fixed or key in live
        self.effects += reaches and not wanted
        if kind == "reset":
            live.discard(key)
        if not fixed:
            self._record(key, target, context, "assign" if kind == "reset" else kind)
        self._read(arguments, live, context, reaches)
        self.expression(target, live, context, wanted and kind != "reset")

    def _call_unknown(
        self,
        node: ast.Call,
        arguments: Sequence[ast.expr],
        live: set[str],
        context: Context,
        wanted: bool,
        bare: bool,
    ) -> None:
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        fixed = self._is_fixed(node.func, context) or any(
            self._is_view(argument, context) for argument in arguments
        )
        elsewhere = receiver is None or self._is_module(
            receiver, context
        )  # no object that the call changes
        if not wanted and (
            fixed or (bare and (elsewhere or loop_forms.last_name(node.func) in loop_forms.EFFECTS))
        ):
            self.effects += 1
            wanted = True
        changed = "" if receiver is None or elsewhere else self._key(receiver, context)
        self._read(arguments, live, context, wanted or changed in live)
        self.expression(node.func, live, context, wanted)
        if wanted and (
            receiver is None or ast.unparse(receiver) == "self"
        ):  # a module, or another callable object
            self._walk_named(("forward", "__call__"), live)

    def _read(
        self, nodes: Iterable[ast.AST], live: set[str], context: Context, wanted: bool
    ) -> None:
        for node in nodes:
            self.expression(node, live, context, wanted)

    # Calls of the user's functions.

    def _follow(self, node: ast.Call, live: set[str], context: Context, wanted: bool) -> bool:
        """Walk the functions that the call may mean. Return whether there are any."""
        candidates = self._candidates(node.func, context)
        if not candidates:
            return False
        arguments, receiver = (
            list(node.args),
            node.func.value if isinstance(node.func, ast.Attribute) else None,
        )
        for function in candidates:
            is_method = function.in_class and not function.is_static
            names = function.parameters[1:] if is_method else function.parameters
            pairs: list[tuple[str, ast.expr]] = list(zip(names, arguments, strict=False))
            pairs += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
            if is_method and receiver is not None and function.parameters:
                pairs.append((function.parameters[0], receiver))
            self.fixed |= {
                f"{function.key}:{name}"
                for name, argument in pairs
                if self._is_view(argument, context)
            }
        before = self.effects
        constructs = any(
            function.name == "__init__" for function in candidates
        )  # attributes of a new object
        self.recording, recording = self.recording and not constructs, self.recording
        entered = self._walk_all(candidates, live, wanted, certain=not constructs)
        self.recording = recording
        matters = wanted or self.effects > before
        if isinstance(node.func, ast.Name) and matters:
            live.add(context.function.variable(node.func.id))
        for function in candidates:
            is_method = function.in_class and not function.is_static
            self._pass(node, function, entered, live, context, matters)
            if is_method and receiver is not None:
                read = (
                    bool(function.parameters)
                    and f"{function.key}:{function.parameters[0]}" in entered
                )
                self.expression(receiver, live, context, read and matters)
        return True

    def _pass(
        self,
        node: ast.Call,
        function: UserFunction,
        entered: set[str],
        live: set[str],
        context: Context,
        matters: bool,
    ) -> None:
        """Read the arguments of the parameters that the function reads."""
        names = (
            function.parameters[1:]
            if function.in_class and not function.is_static
            else function.parameters
        )
        for i, argument in enumerate(node.args):
            known = i < len(names) and not isinstance(argument, ast.Starred)
            self.expression(
                argument,
                live,
                context,
                f"{function.key}:{names[i]}" in entered if known else matters,
            )
        for keyword in node.keywords:
            known = keyword.arg in function.locals
            self.expression(
                keyword.value,
                live,
                context,
                f"{function.key}:{keyword.arg}" in entered if known else matters,
            )

    def _candidates(self, callee: ast.expr, context: Context) -> list[UserFunction]:
        name = loop_forms.last_name(callee)
        if isinstance(callee, ast.Name):
            key = context.function.variable(name)
            name = self.aliases.get(key, name)
            named = self.functions.by_name.get(name, ())
            found = self.functions.classes.get(name) or [
                f for f in named if key in self.aliases or not f.in_class
            ]
        elif isinstance(callee, ast.Attribute) and not self._is_module(callee.value, context):
            found = self.functions.by_name.get(name, [])
            if not context.function.variable(loop_forms.root_name(callee)).startswith("global:"):
                # `model.train()` of an object is no function `train` of a file.
                found = [f for f in found if f.in_class or (f.parent and f.parent.node)]
        else:
            found = []
        found = [function for function in found if function is not self.loop]
        return found if len(found) <= MAX_CANDIDATES else []

    def _walk_named(self, names: Iterable[str], live: set[str]) -> None:
        if self.implicit:  # a module that calls another one: all of them are walked already
            return
        self.implicit = True
        named = [function for name in names for function in self.functions.by_name.get(name, ())]
        found = [function for function in named if function.has_base or function.name != "forward"]
        self._walk_all(found[: 2 * MAX_CANDIDATES], live, True)
        self.implicit = False

    def _walk_all(
        self,
        candidates: Sequence[UserFunction],
        live: set[str],
        wanted: bool,
        *,
        certain: bool = False,
    ) -> set[str]:
        """Walk the bodies, as branches. Return what they read. certain: one of them runs here."""
        results = [
            self._walk_function(function, frozenset(live), wanted) for function in candidates
        ]
        if not results:
            return set()
        entered = set[str]().union(*results)
        if certain:
            live.clear()
        own = tuple(f"{function.key}:" for function in candidates)
        live |= {key for key in entered if not key.startswith(own)}
        return entered

    def _walk_function(
        self, function: UserFunction, live: frozenset[str], wanted: bool
    ) -> frozenset[str]:
        if (
            function in self.calling
            or len(self.calling) >= MAX_CALLS
            or self.expressions > MAX_EXPRESSIONS
        ):
            return live
        known = self.walked.get((function.key, wanted, live))
        if known is None:
            self.reached.setdefault(function.key, function)
            before, bound = self.effects, self.bound
            self.calling.append(function)
            self.bound = set()
            context = Context(function, live, wanted)
            entered = frozenset(self.block(function.body, set(live), context))
            self.bound = bound
            self.calling.pop()
            known = self.walked[function.key, wanted, live] = (
                entered,
                self.effects > before and entered != live,
            )
            self.effects = before
        self.effects += known[1]
        return known[0]

    # Names.

    def _key(self, target: ast.expr, context: Context) -> str:
        """Return the key of the variable that holds the target; "" without one."""
        return loop_forms.key_of(target, context.function, self.bound)

    def _keys_in_chain(self, node: ast.expr, context: Context) -> set[str]:
        keys = set[str]()
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Name):
            keys.add(self._key(node, context) if not isinstance(node, ast.Call) else "")
            if isinstance(node, ast.Name):
                break
            node = node.func if isinstance(node, ast.Call) else node.value
        return keys - {""}

    def _is_fixed(self, node: ast.expr, context: Context) -> bool:
        keys = self._keys_in_chain(node, context)
        return bool(keys & self.fixed) or any(
            key.endswith((":session", ".session")) for key in keys
        )

    def _is_view(self, node: ast.expr, context: Context) -> bool:
        """Return whether the value is a part of the trained state: model.head,
        model.parameters()."""
        if loop_forms.last_name(node) in loop_forms.NUMBERS_OF_SESSION:
            return False
        if isinstance(node, ast.Call):
            parts = (
                [node.func, *node.args]
                if loop_forms.last_name(node.func) in loop_forms.VIEWS
                else []
            )
            return any(
                self._is_fixed(part, context) or self._is_view(part, context) for part in parts
            )
        return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and self._is_fixed(
            node, context
        )

    def _mentions_fixed(self, node: ast.expr, context: Context) -> bool:
        if self._is_view(node, context):
            return True
        names = (child for child in ast.walk(node) if isinstance(child, ast.Name | ast.Attribute))
        return loop_forms.last_name(getattr(node, "func", None)) in loop_forms.VIEWS and any(
            self._is_view(name, context) for name in names
        )

    def _fix(self, targets: Iterable[ast.expr], context: Context) -> None:
        names = (
            node
            for target in targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        self.fixed |= {
            self._key(name, context) for name in names if isinstance(name.ctx, ast.Store)
        }

    def _is_module(self, node: ast.expr, context: Context) -> bool:
        """Return whether the expression is a module that is not one of the user's."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.stems:
            return False
        return node.id in context.function.modules and context.function.variable(
            node.id
        ).startswith("global:")
