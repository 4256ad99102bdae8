"""Which modules belong to a user's training loop: what its callers import, and no other loaded one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.unsaved.user_loop import user_modules

FILES = {
    "loop_main.py": """
import sys
from loop_package.nets import Net

def run(net):
    import loop_late
    return sys._getframe()
""",
    "loop_package/__init__.py": "from . import nets\n",
    "loop_package/nets.py": "class Net:\n    pass\n",
    "loop_late.py": "",
    "loop_data.py": "class Data:\n    pass\n",
    "loop_caller.py": "import loop_main\n\ndef call():\n    return loop_main.run(None)\n",
    "loop_elsewhere.py": "import loop_main\n",
}


def test_modules_of_a_loop_are_those_that_its_callers_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    caller, data, _ = (
        importlib.import_module(f"loop_{name}") for name in ("caller", "data", "elsewhere")
    )
    try:
        found = [module.__name__ for module in user_modules(caller.call(), [data.Data()])]
        assert found[:2] == ["loop_main", "loop_caller"]
        own = {name for name in found if name.startswith("loop_")}
        assert own == {
            "loop_main",
            "loop_caller",
            "loop_package",
            "loop_package.nets",
            "loop_late",
            "loop_data",
        }
    finally:
        for name in [name for name in sys.modules if name.startswith("loop_")]:
            del sys.modules[name]
