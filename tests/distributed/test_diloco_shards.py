"""DiLoCo's learners in shards: the sha256 and the metrics of one worker, in each layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks

from lockstep.checkpoint.commands import digest_line
from lockstep.cli.start import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.record.metrics import read_metrics
from lockstep.train import train
from lockstep.training.setup import lock_run_folder

Values = dict[str, Any]
H, STEPS = 2, 4
# Three micro-batches for each of three learners: neither is a power of two.
SMALL: Values = {
    **{"batch.micro_batches": 9, "compute.precision": "fp32", "checkpoint.every_steps": H, "parallel.bucket_bytes": 30_000},
    **{"optim.warmup_steps": 2, "optim.decay_steps": STEPS, "optim.clip_norm": 0.5, "diloco.learners": 3, "diloco.every": H},
}
TRANSLATOR = SMALL | {
    **{"data.pairs": 1500, "data.held_out": 50, "batch.tokens": 128, "batch.buckets": 3, "tokenizer.vocab_size": 300},
    **{"model.dim": 32, "model.encoder_layers": 1, "model.decoder_layers": 1, "model.ffn_dim": 64},
}
LLAMA = SMALL | {
    **{"task": "pretrain", "data.kind": "text", "data.held_out_share": 0.1, "tokenizer.vocab_size": 330, "llama.size": "1M"},
    **{"batch.tokens": 64, "batch.seq_len": 32, "compute.precision": "bf16"},
}
SHARDS = {"layout.shard": 2}


def trained(runtime: ElasticRuntime, folder: str, values: Values) -> None:
    path = Path(folder)
    resolved = open_run(path, None, {key: str(value) for key, value in values.items()}, {})
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    train(resolved, path, runtime)


@pytest.fixture(scope="module")
def values_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Values]:
    """Return the values of each kind of run."""
    text = tmp_path_factory.mktemp("corpus") / "text.txt"
    text.write_text("\n\n".join(f"the {i} cats saw {i * i} dogs, and ran over {i % 7} houses" for i in range(600)))
    llama, base = LLAMA | {"data.train": str(text)}, text.parent / "base"

    def values(kind: str) -> Values:
        if kind == "adapters" and not base.exists():
            run_ranks(trained, 1, str(base), llama | {"steps": H})
        adapters = {"lora.rank": 4, "lora.alpha": 64, "llama.init_from": str(base)}
        kinds = {"translator": TRANSLATOR, "int8": TRANSLATOR | {"parallel.wire": "int8"}, "llama": llama, "adapters": llama | adapters}
        return kinds[kind]

    return values


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("translator", (2, SHARDS), (4, SHARDS)),
        ("translator", (3, {"layout.shard": 3}), (2, {"layout.shard": 1})),
        ("int8", (2, SHARDS), (4, SHARDS)),
        ("llama", (2, SHARDS | {"fsdp.reduce": "per_step"}), (4, SHARDS | {"fsdp.reshard_after_forward": False})),
        ("adapters", (1, {}), (4, SHARDS)),
    ],
)
def test_each_layout_has_the_hash_and_the_metrics_of_one_worker(
    values_of: Callable[[str], Values], tmp_path: Path, kind: str, first: tuple[int, Values], then: tuple[int, Values]
) -> None:
    """Train in two layouts, one after the other."""
    values, alone, folder = values_of(kind), tmp_path / "alone", tmp_path / "run"
    run_ranks(trained, 1, str(alone), values | {"steps": STEPS})
    for part in (alone / "data", alone / "tokenizer"):
        if part.exists():
            shutil.copytree(part, folder / part.name)
    for steps, (workers, layout) in ((H, first), (STEPS, then)):
        run_ranks(trained, workers, str(folder), values | layout | {"steps": steps})
    assert digest_line(folder) == digest_line(alone)
    (one, *_), other = lines = [
        [(line["loss"], line["norm"], line["tokens"]) for line in read_metrics(path / "metrics.jsonl")] for path in (alone, folder)
    ]
    assert lines[0] == other and one[0] > 0
