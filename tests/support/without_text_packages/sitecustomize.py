"""Hide the packages of the extra [text] from this process and its children."""

from __future__ import annotations

import sys
from typing import Any

HIDDEN = ("babel", "rapidfuzz", "sacrebleu", "tokenizers")


class Hiding:
    """A finder of modules that does not find the hidden packages."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, *rest: Any) -> Any:
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


sys.meta_path[:] = map(Hiding, sys.meta_path)
