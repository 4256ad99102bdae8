"""The values of a run in its folder, and how a start updates them: by run file, flags, environment.

RUN/run.json holds them as JSON, with a format number and a checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.policy import choose_resume_step
from lockstep.config import rules
from lockstep.config.resolve import AS_STEPS, resolve, with_precision
from lockstep.config.schema import ResolvedRun, ScheduleOverride, config_fields, flatten
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import add_checksum, read_json, verify_checksum, write_json
from lockstep.log import log

RUN_FILE = "run.json"
FORMAT = 2


def to_json(resolved: ResolvedRun) -> dict[str, Any]:
    saved: dict[str, Any] = {
        "format": FORMAT,
        "values": json.loads(json.dumps(asdict(resolved.run))),
        "origin": resolved.origin,
    }
    if resolved.overrides:
        saved["overrides"] = list(map(asdict, resolved.overrides))
    return saved


def from_json(saved: Mapping[str, Any], source: str = RUN_FILE) -> ResolvedRun:
    """Return the run that `to_json` wrote. CheckpointError for another format."""
    if saved.get("format") != FORMAT:
        raise CheckpointError(
            f"this version reads runs of format {FORMAT}, not of format {saved.get('format')}",
            source,
            "use the version of lockstep that started this run, "
            "or start a new run in another folder",
        )
    resolved = resolve(None, flatten(saved["values"]))
    overrides = tuple(
        ScheduleOverride(int(item["step"]), rules.parse_schedule(item["values"], source))
        for item in saved.get("overrides", ())
    )
    return ResolvedRun(
        resolved.run, {**dict.fromkeys(config_fields(), "default"), **saved["origin"]}, overrides
    )


def write_run(folder: Path, resolved: ResolvedRun) -> None:
    write_json(folder / RUN_FILE, add_checksum(to_json(resolved)))


def read_run(folder: Path) -> ResolvedRun | None:
    """Return the run in `folder`, or None. CheckpointError if damaged, ConfigError if
    unreadable."""
    path = folder / RUN_FILE
    try:
        return from_json(verify_checksum(read_json(path)), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            "the run's values",
            "give a folder that this user can read and write",
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged or was edited: {error}",
            "lockstep writes it with its sha256; "
            "values are changed on the command line or in the run file",
            "remove it: the next start takes the values from the newest checkpoint",
        ) from None


def has_output(folder: Path) -> bool:
    """Whether the run has produced data, a step or a checkpoint. Until then its values may
    change."""
    return any(
        (folder / name).exists() for name in ("data/prepared.json", "metrics.jsonl", "checkpoints")
    )


def format_run(resolved: ResolvedRun) -> str:
    values = {key: json.dumps(value) for key, value in flatten(asdict(resolved.run)).items()}
    width = max(map(len, values))
    column = min(40, max(map(len, values.values())))
    lines = [
        f"{key:<{width}} = {text:<{column}}  {resolved.origin[key]}" for key, text in values.items()
    ]
    for override in resolved.overrides:
        for key, value in override.values.items():
            lines.append(
                f"{key:<{width}} = {json.dumps(value):<{column}}  --override, "
                f"from step {override.step + 1} on"
            )
    return "\n".join(lines)


def run_of_newest_checkpoint(folder: Path) -> ResolvedRun | None:
    """Return the run in the newest intact checkpoint, or None: a substitute for a lost run.json."""
    step, facts = newest_facts(folder / "checkpoints") or (0, {})
    if "run" not in facts:
        return None
    run = from_json(facts["run"], f"the checkpoint of step {step} in {folder}")
    log.warning(
        "%s is missing: its values are taken from the checkpoint of step %d",
        folder / "run.json",
        step,
    )
    return run


def open_run(
    folder: Path,
    file: Path | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    override: ScheduleOverride | None = None,
    *,
    rewind: bool = False,
) -> ResolvedRun:
    """Return the run in `folder`, updated by the run file, flags and environment; write nothing.

    override, rewind  see `add_override`
    ConfigError if a value that decides bits differs from a run that has output, or if the learning
    rate is 0 before the last step. CheckpointError if run.json is damaged or of another format.
    """
    saved = read_run(folder) or run_of_newest_checkpoint(folder)
    started = saved is not None and has_output(folder)
    decay_follows_steps = not saved or (
        saved.origin[rules.DECAY_STEPS] == AS_STEPS and not (started and saved.run.steps)
    )
    resolved = resolve(file, flags, environ, saved, decay_follows_steps=decay_follows_steps)
    if saved and resolved.run.compute.precision == "auto":
        resolved = with_precision(
            resolved, saved.run.compute.precision, saved.origin["compute.precision"]
        )
    changed = rules.changed_bits(saved.run, resolved.run) if saved and started else []
    changed = [
        change for change in changed if not (decay_follows_steps and change[0] == rules.DECAY_STEPS)
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds another run: "
            + "; ".join(f"{key} was {old!r}, now {new!r}" for key, old, new in changed),
            ", ".join(f"{key} from {resolved.origin[key]}" for key, _, _ in changed),
            "give another folder with --out, or remove these values to resume the run with its own"
            + "".join(
                f"\nto change the schedule on purpose: --override {key}={new}"
                for key, _, new in changed
                if key in rules.SCHEDULE
            ),
        )
    if override and override.values:
        if not started:
            raise ConfigError(
                f"{folder} holds no run to override",
                "--override",
                f"give --{next(iter(override.values))} for a new run",
            )
        resolved = rules.add_override(resolved, override, rewind=rewind)
    rules.refuse_exhausted_schedule(resolved, saved if started else None, flags)
    return resolved


def open_with_overrides(
    folder: Path,
    file: Path | None,
    flags: Mapping[str, Any],
    resume: str,
    overrides: Sequence[str],
) -> ResolvedRun:
    """Return the run in `folder`; `overrides`, as KEY=VALUE, hold from the checkpoint on that
    `resume` names."""
    override = None
    if overrides:
        values = rules.parse_overrides(tuple(overrides))
        override = ScheduleOverride(resume_step(folder, resume), values)
    return open_run(folder, file, flags, os.environ, override, rewind=resume.isdecimal())


def resume_step(folder: Path, resume: str) -> int:
    """Return the step of the checkpoint that `resume` names; 0: from scratch."""
    return choose_resume_step(resume, committed_steps(folder / "checkpoints"))[0] or 0
