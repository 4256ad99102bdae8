"""Session in one process: what it trains, saves, loads, records and refuses."""

from __future__ import annotations

import copy
import logging
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from lockstep.checkpoint.commands import digest_line
from lockstep.errors import CheckpointError, UsageError
from lockstep.record import metrics
from lockstep.session import Session
from lockstep.training.loader import keys_from, to_device

INPUTS = torch.rand(50, 4, generator=torch.Generator().manual_seed(1))


class Noisy(Dataset[Tensor]):
    """Rows with noise that is drawn for each sample anew, and how often each was fetched in this process."""

    def __init__(self) -> None:
        self.fetched = 0

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, i: int) -> Tensor:
        self.fetched += 1
        return INPUTS[i] + 0.1 * torch.randn(4)


def train(out: Path, steps: int, *, num_workers: int = 0, dataset: Any = None, **options: Any) -> Session:
    """A run of a small model with dropout; the session, after it was closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Session(out, **({"micro_batches": 4, "save_every": 2} | options)) as session:
        prepared, _ = session.prepare(model, optimizer)
        loader = session.loader(dataset or Noisy(), batch_size=8, num_workers=num_workers)
        for step in session.steps(steps):
            for rows in loader(step):
                session.backward(prepared(rows).square().mean())
            session.log(step, norm=session.clip_grad_norm_(10.0))
            optimizer.step()
    return session


def test_a_resumed_run_ends_with_the_bits_and_lines_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "resumed", 3)
    resumed = train(tmp_path / "resumed", 6)
    assert digest_line(tmp_path / "whole") == digest_line(tmp_path / "resumed") and whole.loss == resumed.loss
    one, other = (
        [(line["step"], line["loss"], line["norm"]) for line in metrics.read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "resumed")
    )
    assert one == other and [step for step, _, _ in one] == [1, 2, 3, 4, 5, 6]


def test_loading_processes_give_the_same_bits_and_fetch_nothing_here_but_the_rehearsal(tmp_path: Path) -> None:
    dataset = Noisy()
    train(tmp_path / "processes", 3, num_workers=2, dataset=dataset)
    assert dataset.fetched == 2, "micro-batch 0 of the first step, once more"
    train(tmp_path / "here", 3)
    assert digest_line(tmp_path / "processes") == digest_line(tmp_path / "here")


def test_the_gradient_is_the_mean_over_the_samples_of_the_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    expected = torch.autograd.grad(model(INPUTS[:40]).square().mean(), [*model.parameters()])
    with Session(tmp_path, micro_batches=5) as session:
        prepared, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(TensorDataset(INPUTS[:40]), batch_size=40)
        for step in session.steps(1):
            for (rows,) in loader(step):
                session.backward(prepared(rows).square().mean())
            assert all(torch.allclose(p.grad, wanted) for p, wanted in zip(model.parameters(), expected, strict=True) if p.grad is not None)
    assert session.loss == pytest.approx(model(INPUTS[:40]).square().mean().item(), rel=1e-6)


def test_state_is_saved_and_restored(tmp_path: Path) -> None:
    for steps in (2, 5):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with Session(tmp_path, micro_batches=2) as session:
            prepared, _ = session.prepare(model, optimizer)
            session.state(scheduler=scheduler)
            loader = session.loader(Noisy(), batch_size=4)
            for step in session.steps(steps):
                for rows in loader(step):
                    session.backward(prepared(rows).mean())
                optimizer.step()
                scheduler.step()
            with pytest.raises(UsageError, match=r"session\.state after session\.steps"):
                session.state(other=scheduler)
        assert optimizer.param_groups[0]["lr"] == 0.5**steps


def test_an_evaluation_is_the_mean_over_the_samples_and_leaves_no_trace(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    rows = INPUTS.sum(1)
    with Session(tmp_path / "one", micro_batches=2) as session:
        prepared, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.step = 3
        draws = []
        for batch_size in (7, 50):
            found = session.evaluate(lambda batch: batch[0].sum(1).mean(), TensorDataset(INPUTS), batch_size=batch_size)
            assert found == pytest.approx(float(rows.mean()))
            draws.append(torch.rand(2))
        assert draws[0].equal(draws[1]), "equal on all workers, whatever each evaluated"
        named = session.evaluate(lambda batch: {"a": prepared(batch[0]).mean(), "b": torch.is_grad_enabled()}, TensorDataset(INPUTS))
        assert set(named) == {"a", "b"} and named["b"] == 0.0 and model.training
        model.eval()
        assert named["a"] == pytest.approx(model(INPUTS).mean().item(), rel=1e-6), "without dropout"


def test_a_prepared_model_is_called_like_its_module_and_copied_without_the_session(tmp_path: Path) -> None:
    with Session(tmp_path, micro_batches=1) as session:
        module = nn.Linear(4, 1)
        prepared, optimizer = session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        assert prepared.module is module and prepared.in_features == 4 and isinstance(optimizer, torch.optim.SGD)
        assert prepared(INPUTS).equal(module(INPUTS)), "outside of the loop it is the module alone"
        assert type(copy.deepcopy(prepared)) is nn.Linear
        assert not hasattr(prepared, "absent")


def refused(words: str) -> Any:
    return pytest.raises(UsageError, match=words)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    with pytest.raises(UsageError, match=r"session\.world is not there yet"):
        _ = Session(tmp_path, micro_batches=2).world
    with Session(tmp_path, micro_batches=4) as session:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with refused("batch_size=6 with micro_batches=4 and 50 samples"):
            session.loader(Noisy(), batch_size=6)
        with refused("Endless has no length or no index"):
            session.loader(Endless(), batch_size=4)
        with refused(r"session\.steps without a model"):
            next(session.steps(1))
        with refused(r"session\.replicas is not there yet"):
            _ = session.replicas
        prepared, _ = session.prepare(model, optimizer)
        with refused(r"a second session\.prepare"):
            session.prepare(model, optimizer)
        with refused(r"session\.backward outside of the loop"):
            session.backward(prepared(INPUTS).mean())
        with refused("'b.c' is not a name for a state"):
            session.state(**{"b.c": optimizer})
        loader = session.loader(Noisy(), batch_size=4)
        for step in session.steps(2):
            with refused("the micro-batches of step 1"):
                next(loader(step + 1))
            with refused(r"session\.log of step 1"):
                session.log(step + 1, loss=0.0)
            break
        with refused("the body of step 0 did no micro-batches"):
            for _ in session.steps(2):
                pass


def test_a_loop_that_is_left_early_says_what_was_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Session(tmp_path, micro_batches=4) as session:
        model = nn.Linear(4, 1)
        prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = session.loader(Noisy(), batch_size=4)
        for step in session.steps(9):
            for rows in loader(step):
                session.backward(prepared(rows).mean())
            optimizer.step()
            if step == 3:
                break
    assert "the loop was left in step 3 of 9" in caplog.text


def test_other_batches_are_another_run(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.raises(CheckpointError, match="micro_batches was 4, is 2"):
        train(tmp_path, 4, micro_batches=2)


def test_keys_follow_from_where_a_stream_begins_and_tensors_go_to_the_device() -> None:
    keys = keys_from(3, 5, range(4, 6))
    assert [next(keys) for _ in range(4)] == [(3, 5), (4, 4), (4, 5), (5, 4)]
    Pair = namedtuple("Pair", "left right")
    moved = to_device({"a": [INPUTS, "text"], "b": Pair(INPUTS, (INPUTS, 1))}, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1] == "text" and moved["b"].left.is_meta and moved["b"].right[0].is_meta
