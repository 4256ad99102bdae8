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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.training import loop_forms
from lockstep.training.loop_forms import Loop, LoopPath
from lockstep.training.loop_names import MAX_CANDIDATES, Names, session_variables
from lockstep.training.loop_variables import Change, Changes
from lockstep.training.user_functions import UserFunction, UserFunctions

MAX_EXPRESSIONS = 30_000  # 0.2 s; then calls are not followed any more
MAX_CALLS = 6  # nested
ROUNDS = 5  # of a loop, until its live variables are complete
Keys = frozenset[str]


@dataclass
class LoopVariables:
    """What the source tells about a loop. `live`: keys of the variables that later steps use."""

    live: set[str]
    changes: dict[str, Change]  # of live variables, by a statement of a known form
    assigned: set[str]  # all variables with such a statement, live or not
    reached: list[UserFunction]
    targets: set[str]  # names of `for` loops


def loop_variables(
    functions: UserFunctions,
    function: UserFunction,
    path: LoopPath,
    aliases: dict[str, str],
    fixed: set[str],
) -> LoopVariables:
    """Return the variables of a loop over session.steps in `function`; Names has the others."""
    names = Names(functions, function, aliases, set(fixed))
    names.fixed |= set(session_variables(names))
    changes = Changes()
    live, reached = walk_loop(names, path, changes)
    kept = changes.carrying(live, names.fixed, path.loop.body)
    in_loop, more = walk_loop(names, path, changes, returns_count=False)
    kept -= {key for key in kept - in_loop if changes.by_key[key].kinds <= {"append"}}
    printed, most = walk_loop(names, path, changes, prints_count=True)
    kept |= changes.extremes & printed & changes.by_key.keys()
    ordered = sorted(kept, key=lambda key: changes.by_key[key].line)
    return LoopVariables(
        live,
        {key: changes.by_key[key] for key in ordered},
        set(changes.by_key),
        [*dict.fromkeys([*reached, *more, *most])],
        {key.rpartition(":")[2] for key in changes.targets},
    )


def walk_loop(
    names: Names,
    path: LoopPath,
    changes: Changes,
    *,
    returns_count: bool = True,
    prints_count: bool = False,
) -> tuple[set[str], list[UserFunction]]:
    """Return what is live at the head of the loop, and the functions that are called on the way."""
    program = Program(names.function, changes, prints_count)
    behind = Walk(program, names, Keys(), returns_count=returns_count, records=False)
    for statements in reversed(path.following):
        behind.block(statements)
    walk = Walk(program, names, Keys(), returns_count=returns_count, records=True)
    walk.repeat(path.loop, Keys(behind.live))
    return walk.live, program.reached


class Program:
    """The functions that one analysis walks.

    loop  the function of the loop, which its body does not call
    """

    def __init__(self, loop: UserFunction, changes: Changes, prints_count: bool) -> None:
        self.loop = loop
        self.changes = changes
        self.prints_count = prints_count
        self.effects = 0  # so far: assignments of live variables, calls with an effect, jumps
        self.expressions = 0
        self.reached: list[UserFunction] = []
        self._is_implicit = False  # in a function that no call names: forward, __getitem__
        self._calling: list[UserFunction] = []
        self._walked: dict[tuple[UserFunction, bool, Keys, bool], tuple[Keys, bool]] = {}

    def affect(self, matters: bool = True) -> None:
        self.effects += matters

    def count_expression(self) -> None:
        self.expressions += 1

    @contextmanager
    def implicit_call(self) -> Iterator[bool]:
        """Context manager of a call that Python makes. Yields False inside of another one: a module
        that calls another one, and all of them are walked already."""
        before = self._is_implicit
        self._is_implicit = True
        yield not before
        self._is_implicit = before

    def walk(
        self, names: Names, function: UserFunction, live: Keys, wanted: bool, records: bool
    ) -> Keys:
        """Return what is live before a function whose result is `wanted`.

        names    of any function
        records  whether its changes are those of the loop
        """
        is_deep = function in self._calling or len(self._calling) >= MAX_CALLS
        if is_deep or self.expressions > MAX_EXPRESSIONS:
            return live
        key = function, wanted, live, records
        known = self._walked.get(key)
        if known is None:
            before = self.effects
            self.reached.append(function)
            self._calling.append(function)
            inside = names.inside(function)
            walk = Walk(self, inside, live, returns_count=wanted, records=records)
            walk.block(function.body)
            self._calling.pop()
            known = frozenset(walk.live), self.effects > before and walk.live != live
            self._walked[key] = known
            self.effects = before
        self.effects += known[1]
        return known[0]


class Walk:
    """A walk backwards through statements of one function. `live`: before those walked so far."""

    def __init__(
        self, program: Program, names: Names, live: Keys, *, returns_count: bool, records: bool
    ) -> None:
        self.program = program
        self.names = names
        self.live = set(live)
        self.returns_count = returns_count
        self.records = records
        self._after_return = live
        self._after_break = Keys()
        self._after_continue = Keys()

    # Statements.

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in reversed(statements):
            self._statement(statement)

    def _branches(self, *blocks: Sequence[ast.stmt]) -> None:
        """Walk blocks of which one runs."""
        after, merged = self.live, set[str]()
        for block in blocks:
            self.live = set(after)
            self.block(block)
            merged |= self.live
        self.live = merged

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Call() as call):
                self._call(call, False, is_bare=True)
            case ast.Expr(value):
                self._read(value, False)
            case ast.Assign(targets, value):
                if self.names.is_view(value):
                    self.names.fix(targets)
                self._assign(targets, value, "assign")
            case ast.AnnAssign(target, _, ast.expr() as value):
                self._assign([target], value, "assign")
            case ast.AugAssign(target, _, value):
                self._assign([target], value, "augment")
            case ast.Delete(targets):
                self._store(targets, None, "assign")
            case ast.If() | ast.Match():
                self._branch(node)
            case ast.With() | ast.AsyncWith():
                self._with(node)
            case ast.Try() | ast.TryStar():
                self.block(node.finalbody)
                handlers = [handler.body for handler in node.handlers]
                self._branches([*node.body, *node.orelse], *handlers)
            case ast.For() | ast.AsyncFor() | ast.While():
                # A `for` loop is taken to have a turn: what it assigns is assigned after it.
                self.block(node.orelse)
                skipped = self.live if isinstance(node, ast.While) else set[str]()
                self.repeat(node, Keys(self.live))
                self.live |= skipped
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.live.discard(self.names.function.variable(node.name))
            case _:
                self._jump(node)

    def _jump(self, node: ast.stmt) -> None:
        match node:
            case ast.Return(value):
                self._leave(self._after_return)
                self._read(value, self.returns_count)
            case ast.Raise(error):
                self._leave(Keys())
                self._read(error, False)
            case ast.Assert(test):
                self._leave(self.live)
                self._read(test, True)
            case ast.Break():
                self._leave(self._after_break)
            case ast.Continue():
                self._leave(self._after_continue)

    def _leave(self, live: Iterable[str]) -> None:
        self.program.affect()
        self.live = set(live)

    def _branch(self, node: ast.If | ast.Match) -> None:
        before = self.program.effects
        if isinstance(node, ast.Match):
            self._branches([], *(case.body for case in node.cases))
            self._read_all([node.subject, *(case.guard for case in node.cases)], True)
            return
        self.program.changes.lazy.update(loop_forms.filled_first(node))
        self._branches(node.body, node.orelse)
        if self.records:
            self.program.changes.record_branch(self.names, node)
        self._read(node.test, self.program.effects > before)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        self.block(node.body)
        for item in reversed(node.items):
            wanted = bool(item.optional_vars and self._store([item.optional_vars], None, ""))
            self._read(item.context_expr, wanted)

    def repeat(self, loop: Loop, after: Keys) -> None:
        """Walk a loop until its live variables are complete, without its `else`.

        after  what is live behind the loop
        """
        head, wanted = set[str](), False
        before = self.program.effects
        outside = self._after_break, self._after_continue
        if not isinstance(loop, ast.While):
            if self.names.is_view(loop.iter):
                self.names.fix([loop.target])
            named = (node for node in ast.walk(loop.target) if isinstance(node, ast.Name))
            self.program.changes.targets.update(map(self.names.key, named))
        for _ in range(ROUNDS):
            self._after_break = after
            self._after_continue = after | head
            self.live = set(self._after_continue)
            self.block(loop.body)
            self._after_break, self._after_continue = outside
            if isinstance(loop, ast.While):
                self._read(loop.test, self.program.effects > before)
            else:
                wanted |= self._store([loop.target], None, "")
            if self.live <= head:
                break
            head |= self.live
        self.live = head
        if not isinstance(loop, ast.While):
            self._iterate(loop.iter, wanted or self.program.effects > before)

    def _iterate(self, node: ast.expr, wanted: bool) -> None:
        self._read(node, wanted)
        if wanted and not loop_forms.is_range(node):
            self._enter_named(loop_forms.ITERATION)
            self._enter_named(name for name in self.names.functions.by_name if "collate" in name)

    # Assignments.

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, kind: str) -> None:
        self._read(value, self._store(targets, value, kind))

    def _store(self, targets: Sequence[ast.expr], value: ast.expr | None, kind: str) -> bool:
        """Assign to the targets. Return whether the value reaches something.

        kind  "assign", "augment"; "": no change of the user's
        """
        pairs = [pair for target in targets for pair in loop_forms.assignments(target, value)]
        wanted = [self._store_one(target, part, kind) for target, part in pairs]
        self.program.affect(any(wanted))
        return any(wanted)

    def _store_one(self, target: ast.expr, value: ast.expr | None, kind: str) -> bool:
        key = self.names.key(target)
        is_fixed = not isinstance(target, ast.Name) and self.names.is_fixed(target)
        wanted = is_fixed or key in self.live
        if kind != "augment":
            if loop_forms.is_whole(target):
                self.live.discard(key)
            elif kind:
                kind = "append"
        if isinstance(target, ast.Subscript):
            self._read(target.slice, wanted)
        if self.records and kind and not is_fixed:
            self.program.changes.record(self.names, target, kind, value)
        return wanted

    # Expressions: add what is read, if the value is wanted, and the effects of calls.

    def _read_all(self, nodes: Iterable[ast.AST | None], wanted: bool) -> None:
        for node in nodes:
            self._read(node, wanted)

    def _read(self, node: ast.AST | None, wanted: bool) -> None:
        self.program.count_expression()
        by_name = self.names.functions.by_name
        match node:
            case ast.Call():
                self._call(node, wanted)
            case ast.Name(name):
                if wanted and (key := self.names.key(node)):
                    self.live.add(key)
                    named = by_name.get(name, ())  # called elsewhere
                    self._enter([f for f in named if not f.owner and f.is_value_of(key)], True)
            case ast.Attribute(value, name):
                if wanted:
                    self.live.add(f".{name}")
                    self._enter([f for f in by_name.get(name, ()) if f.is_property], True)
                self._read(value, wanted)
            case ast.NamedExpr(target, value):
                self._read(value, self._store([target], value, "assign") or wanted)
            case ast.Lambda(arguments, body):
                self._read_bound(arguments.args, [body], wanted)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                targets = [part.target for part in node.generators]
                self._read_bound(targets, ast.iter_child_nodes(node), wanted)
            case ast.Yield(value) | ast.YieldFrom(value):
                self.program.affect()
                self._read(value, True)
            case ast.AST():
                self._read_all(ast.iter_child_nodes(node), wanted)

    def _read_bound(
        self, targets: Sequence[ast.AST], nodes: Iterable[ast.AST], wanted: bool
    ) -> None:
        """Read nodes of a comprehension or lambda, whose targets are local to it."""
        outside = self.names
        inside = [node for target in targets for node in ast.walk(target)]
        bound = {getattr(node, "id", getattr(node, "arg", "")) for node in inside}
        self.names = outside.inside(outside.function, outside.bound | bound)
        self._read_all(nodes, wanted)
        self.names = outside

    # Calls.

    def _call(self, node: ast.Call, wanted: bool, *, is_bare: bool = False) -> None:
        name, receiver = loop_forms.last_name(node.func), loop_forms.receiver_of(node)
        arguments = loop_forms.arguments_of(node)
        if not wanted and loop_forms.prints(node.func):
            self._read_all(arguments, self.program.prints_count)
            return
        if name in loop_forms.CLOCKS and not arguments:
            return
        is_followed = self._follow(node, wanted)
        kind = loop_forms.change_by(name)
        if name == "next" and not receiver and node.args:
            self._mutate(node.args[0], arguments, wanted, "mutate")
            self._enter_named(["__next__"])
        elif receiver and kind and not self.names.is_module(receiver):
            self._mutate(receiver, arguments, wanted, kind)
        elif not is_followed:
            self._call_unknown(node, wanted, is_bare)

    def _mutate(
        self, target: ast.expr, arguments: Sequence[ast.expr], wanted: bool, kind: str
    ) -> None:
        """`target.append(argument)`: the arguments reach what the target reaches."""
        key = self.names.key(target)
        is_fixed = not key or self.names.is_fixed(target)
        reaches = wanted or is_fixed or key in self.live
        self.program.affect(reaches and not wanted)
        if kind == "assign":
            self.live.discard(key)
        if self.records and not is_fixed:
            self.program.changes.record(self.names, target, kind)
        self._read_all(arguments, reaches)
        self._read(target, wanted and kind != "assign")

    def _call_unknown(self, node: ast.Call, wanted: bool, is_bare: bool) -> None:
        receiver, arguments = loop_forms.receiver_of(node), loop_forms.arguments_of(node)
        changes_nothing = receiver is None or self.names.is_module(receiver)
        is_effect = is_bare and (
            changes_nothing or loop_forms.last_name(node.func) in loop_forms.EFFECTS
        )
        is_effect |= self.names.is_fixed(node.func) or any(map(self.names.is_view, arguments))
        if is_effect and not wanted:
            self.program.affect()
            wanted = True
        changed = "" if receiver is None or changes_nothing else self.names.key(receiver)
        self._read_all(arguments, wanted or changed in self.live)
        self._read(node.func, wanted)
        if wanted and (receiver is None or loop_forms.last_name(receiver) == "self"):
            self._enter_named(["forward", "__call__"])  # a module, or another callable object

    def _follow(self, node: ast.Call, wanted: bool) -> bool:
        """Walk the functions of the user's that the call may mean. Return whether there are any."""
        found = self.names.candidates(node.func)
        candidates = [function for function in found if function is not self.program.loop]
        if not 0 < len(candidates) <= MAX_CANDIDATES:
            return False
        pairs = [pair for function in candidates for pair in parameters_of(function, node)]
        self.names.fixed.update(key for key, part in pairs if key and self.names.is_view(part))
        before = self.program.effects
        constructs = any(function.name == "__init__" for function in candidates)
        # Changes of a constructor are attributes of a new object.
        entered = self._enter(
            candidates, wanted, is_certain=not constructs, records=self.records and not constructs
        )
        matters = wanted or self.program.effects > before
        if isinstance(node.func, ast.Name) and matters:
            self.live.add(self.names.function.variable(node.func.id))
        for key, part in pairs:
            self._read(part, key in entered if key else matters)
        return True

    def _enter_named(self, names: Iterable[str]) -> None:
        """Walk functions that Python calls: one of these names in any class."""
        by_name = self.names.functions.by_name
        named = [function for name in names for function in by_name.get(name, ())]
        found = [f for f in named if f.name != "forward" or (f.owner and f.owner.bases)]
        with self.program.implicit_call() as is_new:
            self._enter(found[: 2 * MAX_CANDIDATES] if is_new else [], True)

    def _enter(
        self,
        functions: Sequence[UserFunction],
        wanted: bool,
        *,
        is_certain: bool = False,
        records: bool | None = None,
    ) -> Keys:
        """Walk the bodies, as branches. Return what they read.

        is_certain  one of them runs
        records     whether their changes are those of the loop; None: as here
        """
        live = Keys(self.live)
        records = self.records if records is None else records
        entered = Keys().union(
            *(self.program.walk(self.names, f, live, wanted, records) for f in functions)
        )
        if is_certain:
            self.live.clear()
        own = tuple(f"{function.key}:" for function in functions)
        self.live |= {key for key in entered if not key.startswith(own)}
        return entered


def parameters_of(function: UserFunction, call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return (key of the parameter, argument) of a call; "" for a key that is not known."""
    names = [*function.parameters]
    arguments = [*call.args]
    receiver = loop_forms.receiver_of(call)
    if function.is_method and receiver:
        arguments.insert(0, receiver)
    elif function.is_method:
        names = names[1:]
    keys = [f"{function.key}:{name}" for name in names] + [""] * len(arguments)
    pairs = [
        ("" if isinstance(argument, ast.Starred) else key, argument)
        for key, argument in zip(keys, arguments, strict=False)
    ]
    for keyword in call.keywords:
        key = f"{function.key}:{keyword.arg}" if keyword.arg in function.locals else ""
        pairs.append((key, keyword.value))
    return pairs
