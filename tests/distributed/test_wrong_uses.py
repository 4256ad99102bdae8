"""Wrong, unsupported and odd uses of a Session (support/wrong_uses/): none is silently different.

Each is refused by name before a wrong update is committed, is named in a warning, or has the bits
of one worker on any number of workers and through a resume.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT
from support.wrong_uses import changes, data, gradients, model, ranks, state
from support.wrong_uses.loop import USES, Loop

from lockstep.checkpoint.commands import digest_line
from lockstep.record import metrics

SECTIONS = (changes, data, gradients, model, ranks, state)  # they fill USES
STEPS = 6


def run_use(
    name: str, folder: Path, workers: int, steps: int = STEPS, **options: Any
) -> LoopResult:
    script, section = ROOT / "tests/support/wrong_uses/script.py", USES[name].__module__
    flags = {"section": section.rpartition(".")[2], "use": name, "steps": steps}
    return run_loop(script, folder, workers, **flags, **options)


@pytest.mark.parametrize("name", [name for name, kind in USES.items() if kind.refused])
def test_wrong_use_is_refused_before_a_wrong_update(name: str, tmp_path: Path) -> None:
    kind = USES[name]
    result = run_use(name, tmp_path, kind.workers, shard=kind.shard, timeout_s=60)
    assert result.code and re.search(kind.refused, result.text), result.text
    lines = tmp_path / "metrics.jsonl"
    assert (len(list(metrics.iter_steps(lines))) if lines.exists() else 0) == kind.committed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of the other uses on one worker."""
    folder, digests = tmp_path_factory.mktemp("alone"), {}
    for name in (name for name, kind in USES.items() if not kind.refused):
        assert run_use(name, folder / name, 1) == LoopResult(0, "")
        digests[name] = digest_line(folder / name)
    return digests


@pytest.mark.parametrize("name", [name for name, kind in USES.items() if not kind.refused])
def test_odd_use_is_harmless_or_named(name: str, alone: dict[str, str], tmp_path: Path) -> None:
    for workers, steps in ((2, STEPS // 2), (3, STEPS)):
        assert run_use(name, tmp_path, workers, steps) == LoopResult(0, "")
    if warned := USES[name].warned:
        assert re.search(warned, (tmp_path / "warnings.log").read_text())
    else:
        assert digest_line(tmp_path) == alone[name]


def test_the_table_has_more_than_40_uses_and_a_right_loop() -> None:
    assert USES["none"] is Loop and len(USES) > 60
