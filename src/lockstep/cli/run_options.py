"""Open the run of a folder: the values that it began with, and what a new start asks for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.config.schema import (
    AS_STEPS,
    DECAY_STEPS,
    SCHEDULE,
    Override,
    Resolved,
    add_override,
    changed_bits,
    from_json,
    has_begun,
    read_run,
    refuse_spent_schedule,
    resolve,
    with_precision,
)
from lockstep.errors import ConfigError

log = logging.getLogger("lockstep")


def run_of_newest_checkpoint(folder: Path) -> Resolved | None:
    """The run in the facts of the newest whole checkpoint of a folder that has lost its run.json; None when there is none."""
    found = newest_facts(folder / "checkpoints")
    if found is None or "run" not in found[1]:
        return None
    log.warning("%s is missing: its values are taken from the checkpoint of step %d", folder / "run.json", found[0])
    return from_json(found[1]["run"])


def open_run(
    folder: Path,
    file: Path | None,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    override: Override | None = None,
    *,
    back: bool = False,
) -> Resolved:
    """The run of `folder`: as it began there, with what is asked for now over it; a new one where the folder holds none. Writes nothing.

    override, back  see add_override
    ConfigError when a value that decides the trained bits is asked to differ and something was made under it, or when the learning rate
    would be 0 before the last step. CheckpointError when run.json is damaged.
    """
    begun = read_run(folder) or run_of_newest_checkpoint(folder)
    made = begun is not None and has_begun(folder)
    follow = not begun or (begun.origin[DECAY_STEPS] == AS_STEPS and not (made and begun.run.steps))
    asked = resolve(file, flags, environ, begun, follow=follow)
    if begun and asked.run.compute.precision == "auto":
        asked = with_precision(asked, begun.run.compute.precision, begun.origin["compute.precision"])
    changed = changed_bits(begun.run, asked.run) if begun and made else []
    changed = [one for one in changed if not (follow and one[0] == DECAY_STEPS)]
    if changed:
        raise ConfigError(
            f"{folder} holds another run: " + "; ".join(f"{key} was {old!r}, now {new!r}" for key, old, new in changed),
            ", ".join(f"{key} from {asked.origin[key]}" for key, _, _ in changed),
            "give another folder with --out, or leave these values out to continue the run as it began"
            + "".join(f"\nto change it on purpose: --override {key}={new}" for key, _, new in changed if key in SCHEDULE),
        )
    if override and override.values:
        if not made:
            raise ConfigError(f"{folder} holds no run to override", "--override", f"give --{next(iter(override.values))} for a new run")
        asked = add_override(asked, override, back=back)
    refuse_spent_schedule(asked, begun if made else None, flags)
    return asked
