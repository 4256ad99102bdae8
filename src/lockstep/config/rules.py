"""Rules for configuration values: invalid combinations, values that must be equal, overrides."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from lockstep.config.adapter_config import LORA_TARGETS
from lockstep.config.schema import (
    ResolvedRun,
    RunConfig,
    ScheduleOverride,
    config_fields,
    flatten,
    parse_value,
)
from lockstep.errors import ConfigError, missing_package
from lockstep.network.wire_format import wire_conflict
from lockstep.training.skip import skip_conflicts

# Files may move: their content is compared (data/manifest.py, Task.fingerprints).
DATA_PATHS = (
    "data.train",
    "data.validation",
    "data.test",
    "data.dataset",
    "llama.init_from",
    "lora.init_from",
)
DECAY_STEPS = "optim.decay_steps"
# --override may change these: the loop computes them for every step, and no state depends on them.
SCHEDULE = (
    "optim.learning_rate",
    "optim.warmup_steps",
    "optim.schedule",
    DECAY_STEPS,
    "optim.wsd_decay",
    "optim.floor",
)

Conflict = tuple[str, Iterable[str], str]  # problem, keys, what to try


class Rule(NamedTuple):
    """Keys that do not support others, or that need another.

    KEY means every value but its default, KEY=A|B these values, KEY!=A|B all but these, PREFIX*
    all keys that begin so.
    """

    keys: str
    others: str
    hint: str
    why: str = ""

    @classmethod
    def read(cls, table: str) -> list[Rule]:
        """Return the rules of a table. Each starts with "KEYS -> OTHERS"; indented lines follow:
        a hint, and the reason."""
        rules = re.split(r"\n(?! )", table.strip())
        return [cls(*re.split(r" -> |\n +", rule)) for rule in rules]


EXCLUSIONS = Rule.read("""
task=translate -> llama.* lora.* batch.seq_len data.truncation data.packing
    remove these values, or set another task
    the task does not read them
task=pretrain -> model.* data.truncation
    remove these values, or set another task
    the task does not read them
task=sft -> model.*
    remove these values, or set another task
    the task does not read them
task=translate -> data.kind!=cldr|files|huggingface
    try data.kind=cldr, files or huggingface
task=pretrain -> data.kind!=stdlib|text|huggingface
    try data.kind=stdlib, text or huggingface
task=sft -> data.kind!=chat|drills
    try data.kind=chat or drills
task=pretrain|sft -> tokenizer.kind tokenizer.lowercase
    remove these values: the tokenizer is byte-level BPE
    a Llama's tokenizer keeps every byte of a text
data.kind=cldr -> data.train data.validation data.test data.dataset data.subset
    set data.kind to files or huggingface
    the pairs are generated
data.kind=files|text|chat|stdlib|drills -> data.dataset data.subset
    set data.kind to huggingface
evaluate.every_steps -> task=translate layout.pipeline
    remove it; lockstep launch --with-evaluator scores each checkpoint
optim.kind -> optim.fused memory.optimizer_state memory.weights memory.offload
    remove these values, or set optim.kind=adamw
optim.kind=muon|adafactor -> layout.tensor
    set layout.tensor=1, with layout.shard for large models
    it needs whole matrices
diloco.learners -> layout.tensor layout.pipeline
    train whole replicas, or set layout.shard
diloco.learners -> memory.weights
    remove memory.weights; memory.optimizer_state=bf16 is supported
    a learner's small change would be rounded away
diloco.learners -> elastic.verify_every!=0|1
    remove elastic.verify_every, or set 0 for no comparison
    learners compare the weights at every outer step
on_divergence divergence.skip -> diloco.learners layout.pipeline
    remove one of them
    no micro-batch is computed alone there
llama.backend -> llama.max_seq_len memory.weights layout.pipeline
    remove these values, or llama.backend
""")
NEEDS = Rule.read("""
data.kind=files -> data.train
    try data.train=["train.en.gz", "train.de.gz"]
data.kind=text -> data.train
    try data.train=["texts/**/*.txt", "more.jsonl.gz"]
data.kind=chat -> data.train
    try data.train=["chats.jsonl"]
data.kind=huggingface -> data.dataset
    try data.dataset=Helsinki-NLP/opus_books
evaluate.patience -> evaluate.every_steps
    set it: evaluations are counted
lora.init_from -> lora.rank
    remove lora.rank: the folder defines it
lora.rank -> lora.targets
    remove lora.targets to adapt all matrices
lora.rank -> llama.init_from
    set llama.init_from to a folder, or lora.rank=0
    adapters need a trained model to adapt
llama.backend -> llama.init_from
    set llama.init_from to a Hugging Face folder
diloco.every diloco.outer* -> diloco.learners
    set diloco.learners to the number of models that train apart
""")


def conflicts(run: RunConfig) -> Iterator[Conflict]:
    """Yield each invalid combination of values."""
    texts = as_text(run, config_fields())
    defaults = as_text(RunConfig(), texts)
    for rule in EXCLUSIONS:
        given = meeting(rule.keys, texts, defaults)
        excluded = meeting(rule.others, texts, defaults)
        if given and excluded:
            what = f"{' and '.join(given.values())} does not support {', '.join(excluded.values())}"
            yield with_reason(what, rule), given | excluded, rule.hint
    for rule in NEEDS:
        given = meeting(rule.keys, texts, defaults)
        value = texts[rule.others]
        if given and value in ("", "0", "[]"):
            missing = "0" if value == "0" else "empty"
            what = f"{', '.join(given.values())} needs {rule.others}, which is {missing}"
            yield with_reason(what, rule), [*given, rule.others], rule.hint
    yield from multiples(run)
    yield from limits(run)
    layout = run.layout
    once = run.fsdp.reduce == "per_step"
    if conflict := wire_conflict(run.parallel.wire, layout.tensor, layout.pipeline, once):
        what, keys, hint = conflict
        yield what, keys.split(), hint
    for what, hint in skip_conflicts(
        "divergence.skip", run.divergence.skip, run.batch.micro_batches
    ):
        yield what, ["divergence.skip", "batch.micro_batches"], hint
    if run.track.backend and not re.fullmatch(r"[\w.]+:\w+", run.track.backend):
        what = f"track.backend = {run.track.backend!r} is no class"
        yield what, ["track.backend"], "write MODULE:CLASS; docs/loop.md lists the four methods"
    for text in run.optim.groups:
        try:
            parse_group(text)
        except ValueError as error:
            hint = "write PATTERN:RATE:DECAY, such as *embedding*:0.5:0"
            yield f"optim.groups has {text!r}: {error}", ["optim.groups"], hint
    unknown = [name for name in run.lora.targets if name not in LORA_TARGETS]
    if unknown and run.llama.backend == "lockstep":
        hint = f"choose from {', '.join(LORA_TARGETS)}"
        yield f"unknown lora.targets: {', '.join(unknown)}", ["lora.targets"], hint


def meeting(words: str, texts: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the keys whose values meet a part of a rule, each with "KEY=VALUE"."""
    met: dict[str, str] = {}
    for pattern, listed in (word.partition("=")[::2] for word in words.split()):
        is_negated = pattern.endswith("!") or not listed
        for key in fnmatch.filter(texts, pattern.removesuffix("!")):
            values = listed.split("|") if listed else [defaults[key]]
            if (texts[key] in values) != is_negated:
                met[key] = f"{key}={texts[key]}"
    return met


def with_reason(what: str, rule: Rule) -> str:
    return f"{what}: {rule.why}" if rule.why else what


def multiples(run: RunConfig) -> Iterator[Conflict]:
    """Yield the values that must be multiples of others."""
    yield from uneven(run, ["model.dim"], "model.n_heads")
    if run.task != "translate":
        yield from uneven(run, ["batch.tokens"], "batch.seq_len")
    if run.diloco.learners:
        steps = ["steps", "checkpoint.every_steps", "evaluate.every_steps"]
        yield from uneven(run, ["batch.micro_batches"], "diloco.learners")
        yield from uneven(run, steps, "diloco.every", ": a state exists after outer steps only")


def uneven(run: RunConfig, keys: Sequence[str], divisor: str, why: str = "") -> Iterator[Conflict]:
    values = flatten(asdict(run))
    size = values[divisor]
    common = math.gcd(*(values[key] for key in keys))
    for key in keys:
        if values[key] % size:
            fits = next(n for n in range(min(size, common), 0, -1) if common % n == 0)
            multiple = max(1, round(values[key] / size)) * size
            what = f"{key}={values[key]} is not a multiple of {divisor}={size}{why}"
            yield what, [key, divisor], f"try {divisor}={fits} or {key}={multiple}"


def limits(run: RunConfig) -> Iterator[Conflict]:
    """Yield the values that are too large beside others."""
    data = run.data
    batch = run.batch
    max_seq_len = run.llama.max_seq_len
    if run.task == "translate" and data.max_tokens > batch.tokens:
        what = (
            f"one pair of data.max_tokens={data.max_tokens} "
            f"does not fit a micro-batch of batch.tokens={batch.tokens}"
        )
        hint = f"try data.max_tokens={batch.tokens} or batch.tokens={data.max_tokens}"
        yield what, ["data.max_tokens", "batch.tokens"], hint
    if run.task != "translate" and 0 < max_seq_len < batch.seq_len:
        what = f"batch.seq_len={batch.seq_len} is greater than llama.max_seq_len={max_seq_len}"
        keys = ["batch.seq_len", "llama.max_seq_len"]
        yield what, keys, f"try batch.seq_len={max_seq_len}"
    if run.llama.backend == "transformers" and run.lora.rank and run.layout.tensor > 1:
        what = "llama.backend=transformers does not support lora.rank with layout.tensor"
        keys = ["llama.backend", "lora.rank", "layout.tensor"]
        yield what, keys, "remove one of these values"
    learners, shard = run.diloco.learners, run.layout.shard
    if not learners:
        return
    each = max(1, batch.micro_batches // learners)
    if shard > each:
        what = (
            f"layout.shard={shard} and {each} micro-batches in a learner's step: "
            "each shard needs one"
        )
        hint = f"try layout.shard={each} or batch.micro_batches={learners * shard}"
        yield what, ["layout.shard", "diloco.learners", "batch.micro_batches"], hint
    if shard > 1 and (run.optim.kind in ("muon", "adafactor") or run.optim.fused):
        what = (
            f"diloco.learners with layout.shard={shard} needs an optimizer "
            "that updates each element by itself"
        )
        keys = ["diloco.learners", "layout.shard", "optim.kind", "optim.fused"]
        yield what, keys, "set optim.kind=adamw without optim.fused, or train whole replicas"


def parse_group(text: str) -> tuple[str, float, float]:
    """Return pattern of names, factor of the learning rate and of the weight decay. ValueError."""
    pattern, *factors = text.split(":")
    if len(factors) != 2:
        raise ValueError("it must have two colons")
    rate, decay = map(float, factors)
    if not (0 <= rate <= 1e6 and 0 <= decay <= 1e6):
        raise ValueError("both factors must be from 0 to 1e6")
    return pattern, rate, decay


def refuse_missing_packages(resolved: ResolvedRun, *, prepared: bool) -> None:
    """ConfigError with what to install when an optional package, or the compiler, is missing.
    prepared: the data of the run is prepared, so its source is not read."""
    run = resolved.run
    needs = {
        "data.kind": ("datasets", "hub", run.data.kind == "huggingface" and not prepared),
        "llama.backend": ("transformers", "transformers", run.llama.backend == "transformers"),
        "track.tensorboard": ("tensorboard", "track", run.track.tensorboard),
        "track.wandb": ("wandb", "track", run.track.wandb != "off"),
    }
    for key, (package, extra, needed) in needs.items():
        if needed and find_spec(package) is None:
            raise missing_package(package, extra, f"{key} from {resolved.origin[key]}")
    # Those of Inductor and Triton.
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang"]
    if run.compute.compile and not any(map(which, filter(None, compilers))):
        raise ConfigError(
            "torch.compile needs a C++ compiler, and none is installed",
            f"compute.compile from {resolved.origin['compute.compile']}",
            "install g++ (in the image: docker build --build-arg APT=g++), "
            "or set compute.compile=false",
        )


def shared_values(run: RunConfig) -> dict[str, str]:
    """Return every value that must be equal on all ranks, as text."""
    return as_text(run, (key for key, field in config_fields().items() if not field.each_host))


def bit_deciding_values(run: RunConfig) -> dict[str, str]:
    """Return every value that decides the trained bits, as text, without the paths of the data."""
    return as_text(
        run, (key for key, field in config_fields().items() if field.bits and key not in DATA_PATHS)
    )


def as_text(run: RunConfig, keys: Iterable[str]) -> dict[str, str]:
    values = flatten(asdict(run))
    return {
        key: values[key] if isinstance(values[key], str) else json.dumps(values[key])
        for key in keys
    }


def changed_bits(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return (key, old, new) of each differing value that decides bits; paths differ by name."""
    old, new = flatten(asdict(before)), flatten(asdict(now))
    differing = [
        key for key, field in config_fields().items() if field.bits and old[key] != new[key]
    ]
    moved = [
        key for key in differing if key in DATA_PATHS and basenames(old[key]) == basenames(new[key])
    ]
    return [(key, old[key], new[key]) for key in differing if key not in moved]


def basenames(paths: str | Sequence[str]) -> list[str]:
    return [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]


def parse_schedule(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return values of SCHEDULE, converted. ConfigError for other keys and invalid values."""
    if others := [key for key in raw if key not in SCHEDULE]:
        raise ConfigError(
            f"{others[0]} cannot be overridden",
            source,
            f"only the schedule can: {', '.join(SCHEDULE)}",
        )
    return {key: parse_value(key, item, source) for key, item in raw.items()}


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    return parse_schedule(
        {key: text for key, _, text in (word.partition("=") for word in words)}, "--override"
    )


def add_override(resolved: ResolvedRun, override: ScheduleOverride, *, rewind: bool) -> ResolvedRun:
    """Return the run with `override` in effect from its step on, unchanged if it already is: at
    that step if the user returns to it (`rewind`), else at the end of the run's history, as the
    user may repeat an earlier command."""
    effective = {
        f"optim.{name}": value
        for name, value in asdict(
            resolved.optim_after(override.step if rewind else math.inf)
        ).items()
    }
    new = {key: value for key, value in override.values.items() if effective[key] != value}
    if not new:
        return resolved
    earlier = [item for item in resolved.overrides if item.step < override.step]
    later = []
    for item in resolved.overrides[len(earlier) :]:
        if kept := {key: value for key, value in item.values.items() if key not in new}:
            later.append(ScheduleOverride(item.step, kept))
    return replace(resolved, overrides=(*earlier, ScheduleOverride(override.step, new), *later))


def refuse_exhausted_schedule(
    resolved: ResolvedRun, saved: ResolvedRun | None, flags: Mapping[str, Any]
) -> None:
    """ConfigError when the learning rate reaches 0 too early, unless flags set optim.decay_steps.
    saved: the run in the folder, if it has output; it keeps a schedule that it was started with."""
    run, last = resolved.run, resolved.optim_after(math.inf)
    first_zero = max(last.decay_steps + 1, last.warmup_steps)
    decays = last.schedule in ("linear", "cosine", "wsd") and last.floor == 0
    if (
        not decays
        or run.steps < first_zero
        or DECAY_STEPS in flags
        or (saved and saved.run.steps >= run.steps)
    ):
        return
    where = (
        f"steps={run.steps} from {resolved.origin['steps']}, "
        f"{DECAY_STEPS}={last.decay_steps} from {resolved.origin[DECAY_STEPS]}"
    )
    hint = (
        f"remove {DECAY_STEPS}, so that it follows steps; "
        f"or set --{DECAY_STEPS} on the command line to train at 0 on purpose"
    )
    if saved:
        hint = (
            f"try --override {DECAY_STEPS}={run.steps}, "
            "which changes the schedule from the newest checkpoint on and is recorded"
        )
    raise ConfigError(
        f"the learning rate is 0 from step {first_zero} on, and the run has {run.steps} steps",
        where,
        hint,
    )
