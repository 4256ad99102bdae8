"""The words that start a process again, for `lockstep replay`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.runtime.worker_env import WORKER_ENV, start_words


def test_a_script_is_named_from_its_working_directory_and_an_interpreter_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=1"])
    monkeypatch.delenv(WORKER_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    assert start_words() == []
    main.__file__ = str(tmp_path / "code" / "train.py")
    assert start_words() == ["run", "code/train.py", "--", "--lr=1"]
