"""Loops with state in many places: each is exact through a kill, a stop, a resume and an extension,
or is named before the first checkpoint. None is silently different."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest
from support.fork_loop import run_loop
from support.launching import one_thread, run_lockstep
from support.state_places import PLACES, write

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.folder import committed_steps
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.record.events import read_events
from lockstep.runtime.worker_env import state_folder

STEPS = 8
SHORT = ("an environment that acts", "plain values of session.state")


def named(log: str, word: str) -> bool:
    """Return whether a warning or an error has named the place before the first checkpoint."""
    before = log.partition("saved ")[0]
    return bool(re.search(word, before))


def verdict(script: Path, folder: Path, word: str) -> str:
    """Return "exact", "named", "refused", or what is silently different."""
    alone = run_loop(script, folder / "alone", 1, steps=STEPS)
    if alone.code:
        return "refused" if word and re.search(word, alone.text) else f"failed: {alone.text}"
    digest = digest_line(folder / "alone")
    log = (folder / "alone" / "0.log").read_text()
    different = []
    if (
        run_loop(script, folder / "two", 2, steps=STEPS).code
        or digest_line(folder / "two") != digest
    ):
        different.append("2 workers")
    run_loop(script, folder / "killed", 1, kill_in=6, steps=STEPS)
    result = run_loop(script, folder / "killed", 2, steps=STEPS)
    if result.code or digest_line(folder / "killed") != digest:
        different.append(f"killed and resumed ({result.text.partition(chr(10))[0]})")
    run_loop(script, folder / "extended", 1, steps=5)
    if (
        run_loop(script, folder / "extended", 1, steps=STEPS).code
        or digest_line(folder / "extended") != digest
    ):
        different.append("extended")
    if healed(script, folder / "healed") != digest:
        different.append("killed and healed")
    if not different:
        return "exact"
    return "named" if word and named(log, word) else f"silent: {', '.join(different)}"


def healed(script: Path, folder: Path) -> str:
    """Kill one of two workers, which is replaced; return the digest of the run, or its error."""
    result = kill_one_worker(script, folder)
    return digest_line(folder) if result.returncode == 0 else result.stderr


def kill_one_worker(script: Path, folder: Path, step: int = 4) -> subprocess.CompletedProcess[str]:
    """Train on two workers, one of which is killed and replaced while the other keeps its state."""
    request_fault(state_folder(folder, socket.gethostname()), 1, "kill", at="forward", step=step)
    words = [
        "launch",
        "--out",
        folder,
        "--workers",
        2,
        "--min",
        2,
        f"{script}:train",
        "--steps",
        STEPS,
    ]
    return run_lockstep(*words, env=one_thread(**{DRILL_VARIABLE: "1"}))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in PLACES],
)
def test_state_is_exact_or_named_before_the_first_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    place = PLACES[name]
    found = verdict(write(name, tmp_path / "script"), tmp_path, place.word)
    print(f"{name}: {found}")
    assert found in (("named", "refused", "exact") if place.word else ("exact",)), found


def test_joiner_that_differs_ends_the_run_after_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    result = kill_one_worker(write("a local number", tmp_path / "script"), tmp_path / "run", step=5)
    assert result.returncode == 2, result.stderr
    assert re.search(
        r"the (loss|gradient) of micro-batch 0 of step \d is not the same on all workers",
        result.stderr,
    )
    assert "a worker has joined, with everything that a checkpoint holds" in result.stderr
    joined = next(
        event
        for event in read_events(tmp_path / "run")
        if event["event"] == "regrouped" and event["joined"]
    )
    assert joined["step"] % 3, "the step was not saved anyway"
    assert committed_steps(tmp_path / "run" / "checkpoints")[-1] == joined["step"], (
        "what the others had is saved"
    )


def test_the_table_has_at_least_40_places() -> None:
    assert len(PLACES) >= 40
