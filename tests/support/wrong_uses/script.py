"""The script of `run_loop`. It imports the section of one use only: a Session analyzes all files
that its script imports.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from support.wrong_uses.loop import USES


def train(out: Path, steps: int = 6, section: str = "loop", use: str = "none") -> None:
    out.mkdir(exist_ok=True)
    logging.getLogger("lockstep").addHandler(logging.FileHandler(out / "warnings.log"))
    importlib.import_module(f"support.wrong_uses.{section}")
    USES[use](out, steps).train()
