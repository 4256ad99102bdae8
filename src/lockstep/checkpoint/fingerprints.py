"""Compare the facts of a checkpoint with those of the run that resumes from it. No torch.

    run_id         of the run folder, from RUN/run_id.json
    fingerprints   the values that decide bits: configuration, data, tokenizer, initial weights
    numerics       machine and versions that may change the bits (runtime/numerics.py)
    code, flags    the sources of Lockstep and the user's loop (runtime/sources.py); its arguments

These keys of facts.json are compared. The first two must be equal; a change of the others may be on
purpose, so it is a warning and an event in events.jsonl.
"""

import json
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import commit
from lockstep.checkpoint.commit import FACTS
from lockstep.checkpoint.folder import committed_steps, pinned
from lockstep.errors import CheckpointError
from lockstep.files import read_json, write_json

RUN_ID = "run_id.json"
BEST_STEP = "best_step"  # fact: the step that a score of the loop has chosen
MAX_SHOWN_CHARS = 80  # longest value that a message repeats


def refuse_other_run(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    step: int,
    folder: Path,
) -> None:
    """CheckpointError when the checkpoint with facts `before` belongs to another run than `now`.
    A key that one side lacks is not compared."""
    if problems := fingerprint_changes(before, now):
        raise CheckpointError(
            f"the checkpoint of step {step} belongs to another run: {'; '.join(problems)}",
            f"{folder}: {FACTS} of that checkpoint holds the old values; "
            f"run.json, {RUN_ID} and the data of this start hold the new ones",
            "move the checkpoint away if it was copied in, "
            "undo the change, or start a new run with another --out",
        )


def fingerprint_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    old, new = (
        {"run_id": facts.get("run_id") or "", **facts.get("fingerprints", {})}
        for facts in (before, now)
    )
    return changes({key: value for key, value in old.items() if value}, new)


def tolerated_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        change
        for name in ("numerics", "code", "flags")
        for change in changes(before.get(name, {}), now.get(name, {}))
    ]


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return "KEY was X, is Y" for each common key whose values differ, without long values."""
    wrong = [key for key in new if key in old and old[key] != new[key]]
    short = [key for key in wrong if max(len(old[key]), len(new[key])) <= MAX_SHOWN_CHARS]
    return [
        f"{key} was {old[key]}, is {new[key]}" if key in short else f"{key} has changed"
        for key in wrong
    ]


def read_run_id(run: Path) -> str:
    """Return the id of a run folder; "" when it has none. CheckpointError for a damaged file."""
    path = run / RUN_ID
    try:
        run_id = str(read_json(path)["id"])
        if not re.fullmatch("[0-9a-f]{16}", run_id):
            raise ValueError(f"{run_id!r} is not an id")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}",
            "it distinguishes this run's checkpoints from others",
            "remove it: the next start takes the id from the newest checkpoint",
        ) from None
    return run_id


def make_run_id(run: Path, known: str) -> str:
    """For rank 0: return the id of a run folder; if it has none, store `known` or a new one."""
    run_id = read_run_id(run) or known or secrets.token_hex(8)
    if not (run / RUN_ID).exists():
        with commit.explain_write_errors(f"{RUN_ID} was not written", run, 100):
            write_json(run / RUN_ID, {"id": run_id})
    return run_id


def newest_facts(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return (step, facts) of the newest checkpoint with a whole facts.json, or None."""
    for step in reversed(committed_steps(folder)):
        with commit.explain_read_errors(folder), pinned(folder, step) as path:
            files = commit.read_manifest(path, step)[0] if path else {}
            if path and FACTS in files:
                content, problem = commit.read_verified(path / FACTS, files[FACTS])
                if not problem:
                    return step, json.loads(content)
    return None
