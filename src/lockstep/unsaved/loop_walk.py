"""Find the variables that carry a value from one step of a user's loop to later ones, in its
source.

The statements of the loop are walked once, in their order. The value of a variable is a set of
keys: the variables whose values at the head of the loop it depends on. A variable is live when its
value at the head reaches an end, in this step or, by way of the variables that it changes, in later
ones: a loss, an update, a decision, the result of the function, or a line that is printed. What is
only printed, and what each step assigns first, carries nothing.

Names decide which function a call means, and an attribute has one key for all objects, so the
result is a good guess, not a proof. It is meant for a warning.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType

from lockstep.unsaved import loop_forms
from lockstep.unsaved.loop_flow import (
    CLOCK,
    NOTHING,
    Change,
    End,
    Flow,
    Keys,
    Values,
    is_clock,
    live_at_head,
    merged,
    replaced,
)
from lockstep.unsaved.loop_forms import Loop, LoopPath
from lockstep.unsaved.user_functions import (
    UserFunction,
    UserFunctions,
    last_name,
    own_nodes,
)

MAX_EXPRESSIONS = 30_000  # 0.2 s; then calls are not followed any more
MAX_CALLS = 10  # nested
MAX_CANDIDATES = 6  # functions of one name
ROUNDS = 5  # of an inner loop, until its values are complete
LITERAL = "literal"  # the source of numbers and texts, except the usual first values
FIRST_VALUES = (0, 1, None)
NUMBERS_OF_SESSION = {"loss", "step", "world"}
SESSION_METHODS = {"prepare", "state", "steps", "loader", "micro_batches"}
Place = tuple[bool, bool, str, int]  # only read, outside of the loop's file, file, line


@dataclass(frozen=True)
class LoopVariables:
    """What the source tells about a loop. `live`: keys of the variables that later steps use."""

    live: set[str]
    changes: dict[str, Change]  # of variables that carry a value, by a statement of a known form
    assigned: set[str]  # all variables with such a statement, live or not
    places: dict[str, tuple[str, int]]  # file and line of the first change, or else use, by key;
    # of a function by "called:NAME"
    reached: list[UserFunction]
    targets: set[str]  # names of `for` loops


def loop_variables(
    functions: UserFunctions,
    function: UserFunction,
    path: LoopPath,
    aliases: dict[str, str],
    fixed: Iterable[str],
) -> LoopVariables:
    """Return the variables of a loop over session.steps in `function`; Program has the others."""
    all_fixed = {*fixed, *session_variables(functions)}
    known = -1
    while known < len(all_fixed):
        known = len(all_fixed)
        program = Program(functions, function, aliases, all_fixed)
        walk = Walk(program, function)
        step = walk.whole_loop(path)
    live = live_at_head(walk.flow, step, *End)
    used = live_at_head(walk.flow, step, End.EFFECT, End.RESULT)
    in_loop = live_at_head(walk.flow, step, End.EFFECT)
    changes = dict(sorted(walk.flow.changes.items(), key=lambda item: item[1].line))
    moving = changes.keys() | all_fixed | program.targets
    kept = {
        key
        for key, change in changes.items()
        if key in (in_loop if change.kinds == {"append"} else used)
        and step.get(key) != NOTHING
        and not is_clock(key, changes)
        and not (change.kinds == {"lazy"} and moving.isdisjoint(NOTHING.union(*change.values)))
    }
    kept |= walk.flow.extremes & live
    return LoopVariables(
        used,
        {key: change for key, change in changes.items() if key in kept},
        set(changes),
        {key: place[2:] for key, place in program.places.items()},
        [*program.flows],
        {key.rpartition(":")[2] for key in program.targets},
    )


class Program:
    """The functions of a user's program around a loop, each of which is walked once.

    aliases  {key of a variable: name of the function that is its value}
    fixed    keys of variables whose use is an effect by itself, such as the optimizer. It grows:
             then another Program starts with all of them
    """

    def __init__(
        self,
        functions: UserFunctions,
        loop: UserFunction,
        aliases: dict[str, str],
        fixed: set[str],
    ) -> None:
        self.functions = functions
        self.loop = loop
        self.aliases = aliases
        self.fixed = fixed
        self.targets: set[str] = set()  # "for KEY" of each variable of a `for` loop
        self.flows: dict[UserFunction, Flow] = {}
        self.places: dict[str, Place] = {}  # by key of a variable: the first change, or else use
        self._expressions = 0
        self._nested = 0

    def count_expression(self) -> None:
        self._expressions += 1

    def note(self, key: str, node: ast.expr, file: str, *, changes: bool = False) -> None:
        """Note where a variable is used or changed."""
        place = not changes, file != self.loop.file, file, node.lineno
        self.places[key] = min(place, self.places.get(key, place))

    def flow_of(self, function: UserFunction) -> Flow:
        """Return what a function does; nothing while it is being walked."""
        if function in self.flows:
            return self.flows[function]
        if self._nested >= MAX_CALLS or self._expressions > MAX_EXPRESSIONS:
            return Flow()
        self.flows[function] = Flow()
        self.places[f"called:{function.name}"] = (False, False, function.file, function.line)
        self._nested += 1
        walk = Walk(self, function)
        with suppress(RecursionError):  # of deep expressions: then nothing is known of it
            walk.block(function.body)
            self.flows[function] = walk.finish()
        self._nested -= 1
        return self.flows[function]

    def called(self, callee: ast.expr, caller: UserFunction) -> list[UserFunction]:
        """Return the functions of the user's that a call may mean, without that of the loop."""
        found = self.functions.candidates(callee, caller, self.aliases)
        found = [function for function in found if function is not self.loop]
        return found if len(found) <= MAX_CANDIDATES else []

    def called_by_python(self, names: Iterable[str]) -> list[UserFunction]:
        """Return the functions of these names in any class."""
        named = [function for name in names for function in self.functions.by_name.get(name, ())]
        found = [f for f in named if f.name != "forward" or (f.owner and f.owner.bases)]
        return found[: 2 * MAX_CANDIDATES]


class Scope:
    """The variables of one function, at one of its statements.

    flow    what they have done so far, except `values`
    values  of the variables now
    """

    def __init__(self, program: Program, function: UserFunction) -> None:
        self.program = program
        self.function = function
        self.flow = Flow()
        self.values: Values = {}
        self._control = NOTHING  # what decides whether the statement runs
        self._jumps = NOTHING  # what has decided on jumps before it
        self._records = True  # changes
        self._lazy: set[int] = set()  # ids of targets that are assigned once, in their first use

    @property
    def control(self) -> Keys:
        return self._control | self._jumps

    # Assignments.

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, kind: str) -> None:
        pairs = [pair for target in targets for pair in loop_forms.assignments(target, value)]
        read = self._read_once(part for _, part in pairs)
        for target, part in pairs:
            if self._records and loop_forms.is_extreme(target, part):
                self.flow.extremes.add(self.function.key_of(target))
            self._store(target, read[id(part)], kind)

    def _store(self, target: ast.expr, value: Keys, kind: str) -> None:
        """Assign to a target. kind: "assign", "augment"; "": no change of the user's"""
        if isinstance(target, ast.Subscript):
            value |= self._read(target.slice)
        is_whole = kind != "augment" and loop_forms.is_whole(target)
        if not isinstance(target, ast.Name) and self._is_fixed(target):
            self._reach(End.EFFECT, value)
            kind = ""
        elif kind == "assign" and not is_whole:
            kind = "append"
        self._change(target, value, kind, is_whole=is_whole)

    def _change(self, target: ast.expr, value: Keys, kind: str, *, is_whole: bool) -> None:
        """Give a variable another value, or add to it. kind: ""; not recorded"""
        key = self.function.key_of(target)
        if key:
            before = NOTHING if is_whole else self._value(key)
            self.values[key] = before | value | self.control
            self.program.note(key, target, self.function.file, changes=True)
        if not key or not kind or not self._records or key in loop_forms.GRADIENTS:
            return
        kind = "lazy" if id(target) in self._lazy else kind
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        change = Change(ast.unparse(target), self.function.file, target.lineno, {kind}, {value})
        self.flow.change(key, change)

    def _reach(self, end: End, keys: Keys) -> None:
        self.flow.reach(end, keys | self.control)

    # Expressions: return what their values depend on.

    def _value(self, key: str) -> Keys:
        return self.values.get(key, Keys([key])) if key else NOTHING

    def _read_all(self, nodes: Iterable[ast.AST | None]) -> Keys:
        return NOTHING.union(*map(self._read, nodes))

    def _read(self, node: ast.AST | None) -> Keys:
        self.program.count_expression()
        by_name = self.program.functions.by_name
        match node:
            case None:
                return NOTHING
            case ast.Constant(constant):
                return NOTHING if constant in FIRST_VALUES else Keys([LITERAL])
            case ast.Call():
                return self._call(node)
            case ast.Name(name):
                key = self.function.variable(name)
                named = by_name.get(name, ())  # called elsewhere
                called = [f for f in named if not f.owner and f.is_value_of(key)]
                return self._read_variable(node) | self._run(called)
            case ast.Attribute(value, name):
                called = [f for f in by_name.get(name, ()) if f.is_property]
                return self._read_variable(node) | self._read(value) | self._run(called)
            case ast.NamedExpr(target, value):
                self._assign([target], value, "assign")
                return self._read(target)
            case ast.Lambda(arguments, body):
                return self._read_bound([part.arg for part in arguments.args], [], [body])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                names = [name for part in node.generators for name in ast.walk(part.target)]
                bound = [name.id for name in names if isinstance(name, ast.Name)]
                iterated = [part.iter for part in node.generators]
                return self._read_bound(bound, iterated, ast.iter_child_nodes(node))
            case ast.Yield(value) | ast.YieldFrom(value):
                result = self._read(value)
                self._reach(End.EFFECT, result)
                return result
        return self._read_all(ast.iter_child_nodes(node))

    def _read_once(self, parts: Iterable[ast.expr | None]) -> dict[int, Keys]:
        """Return the values of expressions by their ids."""
        return {number: self._read(part) for number, part in {id(p): p for p in parts}.items()}

    def _read_variable(self, node: ast.expr) -> Keys:
        key = self.function.key_of(node)
        self.program.note(key, node, self.function.file)
        return self._value(key)

    def _read_bound(
        self, names: Sequence[str], iterated: Sequence[ast.AST], nodes: Iterable[ast.AST]
    ) -> Keys:
        """Read nodes of a comprehension or lambda, in which these names are local."""
        keys = [self.function.variable(name) for name in names]
        outside = {key: self._value(key) for key in keys}
        value = self._read_all(iterated)
        self.values |= dict.fromkeys(keys, value)
        value |= self._read_all(nodes)
        self.values |= outside
        return value

    # Calls.

    def _call(self, node: ast.Call, *, is_bare: bool = False) -> Keys:
        name, arguments = last_name(node.func), loop_forms.arguments_of(node)
        if is_bare and loop_forms.prints(node.func):
            self._reach(End.PRINT, self._read_all(arguments))
            return NOTHING
        receiver = loop_forms.receiver_of(node)
        # Whose method it is; None of a function, also of one in a module.
        owner = None if receiver and self.function.is_foreign_module(receiver) else receiver
        kind = loop_forms.change_by(name)
        followed = self.program.called(node.func, self.function)
        value = self._follow(node, followed) if followed else NOTHING
        if name == "next" and not receiver and node.args:
            called = self.program.called_by_python(["__next__"])
            return value | self._mutate(node.args[0], arguments, "mutate") | self._run(called)
        if owner and kind:
            return value | self._mutate(owner, arguments, kind)
        if followed:
            return value
        value = given = self._read_all(arguments)
        if name in loop_forms.CLOCKS:
            return given | {CLOCK}
        if receiver or not hasattr(builtins, name):
            value |= self._read(node.func)
            if receiver is None or last_name(receiver) == "self":
                # A module, or another callable object.
                value |= self._run(self.program.called_by_python(["forward", "__call__"]))
        is_effect = is_bare and (owner is None or name in loop_forms.EFFECTS)
        if is_effect or self._is_fixed(node.func) or any(map(self._is_view, arguments)):
            self._reach(End.EFFECT, value)
        if owner and (key := self.function.key_of(owner)):
            self.values[key] = self._value(key) | given | self.control
        return value

    def _mutate(self, target: ast.expr, arguments: Sequence[ast.expr], kind: str) -> Keys:
        """`target.append(argument)`: the arguments reach what the target reaches."""
        given = self._read_all(arguments)
        before = self._read(target)
        if not self.function.key_of(target) or self._is_fixed(target):
            self._reach(End.EFFECT, given)
        else:
            self._change(target, given - {CLOCK}, kind, is_whole=kind == "assign")
        return given if kind == "assign" else given | before

    def _follow(self, node: ast.Call, functions: Sequence[UserFunction]) -> Keys:
        """Call functions of the user's, one of which runs."""
        pairs = [pair for function in functions for pair in parameters_of(function, node)]
        receiver = loop_forms.receiver_of(node)  # of any class that has a method of this name
        given = [(key, part) for key, part in pairs if key and part is not receiver]
        self.program.fixed.update(key for key, part in given if self._is_view(part))
        read = self._read_once(part for _, part in pairs)
        bound: Values = {}
        for key, part in pairs:
            bound[key] = bound.get(key, NOTHING) | read[id(part)]
        value = bound.pop("", NOTHING)
        constructs = any(function.name == "__init__" for function in functions)
        if constructs:
            value = value.union(*read.values())
        elif isinstance(node.func, ast.Name):
            value |= self._read_variable(node.func)
        return value | self._run(functions, bound, value, is_call=not constructs)

    def _run(
        self,
        functions: Sequence[UserFunction],
        bound: Mapping[str, Keys] = MappingProxyType({}),
        effective: Keys = NOTHING,
        *,
        is_call: bool = False,
    ) -> Keys:
        """Run functions, as branches. Return their results.

        bound      the values of parameters
        effective  what reaches their effects, too
        is_call    a call of the loop's: one of them runs. Else Python calls them, perhaps

        Their changes are those of the loop, except attributes of a new object.
        """
        if not functions:
            return NOTHING
        before = self.values
        ends = [] if is_call else [before]
        result = NOTHING
        for function in functions:
            flow, own = self.program.flow_of(function), f"{function.key}:"
            known = {**before, **bound}
            after = dict(before)
            for key, keys in flow.after.items():
                if not key.startswith(own):
                    after[key] = replaced(keys, known, own) | self.control
            ends.append(after)
            for end, keys in flow.ends.items():
                reached = replaced(keys, known, own)
                if end is End.RESULT:
                    result |= reached
                    continue
                reached |= effective
                self.flow.reach(end, reached | self.control if is_call else reached)
            if self._records and function.name != "__init__":
                self.flow.take_changes(flow, known, own)
        self.values = merged(ends)
        return result

    # Names.

    def _is_fixed(self, node: ast.AST) -> bool:
        keys = set(map(self.function.key_of, loop_forms.chain(node)))
        return not keys.isdisjoint(self.program.fixed) or any(
            key.endswith((":session", ".session")) for key in keys
        )

    def _is_view(self, node: ast.AST) -> bool:
        """Return whether the value is, or consists of, parts of the trained state: model.head,
        model.parameters()."""
        match node:
            case ast.Call(callee) if last_name(callee) in loop_forms.VIEWS:
                return any(self._is_view(part) for part in ast.walk(node) if last_name(part))
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return last_name(node) not in NUMBERS_OF_SESSION and self._is_fixed(node)
        return False

    def _fix(self, targets: Sequence[ast.expr]) -> None:
        """Take the variables that are assigned here as parts of the trained state."""
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self.program.fixed.add(self.function.key_of(node))


class Walk(Scope):
    """A walk through statements of one function."""

    def __init__(self, program: Program, function: UserFunction) -> None:
        super().__init__(program, function)
        self._is_dead = False  # behind a jump
        self._results: list[Values] = []  # the values at each return
        self._turns: list[Values] = []  # and at each end of a turn of the innermost loop
        self._finals: list[Sequence[ast.stmt]] = []  # `finally` blocks around, the innermost last
        self._outside = 0  # how many of them contain the innermost loop

    def finish(self) -> Flow:
        self.flow.after.update(merged([*self._results, *self._alive()]))
        return self.flow

    def _alive(self) -> list[Values]:
        return [] if self._is_dead else [self.values]

    def whole_loop(self, path: LoopPath) -> Values:
        """Walk a loop and the statements behind it. Return the values after its body."""
        loop = path.loop
        control = self._start_turn(loop)
        if isinstance(loop, ast.While):
            self._reach(End.EFFECT, control)
        self.block(loop.body)
        step = self.values = merged([*self._turns, *self._alive()])
        self._records = False
        self._is_dead = False
        self.block(path.following)
        return step

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if not self._is_dead:
                self._statement(statement)

    def _branches(self, control: Keys, *blocks: Sequence[ast.stmt]) -> None:
        """Walk blocks of which one runs."""
        before, outside = self.values, self._control
        self._control |= control - {CLOCK}
        ends: list[Values] = []
        for block in blocks:
            self.values = dict(before)
            self._is_dead = False
            self.block(block)
            ends += self._alive()
        self._control = outside
        self._is_dead = not ends
        self.values = merged(ends)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Call() as call):
                self._call(call, is_bare=True)
            case ast.Expr(value):
                self._read(value)
            case ast.Assign(targets, value):
                if self._is_view(value):
                    self._fix(targets)
                self._assign(targets, value, "assign")
            case ast.AnnAssign(target, _, ast.expr() as value):
                self._assign([target], value, "assign")
            case ast.AugAssign(target, _, value):
                self._assign([target], value, "augment")
            case ast.Delete(targets):
                self._assign(targets, ast.Constant(None), "assign")
            case ast.If(test):
                self._lazy |= loop_forms.filled_first(node)
                if self._records:
                    extremes = loop_forms.extremes(node)
                    self.flow.extremes.update(map(self.function.key_of, extremes))
                self._branches(self._read(test), node.body, node.orelse)
            case ast.Match(subject, cases):
                control = self._read_all([subject, *(case.guard for case in cases)])
                self._branches(control, [], *(case.body for case in cases))
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars:
                        self._assign([item.optional_vars], item.context_expr, "")
                    else:
                        self._read(item.context_expr)
                self.block(node.body)
            case ast.Try() | ast.TryStar():
                handlers = [handler.body for handler in node.handlers]
                self._finals.append(node.finalbody)
                self._branches(NOTHING, [*node.body, *node.orelse], *handlers)
                self._finals.pop()
                self.block(node.finalbody)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._repeat(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.values[self.function.variable(node.name)] = NOTHING
            case _:
                self._jump(node)

    def _jump(self, node: ast.stmt) -> None:
        is_loop = self.function is self.program.loop
        match node:
            case ast.Return(value):
                self._reach(End.RESULT, self._read(value))
                if is_loop:
                    self._reach(End.EFFECT, NOTHING)
                self._leave(self._results)
            case ast.Raise(error):
                self._read(error)
                self._reach(End.EFFECT, NOTHING)
                self._leave([])
            case ast.Assert(test):
                self._reach(End.EFFECT, self._read(test))
            case ast.Break() | ast.Continue():
                if is_loop:
                    self._reach(End.EFFECT, NOTHING)
                self._leave(self._turns, self._outside)

    def _leave(self, ends: list[Values], outside: int = 0) -> None:
        """Walk the `finally` blocks that a jump runs, without those `outside`, and end there."""
        finals = self._finals
        while len(self._finals) > outside:
            innermost = self._finals[-1]
            self._finals = self._finals[:-1]
            self.block(innermost)
        self._finals = finals
        ends.append(self.values)
        self._jumps |= self._control
        self._is_dead = True

    def _repeat(self, loop: Loop) -> None:
        """Walk a loop until its values are complete. A `for` loop is taken to have a turn."""
        outside, control = self._turns, self._control
        finals = self._outside
        self._outside = len(self._finals)
        head, after = self.values, self.values
        for _ in range(ROUNDS):
            self.values = dict(head)
            self._turns = []
            self._is_dead = False
            self._control = control | self._start_turn(loop) - {CLOCK}
            self.block(loop.body)
            after = merged([*self._turns, *self._alive()] or [self.values])
            complete = merged([head, after])
            if complete == head:
                break
            head = complete
        self._turns, self._control = outside, control
        self._outside = finals
        self._is_dead = False
        self.values = head if isinstance(loop, ast.While) else after
        self.block(loop.orelse)

    def _start_turn(self, loop: Loop) -> Keys:
        """Return what decides whether a loop has a turn. Assign what a `for` loop gives: the turn
        is part of the values."""
        if isinstance(loop, ast.While):
            return self._read(loop.test)
        value = self._read(loop.iter)
        if not loop_forms.is_range(loop.iter):
            collates = [name for name in self.program.functions.by_name if "collate" in name]
            called = self.program.called_by_python([*loop_forms.ITERATION, *collates])
            value |= self._run(called)
        if self._is_view(loop.iter):
            self._fix([loop.target])
        for node in ast.walk(loop.target):
            if isinstance(node, ast.Name):
                key = self.function.key_of(node)
                turn = f"for {key}"
                self.program.targets.add(turn)
                self.values[key] = value | {turn}
        return value


def parameters_of(function: UserFunction, call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return (key of the parameter, argument) of a call; "" for a key that is not known."""
    arguments = [*call.args]
    if function.is_method:
        arguments.insert(0, loop_forms.receiver_of(call) or ast.Constant(None))
    named = [*zip_longest(function.parameters[: len(arguments)], arguments)]
    named += [(keyword.arg, keyword.value) for keyword in call.keywords]
    pairs = []
    for name, argument in named:
        is_known = name in function.locals and not isinstance(argument, ast.Starred)
        pairs.append((f"{function.key}:{name}" if is_known else "", argument))
    return pairs


def session_variables(functions: UserFunctions) -> set[str]:
    """Return the keys of the Session, the model, the optimizers and the session's state."""
    return {
        function.key_of(part)
        for function in functions.by_line.values()
        for node in own_nodes(function.body)
        for part in _parts_of_session(node)
    } - {""}


def _parts_of_session(node: ast.AST) -> Iterator[ast.expr]:
    call = node.value if isinstance(node, ast.Assign) else node
    match call:
        case ast.Call(ast.Attribute(session, method)) if method in SESSION_METHODS:
            if method in ("state", "steps") and "session" not in ast.unparse(session).lower():
                return
            yield session
            if method in ("prepare", "state"):
                yield from loop_forms.arguments_of(call)
            if isinstance(node, ast.Assign) and method in ("prepare", "loader", "state"):
                for target in node.targets:
                    yield from getattr(target, "elts", [target])
