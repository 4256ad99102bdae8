"""Rules for configuration values: invalid combinations, values that must be equal, overrides."""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from lockstep.config.adapter_config import LORA_TARGETS
from lockstep.config.schema import ResolvedRun, RunConfig, ScheduleOverride, config_fields, flatten
from lockstep.errors import ConfigError
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

DATA_KINDS = {
    "translate": ("cldr", "files", "huggingface"),
    "pretrain": ("stdlib", "text", "huggingface"),
    "sft": ("chat", "drills"),
}
UNUSED_KEYS = {
    "translate": ("llama.", "lora.", "batch.seq_len", "data.truncation"),
    "pretrain": ("model.", "data.truncation"),
    "sft": ("model.",),
}
TRAIN_FILE_EXAMPLES = {
    "files": '["train.en.gz", "train.de.gz"]',
    "text": '["texts/**/*.txt", "more.jsonl.gz"]',
    "chat": '["chats.jsonl"]',
}


def conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (problem, keys, what to try) for each invalid combination of values."""
    data, batch, layout, kinds = run.data, run.batch, run.layout, DATA_KINDS[run.task]
    if unused := [
        key for key, _, _ in changed_bits(RunConfig(), run) if key.startswith(UNUSED_KEYS[run.task])
    ]:
        yield (
            f"task {run.task} does not read {', '.join(unused)}",
            " ".join(["task", *unused]),
            "remove these values, or set another task",
        )
    if run.model.dim % run.model.n_heads:
        divisors = [
            n_heads for n_heads in range(1, run.model.dim + 1) if run.model.dim % n_heads == 0
        ]
        best = min(divisors, key=lambda n_heads: abs(n_heads - run.model.n_heads))
        what = f"model.dim={run.model.dim} is not a multiple of model.n_heads={run.model.n_heads}"
        yield what, "model.dim model.n_heads", f"try model.n_heads={best}"
    once = run.fsdp.reduce == "per_step"
    if conflict := wire_conflict(run.parallel.wire, layout.tensor, layout.pipeline, once):
        yield conflict
    yield from optimizer_conflicts(run)
    yield from diloco_conflicts(run)
    yield from divergence_conflicts(run)
    if run.evaluate.every_steps and (run.task == "translate" or layout.pipeline > 1):
        what = "evaluate.every_steps is for Llama tasks, without layout.pipeline"
        yield (
            what,
            "evaluate.every_steps task layout.pipeline",
            "remove it; lockstep launch --with-evaluator scores each checkpoint",
        )
    if run.track.backend and not re.fullmatch(r"[\w.]+:\w+", run.track.backend):
        what = f"track.backend = {run.track.backend!r} is no class"
        yield what, "track.backend", "write MODULE:CLASS; docs/loop.md lists the four methods"
    if run.evaluate.patience and not run.evaluate.every_steps:
        yield (
            "evaluate.patience counts evaluations, and there are none",
            "evaluate.patience",
            "set evaluate.every_steps",
        )
    if data.kind not in kinds:
        yield (
            f"task {run.task} does not read data.kind={data.kind}",
            "task data.kind",
            f"try data.kind={' or '.join(kinds)}",
        )
    if run.task != "translate":
        yield from llama_conflicts(run)
    elif data.max_tokens > batch.tokens:
        what = f"one pair of data.max_tokens={data.max_tokens} does not fit a micro-batch of batch.tokens={batch.tokens}"
        hint = f"try data.max_tokens={batch.tokens} or batch.tokens={data.max_tokens}"
        yield what, "data.max_tokens batch.tokens", hint
    if data.kind in TRAIN_FILE_EXAMPLES and not data.train:
        hint = f"try data.train={TRAIN_FILE_EXAMPLES[data.kind]}"
        yield f"data.kind is {data.kind}, and data.train is empty", "data.kind data.train", hint
    if data.kind == "huggingface" and not data.dataset:
        hint = "try data.dataset=Helsinki-NLP/opus_books"
        yield "data.kind is huggingface, and data.dataset is empty", "data.kind data.dataset", hint


def optimizer_conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    kind = run.optim.kind
    if kind != "adamw" and run.memory.saves_optimizer:
        what = f"optim.kind={kind} does not support memory.optimizer_state, memory.weights and memory.offload"
        yield (
            what,
            "optim.kind memory.optimizer_state memory.weights memory.offload",
            "remove these values, or set optim.kind=adamw",
        )
    if kind != "adamw" and run.optim.fused:
        yield (
            f"optim.fused is for AdamW, and optim.kind is {kind}",
            "optim.kind optim.fused",
            "remove optim.fused",
        )
    if kind in ("muon", "adafactor") and run.layout.tensor > 1:
        hint = "set layout.tensor=1, with layout.shard for large models"
        yield (
            f"optim.kind={kind} needs whole matrices, which layout.tensor splits",
            "optim.kind layout.tensor",
            hint,
        )
    for text in run.optim.groups:
        try:
            parse_group(text)
        except ValueError as error:
            yield (
                f"optim.groups has {text!r}: {error}",
                "optim.groups",
                "write PATTERN:RATE:DECAY, such as *embedding*:0.5:0",
            )


def diloco_conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    learners, every, micro_batches = run.diloco.learners, run.diloco.every, run.batch.micro_batches
    if not learners:
        changed = changed_bits(RunConfig(), run)
        if unused := [key for key, _, _ in changed if key.startswith("diloco.")]:
            yield (
                f"{', '.join(unused)} without learners",
                " ".join(unused),
                "set diloco.learners to the number of models that train apart",
            )
        return
    if micro_batches % learners:
        best = min(
            (n for n in range(1, micro_batches + 1) if micro_batches % n == 0),
            key=lambda n: abs(n - learners),
        )
        what = (
            f"batch.micro_batches={micro_batches} is not a multiple of diloco.learners={learners}"
        )
        hint = f"try diloco.learners={best} or batch.micro_batches={-(-micro_batches // learners) * learners}"
        yield what, "diloco.learners batch.micro_batches", hint
    counts = {
        "steps": run.steps,
        "checkpoint.every_steps": run.checkpoint.every_steps,
        "evaluate.every_steps": run.evaluate.every_steps,
    }
    for key, steps in counts.items():
        if steps % every:
            near = max(1, round(steps / every)) * every
            what = f"{key}={steps} is not a multiple of diloco.every={every}, and a state exists after outer steps only"
            yield (
                what,
                f"{key} diloco.every",
                f"try {key}={near} or diloco.every={math.gcd(*counts.values())}",
            )
    axes = {f"layout.{axis}": getattr(run.layout, axis) for axis in ("tensor", "pipeline")}
    if split := [key for key, size in axes.items() if size > 1]:
        hint = "train whole replicas, or set layout.shard"
        yield (
            f"diloco.learners is not supported with {', '.join(split)}",
            " ".join(["diloco.learners", *split]),
            hint,
        )
    shard, each = run.layout.shard, micro_batches // learners
    if shard > max(1, each):
        what = f"layout.shard={shard} and {each} micro-batches in a learner's step: each shard needs one"
        hint = f"try layout.shard={max(1, each)} or batch.micro_batches={learners * shard}"
        yield what, "layout.shard diloco.learners batch.micro_batches", hint
    if shard > 1 and (run.optim.kind in ("muon", "adafactor") or run.optim.fused):
        key = "optim.fused" if run.optim.fused else "optim.kind"
        what = f"diloco.learners with layout.shard={shard} needs an optimizer that updates each element by itself"
        yield (
            what,
            f"diloco.learners layout.shard {key}",
            "set optim.kind=adamw without optim.fused, or train whole replicas",
        )
    if run.memory.weights != "fp32":
        what = "diloco.learners is not supported with memory.weights=bf16: a learner's small change would be rounded away"
        yield (
            what,
            "diloco.learners memory.weights",
            "remove memory.weights; memory.optimizer_state=bf16 is supported",
        )
    if run.elastic.verify_every > 1:
        what = f"elastic.verify_every={run.elastic.verify_every} with diloco.learners, which compare the weights at every outer step"
        yield (
            what,
            "elastic.verify_every diloco.learners",
            "remove elastic.verify_every, or set 0 for no comparison",
        )


def divergence_conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    keys = {
        "on_divergence": run.on_divergence == "rollback",
        "divergence.skip": bool(run.divergence.skip),
    }
    used = [key for key, given in keys.items() if given]
    parts = {"diloco.learners": run.diloco.learners > 0, "layout.pipeline": run.layout.pipeline > 1}
    if used and (refused := [key for key, given in parts.items() if given]):
        what = f"{', '.join(used)} is not supported with {', '.join(refused)}: no micro-batch is computed alone there"
        yield (
            what,
            " ".join([*used, *refused]),
            f"remove {' and '.join(used)}, or train without {' and '.join(refused)}",
        )
    texts, micro_batches = run.divergence.skip, run.batch.micro_batches
    for what, hint in skip_conflicts("divergence.skip", texts, micro_batches):
        yield what, "divergence.skip batch.micro_batches", hint


def parse_group(text: str) -> tuple[str, float, float]:
    """Return pattern of names, factor of the learning rate and of the weight decay. ValueError."""
    pattern, *factors = text.split(":")
    if len(factors) != 2:
        raise ValueError("it must have two colons")
    rate, decay = map(float, factors)
    if not (0 <= rate <= 1e6 and 0 <= decay <= 1e6):
        raise ValueError("both factors must be from 0 to 1e6")
    return pattern, rate, decay


def llama_conflicts(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    tokens, seq_len, max_seq_len = run.batch.tokens, run.batch.seq_len, run.llama.max_seq_len
    if tokens % seq_len:
        what = f"batch.tokens={tokens} is not a multiple of batch.seq_len={seq_len}"
        yield (
            what,
            "batch.tokens batch.seq_len",
            f"try batch.tokens={max(1, round(tokens / seq_len)) * seq_len}",
        )
    if max_seq_len and max_seq_len < seq_len:
        what = f"batch.seq_len={seq_len} is greater than llama.max_seq_len={max_seq_len}"
        yield what, "batch.seq_len llama.max_seq_len", f"try batch.seq_len={max_seq_len}"
    if run.tokenizer.kind == "word" or run.tokenizer.lowercase:
        what = "a Llama's tokenizer keeps every byte of a text"
        yield (
            what,
            "tokenizer.kind tokenizer.lowercase",
            "remove both values: the tokenizer is byte-level BPE",
        )
    if unknown := [name for name in run.lora.targets if name not in LORA_TARGETS]:
        yield (
            f"unknown lora.targets: {', '.join(unknown)}",
            "lora.targets",
            f"choose from {', '.join(LORA_TARGETS)}",
        )
    if run.lora.rank and not run.lora.targets:
        what = "lora.targets is empty, and adapters need matrices to adapt"
        yield what, "lora.rank lora.targets", "remove lora.targets to adapt all of them"
    if run.llama.backend == "transformers":
        unsupported = {
            "llama.max_seq_len": max_seq_len,
            "memory.weights": run.memory.weights != "fp32",
        }
        unsupported["layout.pipeline"] = run.layout.pipeline > 1
        unsupported["lora.rank with layout.tensor"] = run.lora.rank and run.layout.tensor > 1
        if changed := [key for key, given in unsupported.items() if given]:
            what = f"llama.backend=transformers does not support {', '.join(changed)}"
            where = " ".join(["llama.backend", *changed]).replace(" with ", " ")
            yield what, where, "remove these values, or llama.backend"
        if not run.llama.init_from:
            what = "llama.backend=transformers needs the folder of a model"
            yield (
                what,
                "llama.backend llama.init_from",
                "set llama.init_from to a Hugging Face folder",
            )
    if run.lora.init_from and not run.lora.rank:
        yield (
            "lora.rank is 0, which means no adapters",
            "lora.init_from lora.rank",
            "remove lora.rank: the folder defines it",
        )
    if run.lora.rank and not run.llama.init_from:
        yield (
            "adapters need a trained model to adapt",
            "lora.rank llama.init_from",
            "set llama.init_from to a folder, or lora.rank=0",
        )


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
            hint = f'pip install "lockstep-train[{extra}]"'
            raise ConfigError(
                f"the package {package} is not installed",
                f"{key} from {resolved.origin[key]}",
                hint,
            )
    compilers = [
        os.environ.get("CXX"),
        os.environ.get("CC"),
        "g++",
        "gcc",
        "clang",
    ]  # those of Inductor and Triton
    if run.compute.compile and not any(map(which, filter(None, compilers))):
        hint = "install g++ (in the image: docker build --build-arg APT=g++), or set compute.compile=false"
        where = f"compute.compile from {resolved.origin['compute.compile']}"
        raise ConfigError("torch.compile needs a C++ compiler, and none is installed", where, hint)


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
    known, values = config_fields(), {}
    for key, item in raw.items():
        if key not in SCHEDULE:
            raise ConfigError(
                f"{key} cannot be overridden",
                source,
                f"only the schedule can: {', '.join(SCHEDULE)}",
            )
        try:
            values[key] = known[key].parse(item)
        except ValueError as error:
            raise ConfigError(f"{key} = {item!r}: {error}", source, known[key].doc) from None
    return values


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
    where = f"steps={run.steps} from {resolved.origin['steps']}, {DECAY_STEPS}={last.decay_steps} from {resolved.origin[DECAY_STEPS]}"
    hint = f"remove {DECAY_STEPS}, so that it follows steps; or set --{DECAY_STEPS} on the command line to train at 0 on purpose"
    if saved:
        hint = f"try --override {DECAY_STEPS}={run.steps}, which changes the schedule from the newest checkpoint on and is recorded"
    raise ConfigError(
        f"the learning rate is 0 from step {first_zero} on, and the run has {run.steps} steps",
        where,
        hint,
    )
