"""DiLoCo: one sha256 for every number of processes, equal to a plain loop with torch's optimizers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.saved_run import open_run
from lockstep.config.schema import ResolvedRun
from lockstep.corpus.encoded_pairs import open_prepared
from lockstep.corpus.loaders import PairLoader
from lockstep.data.order import splitmix64
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError
from lockstep.models.translator import build_translator
from lockstep.parallel.grad_norm import sum_of_squares
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.metrics import read_metrics
from lockstep.runtime.numerics import seed_generators
from lockstep.tasks.translation import make_order

M, H, STEPS = 4, 3, 6
FLAGS = {
    **{
        "data.pairs": "1500",
        "data.held_out": "50",
        "batch.micro_batches": "4",
        "batch.tokens": "128",
        "batch.buckets": "3",
    },
    **{
        "model.dim": "32",
        "model.encoder_layers": "1",
        "model.decoder_layers": "1",
        "model.ffn_dim": "64",
    },
    **{
        "compute.precision": "fp32",
        "checkpoint.every_steps": str(H),
        "evaluate.at_end": "0",
        "optim.warmup_steps": "4",
    },
    **{
        "diloco.learners": str(M),
        "diloco.every": str(H),
        "diloco.outer_momentum": "0.5",
        "steps": str(STEPS),
    },
}


def resolved_run(folder: Path, values: dict[str, str]) -> ResolvedRun:
    return open_run(folder, None, FLAGS | values, {})


def trained(runtime: ElasticRuntime, folder: str, values: dict[str, str]) -> str:
    """Train in `folder`; return the digest on rank 0, or the error."""
    path = Path(folder)
    resolved = resolved_run(path, values)
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    try:
        train(resolved, path, runtime)
    except DivergedError as error:
        return str(error)
    return digest_line(path) if runtime.world.leader else ""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(trained, 1, str(folder), {})
    return folder


def new_folder(alone: Path, folder: Path) -> Path:
    """Return a folder with the prepared corpus of `alone`."""
    shutil.copytree(alone / "data", folder / "data")
    return folder


@pytest.mark.long
def test_one_hash_on_any_number_of_processes_and_after_a_resume(
    alone: Path, tmp_path: Path
) -> None:
    lines = read_metrics(alone / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for size, then in ((2, 4), (3, 2)):
        folder = new_folder(alone, tmp_path / f"{size}")
        run_ranks(trained, size, str(folder), {"steps": str(H), "optim.decay_steps": str(STEPS)})
        run_ranks(trained, then, str(folder), {})
        assert digest_line(folder) == digest_line(alone)
        same = [
            (line["loss"], line.get("norm"), line["tokens"])
            for line in read_metrics(folder / "metrics.jsonl")
        ]
        assert same == [(line["loss"], line.get("norm"), line["tokens"]) for line in lines]


def reference(folder: Path, values: dict[str, str]) -> dict[str, torch.Tensor]:
    """Train as Douillard et al., 2023, write it, with a new inner AdamW in each outer step, whose second
    moments start from the mean squares of the rows of its first gradient."""
    run = resolved_run(folder, values).run
    corpus, optim, k_each = open_prepared(folder / "data"), run.optim, run.batch.micro_batches // M
    loader = PairLoader(corpus.train, make_order(run, corpus), torch.device("cpu"))
    length = loader.order.shapes[-1].length
    model = build_translator(
        run.model,
        vocab_size=corpus.tokenizer.vocab_size,
        device=loader.device,
        seed=run.seed,
        length=length,
    )
    parameters = list(model.parameters())
    outer = torch.optim.SGD(
        parameters,
        lr=run.diloco.outer_learning_rate,
        momentum=run.diloco.outer_momentum,
        nesterov=True,
    )
    growth = sum(1 - optim.beta1 ** (t + 1) for t in range(H)) / H
    for step in range(0, STEPS, H):
        start, changes = [p.detach().clone() for p in parameters], []
        for m in range(M):
            groups = [
                {"params": [p for p in parameters if (p.dim() > 1) is decays]}
                for decays in (True, False)
            ]
            groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
            inner = torch.optim.AdamW(
                groups,
                betas=(optim.beta1, optim.beta2),
                eps=optim.epsilon,
                weight_decay=optim.weight_decay,
            )
            for s in range(step, step + H):
                inner.zero_grad()
                for k in range(m * k_each, (m + 1) * k_each):
                    batch = loader.micro_batch(s, k)
                    seed_generators(splitmix64(run.seed, s, k) >> 1, loader.device)
                    model(
                        batch.source, batch.target, batch.labels, smoothing=optim.label_smoothing
                    ).backward()
                tokens = sum(
                    int(loader.pairs.lengths[loader.order.ids(s, k), 1].sum())
                    for k in range(m * k_each, (m + 1) * k_each)
                )
                for p in parameters:
                    p.grad /= tokens
                if optim.clip_norm:
                    torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
                if s == step > 0:
                    norm = sum_of_squares([p.grad for p in parameters]).sqrt().float()
                    least = norm.square() / sum(p.numel() for p in parameters)
                    for p in parameters:
                        rows = p.grad.reshape(len(p), -1)
                        squares = torch.linalg.vector_norm(rows, dim=1).square() * (
                            1 / rows.shape[1]
                        )
                        square = (
                            squares.clamp(min=least)
                            .reshape(-1, *[1] * (p.dim() - 1))
                            .expand_as(p)
                            .clone()
                        )
                        inner.state[p] = {
                            "step": torch.tensor(1e6),
                            "exp_avg": torch.zeros_like(p),
                            "exp_avg_sq": square,
                        }
                for group in inner.param_groups:
                    rise, fall = (
                        (s + 1) / optim.warmup_steps,
                        (STEPS - s) / (STEPS + 1 - optim.warmup_steps),
                    )
                    group["lr"] = optim.learning_rate * (
                        rise if s + 1 < optim.warmup_steps else fall
                    )
                    if step:
                        group["lr"] /= growth
                inner.step()
            changes.append([a - p.detach() for a, p in zip(start, parameters, strict=True)])
            for p, a in zip(parameters, start, strict=True):
                p.data.copy_(a)
        for p, *change in zip(parameters, *changes, strict=True):
            p.grad = ((change[0] + change[1]) + (change[2] + change[3])) / M
        outer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_equal_to_a_plain_loop(alone: Path, tmp_path: Path, micro_batches: int) -> None:
    folder, values = new_folder(alone, tmp_path), {"batch.micro_batches": str(micro_batches)}
    values |= (
        {"optim.clip_norm": "0"} if micro_batches == M else {"optim.epsilon": "1e-4"}
    )  # which makes AdamW less sensitive
    run_ranks(trained, 2, str(folder), values)
    checkpoint = CheckpointStore(folder / "checkpoints").load(STEPS)
    for name, expected in reference(folder, values).items():
        value = checkpoint.tensors[f"model.{name}"]
        if micro_batches == M:
            assert torch.equal(value, expected), name
        else:
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_that_is_not_finite_names_learner_and_step(alone: Path, tmp_path: Path) -> None:
    folder = new_folder(alone, tmp_path)
    errors = run_ranks(
        trained,
        2,
        str(folder),
        {"optim.learning_rate": "1e30", "optim.clip_norm": "0", "optim.warmup_steps": "0"},
    )
    assert (
        errors[0] == errors[1]
        and "loss not finite: learner 0 at step 2, learner 1 at step 2, " in errors[0]
    )
    assert not (folder / "checkpoints").exists() or not list(
        (folder / "checkpoints").glob("step-*")
    )


@pytest.mark.long
def test_one_learner_with_plain_averaging_trains_as_a_plain_run_of_one_step(
    alone: Path, tmp_path: Path
) -> None:
    """M = 1, H = 1, outer learning rate 1, no momentum: the update of AdamW without its state."""
    folder = new_folder(alone, tmp_path)
    one = {
        "diloco.learners": "1",
        "diloco.every": "1",
        "diloco.outer_learning_rate": "1",
        "diloco.outer_momentum": "0",
        "steps": "1",
    }
    run_ranks(trained, 1, str(folder), one | {"optim.decay_steps": "6"})
    plain = new_folder(alone, tmp_path / "plain")
    off = {
        key: str(value)
        for key, value in (
            ("diloco.learners", 0),
            ("diloco.every", 50),
            ("diloco.outer_momentum", 0),
        )
    }
    run_ranks(
        trained,
        1,
        str(plain),
        off | {"steps": "1", "optim.decay_steps": "6", "checkpoint.every_steps": "1"},
    )
    states = [CheckpointStore(path / "checkpoints").load(1).tensors for path in (folder, plain)]
    for name in (name for name in states[0] if name.startswith("model.")):
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-5, atol=1e-6)
    assert math.isclose(
        *(json.loads((path / "metrics.jsonl").read_text())["loss"] for path in (folder, plain)),
        rel_tol=1e-6,
    )
