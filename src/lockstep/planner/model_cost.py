"""What the layers of a model cost: parameters, multiply-adds, saved activations, sums over ranks.

The numbers follow from the configuration. Tests count the same in real modules: parameters and
saved activations exactly, the latter in float32 and in bf16 autocast on a CPU.

Dimensions: N tokens of a micro-batch, D dim, F ffn_dim, H heads of E, G key-value heads, T target
and S source positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lockstep.config.schema import ModelOptions
from lockstep.models.llama_config import LlamaConfig

Mode = Literal["none", "selective", "full"]
CHECKPOINT_MODES: tuple[Mode, ...] = get_args(Mode)


class Amount(NamedTuple):
    """A quantity of which the tensor axis divides one part."""

    whole: float
    split: float = 0

    def on(self, tensor: int) -> float:
        return self.whole + self.split / tensor


class Saved(NamedTuple):
    """Elements that a forward pass keeps for its backward pass: in float32, and in autocast's
    dtype."""

    wide: Amount
    narrow: Amount = Amount(0)

    def bytes(self, tensor: int, precision: str) -> float:
        return 4 * self.wide.on(tensor) + (2 if precision == "bf16" else 4) * self.narrow.on(tensor)


@dataclass(frozen=True)
class Unit:
    """A block of layers that the shard axis gathers at once, or the rest of the model, in one
    place.

    parameters  elements of each parameter, in the order of the module
    macs        multiply-adds of a forward pass over a micro-batch
    saved       of a forward pass, by activation checkpointing
    sums        elements of each sum over the tensor axis, of a micro-batch: (forward pass,
                backward pass)
    """

    kind: str
    parameters: tuple[Amount, ...]
    macs: Amount
    saved: dict[Mode, Saved]
    sums: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    def elements(self, tensor: int) -> int:
        return int(sum(parameter.on(tensor) for parameter in self.parameters))


@dataclass(frozen=True)
class ModelCost:
    """A model as blocks in forward order, and the rest: embedding before them, norm and output
    after.

    passed  elements of a micro-batch that a pipeline stage passes on
    tied    the output matrix is the embedding
    dim     of the embedding; 0: the loss is no sum over a vocabulary
    heads   numbers that the tensor axis must divide; empty: it has no plan for the tensor axis
    layers  that a pipeline can split; 0: none
    ragged  micro-batches have many shapes
    """

    name: str
    embedding: Unit
    blocks: tuple[Unit, ...]
    output: Unit
    tokens: int
    dim: int
    passed: float
    tied: bool
    heads: tuple[int, ...]
    layers: int
    ragged: bool = False

    @property
    def parameters(self) -> int:
        return sum(unit.elements(1) for unit in (self.embedding, *self.blocks, self.output))


@dataclass(frozen=True)
class MicroBatch:
    """The shape of a micro-batch: rows of `source` and of `target` positions."""

    rows: int
    target: int
    source: int = 0


def llama_cost(config: LlamaConfig, batch: MicroBatch, precision: str) -> ModelCost:
    """Return the cost of a Llama over `batch`."""
    d, f, length, n = config.dim, config.ffn_dim, batch.target, batch.rows * batch.target
    he, ge = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    projections: list[Amount] = []
    for width in (he, ge, ge):
        projections += [Amount(0, d * width), *([Amount(0, width)] if config.qkv_bias else [])]
    norms = [Amount(config.head_dim)] * 2 if config.qk_norm else []
    matrices = [*projections, Amount(0, he * d)]
    feed_forward = [Amount(0, d * f)] * 3
    weights = 2 * d * (he + ge) + 3 * d * f
    rotary = length * config.head_dim
    # Autocast casts weights, rotations, and the input of each of five matrices.
    casts = Amount(3 * n * d + 4 * rotary, weights) if precision == "bf16" else Amount(0)
    normed = (2 * (he + ge) + config.n_heads + config.n_kv_heads, he) if config.qk_norm else (0, 0)
    narrow = Amount(2 * n * d, n * (2 * he + 2 * ge + 4 * f + normed[1]))
    all_saved = Saved(
        Amount(n * (4 * d + 2), n * (config.n_heads + normed[0])), added(narrow, casts)
    )
    products = Amount(2 * n * d, n * (2 * he + 2 * ge + 2 * f))
    layer = Unit(
        "layer",
        (Amount(d), *matrices, *norms, Amount(d), *feed_forward),
        Amount(0, n * weights + 2 * n * length * he),
        {
            "none": all_saved,
            "selective": Saved(Amount(n * d, n * config.n_heads), products),
            "full": Saved(Amount(n * d)),
        },
        ((n * d,) * 2, (n * d,) * 2),
    )
    vocabulary = config.vocab_size * d
    embedding = Unit(
        "embedding",
        (Amount(vocabulary),),
        Amount(0),
        dict.fromkeys(CHECKPOINT_MODES, Saved(Amount(2 * n + (0 if casts.whole else 2 * rotary)))),
    )
    rest = Saved(Amount(n * (3 * d + 1) + vocabulary))
    outputs = (Amount(d), *(() if config.tie_embeddings else (Amount(vocabulary),)))
    output = Unit("output", outputs, Amount(n * vocabulary), dict.fromkeys(CHECKPOINT_MODES, rest))
    heads = (config.n_heads, config.n_kv_heads, config.ffn_dim)
    name = f"Llama, {config.n_layers} layers of {d}"
    return ModelCost(
        name,
        embedding,
        (layer,) * config.n_layers,
        output,
        n,
        d,
        n * d,
        config.tie_embeddings,
        heads,
        config.n_layers,
    )


def translator_cost(
    model: ModelOptions, vocab_size: int, batch: MicroBatch, precision: str
) -> ModelCost:
    """Return the cost of a translator over `batch`, with the attention of a CPU and with
    dropout."""
    d, f, h = model.dim, model.ffn_dim, model.n_heads
    source, target = batch.rows * batch.source, batch.rows * batch.target
    norm, square, feed_forward = [Amount(d)] * 2, Amount(0, d * d), [Amount(0, d * f)] * 2
    own = [*norm, square, Amount(0, 3 * d * d)]
    cross = [*norm, square, square, Amount(0, 2 * d * d)]

    def layer(
        kind: str,
        parameters: list[Amount],
        n: int,
        saved: Saved,
        products: Saved,
        attended: float,
        sums: tuple[tuple[float, ...], tuple[float, ...]],
    ) -> Unit:
        cast = sum(parameter.split for parameter in parameters) if precision == "bf16" else 0
        modes: dict[Mode, Saved] = {
            "none": Saved(saved.wide, added(saved.narrow, Amount(0, cast))),
            "selective": products,
            "full": Saved(Amount(n * d)),
        }
        products_macs = n * sum(parameter.split for parameter in parameters)
        return Unit(
            kind, tuple(parameters), Amount(0, products_macs + 2 * attended * d), modes, sums
        )

    scores, cross_scores = h * target * batch.target, h * target * batch.source
    encoder = layer(
        "encoder",
        [*own, *norm, *feed_forward],
        source,
        Saved(
            Amount(source * (4 * d + 4), source * (3 * d + h * batch.source)),
            Amount(source * 2 * d, source * (d + f)),
        ),
        Saved(Amount(source * d), Amount(2 * source * d, source * (3 * d + f))),
        source * batch.source,
        ((source * d,) * 2, (source * d,) * 2),
    )
    decoder = layer(
        "decoder",
        [*own, *cross, *norm, *feed_forward],
        target,
        Saved(
            Amount(target * (6 * d + 6), target * 4 * d + 2 * source * d + scores + cross_scores),
            Amount(
                target * 3 * d + (source * d if precision == "bf16" else 0), target * (2 * d + f)
            ),
        ),
        Saved(Amount(target * d), Amount(3 * target * d, target * (4 * d + f) + 2 * source * d)),
        target * (batch.target + batch.source),
        ((target * d,) * 3, (*(target * d,) * 3, source * d)),
    )
    nothing = dict.fromkeys(
        CHECKPOINT_MODES, Saved(Amount(source * ((2 if precision == "bf16" else 3) * d + 2)))
    )
    encoder_norm = Unit("encoder_norm", (Amount(d), Amount(d)), Amount(0), nothing)
    vocabulary = vocab_size * d
    embedding = Unit(
        "embedding",
        (Amount(vocabulary),),
        Amount(0),
        dict.fromkeys(CHECKPOINT_MODES, Saved(Amount(2 * (source + target)))),
    )
    rest = Saved(Amount(target * (3 * d + 2) + vocabulary))
    output = Unit(
        "output",
        (Amount(d), Amount(d)),
        Amount(target * vocabulary),
        dict.fromkeys(CHECKPOINT_MODES, rest),
    )
    blocks = (*(encoder,) * model.encoder_layers, encoder_norm, *(decoder,) * model.decoder_layers)
    layers = model.encoder_layers + model.decoder_layers
    name = f"translator, {model.encoder_layers} + {model.decoder_layers} layers of {d}"
    return ModelCost(
        name,
        embedding,
        blocks,
        output,
        target,
        d,
        (source + target) * d,
        True,
        (h, f),
        layers,
        ragged=True,
    )


def added(a: Amount, b: Amount) -> Amount:
    return Amount(a.whole + b.whole, a.split + b.split)
