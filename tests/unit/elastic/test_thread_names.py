"""Subclasses of Thread keep its attributes: Python 3.13 added `_handle` to each thread."""

from __future__ import annotations

import ast
import threading

import pytest
from support.launching import ROOT

TAKEN = {*vars(threading.Thread()), *vars(threading.Thread), "_handle", "_os_thread_handle"}
OVERRIDDEN = {"__init__", "__doc__", "run"}
CLASSES = [
    node
    for path in sorted((ROOT / "src").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
    and any(ast.unparse(base).endswith("Thread") for base in node.bases)
]


@pytest.mark.parametrize("owner", CLASSES, ids=lambda owner: owner.name)
def test_no_attribute_of_a_thread_is_replaced(owner: ast.ClassDef) -> None:
    methods = {part.name for part in owner.body if isinstance(part, ast.FunctionDef)}
    stored = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    assert not (methods | stored) & TAKEN - OVERRIDDEN


def test_there_are_threads_to_check() -> None:
    assert CLASSES
