"""The scores of a run's checkpoints, RUN/evaluations.jsonl, and the best one, RUN/best.json.

`lockstep evaluate` writes them (tasks/evaluate.py); retention keeps the best checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import committed_steps
from lockstep.files import read_json
from lockstep.log import log
from lockstep.record.metrics import iter_steps

EVALUATIONS = "evaluations.jsonl"
BEST = "best.json"
SPEC = ("split", "beams", "average", "lowercase")  # with the step they identify a line


def best_of(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the best evaluation of the validation split, or None: highest BLEU, else highest exact
    match, else lowest loss. Ties: lowest loss, then earliest step."""
    validation = [record for record in records if record.get("split") == "validation"]
    metric = next(
        (key for key in ("bleu", "exact_match") if any(key in record for record in validation)),
        "loss",
    )
    needed = ("step", metric, "loss", *SPEC)
    # Skip damaged lines.
    validation = [record for record in validation if all(key in record for key in needed)]
    if not validation:
        return None
    best = min(
        validation,
        key=lambda r: (r["loss"] if metric == "loss" else -r[metric], r["loss"], r["step"]),
    )
    return {"by": metric, **{key: best[key] for key in dict.fromkeys(needed)}}


def best_steps(folder: Path) -> list[int]:
    """Return the steps that retention keeps: the one in best.json, and the best evaluated one."""
    path = folder / BEST
    best = None
    try:
        best = best_of(list(iter_steps(folder / EVALUATIONS)))
        return sorted({*([best["step"]] if best else []), int(read_json(path)["step"])})
    except FileNotFoundError:
        return [best["step"]] if best else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        steps = [best["step"]] if best else committed_steps(folder / "checkpoints")
        stays = (
            f"step {best['step']}, the best one of {EVALUATIONS}, is kept"
            if best
            else "no checkpoint is deleted until it is removed"
        )
        log.warning("%s cannot be read (%s): %s", path, error, stays)
        return steps
