"""session.gather, lockstep.Best and lockstep.EarlyStopping: the same scores, best weights and last step
on any number of workers, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fork_loop import LoopResult, run_loop

from lockstep.checkpoint.commands import best_step, digest_line, export
from lockstep.checkpoint.folder import committed_steps
from lockstep.record.metrics import iter_steps

LOOP = Path(__file__).parents[1] / "support" / "loops" / "scored.py"


def train(folder: Path, workers: int, **flags: Any) -> None:
    result = run_loop(LOOP, folder, workers, **flags)
    assert result == LoopResult(0, ""), result.text


def outcome(folder: Path) -> tuple[list[int], int, str, str]:
    """Return the checkpoints, the best step, and digests of the last and the best weights."""
    best = best_step(folder)
    export(folder, best, folder / "best.safetensors")
    steps = committed_steps(folder / "checkpoints")
    return steps[-1:], best, digest_line(folder), digest_line(folder, best)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1)
    return folder


def test_scores_vary_and_the_loop_stops_early(alone: Path) -> None:
    scores = [line["f1"] for line in iter_steps(alone / "metrics.jsonl") if "f1" in line]
    assert len(set(scores)) > 3, "the scores of this loop change"
    assert 6 < committed_steps(alone / "checkpoints")[-1] < 60
    assert best_step(alone) in committed_steps(alone / "checkpoints"), "kept beside the newest"


@pytest.mark.parametrize(
    ("workers", "shard"), [pytest.param(2, 1, marks=pytest.mark.long), (3, 1), (2, 2)]
)
def test_other_workers_end_in_the_same_step_with_the_same_best_weights(
    alone: Path, tmp_path: Path, workers: int, shard: int
) -> None:
    train(tmp_path, workers, shard=shard)
    assert outcome(tmp_path) == outcome(alone)


def test_killed_and_resumed_with_other_workers(alone: Path, tmp_path: Path) -> None:
    last = committed_steps(alone / "checkpoints")[-1]
    assert run_loop(LOOP, tmp_path, 3, kill_in=last - 2).code, "it was killed"
    assert committed_steps(tmp_path / "checkpoints")[-1] < last
    train(tmp_path, 2)
    assert outcome(tmp_path) == outcome(alone)
    train(tmp_path, 1)
    assert outcome(tmp_path) == outcome(alone), "a run that has stopped trains no more step"
    train(tmp_path, 1, patience=50)
    assert committed_steps(tmp_path / "checkpoints")[-1] > last, "a higher patience continues it"


GATHERED = """
import torch, lockstep

def results(x):
    return {
        "row": x * 2,
        "half": x[:, 0].bfloat16(),
        "texts": [f"{value:.0f}" for value in x[:, 0].tolist()],
        "pair": (x.sum(1) > 3, x.numpy()),
    }

def train(out: str, wrong: str = ""):
    data = torch.arange(22.0).view(11, 2)
    dataset = torch.utils.data.TensorDataset(data)
    model = torch.nn.Linear(2, 1)
    functions = {
        "one number": lambda batch: batch[0].mean(),
        "other rows": lambda batch: batch[0][1:],
        "an object": lambda batch: [object() for _ in batch[0]],
        "other widths": lambda batch: torch.ones(len(batch[0]), int(batch[0][0, 0])),
    }
    with lockstep.Session(out, micro_batches=3) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        function = functions.get(wrong, lambda batch: results(batch[0]))
        gathered = session.gather(function, dataset, batch_size=4)
        assert torch.equal(gathered["row"], data * 2)
        assert torch.equal(gathered["half"], data[:, 0].bfloat16())
        assert gathered["texts"] == [f"{2 * i}" for i in range(11)]
        assert torch.equal(gathered["pair"][0], data.sum(1) > 3)
        assert (gathered["pair"][1] == data.numpy()).all()
"""


@pytest.fixture
def gathered(tmp_path: Path) -> Path:
    (tmp_path / "gathered.py").write_text(GATHERED)
    return tmp_path / "gathered.py"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_workers_get_the_results_of_all_samples_in_order(
    gathered: Path, tmp_path: Path, workers: int
) -> None:
    assert run_loop(gathered, tmp_path / "run", workers) == LoopResult(0, "")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("one number", "the function returns Tensor for a batch of 4 samples"),
        ("other rows", "the function returns 3 results for a batch of 4 samples"),
        ("an object", "results cannot be sent: results.0 is a object"),
        ("other widths", "the results of the batches have other shapes"),
    ],
)
def test_results_that_are_not_of_samples_are_refused(
    gathered: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    result = run_loop(gathered, tmp_path / "run", 1, wrong=wrong)
    assert result.code == 2 and message in result.text, result.text


UNEQUAL = """
import torch, lockstep

def train(out: str):
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    best = lockstep.Best()
    with lockstep.Session(out, micro_batches=2) as session:
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.state(best=best)
        loader = session.loader(data, batch_size=8)
        for step in session.steps(6):
            for (x,) in loader(step):
                session.backward(model(x).square().mean())
            optimizer.step()
            best.update(step, float(session.world.rank))
"""


def test_scores_that_differ_between_workers_are_refused_on_all(tmp_path: Path) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    result = run_loop(tmp_path / "unequal.py", tmp_path / "run", 2, timeout_s=60)
    assert result.code == 2 and "the scores differ between the workers: rank 0: " in result.text
