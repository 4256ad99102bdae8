"""The run is a value: one tree of frozen dataclasses, and where each of its values came from.

A value is taken from the first of: a flag (`--optim.learning_rate 1e-3`), the environment (`LOCKSTEP_OPTIM_LEARNING_RATE`), the TOML
file, the run as it began (when it goes on), the default. Unknown keys and wrong types are all reported at once, with the nearest names.
Fields marked BITS decide the trained bits: a run that goes on must have them as it began. The others (how long, how often to save, what
to show) may change at each start. Whoever trains together at one time has all of them alike, but for those marked EACH_HOST.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from lockstep.errors import CheckpointError, ConfigError
from lockstep.files import CHECKSUM, checked, read_json, with_checksum, write_json
from lockstep.units import parse_bytes, parse_seconds

log = logging.getLogger("lockstep")
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
BITS = True
EACH_HOST = True
# Where data lies. Its content is compared (data/manifest.py, Task.fingerprints): the same files seen from another folder are the same run.
DATA_PATHS = ("data.train", "data.validation", "data.test", "data.dataset", "llama.start")

# Upper bounds turn a slip of the keyboard into an error instead of a hang. What fits a machine is for parallel/memory_estimate.py to say.
MOST = 10**9  # where nothing less is named: more steps than a run takes, and in seconds what torch still counts in nanoseconds (31 years)
SIDE = 1 << 20  # of a matrix or a batch; the widest published model has 16,384
LAYERS = 1024
WORKERS = 1 << 16
PATH_BYTES = 4096  # PATH_MAX of Linux


def split_words(given: object) -> object:
    """Text as a tuple of words: "a,b", or an array as TOML and JSON write it: '["a", "b"]'."""
    if not isinstance(given, str):
        return given
    if given.startswith('["'):
        try:
            return json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"begins like an array and is none ({error})") from None
    return given.split(",") if given else ()


Words = Annotated[tuple[str, ...], BeforeValidator(split_words)]


@dataclass(frozen=True)
class Field:
    """One leaf of the tree: its default, one sentence on what it does, whether it decides the trained bits, whether each host may have its
    own, and its range: every number has an upper bound. `leaves` fills in its key and type."""

    default: Any
    doc: str
    bits: bool = False
    each_host: bool = False
    least: float | None = None
    below: float | None = None
    most: float = MOST
    key: str = ""
    type: Any = None


def value(default: Any, doc: str, **rules: Any) -> Any:
    """A dataclass field with the rules of `Field`."""
    return field(default=default, metadata={"rules": Field(default, doc, **rules)})


@dataclass(frozen=True)
class Data:
    kind: Literal["cldr", "files", "huggingface", "gettext", "stdlib", "text", "chat", "drills"] = value(
        "cldr", "where the text comes from; cldr (pairs), stdlib (text) and drills (chats) are made here and need no download", bits=BITS
    )
    source: str = value("en", "language of the source side", bits=BITS)
    target: str = value("it", "language of the target side", bits=BITS)
    train: Words = value(
        (),
        "training files, plain or .gz: two texts, or one .tsv, or one .jsonl; text, chat: any number, * and ** stand for names",
        bits=BITS,
    )
    validation: Words = value((), "validation files, as train; empty: pairs are held out of train", bits=BITS)
    test: Words = value((), "test files, as train; empty: pairs are held out of train", bits=BITS)
    dataset: str = value("", "huggingface: name or folder of the dataset, such as Helsinki-NLP/opus_books", bits=BITS)
    subset: str = value("", "huggingface: the configuration, such as en-it", bits=BITS)
    pairs: int = value(120_000, "cldr: training pairs to make at most; 0 makes all", bits=BITS, least=0)
    held_out: int = value(1000, "pairs of validation and of test each, where the corpus has none; 0: none", bits=BITS, least=0)
    column: str = value("text", "text, huggingface: where the text stands in a JSON object or a row, when a Llama is trained", bits=BITS)
    held_out_share: float = value(
        0.015,
        "share of the documents in validation and in test each, where no files are named for them; 0: none",
        bits=BITS,
        least=0,
        below=0.5,
    )
    max_tokens: int = value(128, "longer pairs are left out of training and counted", bits=BITS, least=4, most=SIDE)


@dataclass(frozen=True)
class Tokens:
    kind: Literal["bpe", "word"] = value("bpe", "joint byte-level BPE, or whole words", bits=BITS)
    vocabulary: int = value(3000, "entries; the output layer grows with it", bits=BITS, least=300, most=SIDE)
    min_frequency: int = value(2, "rarer entries are left out", bits=BITS, least=1)
    lowercase: bool = value(False, "train and translate in lower case", bits=BITS)


@dataclass(frozen=True)
class Batch:
    micro_batches: int = value(8, "K, forward and backward passes a step, over all replicas together", bits=BITS, least=1, most=WORKERS)
    tokens: int = value(512, "target positions of a micro-batch, padding included; memory grows with it", bits=BITS, least=1, most=SIDE)
    length: int = value(
        512, "a Llama's: positions of a row; batch.tokens / batch.length rows are a micro-batch", bits=BITS, least=2, most=SIDE
    )
    shapes: int = value(6, "how many shapes micro-batches have; more pad less and compile longer", bits=BITS, least=1, most=256)


@dataclass(frozen=True)
class Model:
    width: int = value(128, "size of a token's vector", bits=BITS, least=8, most=SIDE)
    heads: int = value(4, "attention heads; divides width", bits=BITS, least=1, most=WORKERS)
    encoder_layers: int = value(3, "blocks of the encoder", bits=BITS, least=1, most=LAYERS)
    decoder_layers: int = value(3, "blocks of the decoder", bits=BITS, least=1, most=LAYERS)
    feed_forward: int = value(512, "inner size of the feed-forward part", bits=BITS, least=8, most=SIDE)
    dropout: float = value(0.05, "share of activations dropped in training", bits=BITS, least=0, below=1)
    attention: Literal["auto", "plain", "sdpa"] = value("auto", "plain is faster on a CPU at short lengths", bits=BITS)


@dataclass(frozen=True)
class Llama:
    shape: Literal["1M", "5M", "25M", "100M", "1B", "3B", "8B", "70B", "405B"] = value(
        "5M", "name of a shape in models/llama.py; a new model's vocabulary is its tokenizer's", bits=BITS
    )
    start: str = value(
        "", "folder whose weights, shape and tokenizer it begins with: Hugging Face's or a run's; empty: a new one", bits=BITS
    )
    context: int = value(0, "positions that the model is said to be made for; 0: as its shape or its start has it", bits=BITS, least=0)


@dataclass(frozen=True)
class Lora:
    rank: int = value(0, "of the adapters, which alone are trained; 0: none, all weights are", bits=BITS, least=0, most=SIDE)
    alpha: float = value(16.0, "what an adapter adds is multiplied by alpha / rank", bits=BITS, least=0)
    targets: Words = value(
        ("query", "key", "value", "out", "gate", "up", "down"), "matrices that get one; out: attention's, down: the gated unit's", bits=BITS
    )
    save: Literal["adapters", "all"] = value(
        "adapters", "what a checkpoint holds; adapters: the rest comes from llama.start again", bits=BITS
    )


@dataclass(frozen=True)
class Optim:
    learning_rate: float = value(4e-3, "at its peak, after the warm-up", bits=BITS, least=0, most=1e30)  # a float32 holds it
    warmup_steps: int = value(60, "steps in which the learning rate rises from 0", bits=BITS, least=0)
    decay: Literal["linear", "cosine", "inverse_sqrt", "constant"] = value("linear", "after the warm-up", bits=BITS)
    decay_steps: int = value(300, "linear, cosine: the last step with a learning rate above 0; left out: as steps", bits=BITS, least=1)
    beta1: float = value(0.9, "AdamW: decay of the mean of the gradient", bits=BITS, least=0, below=1)
    beta2: float = value(0.98, "AdamW: decay of the mean of its square", bits=BITS, least=0, below=1)
    epsilon: float = value(1e-9, "AdamW: added to the root of that mean", bits=BITS, least=0)
    weight_decay: float = value(0.01, "AdamW: matrices only", bits=BITS, least=0)
    clip_norm: float = value(1.0, "global norm above which the gradient is scaled down; 0: never", bits=BITS, least=0)
    label_smoothing: float = value(0.1, "share of the target given to all words alike; translate alone", bits=BITS, least=0, below=1)
    fused: bool = value(False, "torch's fused AdamW; on a CPU its bits depend on how tensors are cut", bits=BITS)


@dataclass(frozen=True)
class Parallel:
    reduce: Literal["ordered", "fast"] = value(
        "ordered", "ordered: the same bits on any number of replicas; fast: the backend's all-reduce", bits=BITS
    )
    bucket_bytes: Bytes = value(25_000_000, "gradients that travel together, overlapped with the backward pass", least=1, most=10**12)
    timeout_s: Seconds = value(600.0, "after which a silent peer counts as lost", each_host=EACH_HOST, least=1)


@dataclass(frozen=True)
class Layout:
    replicate: int = value(0, "whole copies of the model; 0: as many as the workers make", least=0, most=WORKERS)
    shard: int = value(1, "workers that share the parameters, gradients and optimizer state of a copy (FSDP)", least=1, most=WORKERS)
    tensor: int = value(1, "workers that share each layer's matrices; another number has other bits", least=1, most=WORKERS)
    pipeline: int = value(1, "stages that the layers are dealt to; with dropout another number has other bits", least=1, most=LAYERS)
    parts: int = value(1, "pipeline: parts of the model that each stage holds (interleaved 1F1B)", least=1, most=LAYERS)


@dataclass(frozen=True)
class Shard:
    units_ahead: int = value(1, "blocks gathered ahead of the one that computes; 1 + units_ahead are whole at once", least=0, most=LAYERS)
    reduce: Literal["each", "together"] = value(
        "each", "gradients after each micro-batch; together: after the last one, with less traffic and whole gradients in memory"
    )
    free_after_forward: bool = value(True, "gather each block again for its backward pass (ZeRO-3); false: keep it (ZeRO-2)")


@dataclass(frozen=True)
class Heal:
    silent_s: Seconds = value(2.5, "after which a worker or host that says nothing counts as gone", each_host=EACH_HOST, least=0.5)
    gather_s: Seconds = value(30.0, "that a start waits for all workers, when there are enough without them", each_host=EACH_HOST, least=0)
    hang_s: Seconds = value(10.0, "without a step forward, and nobody only slow, until the verdict on a hang", each_host=EACH_HOST, least=1)
    evaluate_s: Seconds = value(
        1800.0, "that a worker may evaluate while the others wait for it, until the same verdict", each_host=EACH_HOST, least=1
    )
    on_hang: Literal["evict", "end", "tell"] = value("evict", "evict: end the culprit, the rest goes on; end: the run; tell: only say so")
    verify_every: int = value(1, "steps from one comparison of all replicas' weights to the next; 0: never", least=0)


@dataclass(frozen=True)
class Compute:
    precision: Literal["auto", "bf16", "fp32"] = value(
        "auto", "of matrix products; weights and sums stay fp32. auto: bf16 where the device has units for it; kept from then on", bits=BITS
    )
    compile: bool = value(False, "torch.compile; helps narrow models on a CPU, hurts wide ones", bits=BITS)
    threads: int = value(1, "of a worker on a CPU; the number changes the bits", bits=BITS, least=1, most=1024)


@dataclass(frozen=True)
class Memory:
    recompute: Literal["none", "selective", "full"] = value(
        "none", "what the backward pass computes again instead of keeping it: nothing, all but products and attention, whole blocks"
    )
    optimizer_state: Literal["fp32", "bf16"] = value("fp32", "both means of AdamW; bf16: half of their memory", bits=BITS)
    weights: Literal["fp32", "bf16"] = value("fp32", "bf16: the model and its gradients, with masters in the optimizer", bits=BITS)
    offload: Literal["none", "optimizer"] = value("none", "optimizer: its state in the CPU's memory, and the update done there", bits=BITS)

    @property
    def saves_optimizer(self) -> bool:
        """Whether torch's own AdamW will not do."""
        return (self.optimizer_state, self.weights, self.offload) != ("fp32", "fp32", "none")


@dataclass(frozen=True)
class Save:
    every_steps: int = value(100, "committed steps from one checkpoint to the next; 0: only at the end", least=0)
    keep: int = value(3, "newest checkpoints kept; 0: all", least=0)
    on_error: Literal["continue", "stop"] = value("continue", "when a checkpoint cannot be written")


@dataclass(frozen=True)
class Track:
    log_every: int = value(20, "steps from one line on the screen to the next", each_host=EACH_HOST, least=1)
    tensorboard: bool = value(False, "write RUN/tensorboard", each_host=EACH_HOST)
    wandb: Literal["off", "offline", "online"] = value("off", "Weights & Biases", each_host=EACH_HOST)
    project: str = value("lockstep", "its project there", each_host=EACH_HOST)
    mfu: bool = value(
        False,
        "tell the share of the peak that is used; where it is not known, as on a CPU, it is measured at the start",
        each_host=EACH_HOST,
    )


@dataclass(frozen=True)
class Evaluate:
    at_end: int = value(1000, "held-out pairs translated, chats answered, when the last step is done; 0: nothing is scored then", least=0)
    beams: int = value(1, "1: greedy; more: beam search of that width", least=1, most=256)


@dataclass(frozen=True)
class Run:
    task: Literal["translate", "pretrain", "sft"] = value(
        "translate", "what is trained: a translator, a Llama on text, or a Llama on the answers of chats", bits=BITS
    )
    seed: int = value(1, "of the weights, the order and the dropout", bits=BITS, least=0, most=2**63 - 1)
    steps: int = value(300, "the last step", least=0)
    data: Data = Data()
    tokens: Tokens = Tokens()
    batch: Batch = Batch()
    model: Model = Model()
    llama: Llama = Llama()
    lora: Lora = Lora()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    layout: Layout = Layout()
    shard: Shard = Shard()
    heal: Heal = Heal()
    compute: Compute = Compute()
    memory: Memory = Memory()
    save: Save = Save()
    track: Track = Track()
    evaluate: Evaluate = Evaluate()


DECAY_STEPS, AS_STEPS = "optim.decay_steps", "as steps"
# What --override may change while a run trains: the loop computes these for every step, and no state depends on them.
SCHEDULE = ("optim.learning_rate", "optim.warmup_steps", "optim.decay", DECAY_STEPS)


@dataclass(frozen=True)
class Override:
    """Values of SCHEDULE, by key, for the updates after `step` committed steps."""

    step: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A run and, for each dotted key, where its value came from; `overrides` of its schedule in the order of their steps."""

    run: Run
    origin: dict[str, str]
    overrides: tuple[Override, ...] = ()

    def optim_after(self, step: float) -> Optim:
        """The values that hold for the update after `step` committed steps."""
        changed = {key.removeprefix("optim."): item for one in self.overrides if one.step <= step for key, item in one.values.items()}
        return replace(self.run.optim, **changed) if changed else self.run.optim


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """The type of each field; reading them costs more than everything else here."""
    return get_type_hints(cls, include_extras=True)


@cache
def leaves(cls: type = Run, prefix: str = "") -> dict[str, Field]:
    """Every dotted key of the run's tree, in the order of the file."""
    hints = hints_of(cls)
    found: dict[str, Field] = {}
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            found |= leaves(hints[one.name], f"{prefix}{one.name}.")
        else:
            found[prefix + one.name] = replace(one.metadata["rules"], key=prefix + one.name, type=hints[one.name])
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for name, item in tree.items():
        flat |= flatten(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat


def recipes() -> dict[str, Path]:
    """The run files that come with Lockstep, by name: in the package of an installed one, beside src/ in its repository."""
    here = Path(__file__).parents[1]
    found = [*sorted((here / "recipes").glob("*.toml")), *sorted((here.parents[1] / "recipes").glob("*.toml"))]
    return {path.stem: path for path in reversed(found)}


def read_toml(path: Path) -> dict[str, Any]:
    """The dotted keys of a TOML file, or of the recipe of this name where there is no file. ConfigError when it is missing or no TOML."""
    if not path.exists() and str(path.parent) in (".", "recipes") and path.suffix in ("", ".toml"):
        path = recipes().get(path.stem, path)
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        near = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = near or [f"recipes/{name}.toml" for name in sorted(recipes())]
        hint = f"there are {', '.join(near)}" if near else "give the path of a TOML file, or none for the embedded default"
        raise ConfigError(f"there is no run file {path}", "given on the command line", hint) from None
    except (ValueError, RecursionError) as error:
        what = f"{path} is not TOML: {error}"
        raise ConfigError(what, "the run file", "mend that place; tables are [section], strings are in quotes") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", str(path), "give a file that this user can read") from None


def read_flags(words: list[str]) -> dict[str, str]:
    """`--key value` and `--key=value` as a mapping. ConfigError for anything else."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is neither an option nor the value of one", "command line", "write --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} has no value", "command line", f"write --{key} VALUE")
            text = rest.pop(0)
        given[key] = text
    return given


def nearest(key: str, known: list[str]) -> list[str]:
    """Up to three known keys that `key` may mean: the same last word elsewhere, its initials (lr), or a spelling close to it."""
    last = key.rpartition(".")[2]
    alike = [k for k in known if last in (k.rpartition(".")[2], "".join(word[0] for word in k.rpartition(".")[2].split("_")))]
    return (alike or difflib.get_close_matches(key, known, n=3, cutoff=0.6))[:3]


def variable(key: str) -> str:
    """The environment variable for a key: "optim.learning_rate" -> "LOCKSTEP_OPTIM_LEARNING_RATE"."""
    return "LOCKSTEP_" + key.upper().replace(".", "_")


def refuse_unknown_variables(environ: Mapping[str, str], others: Sequence[str]) -> None:
    """ConfigError for LOCKSTEP_ variables that mean nothing, with the nearest names.

    others  variables that are no value of a run
    """
    keys = list(leaves())
    known = {*map(variable, keys), *others}
    unknown = [name for name in environ if name.startswith("LOCKSTEP_") and name not in known]
    if unknown:
        key = unknown[0].removeprefix("LOCKSTEP_").lower().replace("_", ".", 1)
        near = difflib.get_close_matches(unknown[0], others, n=1, cutoff=0.85) or [variable(one) for one in nearest(key, keys)]
        what = f"unknown variable {', '.join(unknown)}"
        hint = f"write {' or '.join(near)}" if near else "unset it; lockstep train --help lists the values of a run"
        raise ConfigError(what, "environment", hint)


def refuse_missing_packages(resolved: Resolved, *, prepared: bool) -> None:
    """ConfigError when the run asks for an optional package that is not installed, with the extra that has it.

    prepared  the run's data is there already, so that its source is not read
    """
    run = resolved.run
    asked = {
        "data.kind": ("datasets", "hub", run.data.kind == "huggingface" and not prepared),
        "track.tensorboard": ("tensorboard", "track", run.track.tensorboard),
        "track.wandb": ("wandb", "track", run.track.wandb != "off"),
    }
    for key, (package, extra, needed) in asked.items():
        if needed and find_spec(package) is None:
            what = f"the package {package} is not installed"
            raise ConfigError(what, f"{key} from {resolved.origin[key]}", f'pip install "lockstep-train[{extra}]"')


def check(one: Field, raw: Any) -> Any:
    """`raw` as a value of the field. ValueError with the reason when it does not fit."""
    if isinstance(raw, bool) and one.type is not bool:
        raise ValueError(f"is {'true' if raw else 'false'}, and this is no switch")
    try:
        result = adapter(one.type).validate_python(raw)
    except ValidationError as error:
        detail = error.errors()[0]
        raise ValueError(str(detail["ctx"]["error"]) if "error" in detail.get("ctx", {}) else detail["msg"]) from None
    for text in (result,) if isinstance(result, str) else result if isinstance(result, tuple) else ():
        check_text(text)
    if isinstance(result, tuple) and "" in result:
        raise ValueError("has an empty word in it")
    if isinstance(result, float) and not math.isfinite(result):
        raise ValueError("must be a finite number")
    if one.least is not None and result < one.least:
        raise ValueError(f"must be at least {one.least:g}")
    if one.below is not None and result >= one.below:
        raise ValueError(f"must be below {one.below:g}")
    if isinstance(result, int | float) and result > one.most:
        raise ValueError(f"must be at most {one.most:,}" if isinstance(one.most, int) else f"must be at most {one.most:g}")
    return result


@cache
def adapter(type: Any) -> TypeAdapter[Any]:
    """pydantic's reader of a type; making one costs 100 times as much as using it."""
    return TypeAdapter(type)


def check_text(text: str) -> None:
    """ValueError for a text that no file, no other process and no other host could be given."""
    if "\0" in text:
        raise ValueError("has a NUL byte in it")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("is not valid UTF-8")
    if len(text.encode()) > PATH_BYTES:
        raise ValueError(f"must be at most {PATH_BYTES} bytes long")


def resolve(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    begun: Resolved | None = None,
    *,
    follow: bool = True,
) -> Resolved:
    """The run that a file, flags and the environment describe, over the values of the run that it continues, if any.

    follow  optim.decay_steps is that of `steps` when no layer gives it

    ConfigError names everything that is wrong, at once.
    """
    known = leaves()
    in_file = read_toml(file) if file else {}
    by_variable = {variable(key): key for key in known}
    in_environ = {by_variable[name]: text for name, text in (environ or {}).items() if name in by_variable}
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (str(file), in_file),
        ("LOCKSTEP_* in the environment", in_environ),
        ("command line", flags or {}),
    ]
    values = flatten(asdict(begun.run)) if begun else {key: one.default for key, one in known.items()}
    origin = dict(begun.origin) if begun else {key: "default" for key in known}
    wrong: list[tuple[str, str, str]] = []
    for source, layer in layers:
        for key, raw in layer.items():
            if key not in known:
                near = nearest(key, list(known))
                wrong.append((f"unknown key {key!r}", source, f"perhaps {' or '.join(near)}" if near else "see lockstep train --help"))
                continue
            try:
                values[key], origin[key] = check(known[key], raw), source
            except ValueError as error:
                wrong.append((f"{key} = {shown(raw)}: {error}", source, known[key].doc))
    if wrong:
        what = wrong[0][0] if len(wrong) == 1 else f"{len(wrong)} values do not fit: " + "; ".join(w for w, _, _ in wrong)
        raise ConfigError(what, "\n".join(dict.fromkeys(w for _, w, _ in wrong)), "\n".join(dict.fromkeys(h for _, _, h in wrong)))
    if follow and all(DECAY_STEPS not in layer for _, layer in layers):
        values[DECAY_STEPS], origin[DECAY_STEPS] = max(1, values["steps"]), AS_STEPS
    run = from_values(values)
    for what, keys, hint in contradictions(run):
        raise ConfigError(what, ", ".join(f"{key} from {origin[key]}" for key in keys.split()), hint)
    return Resolved(run, origin, begun.overrides if begun else ())


def shown(raw: object) -> str:
    """A value that was given, cut to a length that a message can carry."""
    try:
        text = repr(raw)
    except (ValueError, RecursionError):  # more digits than Python writes, or too deeply nested
        return f"({type(raw).__name__} too large to show)"
    return text if len(text) <= 80 else f"{text[:70]}... ({len(text):,} characters)"


def from_values(values: Mapping[str, Any], cls: type = Run, prefix: str = "") -> Any:
    """The dataclass tree for dotted keys."""
    hints = hints_of(cls)
    parts = {f.name: prefix + f.name for f in fields(cls)}
    return cls(**{n: from_values(values, hints[n], k + ".") if is_dataclass(hints[n]) else values[k] for n, k in parts.items()})


# What each task reads.
KINDS = {
    "translate": ("cldr", "files", "huggingface", "gettext"),
    "pretrain": ("stdlib", "text", "huggingface"),
    "sft": ("chat", "drills"),
}
NOT_READ = {"translate": ("llama.", "lora.", "batch.length"), "pretrain": ("model.",), "sft": ("model.",)}
WITH_FILES = {
    "files": '["train.en.gz", "train.de.gz"]',
    "text": '["texts/**/*.txt", "more.jsonl.gz"]',
    "chat": '["chats.jsonl"]',
}
LORA_TARGETS = ("query", "key", "value", "out", "gate", "up", "down")


def contradictions(run: Run) -> Iterator[tuple[str, str, str]]:
    """(what is wrong between values, their keys, what to try): all that can be known before a process starts."""
    data, batch, kinds = run.data, run.batch, KINDS[run.task]
    if ignored := [key for key, _, _ in changed_bits(Run(), run) if key.startswith(NOT_READ[run.task])]:
        yield f"task {run.task} does not read {', '.join(ignored)}", " ".join(["task", *ignored]), "leave these out, or set another task"
    if run.model.width % run.model.heads:
        near = [heads for heads in range(1, run.model.width + 1) if run.model.width % heads == 0]
        best = min(near, key=lambda heads: abs(heads - run.model.heads))
        what = f"model.width={run.model.width} is no multiple of model.heads={run.model.heads}"
        yield what, "model.width model.heads", f"try model.heads={best}"
    if run.layout.shard * run.layout.tensor * run.layout.pipeline > 1 and run.parallel.reduce == "fast":
        what = "parallel.reduce is fast, and replicas are several workers, whose gradients are always added in order"
        yield what, "parallel.reduce", "try parallel.reduce=ordered"
    if data.kind not in kinds:
        yield f"task {run.task} does not read data.kind={data.kind}", "task data.kind", f"try data.kind={' or '.join(kinds)}"
    if run.task != "translate":
        yield from contradictions_of_llama(run)
    elif data.max_tokens > batch.tokens:
        what = f"one pair of data.max_tokens={data.max_tokens} does not fit a micro-batch of batch.tokens={batch.tokens}"
        hint = f"try data.max_tokens={batch.tokens} or batch.tokens={data.max_tokens}"
        yield what, "data.max_tokens batch.tokens", hint
    if data.kind in WITH_FILES and not data.train:
        what = f"data.kind is {data.kind}, and data.train is empty"
        yield what, "data.kind data.train", f"try data.train={WITH_FILES[data.kind]}"
    if data.kind == "huggingface" and not data.dataset:
        what = "data.kind is huggingface, and data.dataset is empty"
        yield what, "data.kind data.dataset", "try data.dataset=Helsinki-NLP/opus_books"


def contradictions_of_llama(run: Run) -> Iterator[tuple[str, str, str]]:
    """Those when a Llama is trained."""
    tokens, length, context = run.batch.tokens, run.batch.length, run.llama.context
    if tokens % length:
        what = f"micro-batches of batch.tokens={tokens} do not consist of rows of batch.length={length}"
        yield what, "batch.tokens batch.length", f"try batch.tokens={max(1, round(tokens / length)) * length}"
    if context and context < length:
        what = f"rows of batch.length={length} in a model of llama.context={context}"
        yield what, "batch.length llama.context", f"try batch.length={context}"
    if run.tokens.kind == "word" or run.tokens.lowercase:
        what = "a Llama's tokenizer keeps every byte of a text"
        yield what, "tokens.kind tokens.lowercase", "leave both out: it is byte-level BPE"
    if unknown := [name for name in run.lora.targets if name not in LORA_TARGETS]:
        yield f"lora.targets names {', '.join(unknown)}", "lora.targets", f"there are {', '.join(LORA_TARGETS)}"
    if run.lora.rank and not run.lora.targets:
        what = "lora.targets is empty, and adapters need matrices to adapt"
        yield what, "lora.rank lora.targets", "leave lora.targets out for all of them"
    if run.lora.rank and not run.llama.start:
        yield "adapters need a trained model to adapt", "lora.rank llama.start", "set llama.start to a folder, or lora.rank=0"


def shared_values(run: Run) -> dict[str, str]:
    """Every value that all who train together must have alike, as text."""
    return as_text(run, [key for key, one in leaves().items() if not one.each_host])


def bits_as_text(run: Run) -> dict[str, str]:
    """Every value that decides the trained bits, as text; not where the data lies."""
    return as_text(run, [key for key, one in leaves().items() if one.bits and key not in DATA_PATHS])


def as_text(run: Run, keys: Sequence[str]) -> dict[str, str]:
    values = flatten(asdict(run))
    return {key: values[key] if isinstance(values[key], str) else json.dumps(values[key]) for key in keys}


def with_precision(resolved: Resolved, precision: Literal["auto", "bf16", "fp32"], origin: str) -> Resolved:
    """The run with its precision decided, and by whom."""
    run = replace(resolved.run, compute=replace(resolved.run.compute, precision=precision))
    return replace(resolved, run=run, origin=resolved.origin | {"compute.precision": origin})


def to_json(resolved: Resolved) -> dict[str, Any]:
    """The run as JSON: every value and where it came from, and the overrides of its schedule where there are some."""
    overrides = {"overrides": [asdict(one) for one in resolved.overrides]} if resolved.overrides else {}
    return {"values": json.loads(json.dumps(asdict(resolved.run))), "origin": resolved.origin} | overrides


def from_json(saved: Mapping[str, Any]) -> Resolved:
    """The run that `to_json` wrote. Keys of a newer version are an error, missing ones get their default."""
    resolved = resolve(None, flatten(saved["values"]))
    overrides = tuple(Override(int(one["step"]), schedule_values(one["values"], "run.json")) for one in saved.get("overrides", ()))
    return Resolved(resolved.run, {**{key: "default" for key in leaves()}, **saved["origin"]}, overrides)


def schedule_values(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values of SCHEDULE, checked. ConfigError for any other key, and for a value that does not fit."""
    known, found = leaves(), {}
    for key, item in raw.items():
        if key not in SCHEDULE:
            raise ConfigError(f"{key} cannot be overridden", source, f"only the schedule can: {', '.join(SCHEDULE)}")
        try:
            found[key] = check(known[key], item)
        except ValueError as error:
            raise ConfigError(f"{key} = {item!r}: {error}", source, known[key].doc) from None
    return found


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """The KEY=VALUE words of --override as values of SCHEDULE. ConfigError for anything else."""
    return schedule_values(dict((key, text) for key, _, text in (word.partition("=") for word in words)), "--override")


def add_override(resolved: Resolved, asked: Override, *, back: bool) -> Resolved:
    """The run with `asked` in force from its step on; unchanged where it is in force already.

    back  the run goes back to that step on purpose. Otherwise the same command may have been given before, and the run may since have
          gone back to an earlier checkpoint by itself: what its history ends with counts.
    """
    held = {f"optim.{name}": item for name, item in asdict(resolved.optim_after(asked.step if back else math.inf)).items()}
    new = {key: item for key, item in asked.values.items() if held[key] != item}
    if not new:
        return resolved
    earlier = [one for one in resolved.overrides if one.step < asked.step]
    later = [Override(one.step, {k: v for k, v in one.values.items() if k not in new}) for one in resolved.overrides[len(earlier) :]]
    kept = [one for one in later if one.values]
    return replace(resolved, overrides=(*earlier, Override(asked.step, new), *kept))


def refuse_spent_schedule(resolved: Resolved, begun: Resolved | None, flags: Mapping[str, Any]) -> None:
    """ConfigError when the learning rate is 0 before the last step, unless this command gives optim.decay_steps or the run began so."""
    run, last = resolved.run, resolved.optim_after(math.inf)
    spent = max(last.decay_steps + 1, last.warmup_steps)
    if last.decay not in ("linear", "cosine") or run.steps < spent or DECAY_STEPS in flags or (begun and begun.run.steps >= run.steps):
        return
    where = f"steps={run.steps} from {resolved.origin['steps']}, {DECAY_STEPS}={last.decay_steps} from {resolved.origin[DECAY_STEPS]}"
    hint = f"leave {DECAY_STEPS} out, then it follows steps; or give --{DECAY_STEPS} on the command line to train at 0 on purpose"
    if begun:
        hint = f"try --override {DECAY_STEPS}={run.steps}, which changes the schedule from the newest checkpoint on and is recorded"
    raise ConfigError(f"the learning rate is 0 from step {spent} on, and the run has {run.steps} steps", where, hint)


def write_run(folder: Path, resolved: Resolved) -> None:
    """Write run.json: `to_json`, with a checksum."""
    write_json(folder / "run.json", with_checksum(to_json(resolved)))


def read_run(folder: Path) -> Resolved | None:
    """The run in `folder`, as `write_run` wrote it; None when there is none. CheckpointError when it is damaged or was edited."""
    path = folder / "run.json"
    try:
        value = read_json(path)
        if CHECKSUM not in value:
            raise ValueError(f"it has no {CHECKSUM}")
        return from_json(checked(value))
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(what, "the run's values", "give a folder that this user can read and write") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged or was edited: {error}",
            "lockstep writes it, with its sha256; values are changed on the command line or in the run file",
            "remove it: the next start takes the values from the newest checkpoint",
        ) from None


def has_begun(folder: Path) -> bool:
    """Whether anything was made under the values of the run: data, a step, a checkpoint. Before that a mistyped value may be mended."""
    return any((folder / name).exists() for name in ("data/prepared.json", "metrics.jsonl", "checkpoints"))


def show(resolved: Resolved) -> str:
    """Every value and where it came from, a line each."""
    values = flatten(asdict(resolved.run))
    width = max(map(len, values))
    shown = {key: json.dumps(item) for key, item in values.items()}
    column = min(40, max(map(len, shown.values())))
    lines = [f"{key:<{width}} = {shown[key]:<{column}}  {resolved.origin[key]}" for key in values]
    later = [(key, json.dumps(item), one.step + 1) for one in resolved.overrides for key, item in one.values.items()]
    return "\n".join([*lines, *(f"{key:<{width}} = {item:<{column}}  --override, from step {step} on" for key, item, step in later)])


def changed_bits(begun: Run, now: Run) -> list[tuple[str, Any, Any]]:
    """(key, as begun, as asked for now) for each value that decides the trained bits and differs. Of paths only the last names count."""
    old, new = flatten(asdict(begun)), flatten(asdict(now))
    last = {key: [last_names(value[key]) for value in (old, new)] for key in DATA_PATHS}
    return [
        (key, old[key], new[key])
        for key, one in leaves().items()
        if one.bits and old[key] != new[key] and not (key in last and last[key][0] == last[key][1])
    ]


def last_names(paths: str | Sequence[str]) -> list[str]:
    """The names of files or folders without the folders in which they lie."""
    return [Path(path).name for path in ([paths] if isinstance(paths, str) else paths)]
