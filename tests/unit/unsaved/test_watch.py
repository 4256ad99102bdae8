"""The warning of what a loop carries from step to step and no checkpoint holds."""

from __future__ import annotations

import gc
import importlib.util
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.loops_with_state import CARRIED, ORDINARY, Case
from torch import nn

from lockstep.session import Session
from lockstep.unsaved import watch
from lockstep.unsaved.user_loop import user_modules
from lockstep.unsaved.values import Look
from lockstep.unsaved.watch import UnsavedVariables

TESTS = Path(__file__).parents[2]
WARNING = "the loop changes what no checkpoint holds: "
Load = Callable[..., ModuleType]


@pytest.fixture(autouse=True)
def without_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the modules of the tests out of the user's program, which other files have imported."""

    def without(frame: FrameType, others: Sequence[Any]) -> list[ModuleType]:
        modules = user_modules(frame, others)
        return [module for module in modules if not str(module.__file__).startswith(str(TESTS))]

    monkeypatch.setattr(watch, "user_modules", without)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """Load the text of a user's script from a file."""

    def load_text(text: str, name: str = "user_loop") -> ModuleType:
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module

    names: list[str] = []
    yield load_text
    for name in names:
        sys.modules.pop(name, None)


def run(
    module: ModuleType, out: Path, caplog: pytest.LogCaptureFixture, steps: int = 3
) -> list[str]:
    """Run the script; return what the warnings name."""
    out.mkdir(exist_ok=True)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "lockstep"):
        module.run(out, steps)
    assert "were not compared" not in caplog.text
    messages = (record.getMessage() for record in caplog.records)
    return [
        message.removeprefix(WARNING).partition(". After a resume")[0]
        for message in messages
        if message.startswith(WARNING)
    ]


@pytest.mark.parametrize("case", CARRIED, ids=lambda case: case.title)
def test_a_value_that_later_steps_use_is_named(
    case: Case, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [named] = run(load(case.script()), tmp_path / "run", caplog)
    for name in case.names:
        assert name in named
    assert "line " in named
    assert len(named.split("), ")) == len(case.names), named


def test_a_function_named_like_a_method_of_the_model_hides_nothing(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "model.train()\nif session.loss < best:\n    best = session.loss\n    optimizer.param_groups[0]['lr'] *= 0.9"
    text = Case("", (), {"before": "best = 1e9", "body": body}).script()
    module = load(text.replace("def run(", "def train(") + "\nrun = train\n")
    [named] = run(module, tmp_path / "run", caplog)
    assert "best (line" in named


@pytest.mark.parametrize("case", ORDINARY, ids=lambda case: case.title)
def test_an_ordinary_loop_is_no_warning(
    case: Case, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(load(case.script()), tmp_path / "run", caplog) == []


def test_the_warning_comes_before_the_first_checkpoint_of_each_start(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = next(case for case in CARRIED if case.title == "patience")
    for save_every, steps in ((1, 3), (2, 6)):
        script = load(case.script().replace("rehearse=False", f"save_every={save_every}"))
        lines = case.script().split("\n")
        [named] = run(script, tmp_path / "run", caplog, steps)
        line = 1 + lines.index("                best, bad = score, 0")
        assert sorted(named.split(", ")) == [f"bad (line {line})", f"best (line {line})"]
        messages = [record.getMessage() for record in caplog.records]
        warned = next(i for i, message in enumerate(messages) if message.startswith(WARNING))
        saved = next(i for i, message in enumerate(messages) if message.startswith("saved "))
        assert warned < saved
        assert "saved = session.state(best=0.0)" in messages[warned]


OTHER_FORMS = {
    "for step in wrap(session.steps(steps)):": "best (line",
    "for i, step in enumerate(session.steps(steps)):": "best (line",
    "for step in [0]:\n            pass\n        for step in session.steps(steps):": "best (line",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_wrapped_loop_is_found(
    form: str, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = next(case for case in CARRIED if case.title == "best score")
    wrapper = "from tqdm import tqdm\ndef wrap(steps):\n    return tqdm(steps, disable=True)\n"
    [named] = run(
        load(wrapper + case.script().replace("for step in session.steps(steps):", form)),
        tmp_path / "run",
        caplog,
    )
    assert OTHER_FORMS[form] in named


TRAINER = """
import torch
from torch import nn
from lockstep.session import Session
import shared_state

class Trainer:
    def __init__(self, out):
        self.best, self.bad, self.printed = 1e9, 0, 0.0
        self.session = Session(out, micro_batches=2, rehearse=False)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, steps):
        with self.session:
            self.model, self.optimizer = self.session.prepare(self.model, self.optimizer)
            self.loader = self.session.loader([torch.ones(2)] * 8, batch_size=4)
            for step in self.session.steps(steps):
                self.one_step(step)
                self.validate(step)

    def one_step(self, step):
        for rows in self.loader(step):
            self.loss = self.compute(rows)
            self.session.backward(self.loss)
        self.optimizer.step()
        self.printed += self.loss.item()

    def compute(self, rows):
        return self.model(rows).square().mean() * shared_state.weight()

    def validate(self, step):
        print(self.printed)
        if self.session.loss < self.best:
            self.best, self.bad = self.session.loss, 0
        else:
            self.bad += 1
        if self.bad > 99:
            self.session.stop()

def run(out, steps):
    Trainer(out).run(steps)
"""


def test_attributes_of_a_trainer_and_globals_of_a_module_are_named(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(
        "CALLS = 0\ndef weight():\n    global CALLS\n    CALLS += 1\n    return 1 / CALLS\n",
        "shared_state",
    )
    found = run(load(TRAINER), tmp_path / "run", caplog)
    assert len(found) == 1, found
    [named] = found
    assert sorted(text.partition(" ")[0] for text in named.split("), ")) == [
        "CALLS",
        "self.bad",
        "self.best",
    ]
    assert "CALLS (shared_state.py:4)" in named


def test_a_global_that_the_loop_reads_through_its_module_is_named(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load("factor = 1.0\ndef decay():\n    global factor\n    factor *= 0.5\n", "shared_factor")
    parts = {
        "top": "import shared_factor",
        "inner": "loss = loss * shared_factor.factor",
        "body": "shared_factor.decay()",
    }
    [named] = run(load(Case("", (), parts).script()), tmp_path / "run", caplog)
    assert named.startswith("factor (shared_factor.py:4)")


class Hostile:
    """An object of a user's class that counts the calls of its special methods."""

    calls = 0

    def __init__(self) -> None:
        self.number = 0

    def _count(self, *_: Any) -> Any:
        Hostile.calls += 1
        raise RuntimeError("the user's code was called")

    __repr__ = __eq__ = __hash__ = __iter__ = __len__ = __bool__ = __getattr__ = __reduce__ = _count
    value = property(_count)


def test_a_look_calls_no_code_of_the_user_and_keeps_no_object() -> None:
    values = {
        "object": Hostile(),
        "list": [Hostile()],
        "tensor": torch.ones(8),
        "array": np.ones(8),
    }
    look = Look(set(), {__name__}, 1.0)
    marks = [look.hash_of(value) for value in values.values()]
    list(look.attributes("object", values["object"]))
    assert Hostile.calls == 0
    tensor = weakref.ref(values["tensor"])
    values["list"][0].number = 1
    assert look.hash_of(values["list"]) != marks[1]
    del values["tensor"]
    assert tensor() is None


def test_looks_keep_no_variable_of_the_loop_alive(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    alive = []
    gc.disable()
    with Session(tmp_path, micro_batches=1) as session:
        prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(4):
            for _ in session.micro_batches(step):
                output = prepared(torch.ones(1, 2))
                session.backward(output.mean())
            optimizer.step()
            reference = weakref.ref(output)
            del output
            alive.append(reference() is not None)
    gc.enable()
    assert alive == [False] * 4


def test_a_failed_look_is_no_error_of_the_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.unsaved.watch.user_frame", lambda: 1 / 0)
    with caplog.at_level(logging.DEBUG, "lockstep"):
        UnsavedVariables(()).look(saves=True)
    assert "the variables of the loop were not compared: ZeroDivisionError" in caplog.text


def test_looks_at_many_objects_end_in_time() -> None:
    look = Look(set(), set(), 0.02)
    many: list[Any] = [[[i, {"a": [i]}] for i in range(1000)] for _ in range(100)]
    started = time.thread_time()
    with pytest.raises(Exception, match="limit"):
        look.hash_of(many)
    assert time.thread_time() - started < 0.5
