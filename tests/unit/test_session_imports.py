"""The packages that a user's own loop loads beside torch."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = "import lockstep.session, sys; print(*sorted({'pydantic', 'tokenizers', 'transformers', 'obstore', 'rich'} & sys.modules.keys()))"


def test_a_session_loads_neither_tokenizers_nor_the_values_of_built_in_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
