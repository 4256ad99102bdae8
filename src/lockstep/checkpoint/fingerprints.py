"""Compare the facts of a checkpoint with those of the run that resumes from it. Pure functions; imports no torch.

Keys of a checkpoint's facts.json:

    run_id         of the run folder, from RUN/run_id.json
    fingerprints   the values that decide bits, the data, the tokenizer, the first weights
    numerics       what decides the bits of a process besides the run (runtime/numerics.py)
    code           Lockstep's sources and those of the user's own loop (runtime/sources.py)
    flags          the arguments of a user's own function

The first two must be equal. Another machine, another version and an edited loop are deliberate: a warning, and a line in events.jsonl.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import commit
from lockstep.checkpoint import folder as seal
from lockstep.checkpoint.commit import FACTS
from lockstep.errors import CheckpointError
from lockstep.files import read_json, write_json

RUN_ID = "run_id.json"
SHOWN = 80  # letters of the longest value that a message repeats


def refuse_another_run(before: Mapping[str, Any], now: Mapping[str, Any], step: int, folder: Path, allowed: Collection[str] = ()) -> None:
    """Raise a CheckpointError with both values of each fact when a checkpoint (`before`) belongs to another run than this one (`now`)."""
    if problems := differences(before, now, allowed):
        raise CheckpointError(
            f"the checkpoint of step {step} belongs to another run: {'; '.join(problems)}",
            f"{folder}: {FACTS} of that checkpoint says what was; run.json, {RUN_ID} and the data of this start say what is",
            "move the checkpoint away if it was copied in, put back what was changed, or start a new run with another --out",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """Return "KEY was X, is Y" for each fact that must be equal and is not. A fact that one side lacks is not compared.

    allowed  keys that were changed on purpose
    """
    old, new = ({"run_id": one.get("run_id") or "", **one.get("fingerprints", {})} for one in (before, now))
    return changes({key: value for key, value in old.items() if value and key not in allowed}, new)


def warnings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "KEY was X, is Y" for what may change between two starts, though the bits may change with it."""
    return [one for name in ("numerics", "code", "flags") for one in changes(before.get(name, {}), now.get(name, {}))]


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a sentence for each key of both whose values differ; a long value is not repeated."""
    wrong = [key for key in new if key in old and old[key] != new[key]]
    short = [key for key in wrong if max(len(old[key]), len(new[key])) <= SHOWN]
    return [f"{key} was {old[key]}, is {new[key]}" if key in short else f"{key} is not what it was" for key in wrong]


def read_run_id(run: Path) -> str:
    """Return the id of a run's folder; "" when it has none. CheckpointError when it is damaged."""
    path = run / RUN_ID
    try:
        found = str(read_json(path)["id"])
        if not re.fullmatch("[0-9a-f]{16}", found):
            raise ValueError(f"{found!r} is no id")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        hint = "remove it: the next start takes the id from the newest checkpoint"
        raise CheckpointError(f"{path} is damaged: {error}", "it tells this run's checkpoints from others", hint) from None
    return found


def make_run_id(run: Path, known: str) -> str:
    """Return the id of a run's folder, made when it has none. For rank 0. `known`: the one in its newest checkpoint, or ""."""
    found = read_run_id(run) or known or secrets.token_hex(8)
    if not (run / RUN_ID).exists():
        with commit.writing(f"{RUN_ID} was not written", run, 100):
            write_json(run / RUN_ID, {"id": found})
    return found


def newest_facts(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return (step, facts) of the newest checkpoint under `folder` whose facts are whole; None when there is none."""
    for step in reversed(seal.committed_steps(folder)):
        with commit.reading(folder), seal.pinned(folder, step) as path:
            if path is None:
                continue
            files, _ = commit.read_manifest(path, step)
            content, problem = commit.read_checked(path / FACTS, files[FACTS]) if FACTS in files else (b"", "it has none")
            if not problem:
                return step, json.loads(content)
    return None
