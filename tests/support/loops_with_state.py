"""Small scripts of users whose loops carry values from step to step, and ordinary loops.

A case is a part of SCRIPT: `top` at module level, `before` the loop, `inner` in the micro-batch loop,
`body` after the update, `after` the loop. `names`: what the warning must name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

FOLDER = Path(__file__).parent
SCRIPT = """
import copy, itertools, json, logging, math, os, random, time, types
from collections import defaultdict, deque
from pathlib import Path
import numpy as np
import torch
from torch import nn
from lockstep.session import Session

ROWS = [torch.tensor([float(i), 1.0]) for i in range(16)]
{top}

def run(out, steps):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(out, micro_batches=2, rehearse=False) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(ROWS, batch_size=4)
{before}
        for step in session.steps(steps):
            for rows in loader(step):
                loss = model(rows).square().mean()
{inner}
                session.backward(loss)
            optimizer.step()
{body}
{after}
"""


@dataclass(frozen=True)
class Case:
    title: str
    names: tuple[str, ...]
    parts: dict[str, str]

    def script(self) -> str:
        depths = {"top": 0, "before": 8, "inner": 16, "body": 12, "after": 8}
        return SCRIPT.format(
            **{
                part: indent(self.parts.get(part, ""), " " * depth)
                for part, depth in depths.items()
            }
        )


def read_cases(file: str) -> list[Case]:
    """Read "== TITLE", "names: A, B", and code below "-- PART"."""
    cases = []
    for text in re.split(r"^== ", (FOLDER / file).read_text(), flags=re.MULTILINE)[1:]:
        head, *parts = re.split(r"^-- ", text, flags=re.MULTILINE)
        title, _, more = head.strip().partition("\n")
        names = tuple(more.removeprefix("names: ").split(", ")) if more else ()
        cases.append(
            Case(
                title,
                names,
                {
                    name: code.strip("\n")
                    for name, _, code in (part.partition("\n") for part in parts)
                },
            )
        )
    return cases


CARRIED = read_cases("loops_with_state.txt")
ORDINARY = read_cases("ordinary_loops.txt")
