"""RUN/run.json: the configuration of a run as JSON, with a format number and a checksum."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config.resolve import resolve
from lockstep.config.rules import parse_schedule
from lockstep.config.schema import ResolvedRun, ScheduleOverride, config_fields, flatten
from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import add_checksum, read_json, verify_checksum, write_json

RUN_FILE = "run.json"
FORMAT = 2


def to_json(resolved: ResolvedRun) -> dict[str, Any]:
    overrides = (
        {"overrides": [asdict(override) for override in resolved.overrides]}
        if resolved.overrides
        else {}
    )
    return {
        "format": FORMAT,
        "values": json.loads(json.dumps(asdict(resolved.run))),
        "origin": resolved.origin,
    } | overrides


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
        ScheduleOverride(int(item["step"]), parse_schedule(item["values"], source))
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
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(
            what, "the run's values", "give a folder that this user can read and write"
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
