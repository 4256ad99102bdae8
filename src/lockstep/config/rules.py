"""Rules between values of a configuration: which combinations are invalid, which values must be
equal on all ranks or when a run resumes, and which may be overridden while it trains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.config.schema import ResolvedRun, RunConfig, ScheduleOverride, config_fields, flatten
from lockstep.errors import ConfigError

# Paths of data. Their content is compared (data/manifest.py, Task.fingerprints): the same files under
# another folder are the same run.
DATA_PATHS = ("data.train", "data.validation", "data.test", "data.dataset", "llama.init_from")
DECAY_STEPS = "optim.decay_steps"
# What --override may change: the training loop computes these values for every step, and no state depends on them.
SCHEDULE = ("optim.learning_rate", "optim.warmup_steps", "optim.schedule", DECAY_STEPS)

DATA_KINDS = {
    "translate": ("cldr", "files", "huggingface", "gettext"),
    "pretrain": ("stdlib", "text", "huggingface"),
    "sft": ("chat", "drills"),
}
UNUSED_KEYS = {"translate": ("llama.", "lora.", "batch.seq_len"), "pretrain": ("model.",), "sft": ("model.",)}
TRAIN_FILE_EXAMPLES = {
    "files": '["train.en.gz", "train.de.gz"]',
    "text": '["texts/**/*.txt", "more.jsonl.gz"]',
    "chat": '["chats.jsonl"]',
}
LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")


# -- combinations of values -------------------------------------------------------------------------------------------


def conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (what is wrong, the keys involved, what to try) for invalid combinations of values."""
    data, batch, kinds = run.data, run.batch, DATA_KINDS[run.task]
    if unused := [key for key, _, _ in changed_bits(RunConfig(), run) if key.startswith(UNUSED_KEYS[run.task])]:
        yield f"task {run.task} does not read {', '.join(unused)}", " ".join(["task", *unused]), "remove these values, or set another task"
    if run.model.dim % run.model.n_heads:
        divisors = [n_heads for n_heads in range(1, run.model.dim + 1) if run.model.dim % n_heads == 0]
        best = min(divisors, key=lambda n_heads: abs(n_heads - run.model.n_heads))
        what = f"model.dim={run.model.dim} is not a multiple of model.n_heads={run.model.n_heads}"
        yield what, "model.dim model.n_heads", f"try model.n_heads={best}"
    if run.layout.shard * run.layout.tensor * run.layout.pipeline > 1 and run.parallel.reduce == "fast":
        what = "parallel.reduce=fast is not supported when a replica spans several workers: their gradients are always added in order"
        yield what, "parallel.reduce", "try parallel.reduce=ordered"
    if data.kind not in kinds:
        yield f"task {run.task} does not read data.kind={data.kind}", "task data.kind", f"try data.kind={' or '.join(kinds)}"
    if run.task != "translate":
        yield from llama_conflicts(run)
    elif data.max_tokens > batch.tokens:
        what = f"one pair of data.max_tokens={data.max_tokens} does not fit a micro-batch of batch.tokens={batch.tokens}"
        hint = f"try data.max_tokens={batch.tokens} or batch.tokens={data.max_tokens}"
        yield what, "data.max_tokens batch.tokens", hint
    if data.kind in TRAIN_FILE_EXAMPLES and not data.train:
        what = f"data.kind is {data.kind}, and data.train is empty"
        yield what, "data.kind data.train", f"try data.train={TRAIN_FILE_EXAMPLES[data.kind]}"
    if data.kind == "huggingface" and not data.dataset:
        what = "data.kind is huggingface, and data.dataset is empty"
        yield what, "data.kind data.dataset", "try data.dataset=Helsinki-NLP/opus_books"


def llama_conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the conflicts of a run that trains a Llama."""
    tokens, seq_len, max_seq_len = run.batch.tokens, run.batch.seq_len, run.llama.max_seq_len
    if tokens % seq_len:
        what = f"batch.tokens={tokens} is not a multiple of batch.seq_len={seq_len}"
        yield what, "batch.tokens batch.seq_len", f"try batch.tokens={max(1, round(tokens / seq_len)) * seq_len}"
    if max_seq_len and max_seq_len < seq_len:
        what = f"batch.seq_len={seq_len} is greater than llama.max_seq_len={max_seq_len}"
        yield what, "batch.seq_len llama.max_seq_len", f"try batch.seq_len={max_seq_len}"
    if run.tokenizer.kind == "word" or run.tokenizer.lowercase:
        what = "a Llama's tokenizer keeps every byte of a text"
        yield what, "tokenizer.kind tokenizer.lowercase", "remove both values: the tokenizer is byte-level BPE"
    if unknown := [name for name in run.lora.targets if name not in LORA_TARGETS]:
        yield f"unknown lora.targets: {', '.join(unknown)}", "lora.targets", f"choose from {', '.join(LORA_TARGETS)}"
    if run.lora.rank and not run.lora.targets:
        what = "lora.targets is empty, and adapters need matrices to adapt"
        yield what, "lora.rank lora.targets", "remove lora.targets to adapt all of them"
    if run.lora.rank and not run.llama.init_from:
        yield "adapters need a trained model to adapt", "lora.rank llama.init_from", "set llama.init_from to a folder, or lora.rank=0"


def refuse_missing_packages(resolved: ResolvedRun, *, prepared: bool) -> None:
    """ConfigError with the extra to install when the run needs an optional package that is missing.

    prepared  the data of the run is prepared, so its source is not read
    """
    run = resolved.run
    needs = {
        "data.kind": ("datasets", "hub", run.data.kind == "huggingface" and not prepared),
        "track.tensorboard": ("tensorboard", "track", run.track.tensorboard),
        "track.wandb": ("wandb", "track", run.track.wandb != "off"),
    }
    for key, (package, extra, needed) in needs.items():
        if needed and find_spec(package) is None:
            what = f"the package {package} is not installed"
            raise ConfigError(what, f"{key} from {resolved.origin[key]}", f'pip install "lockstep-train[{extra}]"')


# -- values that must be equal ----------------------------------------------------------------------------------------


def shared_values(run: RunConfig) -> dict[str, str]:
    """Every value that all ranks must agree on, as text."""
    return as_text(run, [key for key, member in config_fields().items() if not member.each_host])


def bit_deciding_values(run: RunConfig) -> dict[str, str]:
    """Every value that decides the trained bits, as text; without the paths of the data."""
    return as_text(run, [key for key, member in config_fields().items() if member.bits and key not in DATA_PATHS])


def as_text(run: RunConfig, keys: Sequence[str]) -> dict[str, str]:
    values = flatten(asdict(run))
    return {key: values[key] if isinstance(values[key], str) else json.dumps(values[key]) for key in keys}


def changed_bits(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of each value that decides bits and differs. Of paths, only the
    last names are compared."""
    old, new = flatten(asdict(before)), flatten(asdict(now))
    names = {key: [basenames(values[key]) for values in (old, new)] for key in DATA_PATHS}
    return [
        (key, old[key], new[key])
        for key, member in config_fields().items()
        if member.bits and old[key] != new[key] and not (key in names and names[key][0] == names[key][1])
    ]


def basenames(paths: str | Sequence[str]) -> list[str]:
    """The last component of each path."""
    return [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]


# -- overrides of the schedule ----------------------------------------------------------------------------------------


def parse_schedule(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values of SCHEDULE, converted. ConfigError for other keys and invalid values."""
    known, values = config_fields(), {}
    for key, item in raw.items():
        if key not in SCHEDULE:
            raise ConfigError(f"{key} cannot be overridden", source, f"only the schedule can: {', '.join(SCHEDULE)}")
        try:
            values[key] = known[key].parse(item)
        except ValueError as error:
            raise ConfigError(f"{key} = {item!r}: {error}", source, known[key].doc) from None
    return values


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return the KEY=VALUE words of --override as values of SCHEDULE. ConfigError if invalid."""
    return parse_schedule(dict((key, text) for key, _, text in (word.partition("=") for word in words)), "--override")


def add_override(resolved: ResolvedRun, override: ScheduleOverride, *, rewind: bool) -> ResolvedRun:
    """Return the run with `override` in effect from its step on; unchanged if it is in effect already.

    rewind  The user returns to an earlier step on purpose. Without it, the same command may have been
            given before, and the run may since have resumed from an earlier checkpoint: then the
            values at the end of its history count.
    """
    effective = {f"optim.{name}": value for name, value in asdict(resolved.optim_after(override.step if rewind else math.inf)).items()}
    new = {key: value for key, value in override.values.items() if effective[key] != value}
    if not new:
        return resolved
    earlier = [item for item in resolved.overrides if item.step < override.step]
    later = [
        ScheduleOverride(item.step, {key: value for key, value in item.values.items() if key not in new})
        for item in resolved.overrides[len(earlier) :]
    ]
    return replace(resolved, overrides=(*earlier, ScheduleOverride(override.step, new), *(item for item in later if item.values)))


def refuse_exhausted_schedule(resolved: ResolvedRun, saved: ResolvedRun | None, flags: Mapping[str, Any]) -> None:
    """ConfigError when the learning rate reaches 0 before the last step, unless this command sets
    optim.decay_steps or the run was started so (`saved`: the run in the folder, if it has any output)."""
    run, last = resolved.run, resolved.optim_after(math.inf)
    first_zero = max(last.decay_steps + 1, last.warmup_steps)
    decays = last.schedule in ("linear", "cosine")
    if not decays or run.steps < first_zero or DECAY_STEPS in flags or (saved and saved.run.steps >= run.steps):
        return
    where = f"steps={run.steps} from {resolved.origin['steps']}, {DECAY_STEPS}={last.decay_steps} from {resolved.origin[DECAY_STEPS]}"
    hint = f"remove {DECAY_STEPS}, so that it follows steps; or set --{DECAY_STEPS} on the command line to train at 0 on purpose"
    if saved:
        hint = f"try --override {DECAY_STEPS}={run.steps}, which changes the schedule from the newest checkpoint on and is recorded"
    raise ConfigError(f"the learning rate is 0 from step {first_zero} on, and the run has {run.steps} steps", where, hint)
