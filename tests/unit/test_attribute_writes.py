"""No object assigns another object's attributes: dependencies arrive by constructor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"

# Attributes that any code may assign, with the reason.
ALLOWED_NAMES = {
    "grad": "torch's own protocol for gradients",
    "training": "torch's own protocol for eval mode",
    "forward": "a wrapped block keeps its class",
    "in_features": "torch's linear layers with fewer rows or columns",
    "out_features": "torch's linear layers with fewer rows or columns",
    "__traceback__": "a kept exception must not reference the process group",
    "epilog": "argparse",
    "f_trace": "the debugger of a replay",
    "formatter_class": "argparse",
    "propagate": "logging",
}
# Objects whose attributes any code may assign, with the reason.
ALLOWED_OBJECTS = {
    "ctx": "torch.autograd.Function keeps values for the backward pass there",
    "sys": "arguments of a script",
    "args": "argparse.Namespace",
    "torch": "settings of torch",
    "dist": "settings of torch",
    "self._local": "threading.local",
    "inner": "the tokenizers library is configured by attributes",
    "self._inner": "the tokenizers library is configured by attributes",
}
# (file or package, object) whose attributes this code may assign, with the reason.
ALLOWED_IN = {
    ("agent", "worker"): "record of one process, changed by the agent alone",
    ("agent", "slot"): "record of one slot, changed by the agent alone",
    ("agent", "slot.worker"): "record of one process, changed by the agent alone",
    ("cli", "run"): "record of a drill",
    ("elastic/protocol/transitions.py", "self.peers"): "a part of the state of the protocol",
    ("elastic/protocol/transitions.py", "self.log"): "a part of the state of the protocol",
    ("elastic/protocol/transitions.py", "self.outbox"): "a part of the state of the protocol",
    ("generation/decoder.py", "cache"): "position of a cache that the decoder owns",
    ("generation/sampling.py", "parameter"): "frees the whole weight",
    ("models/translator.py", "cache"): "position of a cache that the decoder owns",
    ("generation/decoder.py", "model"): "the decoder's copy of the model",
    ("parallel/replica.py", "self.groups"): "ProcessGroups is a part of Replica",
    ("record/tracker.py", "self.metrics"): "the log of metrics is a part of the tracker",
    ("testing/tensor_memory.py", "storage"): "a mark on torch's storage",
}


def is_allowed(file: str, owner: str, attribute: str) -> bool:
    if (
        attribute in ALLOWED_NAMES
        or owner in ALLOWED_OBJECTS
        or owner.partition(".")[0] in ALLOWED_OBJECTS
    ):
        return True
    return any(file.startswith(place) and owner == name for place, name in ALLOWED_IN)


def attribute_writes(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, object, attribute) of each assignment to an attribute of an object that is not
    `self`, `cls`, or constructed in the same function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        constructed = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_constructor(node.value)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            for target in assigned(node):
                if isinstance(target, ast.Attribute):
                    owner = ast.unparse(target.value)
                    if owner not in {"self", "cls", *constructed}:
                        yield target.lineno, owner, target.attr


def is_constructor(value: ast.expr | None) -> bool:
    name = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name == "cls" or name[:1].isupper()


def assigned(node: ast.AST) -> list[ast.expr]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AugAssign | ast.AnnAssign)
        else []
    )
    return [
        part
        for target in targets
        for part in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]


def test_no_object_assigns_attributes_of_another() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        file = str(path.relative_to(SOURCE))
        for line, owner, attribute in attribute_writes(ast.parse(path.read_text())):
            if not is_allowed(file, owner, attribute):
                found.append(f"src/lockstep/{file}:{line}: {owner}.{attribute}")
    assert not found, "pass the value to the constructor, or call a method:\n" + "\n".join(
        sorted(set(found))
    )


def test_writes_are_found() -> None:
    source = "def f(self, other):\n    made = Thing()\n    made.a = self.b = 1\n    other.c, self.d.e = 2, 3\n    self.d.f += 1\n"
    assert list(attribute_writes(ast.parse(source))) == [
        (4, "other", "c"),
        (4, "self.d", "e"),
        (5, "self.d", "f"),
    ]
