"""DiLoCo's learners in shards: the sha256 and the metrics of one worker, in each layout."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_ranks

from lockstep.checkpoint.commands import digest_line
from lockstep.config.saved_run import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.metrics import read_metrics

Values = dict[str, Any]
H, STEPS = 2, 4
# Three micro-batches for each of three learners: neither is a power of two.
SMALL: Values = {
    **{
        "batch.micro_batches": 9,
        "compute.precision": "fp32",
        "checkpoint.every_steps": H,
        "evaluate.at_end": 0,
        "parallel.bucket_bytes": 30_000,
    },
    **{
        "optim.warmup_steps": 2,
        "optim.decay_steps": STEPS,
        "optim.clip_norm": 0.5,
        "diloco.learners": 3,
        "diloco.every": H,
    },
}
TRANSLATOR = SMALL | {
    **{
        "data.pairs": 1500,
        "data.held_out": 50,
        "batch.tokens": 128,
        "batch.buckets": 3,
        "tokenizer.vocab_size": 300,
    },
    **{"model.dim": 32, "model.encoder_layers": 1, "model.decoder_layers": 1, "model.ffn_dim": 64},
}
LLAMA = SMALL | {
    **{
        "task": "pretrain",
        "data.kind": "text",
        "data.held_out_share": 0.1,
        "tokenizer.vocab_size": 330,
        "llama.size": "1M",
    },
    **{"batch.tokens": 64, "batch.seq_len": 32, "compute.precision": "bf16"},
    **{"optim.ema_decay": 0.9, "evaluate.every_steps": H},
}
SHARDS = {"layout.shard": 2}


def trained(runtime: ElasticRuntime, folder: str, values: Values) -> None:
    path = Path(folder)
    resolved = open_run(path, None, {key: str(value) for key, value in values.items()}, {})
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    train(resolved, path, runtime)


def error_of(runtime: ElasticRuntime, folder: str, values: Values) -> str:
    try:
        trained(runtime, folder, values)
    except DivergedError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def truth_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Values, Path]]:
    """Return the values of each kind of run, and its folder after a run of one worker."""
    folder = tmp_path_factory.mktemp("alone")
    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(
            f"the {i} cats saw {i * i} dogs, and ran over {i % 7} houses" for i in range(600)
        )
    )
    llama = LLAMA | {"data.train": str(text)}
    kinds = {
        **{
            "translator": TRANSLATOR,
            "int8": TRANSLATOR | {"parallel.wire": "int8", "memory.optimizer_state": "bf16"},
            "llama": llama,
        },
        **{
            "adapters": llama
            | {"lora.rank": 4, "lora.alpha": 64, "llama.init_from": str(folder / "llama")}
        },
    }

    def truth(kind: str) -> tuple[Values, Path]:
        if kind == "adapters":
            truth("llama")
        if not (folder / kind).exists():
            run_ranks(trained, 1, str(folder / kind), kinds[kind] | {"steps": STEPS})
        return kinds[kind], folder / kind

    return truth


def new_folder(alone: Path, folder: Path) -> Path:
    """Return a folder with the prepared data of `alone`."""
    for part in (alone / "data", alone / "tokenizer"):
        if part.exists():
            shutil.copytree(part, folder / part.name)
    return folder


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        pytest.param("translator", (2, SHARDS), (4, SHARDS), marks=pytest.mark.long),
        pytest.param(
            "translator", (3, {"layout.shard": 3}), (2, {"layout.shard": 1}), marks=pytest.mark.long
        ),
        pytest.param("int8", (2, SHARDS), (4, SHARDS), marks=pytest.mark.long),
        (
            "llama",
            (2, SHARDS | {"fsdp.reduce": "per_step"}),
            (4, SHARDS | {"fsdp.reshard_after_forward": False}),
        ),
        pytest.param("adapters", (1, {}), (4, SHARDS), marks=pytest.mark.long),
    ],
)
def test_each_layout_has_the_hash_and_the_metrics_of_one_worker(
    truth_of: Callable[[str], tuple[Values, Path]],
    tmp_path: Path,
    kind: str,
    first: tuple[int, Values],
    then: tuple[int, Values],
) -> None:
    """Train in two layouts, one after the other."""
    values, alone = truth_of(kind)
    folder = new_folder(alone, tmp_path)
    for steps, (workers, layout) in ((H, first), (STEPS, then)):
        run_ranks(trained, workers, str(folder), values | layout | {"steps": steps})
    assert digest_line(folder) == digest_line(alone)
    one, other = (
        [
            (line["loss"], line.get("norm"), line["tokens"])
            for line in read_metrics(f / "metrics.jsonl")
        ]
        for f in (alone, folder)
    )
    assert one == other and len(one) == STEPS


def test_a_loss_that_is_not_finite_names_learner_and_step(
    truth_of: Callable[[str], tuple[Values, Path]], tmp_path: Path
) -> None:
    values, alone = truth_of("translator")
    values = (
        values
        | SHARDS
        | {
            "optim.learning_rate": 1e30,
            "optim.clip_norm": 0,
            "optim.warmup_steps": 0,
            "steps": STEPS,
        }
    )
    errors = run_ranks(error_of, 4, str(new_folder(alone, tmp_path)), values)
    assert (
        len(set(errors)) == 1
        and "loss not finite: learner 0 at step 2, learner 1 at step 2, learner 2 at step 2"
        in errors[0]
    )
    assert not (tmp_path / "checkpoints").exists() or not list(
        (tmp_path / "checkpoints").glob("step-*")
    )
