"""The races as values: contestants, the run they train, and the claims.

A race is interleaved: each repetition starts every contestant once, one after the other, so that a slow minute of the machine slows all
of them. Ratios are taken within a repetition; the median of the repetitions counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
MULTI30K = HERE.parents[2] / "shared" / "data" / "multi30k"
LOCKSTEP = "lockstep train"

Flags = dict[str, str]
Unit = Literal["pairs a second", "tokens a second", "step time"]


@dataclass(frozen=True)
class Contestant:
    """script: a file of this folder, or the command `lockstep train` itself; steps 0: those of the race."""

    name: str
    script: str
    flags: Flags = field(default_factory=dict)
    steps: int = 0
    warmup: int = 0


@dataclass(frozen=True)
class Claim:
    """`ours` over `theirs` in `unit` is at least (rates) or at most (step time) `bound`."""

    ours: str
    theirs: str
    unit: Unit
    bound: float
    goal: float = 0.0

    def met(self, ratio: float) -> bool:
        return ratio <= self.bound if self.unit == "step time" else ratio >= self.bound


@dataclass(frozen=True)
class Race:
    name: str
    flags: Flags
    contestants: tuple[Contestant, ...]
    claims: tuple[Claim, ...]
    steps: int
    repetitions: int
    file: Path | None = None
    environ: dict[str, str] = field(default_factory=dict)  # of all contestants
    warmup: int = 3  # steps at each start that do not count


def real_text() -> Flags:
    """Return the values for Multi30k if it is on this machine, else none, which means the embedded corpus."""
    if not MULTI30K.is_dir():
        return {}
    files = {
        split: ",".join(str(MULTI30K / f"{name}.{side}.gz") for side in ("en", "de"))
        for split, name in SPLITS.items()
    }
    return {
        "data.kind": "files",
        "data.target": "de",
        **{f"data.{split}": paths for split, paths in files.items()},
    }


# How Lockstep's launcher sets glibc's allocator in its workers: memory that was freed stays mapped. Given to both sides where only
# the loops are compared; elsewhere each contestant has what its own launcher gives it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
SPLITS = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
BASE = {
    "model.dim": "512",
    "model.n_heads": "8",
    "model.ffn_dim": "2048",
}  # 3 + 3 layers: 26 M parameters


def races(*, full: bool, precision: str) -> list[Race]:
    """All races, small or full.

    precision  of Lockstep, the bare loop, Accelerate and Fabric alike; the tutorial's is fp32 by its nature
    """
    common = {
        "compute.precision": precision,
        "checkpoint.every_steps": "0",
        "evaluate.at_end": "0",
        "data.pairs": "30000",
    }
    found = [tutorial(full, common)]
    for size, model in (("default", {}), ("base", BASE)):
        for each in (1, 4):
            found.append(
                against_bare(
                    f"bare-{size}-{each}",
                    common | model | {"batch.micro_batches": str(2 * each)},
                    full,
                )
            )
    for size, model in (("default", {}), ("base", BASE)):
        found.append(against_others(f"others-{size}", common | model, full))
    return found


def tutorial(full: bool, common: Flags) -> Race:
    """(i) The tutorial's own loop against `lockstep train` with the same model size and corpus."""
    return Race(
        "tutorial",
        common | real_text(),
        (
            Contestant("tutorial", "tutorial.py", steps=5 if full else 2, warmup=1),
            Contestant("lockstep", LOCKSTEP),
        ),
        (Claim("lockstep", "tutorial", "pairs a second", bound=100, goal=150),),
        steps=23 if full else 8,
        repetitions=3 if full else 1,
        file=HERE / "wide.toml",
    )


def against_bare(name: str, flags: Flags, full: bool) -> Race:
    """(ii) `lockstep train` against a bare DDP loop over the same model and micro-batches."""
    return Race(
        name,
        flags | ({} if full else {"batch.tokens": "1024"}),
        (
            Contestant("bare DDP", "bare_ddp.py"),
            Contestant("lockstep", LOCKSTEP),
        ),
        (Claim("lockstep", "bare DDP", "step time", bound=1.08),),
        steps=23 if full else 15,
        repetitions=5 if full else 2,
        environ=ALLOCATOR,
    )


def against_others(name: str, flags: Flags, full: bool) -> Race:
    """(iii) `lockstep train` against Accelerate and Fabric: same model, token budget, optimizer and precision."""
    like = {"optim.fused": "true", "batch.buckets": "24", "batch.micro_batches": "4"}
    return Race(
        name,
        flags | real_text() | like | ({} if full else {"batch.tokens": "1024"}),
        (
            Contestant("accelerate", "with_accelerate.py"),
            Contestant("fabric", "with_fabric.py"),
            Contestant("lockstep", LOCKSTEP),
        ),
        (
            Claim("lockstep", "accelerate", "tokens a second", bound=1.0),
            Claim("lockstep", "fabric", "tokens a second", bound=1.0),
        ),
        steps=43 if full else 15,
        repetitions=5 if full else 2,
    )
