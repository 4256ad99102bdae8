"""`lockstep why`: which micro-batch and which samples have made the loss of a step."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import require_text_packages
from lockstep.history.replay import recorded_steps, replay
from lockstep.history.request import Replay
from lockstep.history.why import explain
from lockstep.report.run_data import require_run

MAX_TEXT = 300
Decode = Callable[[list[int]], str]


def main(args: argparse.Namespace, rest: list[str]) -> int:
    require_run(args.folder)
    lines = recorded_steps(args.folder, args.step, or_next=True)
    request = Replay(folder="", step=args.step, observes=True)
    done = replay(args.folder, request, sys.executable, from_start=args.from_start)
    if difference := done.difference():
        print(f"the replay differs from the record, and may tell something else: {difference}")
    shown = partial(as_text, decode=decoder_of(args.folder))
    for line in explain(args.step, done, lines, shown):
        print(line)
    return 0


def decoder_of(folder: Path) -> Decode:
    """Return what makes text of the token ids of a run; without a tokenizer they stay numbers."""
    paths = (folder / "tokenizer" / "tokenizer.json", folder / "data" / "tokenizer.json")
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return lambda tokens: ", ".join(map(str, tokens))
    require_text_packages(str(path))
    from tokenizers import Tokenizer  # only for runs that have one

    tokenizer = Tokenizer.from_file(str(path))
    return lambda tokens: repr(tokenizer.decode([token for token in tokens if token >= 0]))


def as_text(part: Any, decode: Decode) -> str:
    text = decode(part) if isinstance(part, list) else str(part)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
