"""The packages that a user's own loop loads beside torch."""

from __future__ import annotations

import runpy
import subprocess
import sys

from support.launching import ROOT

PROGRAM = "import lockstep.session, sys; print(*sorted({'pydantic', 'tokenizers', 'transformers', 'obstore', 'rich'} & sys.modules.keys()))"


def test_a_session_loads_neither_tokenizers_nor_the_values_of_built_in_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


def test_a_session_loads_the_core_only() -> None:
    program = "import lockstep, sys; lockstep.Session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = [name.split(".")[1:2] for name in done.stdout.decode().split() if "lockstep." in name]
    packages = {package for [package] in loaded}
    assert packages >= {"session", "training", "parallel"}
    assert packages <= set(runpy.run_path(str(ROOT / "tools/packages.py"))["CORE"])
