"""Resolve the configuration of a run from its sources.

The value of a key comes from the first of: a flag (`--optim.learning_rate 1e-3`), an environment
variable (`LOCKSTEP_OPTIM_LEARNING_RATE`), the run file (TOML), the saved run (when it resumes), the
default. One error reports all unknown keys and invalid values, with the nearest known names.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.config.adapter_config import ADAPTER_CONFIG, read_adapter_config
from lockstep.config.rules import DECAY_STEPS, conflicts
from lockstep.config.schema import (
    ResolvedRun,
    build_config,
    config_fields,
    flatten,
    nearest_keys,
    parse_value,
)
from lockstep.errors import ConfigError
from lockstep.log import log
from lockstep.runtime.variables import environment_variable, takes_no_value, unknown_variables
from lockstep.units import shorten

ADAPTER = "lora.init_from"
AS_STEPS = "as steps"  # origin of optim.decay_steps when it follows `steps`


def recipes() -> dict[str, Path]:
    """Return the installed run files by name; in a checkout they are beside src/."""
    package = Path(__file__).parents[1]
    folders = package / "recipes", package.parents[1] / "recipes"
    paths = [path for folder in folders for path in sorted(folder.glob("*.toml"))]
    return {path.stem: path for path in reversed(paths)}


def find_run_file(path: Path) -> Path:
    """Return `path`; without such a file, the installed recipe of this name, with a log line."""
    if (
        path.exists()
        or str(path.parent) not in (".", "recipes")
        or path.suffix not in ("", ".toml")
    ):
        return path
    recipe = recipes().get(path.stem, path)
    if recipe != path:
        log.info(
            "%s: no such file here; using the recipe that comes with lockstep, %s", path, recipe
        )
    return recipe


def read_toml(path: Path) -> dict[str, Any]:
    """Return the dotted keys of a TOML file, or of the recipe with this name. ConfigError."""
    path = find_run_file(path)
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        present = [str(other) for other in sorted(path.parent.glob("*.toml")) if is_run_file(other)]
        present = present or [f"recipes/{name}.toml" for name in sorted(recipes())]
        raise ConfigError(
            f"there is no run file {path}",
            "given on the command line",
            f"available: {', '.join(present)}"
            if present
            else "give the path of a TOML file, or none for the default values",
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}",
            "the run file",
            "fix this line; tables are [section], strings are in quotes",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            str(path),
            "give a file that this user can read",
        ) from None


def is_run_file(path: Path) -> bool:
    """Whether a TOML file has a key of a run; pyproject.toml and a list of hosts have none."""
    try:
        return (
            not config_fields()
            .keys()
            .isdisjoint(flatten(tomllib.loads(path.read_text(encoding="utf-8"))))
        )
    except (OSError, ValueError, RecursionError):
        return False


def parse_flags(words: list[str]) -> dict[str, str]:
    """Return `--key value` and `--key=value` as a mapping, and `--no-key`, which takes no value,
    with an empty text. ConfigError for anything else."""
    flags: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                f"{word!r} is neither an option nor the value of one",
                "command line",
                "write --section.key value",
            )
        key, equals, text = word[2:].partition("=")
        if not equals and not takes_no_value(word):
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} has no value", "command line", f"write --{key} VALUE")
            text = rest.pop(0)
        flags[key] = text
    return flags


def refuse_unknown_variables(environ: Mapping[str, str], others: Sequence[str]) -> None:
    """ConfigError with the nearest names for LOCKSTEP_ variables that are neither a key of a run
    nor in `others`."""
    keys = list(config_fields())
    unknown = unknown_variables(environ, {*map(environment_variable, keys), *others})
    if not unknown:
        return
    key = unknown[0].removeprefix("LOCKSTEP_").lower().replace("_", ".", 1)
    near = difflib.get_close_matches(unknown[0], others, n=1, cutoff=0.85)
    near = near or list(map(environment_variable, nearest_keys(key, keys)))
    hint = "unset it; lockstep train --help lists the values of a run"
    if near:
        hint = f"write {' or '.join(near)}"
    raise ConfigError(f"unknown variable {', '.join(unknown)}", "environment", hint)


def resolve(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    saved: ResolvedRun | None = None,
    *,
    decay_follows_steps: bool = True,
) -> ResolvedRun:
    """Return the configuration from a run file, flags and the environment, on top of a saved run.

    decay_follows_steps  optim.decay_steps equals `steps` when no source sets it
    ConfigError lists everything that is wrong.
    """
    known = config_fields()
    key_of = {environment_variable(key): key for key in known}
    layers: dict[str, Mapping[str, Any]] = {
        str(file): read_toml(file) if file else {},
        "LOCKSTEP_* in the environment": {
            key_of[name]: text for name, text in (environ or {}).items() if name in key_of
        },
        "command line": flags or {},
    }
    set_by = {key: source for source, layer in layers.items() for key in layer}
    source = set_by.get(ADAPTER, "")
    if source and layers[source][ADAPTER] and "lora.rank" not in set_by:
        layers = read_adapter(str(layers[source][ADAPTER]), source) | layers
    values = {key: field.default for key, field in known.items()}
    origin = dict.fromkeys(known, "default")
    if saved:
        values = flatten(asdict(saved.run))
        origin = dict(saved.origin)
    problems = []
    for source, layer in layers.items():
        for key, raw in layer.items():
            try:
                values[key] = parse_value(key, raw, source)
                origin[key] = source
            except ConfigError as error:
                problems.append(error)
    if problems:
        many = f"{len(problems)} invalid values: " if len(problems) > 1 else ""
        raise ConfigError(
            many + "; ".join(error.what for error in problems),
            "\n".join(dict.fromkeys(error.where for error in problems)),
            "\n".join(dict.fromkeys(error.hint for error in problems)),
        )
    if decay_follows_steps and DECAY_STEPS not in set_by:
        values[DECAY_STEPS] = max(1, values["steps"])
        origin[DECAY_STEPS] = AS_STEPS
    run = build_config(values)
    for what, keys, hint in conflicts(run):
        raise ConfigError(what, ", ".join(f"{key} from {origin[key]}" for key in keys), hint)
    return ResolvedRun(run, origin, saved.overrides if saved else ())


def read_adapter(folder: str, source: str) -> dict[str, Mapping[str, Any]]:
    """Return the values that a folder of PEFT defines, by their source. ConfigError."""
    if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        raise ConfigError(
            f"{ADAPTER} = {shorten(folder)}: there is no {ADAPTER_CONFIG}",
            source,
            "give a folder with adapters of PEFT",
        )
    return {f"{ADAPTER_CONFIG} in {folder}": read_adapter_config(Path(folder))}


def with_precision(
    resolved: ResolvedRun, precision: Literal["auto", "bf16", "fp32"], origin: str
) -> ResolvedRun:
    run = replace(resolved.run, compute=replace(resolved.run.compute, precision=precision))
    return replace(resolved, run=run, origin=resolved.origin | {"compute.precision": origin})
