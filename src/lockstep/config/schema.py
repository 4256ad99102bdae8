"""The configuration of a run: a default, a range and a sentence for every key.

A `bits_option` decides the trained bits, and cannot change when the run resumes. The other keys
(number of steps, checkpoint interval, logging) may change at each start. All ranks must agree on
every key, except for each `host_option`.
"""

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from lockstep.config.adapter_config import LORA_TARGETS
from lockstep.errors import ConfigError
from lockstep.layout import Layout
from lockstep.network.bucket_sizes import default_bucket_size
from lockstep.network.wire_format import Wire
from lockstep.units import parse_bytes, parse_seconds, shorten

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]

# Upper bounds turn a typing error into an error message instead of a hang.
# default upper bound: more steps than any run; 31 years of seconds, which torch counts in
# nanoseconds
MAX_VALUE = 10**9
MAX_DIM = 1 << 20  # side of a matrix or a batch; the widest published model has 16,384
MAX_LAYERS = 1024
MAX_WORKERS = 1 << 16
MAX_TEXT_BYTES = 4096  # PATH_MAX of Linux


def parse_list(raw: object) -> object:
    """Return the entries of "a,b" or '["a", "b"]' (TOML and JSON); return other types unchanged."""
    if not isinstance(raw, str):
        return raw
    if raw.startswith('["'):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"starts like a JSON array but is not one ({error})") from None
    return raw.split(",") if raw else ()


type_adapter = cache(TypeAdapter[Any])  # to construct a validator costs 100 times as much as a call
StringList = Annotated[tuple[str, ...], BeforeValidator(parse_list)]


@dataclass(frozen=True)
class Field:
    default: Any
    doc: str  # one sentence for --help and for error messages
    bits: bool = False  # the key decides the trained bits
    each_host: bool = False  # each host may have its own value
    ge: float = 0  # range of a number, as in pydantic
    lt: float = math.inf
    le: float = MAX_VALUE
    type: Any = None  # filled in by `config_fields`

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid values, if the key is one of a few words; else ()."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def parse(self, raw: Any) -> Any:
        """Return `raw` converted to the type of this key. ValueError with the reason if it is
        invalid."""
        if isinstance(raw, bool) and self.type is not bool:
            raise ValueError(f"must not be a boolean ({'true' if raw else 'false'})")
        try:
            value = type_adapter(self.type).validate_python(raw)
        except ValidationError as error:
            detail = error.errors()[0]
            raise ValueError(
                str(detail["ctx"]["error"]) if "error" in detail.get("ctx", {}) else detail["msg"]
            ) from None
        texts = value if isinstance(value, tuple) else [value]
        for text in texts:
            if isinstance(text, str):
                check_text(text)
        if isinstance(value, tuple) and "" in value:
            raise ValueError("contains an empty entry")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("must be a finite number")
        if isinstance(value, int | float):
            if value < self.ge:
                raise ValueError(f"must be at least {self.ge:g}")
            if value >= self.lt:
                raise ValueError(f"must be below {self.lt:g}")
            if value > self.le:
                most = f"{self.le:,}" if isinstance(self.le, int) else f"{self.le:g}"
                raise ValueError(f"must be at most {most}")
        return value


def check_text(text: str) -> None:
    """ValueError for text that cannot be passed to the file system, a process or another host."""
    if "\0" in text:
        raise ValueError("contains a NUL byte")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("is not valid UTF-8")
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"must be at most {MAX_TEXT_BYTES} bytes long")


def option(default: Any, doc: str, **constraints: Any) -> Any:
    """A dataclass field that carries a `Field`: a key that may change at each start."""
    return field(default=default, metadata={"field": Field(default, doc, **constraints)})


bits_option = partial(option, bits=True)
host_option = partial(option, each_host=True)


@dataclass(frozen=True)
class DataOptions:
    kind: Literal["cldr", "files", "huggingface", "stdlib", "text", "chat", "drills"] = bits_option(
        "cldr",
        "source of the data; cldr (pairs), stdlib (text) and drills (chats) need no download",
    )
    source: str = bits_option("en", "source language")
    target: str = bits_option("it", "target language")
    train: StringList = bits_option(
        (),
        "training files, also .gz: two texts, one .tsv or .jsonl; "
        "text, chat: any number, with *, **",
    )
    validation: StringList = bits_option(
        (), "validation files, as train; empty: pairs are held out of train"
    )
    test: StringList = bits_option((), "test files, as train; empty: pairs are held out of train")
    dataset: str = bits_option(
        "", "huggingface: name or folder of the dataset, such as Helsinki-NLP/opus_books"
    )
    subset: str = bits_option("", "huggingface: configuration name, such as en-it")
    pairs: int = bits_option(120_000, "cldr: maximum number of training pairs to generate; 0: all")
    held_out: int = bits_option(
        1000, "pairs in each of validation and test, if the corpus has no such split; 0: none"
    )
    column: str = bits_option(
        "text",
        "text, huggingface: key of the text in a JSON object or a row, when a Llama is trained",
    )
    held_out_share: float = bits_option(
        0.015, "fraction of the documents in each of validation and test; 0: none", lt=0.5
    )
    truncation: Literal["drop", "right", "message"] = bits_option(
        "drop",
        "chats longer than batch.seq_len: "
        "drop, cut at the right, or cut after the last answer that fits",
    )
    packing: bool = bits_option(
        True,
        "several documents or chats in a row; false: one, for models that mix those of a row",
    )
    max_tokens: int = bits_option(
        128, "longer pairs are dropped from training and counted", ge=4, le=MAX_DIM
    )


@dataclass(frozen=True)
class TokenizerOptions:
    kind: Literal["bpe", "word"] = bits_option("bpe", "joint byte-level BPE, or whole words")
    vocab_size: int = bits_option(
        3000, "number of entries; the output layer grows with it", ge=300, le=MAX_DIM
    )
    min_frequency: int = bits_option(2, "rarer entries are dropped", ge=1)
    lowercase: bool = bits_option(False, "train and translate in lower case")


@dataclass(frozen=True)
class BatchOptions:
    micro_batches: int = bits_option(
        8, "K: forward and backward passes per step, summed over all replicas", ge=1, le=MAX_WORKERS
    )
    tokens: int = bits_option(
        512,
        "target positions of a micro-batch, including padding; memory grows with it",
        ge=1,
        le=MAX_DIM,
    )
    seq_len: int = bits_option(
        512,
        "Llama: tokens of a row; a micro-batch has batch.tokens / batch.seq_len rows",
        ge=2,
        le=MAX_DIM,
    )
    buckets: int = bits_option(
        6, "number of micro-batch shapes; more: less padding, longer compilation", ge=1, le=256
    )


@dataclass(frozen=True)
class ModelOptions:
    dim: int = bits_option(128, "embedding dimension", ge=8, le=MAX_DIM)
    n_heads: int = bits_option(4, "attention heads; must divide dim", ge=1, le=MAX_WORKERS)
    encoder_layers: int = bits_option(3, "layers of the encoder", ge=1, le=MAX_LAYERS)
    decoder_layers: int = bits_option(3, "layers of the decoder", ge=1, le=MAX_LAYERS)
    ffn_dim: int = bits_option(
        512, "hidden dimension of the feed-forward network", ge=8, le=MAX_DIM
    )
    dropout: float = bits_option(0.05, "dropout probability in training", lt=1)
    attention: Literal["auto", "plain", "sdpa"] = bits_option(
        "auto", "kernel; plain is faster on a CPU for short sequences"
    )


@dataclass(frozen=True)
class LlamaOptions:
    size: Literal["1M", "5M", "25M", "100M", "1B", "3B", "8B", "70B", "405B"] = bits_option(
        "5M", "size of a new model"
    )
    init_from: str = bits_option(
        "", "initialize from this Hugging Face or run folder; empty: train from scratch"
    )
    backend: Literal["lockstep", "transformers"] = bits_option(
        "lockstep",
        "transformers: any causal language model of that package, "
        "from init_from, in replicas and shards",
    )
    max_seq_len: int = bits_option(
        0, "maximum sequence length in the model's config; 0: as in size or init_from"
    )


@dataclass(frozen=True)
class LoraOptions:
    rank: int = bits_option(
        0,
        "rank of the adapters, which are then the only trained weights; 0: no adapters",
        le=MAX_DIM,
    )
    alpha: float = bits_option(16.0, "the output of an adapter is scaled by alpha / rank")
    targets: StringList = bits_option(
        tuple(LORA_TARGETS),
        "matrices with an adapter; out: attention output, down: feed-forward output; "
        "llama.backend=transformers: also names of linear layers, such as query_key_value",
    )
    dropout: float = bits_option(0.0, "dropout probability of an adapter's input in training", lt=1)
    init_from: str = bits_option(
        "",
        "start from the adapters in this folder of PEFT, "
        "which defines the other values; empty: new",
    )


@dataclass(frozen=True)
class OptimOptions:
    kind: Literal["adamw", "sgd", "lion", "muon", "adafactor"] = bits_option(
        "adamw",
        "optimizer; muon: of the matrices of the layers, "
        "with AdamW for embeddings, output and norms",
    )
    # Fits a float32.
    learning_rate: float = bits_option(4e-3, "peak value, reached after the warm-up", le=1e30)
    warmup_steps: int = bits_option(60, "steps in which the learning rate rises from 0 to its peak")
    schedule: Literal["linear", "cosine", "inverse_sqrt", "constant", "wsd"] = bits_option(
        "linear",
        "decay of the learning rate; wsd: stable after the warm-up, then linear in the last steps",
    )
    decay_steps: int = bits_option(
        300, "linear, cosine, wsd: last step of the decay; by default as steps", ge=1
    )
    wsd_decay: float = bits_option(
        0.2, "wsd: share of decay_steps in which the learning rate falls", le=1.0
    )
    floor: float = bits_option(
        0.0, "lowest learning rate after the warm-up, as a share of the peak", le=1.0
    )
    momentum: float = bits_option(0.95, "sgd, muon: decay rate of the sum of gradients", lt=1)
    beta1: float = bits_option(0.9, "AdamW, Lion: decay rate of the mean of the gradient", lt=1)
    beta2: float = bits_option(
        0.98, "AdamW: decay rate of the mean of the squared gradient; Lion: of the mean", lt=1
    )
    epsilon: float = bits_option(1e-9, "AdamW: added to the square root of the second mean")
    weight_decay: float = bits_option(0.01, "weight decay of matrices; other parameters have none")
    groups: StringList = bits_option(
        (),
        "PATTERN:RATE:DECAY by parameter names: "
        "factors of learning rate and weight decay, as *embedding*:0.5:0",
    )
    ema_decay: float = bits_option(
        0.0, "decay rate of averaged weights, which are then evaluated and exported; 0: none", lt=1
    )
    clip_norm: float = bits_option(1.0, "maximum global norm of the gradient; 0: no clipping")
    label_smoothing: float = bits_option(
        0.1, "translate: probability that is spread evenly over the vocabulary", lt=1
    )
    fused: bool = bits_option(False, "torch's fused AdamW, as always on a GPU; other bits on a CPU")


@dataclass(frozen=True)
class ParallelOptions:
    wire: Wire = bits_option("fp32", "format in which gradients travel between workers")
    bucket_bytes: Bytes = option(
        0,
        "size of a bucket of gradients, reduced while the backward pass runs; "
        "0: 100 MB on a GPU, 25 MB on a CPU",
        le=10**12,
    )
    timeout_s: Seconds = host_option(
        600.0, "timeout of a collective, after which a silent peer counts as lost", ge=1
    )

    def bucket_size(self, device_type: str) -> int:
        """Return the bytes of a bucket on such a device."""
        return self.bucket_bytes or default_bucket_size(device_type)


@dataclass(frozen=True)
class LayoutOptions:
    replicate: int = option(
        0, "copies of the model; 0: as many as the workers allow", le=MAX_WORKERS
    )
    shard: int = option(
        1,
        "workers that shard the parameters, gradients and optimizer state of one copy (FSDP)",
        ge=1,
        le=MAX_WORKERS,
    )
    tensor: int = option(
        1, "tensor-parallel size; changing it changes the bits", ge=1, le=MAX_WORKERS
    )
    pipeline: int = option(
        1, "pipeline stages; with dropout, changing it changes the bits", ge=1, le=MAX_LAYERS
    )
    pipeline_chunks: int = option(
        1,
        "chunks per stage (interleaved 1F1B); with dropout, changing it changes the bits",
        ge=1,
        le=MAX_LAYERS,
    )
    balance: Literal["auto", "off"] = option(
        "auto", "auto: fast replicas compute more micro-batches than slow ones; off: equal numbers"
    )

    @property
    def axes(self) -> Layout:
        """The sizes of the axes; replicate 0: unknown."""
        return Layout(self.replicate, self.shard, self.tensor, self.pipeline)


@dataclass(frozen=True)
class FsdpOptions:
    prefetch_units: int = option(
        1, "blocks that are gathered ahead; 1 + prefetch_units are unsharded at once", le=MAX_LAYERS
    )
    reduce: Literal["per_micro_batch", "per_step"] = option(
        "per_micro_batch",
        "when gradients are reduced; per_step: less traffic, but unsharded gradients in memory",
    )
    reshard_after_forward: bool = option(
        True,
        "free each block after its forward pass (ZeRO-3); false: keep it until backward (ZeRO-2)",
    )


@dataclass(frozen=True)
class ElasticOptions:
    heartbeat_timeout_s: Seconds = host_option(
        2.5, "time without a heartbeat until a worker counts as lost", ge=0.5
    )
    rendezvous_timeout_s: Seconds = host_option(
        30.0, "time to wait for more workers than the minimum at a start"
    )
    hang_timeout_s: Seconds = host_option(
        10.0, "time without progress before the blocking rank is identified", ge=1
    )
    evaluate_timeout_s: Seconds = host_option(1800.0, "the same while a worker evaluates", ge=1)
    on_hang: Literal["evict", "abort", "warn"] = option(
        "evict", "evict: remove the blocking rank and continue; abort the run; warn only"
    )
    verify_every: int = option(
        1, "steps between comparisons of the weights of all replicas; 0: never"
    )
    rehearse: bool = option(
        True,
        "compute the first micro-batch of a start, and after a join, twice; compare it at a resume",
    )


@dataclass(frozen=True)
class ComputeOptions:
    precision: Literal["auto", "bf16", "fp32"] = bits_option(
        "auto", "precision of matrix products; auto: bf16 where supported"
    )
    compile: bool = bits_option(
        False, "use torch.compile; on a CPU faster for narrow models, slower for wide ones"
    )
    num_threads: int = bits_option(
        1, "threads of a worker on a CPU; changing it changes the bits", ge=1, le=1024
    )


@dataclass(frozen=True)
class MemoryOptions:
    activation_checkpoint: Literal["none", "selective", "full"] = option(
        "none",
        "recompute in the backward pass: "
        "nothing, all but matrix products and attention, or whole blocks",
    )
    optimizer_state: Literal["fp32", "bf16"] = bits_option(
        "fp32", "data type of the means of AdamW; bf16: half of their memory"
    )
    weights: Literal["fp32", "bf16"] = bits_option(
        "fp32", "bf16: model and gradients, with fp32 weights in the optimizer"
    )
    offload: Literal["none", "optimizer"] = bits_option(
        "none", "optimizer: keep its state in CPU memory and update there"
    )

    @property
    def saves_optimizer(self) -> bool:
        """Whether the options need another optimizer than torch's AdamW."""
        return (self.optimizer_state, self.weights, self.offload) != ("fp32", "fp32", "none")


@dataclass(frozen=True)
class CheckpointOptions:
    every_steps: int = option(100, "committed steps between checkpoints; 0: only at the end")
    keep: int = option(3, "number of newest checkpoints to keep; 0: all")
    on_error: Literal["continue", "stop"] = option(
        "continue", "reaction to a checkpoint that cannot be written"
    )


@dataclass(frozen=True)
class TrackOptions:
    every_s: Seconds = host_option(10.0, "seconds between lines on the screen")
    tensorboard: bool = host_option(False, "write RUN/tensorboard")
    wandb: Literal["off", "offline", "online"] = host_option("off", "Weights & Biases")
    project: str = host_option("lockstep", "project name in Weights & Biases")
    backend: str = host_option("", "MODULE:CLASS, a metric backend of your own; empty: none")
    mfu: bool = host_option(
        False,
        "report model FLOPs utilization; an unknown peak, as on a CPU, is measured at the start",
    )

    @property
    def backends(self) -> list[str]:
        """The metric backends, as Session(track=...) takes them."""
        names = ["tensorboard"] if self.tensorboard else []
        if self.wandb != "off":
            names.append(f"wandb:{self.wandb}:{self.project}")
        return [*names, self.backend] if self.backend else names


@dataclass(frozen=True)
class EvaluateOptions:
    at_end: int = option(
        1000, "held-out pairs to translate or chats to answer after the last step; 0: no score"
    )
    beams: int = option(1, "1: greedy; more: width of the beam search", ge=1, le=256)
    every_steps: int = option(
        0, "Llama: committed steps between evaluations of the validation loss; 0: none"
    )
    patience: int = option(
        0, "stop after this many evaluations without a lower validation loss; 0: never"
    )


@dataclass(frozen=True)
class DilocoOptions:
    learners: int = bits_option(
        0,
        "M: models that train apart between outer steps; divides batch.micro_batches; 0: off",
        le=MAX_WORKERS,
    )
    every: int = bits_option(50, "H: steps of a learner between two outer steps", ge=1)
    outer_learning_rate: float = bits_option(
        1.0, "learning rate of the outer step, Nesterov SGD", le=1e30
    )
    outer_momentum: float = bits_option(0.0, "momentum of the outer step", lt=1)


@dataclass(frozen=True)
class DivergenceOptions:
    max_skipped: int = option(100, "rollback: micro-batches that a run may skip; one more ends it")
    spike: float = option(
        10.0,
        "rollback: robust standard deviations above the newest losses that make a spike; 0: none",
    )
    skip: StringList = bits_option(
        (), "STEP:K,...: micro-batches that contribute nothing; steps as in metrics.jsonl, K from 0"
    )


@dataclass(frozen=True)
class RunConfig:
    task: Literal["translate", "pretrain", "sft"] = bits_option(
        "translate", "train a translator, or a Llama on text or on chats"
    )
    seed: int = bits_option(1, "seed of the weights, the data order and the dropout", le=2**63 - 1)
    steps: int = option(300, "number of the last step")
    on_divergence: Literal["stop", "rollback"] = option(
        "stop",
        "loss or gradient not finite: stop; "
        "rollback: on a spike too, retry the step without the guilty micro-batches",
    )
    data: DataOptions = DataOptions()
    tokenizer: TokenizerOptions = TokenizerOptions()
    batch: BatchOptions = BatchOptions()
    model: ModelOptions = ModelOptions()
    llama: LlamaOptions = LlamaOptions()
    lora: LoraOptions = LoraOptions()
    optim: OptimOptions = OptimOptions()
    parallel: ParallelOptions = ParallelOptions()
    layout: LayoutOptions = LayoutOptions()
    fsdp: FsdpOptions = FsdpOptions()
    elastic: ElasticOptions = ElasticOptions()
    compute: ComputeOptions = ComputeOptions()
    memory: MemoryOptions = MemoryOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    track: TrackOptions = TrackOptions()
    evaluate: EvaluateOptions = EvaluateOptions()
    diloco: DilocoOptions = DilocoOptions()
    divergence: DivergenceOptions = DivergenceOptions()

    @property
    def leaves(self) -> int:
        """Operands of the sum over all workers: the micro-batches of a step, or DiLoCo's
        learners."""
        return self.diloco.learners or self.batch.micro_batches

    @property
    def data_parallel_limit(self) -> int:
        """Workers that can train different micro-batches. All shards of a replica share a
        learner."""
        return self.diloco.learners * self.layout.shard or self.batch.micro_batches

    @property
    def commit_steps(self) -> int:
        """Steps that a commit completes."""
        return self.diloco.every if self.diloco.learners else 1


@dataclass(frozen=True)
class ScheduleOverride:
    """Values of the learning rate schedule, by key, for the updates after `step` committed
    steps."""

    step: int
    values: dict[str, Any]


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration, the source of each value by key, and its schedule overrides in step
    order."""

    run: RunConfig
    origin: dict[str, str]
    overrides: tuple[ScheduleOverride, ...] = ()

    def optim_after(self, step: float) -> OptimOptions:
        """Return the values that hold for the update after `step` committed steps."""
        changed: dict[str, Any] = {}
        for override in self.overrides:
            if override.step <= step:
                changed |= {
                    key.removeprefix("optim."): value for key, value in override.values.items()
                }
        return replace(self.run.optim, **changed)


@cache
def config_fields(cls: type = RunConfig, prefix: str = "") -> dict[str, Field]:
    """Return every dotted key of the configuration, in the order of this file."""
    hints = get_type_hints(cls, include_extras=True)
    by_key: dict[str, Field] = {}
    for member in fields(cls):
        key, part = prefix + member.name, type(member.default)
        if is_dataclass(part):
            by_key |= config_fields(part, f"{key}.")
        else:
            by_key[key] = replace(member.metadata["field"], type=hints[member.name])
    return by_key


def nearest_keys(key: str, known: list[str]) -> list[str]:
    """Return up to three known keys that resemble `key`: its last word, initials (lr)."""
    last = key.rpartition(".")[2]

    def short_forms(key: str) -> tuple[str, str]:
        name = key.rpartition(".")[2]
        return name, "".join(word[0] for word in name.split("_"))

    same = [k for k in known if last in short_forms(k)]
    return (same or difflib.get_close_matches(key, known, n=3, cutoff=0.6))[:3]


def parse_value(key: str, raw: Any, source: str) -> Any:
    """Return the value of a key. ConfigError for an unknown key and an invalid value."""
    known = config_fields()
    if key not in known:
        near = " or ".join(nearest_keys(key, list(known)))
        raise ConfigError(
            f"unknown key {key!r}",
            source,
            f"perhaps {near}" if near else "see lockstep train --help",
        )
    try:
        return known[key].parse(raw)
    except ValueError as error:
        raise ConfigError(f"{key} = {shorten(raw)}: {error}", source, known[key].doc) from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for name, item in tree.items():
        flat |= (
            flatten(item, f"{prefix}{name}.")
            if isinstance(item, Mapping)
            else {prefix + name: item}
        )
    return flat


def build_config(values: Mapping[str, Any], cls: type = RunConfig, prefix: str = "") -> Any:
    """Return the dataclass tree for dotted keys."""
    options = {}
    for member in fields(cls):
        key, part = prefix + member.name, type(member.default)
        options[member.name] = (
            build_config(values, part, f"{key}.") if is_dataclass(part) else values[key]
        )
    return cls(**options)
