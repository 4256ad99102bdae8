"""Draw a case of the fuzzer from a seed: a model, how it is trained, and by how many workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch
from support.gradient_fuzz.random_models import KINDS, NO_BFLOAT16, RandomModel
from torch import nn

from lockstep.layout import Layout
from lockstep.models import llama
from lockstep.parallel.deferred_init import materialize

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
SHARDED = [Layout(1, 2), Layout(1, 3), Layout(1, 4), Layout(1, 5), Layout(2, 2)]
SPLIT = [
    Layout(1, 1, 2),
    Layout(2, 1, 2),
    Layout(1, 2, 2),
    Layout(1, 1, 1, 2),
    Layout(2, 1, 1, 2),
    Layout(1, 2, 1, 2),
]


@dataclass(frozen=True)
class Case:
    """A model and a training loop, drawn from a seed.

    layout       of a Llama; whole replicas of a RandomModel where a replica is one worker
    trained      layer -> (first, last): trained in steps first <= step < last, otherwise frozen
    leave_out    (step, micro-batch, layer): this layer does not take part there
    group        train through ReplicaGroup with counts, not through Replica
    calls_model  call the model itself, not the replica
    after_step   between two steps .grad is "kept", set to "none" or "zeros", or "replaced" by
                 another tensor; or the values are "moved" to other memory, row by row
    """

    seed: int
    layout: Layout
    micro_batches: int
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    width: int = 4
    checkpointed: tuple[int, ...] = ()
    tied: bool = True
    steps: int = 2
    trained: dict[int, tuple[int, int]] = field(default_factory=dict)
    frozen_embedding: bool = False
    frozen_biases: bool = False
    leave_out: tuple[int, int, int] | None = None
    autocast: bool = False
    group: bool = False
    scale: float = 0.0
    calls_model: bool = False
    after_step: str = "kept"
    bucket_bytes: int = 25_000_000
    once_per_step: bool = False
    prefetch_units: int = 1
    reshard: bool = True

    @property
    def workers(self) -> int:
        return self.layout.workers

    @property
    def is_split(self) -> bool:
        """True: several workers compute one micro-batch together, by other additions than one."""
        return self.layout.tensor * self.layout.pipeline > 1

    @property
    def one_tree(self) -> bool:
        """True: the sum is promised to have the bits of one process in the same dtype."""
        return not self.is_split


def draw(seed: int) -> Case:
    """Return the case of `seed`: one in five is a Llama on a random layout."""
    random = Random(seed)
    return draw_llama(seed, random) if random.random() < 0.2 else draw_model(seed, random)


def draw_model(seed: int, random: Random) -> Case:
    count, steps, k = random.randint(1, 6), random.randint(2, 3), random.randint(1, 12)
    kinds = [random.choice(list(KINDS))]
    kinds += random.choices([*KINDS, "again", "again"], k=count - 1)
    dtypes = (
        random.choices(list(DTYPES), k=count)
        if random.random() < 0.15
        else [random.choice(["float32", "float32", *DTYPES])] * count
    )
    dtypes = [
        "float32" if kind in NO_BFLOAT16 and dtype == "bfloat16" else dtype
        for kind, dtype in zip(kinds, dtypes, strict=True)
    ]
    tied, freezes, group = random.random() < 0.5, random.random() < 0.4, random.random() < 0.2
    trained = {
        i: random.choice([(0, 0), (1, 3), (0, 1), (0, 2), (2, 3)])
        for i in range(count)
        if freezes and random.random() < 0.5
    }
    leaves_out = random.random() < 0.07
    return Case(
        seed,
        Layout(random.randint(1, min(5, k))),
        k,
        tuple(dtypes),
        kinds=tuple(kinds),
        width=random.choice([4, 6, 8]),
        checkpointed=tuple(i for i in range(count) if random.random() < 0.2),
        tied=tied,
        steps=steps,
        trained=trained,
        frozen_embedding=freezes and not tied and random.random() < 0.3,
        frozen_biases=random.random() < 0.1,
        leave_out=(random.randrange(steps), random.randrange(k), random.randrange(count))
        if leaves_out
        else None,
        autocast="float32" in dtypes and random.random() < 0.25,
        group=group,
        scale=2.0 ** random.randint(0, 16) if not group and random.random() < 0.15 else 0.0,
        after_step=random.choice(["kept", "none", "zeros", "replaced", "moved"]),
        bucket_bytes=int(10 ** random.uniform(0, 9)),
        calls_model=random.random() < 0.3,
    )


def draw_llama(seed: int, random: Random) -> Case:
    split = random.random() < 0.4
    layout, layers = random.choice(SPLIT if split else SHARDED), random.randint(2, 3)
    frozen = random.random() < 0.3
    return Case(
        seed,
        layout,
        random.randint(layout.data_parallel_size, 12),
        ("float64" if split else random.choice(["float32", "float64", "bfloat16"]),),
        kinds=("llama",) * layers,
        width=random.choice([8, 16]),
        checkpointed=tuple(range(layers)) if random.random() < 0.3 else (),
        tied=random.random() < 0.5,
        trained={0: (0, 0)} if frozen else {},
        leave_out=(1, layout.data_parallel_size - 1, 1)
        if not split and random.random() < 0.07
        else None,
        autocast=not split and random.random() < 0.3,
        once_per_step=layout.shard > 1 and random.random() < 0.4,
        prefetch_units=random.randint(0, 2),
        reshard=random.random() < 0.5,
    )


def llama_of(case: Case) -> nn.Module:
    """Build the Llama of the case on the meta device."""
    config = llama.LlamaConfig(
        31,
        case.width,
        len(case.kinds),
        4,
        2,
        4,
        3 * case.width,
        64,
        10_000.0,
        tie_embeddings=case.tied,
    )
    with torch.device("meta"):
        return llama.Llama(config).to(DTYPES[case.dtypes[0]])


def llama_value(case: Case, name: str, size: torch.Size) -> torch.Tensor:
    return llama.init_param(name, size, len(case.kinds), case.seed).to(DTYPES[case.dtypes[0]])


def build_model(case: Case) -> nn.Module:
    """Build the whole model of the case."""
    if case.kinds[0] == "llama":
        return materialize(llama_of(case), CPU, lambda name, size: llama_value(case, name, size))
    dtypes = [DTYPES[name] for name in case.dtypes]
    return RandomModel(
        list(case.kinds),
        dtypes,
        case.width,
        checkpointed=list(case.checkpointed),
        tied=case.tied,
        seed=case.seed,
    )


def freeze(case: Case, model: nn.Module, step: int) -> None:
    """Set requires_grad of all parameters as `step` trains them."""
    model.requires_grad_(True)
    if case.frozen_embedding:
        model.get_submodule("embedding").requires_grad_(False)
    for layer, (first, last) in case.trained.items():
        model.get_submodule(f"layers.{layer}").requires_grad_(first <= step < last)
    for name, p in model.named_parameters():
        if case.frozen_biases and name.startswith("layers.") and name.endswith("bias"):
            p.requires_grad_(False)
