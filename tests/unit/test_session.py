"""Session in one process: what it trains, saves, loads, records and refuses."""

from __future__ import annotations

import copy
import logging
import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import lockstep
from lockstep.checkpoint.commands import digest_line
from lockstep.errors import CheckpointError, DivergedError, UsageError
from lockstep.record import metrics
from lockstep.runtime.worker_env import WorkerEnv
from lockstep.session import Session
from lockstep.training.loader import keys_from, to_device
from lockstep.training.session_checks import refuse_different_folders

INPUTS = torch.rand(50, 4, generator=torch.Generator().manual_seed(1))


class Noisy(Dataset[Tensor]):
    """Rows with random noise. Counts the samples loaded in this process."""

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, i: int) -> Tensor:
        self.loaded += 1
        return INPUTS[i] + 0.1 * torch.randn(4)


def leave_out_nonfinite(model: nn.Module, loss: Tensor, count: int) -> tuple[Tensor, int]:
    """The pattern of docs/divergence.md."""
    if not loss.isfinite():
        return sum((0.0 * p.sum() for p in model.parameters()), torch.zeros(())), 0
    return loss, count


def test_a_loop_leaves_out_micro_batches_that_are_not_finite(tmp_path: Path) -> None:
    gradients = []
    for poison in (True, False):
        inputs = INPUTS[:8].clone()
        inputs[3, 2] = torch.nan if poison else 1.0
        with linear_session(tmp_path / str(poison), 4) as (session, prepared, optimizer):
            for step in session.steps(1):
                for k in session.micro_batches(step):
                    rows = inputs[2 * k : 2 * k + 2]
                    loss = prepared(rows).square().sum() * (1 if poison or k != 1 else torch.nan)
                    loss, count = leave_out_nonfinite(prepared, loss, len(rows))
                    session.backward(loss, count=count)
                gradients.append([p.grad.clone() for p in prepared.parameters()])
                assert session.replicas.decision.count == 6
                optimizer.step()
    assert all(map(torch.equal, *gradients)) and all(bool(g.isfinite().all()) for g in gradients[0])


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


@contextmanager
def linear_session(
    folder: Path, micro_batches: int = 2, lr: float = 0.1, **options: Any
) -> Iterator[tuple[Session, Any, torch.optim.Optimizer]]:
    """Open a session; yield it with a prepared linear model and its optimizer."""
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    with Session(folder, micro_batches=micro_batches, **options) as session:
        yield session, *session.prepare(model, sgd(model, lr))


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def train(
    out: Path,
    steps: int,
    *,
    num_workers: int = 0,
    dataset: Any = None,
    make_model: Callable[[], nn.Module] = small_model,
    **options: Any,
) -> Session:
    """Train a small model with dropout; return the closed session."""
    torch.manual_seed(0)
    model = make_model()
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


def test_resumed_run_ends_with_the_bits_and_metrics_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "resumed", 3)
    resumed = train(tmp_path / "resumed", 6)
    assert (
        digest_line(tmp_path / "whole") == digest_line(tmp_path / "resumed")
        and whole.loss == resumed.loss
    )
    first_lines, second_lines = (
        [
            (line["step"], line["loss"], line["norm"])
            for line in metrics.read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "resumed")
    )
    assert first_lines == second_lines and [step for step, _, _ in first_lines] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_wire_format_decides_bits_and_cannot_change_at_a_resume(tmp_path: Path) -> None:
    for wire in ("fp32", "bf16", "int8"):
        train(
            tmp_path / wire,
            2,
            wire=wire,
            make_model=lambda: nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1)),
        )
    assert len({digest_line(tmp_path / wire) for wire in ("fp32", "bf16", "int8")}) == 3
    with pytest.raises(CheckpointError, match="belongs to another run: wire was bf16, is int8"):
        train(tmp_path / "bf16", 4, wire="int8")


def test_deferred_weights_train_with_the_bits_of_a_model_built_at_once(tmp_path: Path) -> None:
    train(tmp_path / "at once", 3)
    train(tmp_path / "deferred", 3, make_model=lambda: lockstep.deferred_init(small_model))
    assert digest_line(tmp_path / "at once") == digest_line(tmp_path / "deferred")


def test_average_of_weights_without_values_is_refused(tmp_path: Path) -> None:
    model = lockstep.deferred_init(small_model)
    with Session(tmp_path, micro_batches=2) as session:
        session.state(ema=torch.optim.swa_utils.AveragedModel(model))
        session.prepare(model, sgd(model))
        with refused(r"state\.ema\.module\.0\.weight is on the meta device, without values"):
            next(session.steps(1))


def test_loader_processes_give_the_same_bits_and_only_the_rehearsal_loads_here(
    tmp_path: Path,
) -> None:
    dataset = Noisy()
    train(tmp_path / "processes", 3, num_workers=2, dataset=dataset)
    assert dataset.loaded == 2, "micro-batch 0 of the first step, once more"
    train(tmp_path / "here", 3)
    assert digest_line(tmp_path / "processes") == digest_line(tmp_path / "here")


class Augmented(Dataset[Tensor]):
    """Samples that are shifted by parts of the data set, which the loop may change."""

    def __init__(self) -> None:
        self.shift = 0.0
        self.scale = (torch.ones(4),)
        self.transforms = [SimpleNamespace(offset=0.0)]
        self.table = np.zeros(4, np.float32)
        self.large = np.zeros(20_000, np.float32)
        self.named = {"offset": 0.0}

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, i: int) -> Tensor:
        return (
            INPUTS[i] * self.scale[0]
            + self.shift
            + self.transforms[0].offset
            + self.named["offset"]
            + torch.from_numpy(self.table + self.large[:4])
        )


DATA_CHANGES: dict[str, Callable[[Augmented], object]] = {
    "number": lambda dataset: setattr(dataset, "shift", 3.0),
    "tensor of a tuple": lambda dataset: dataset.scale[0].fill_(3.0),
    "part of a list": lambda dataset: setattr(dataset.transforms[0], "offset", 3.0),
    "array in place": lambda dataset: dataset.table.fill(3.0),
    "large array in place": lambda dataset: dataset.large.fill(3.0),
    "item of a dict": lambda dataset: dataset.named.update(offset=3.0),
}


@pytest.mark.parametrize("change", DATA_CHANGES)
def test_loader_processes_follow_a_change_of_the_data_set(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests = set()
    for num_workers in (0, 2):
        dataset = Augmented()
        with linear_session(tmp_path / str(num_workers), 4, lr=0.01) as opened:
            session, prepared, optimizer = opened
            loader = session.loader(dataset, batch_size=8, num_workers=num_workers)
            for step in session.steps(5):
                if step == 3:
                    DATA_CHANGES[change](dataset)
                for rows in loader(step):
                    session.backward(prepared(rows).square().mean())
                optimizer.step()
        digests.add(digest_line(tmp_path / str(num_workers)))
    assert len(digests) == 1
    assert (
        "the data set has changed at step 4: the processes that load it start again" in caplog.text
    )


def test_the_gradient_is_the_mean_over_the_samples_of_the_step(tmp_path: Path) -> None:
    with linear_session(tmp_path, 5) as (session, prepared, _):
        model = prepared.module
        expected = torch.autograd.grad(model(INPUTS[:40]).square().mean(), [*model.parameters()])
        loader = session.loader(TensorDataset(INPUTS[:40]), batch_size=40)
        for step in session.steps(1):
            for (rows,) in loader(step):
                session.backward(prepared(rows).square().mean())
            pairs = zip(model.parameters(), expected, strict=True)
            assert all(p.grad is not None and torch.allclose(p.grad, wanted) for p, wanted in pairs)
    assert session.loss == pytest.approx(model(INPUTS[:40]).square().mean().item(), rel=1e-6)


def test_state_is_saved_and_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (2, 5):
        model = nn.Linear(4, 1)
        optimizer = sgd(model, 1.0)
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
    assert "as constructed" not in caplog.text, "the scheduler has set the learning rate"


def test_an_evaluation_is_the_mean_over_the_samples_and_leaves_no_trace(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    rows = INPUTS.sum(1)
    with Session(tmp_path / "one", micro_batches=2) as session:
        prepared, _ = session.prepare(model, sgd(model))
        session.step = 3
        draws = []
        for batch_size in (7, 50):
            mean = session.evaluate(
                lambda batch: batch[0].sum(1).mean(), TensorDataset(INPUTS), batch_size=batch_size
            )
            assert mean == pytest.approx(float(rows.mean()))
            draws.append(torch.rand(2))
        assert draws[0].equal(draws[1]), (
            "equal on all workers, although each evaluated another share"
        )
        named = session.evaluate(
            lambda batch: {"a": prepared(batch[0]).mean(), "b": torch.is_grad_enabled()},
            TensorDataset(INPUTS),
        )
        assert set(named) == {"a", "b"} and named["b"] == 0.0 and model.training
        model.eval()
        assert named["a"] == pytest.approx(model(INPUTS).mean().item(), rel=1e-6), "without dropout"


def test_an_evaluation_of_extreme_values_or_of_nothing(tmp_path: Path) -> None:
    huge = TensorDataset(torch.full((6, 1), 1.5e308, dtype=torch.float64))
    with Session(tmp_path, micro_batches=1) as session:
        session.prepare(model := nn.Linear(1, 1), sgd(model))
        for batch_size in (1, 4):
            assert (
                session.evaluate(lambda batch: batch[0][0], huge, batch_size=batch_size) == 1.5e308
            )
        assert math.isnan(session.evaluate(lambda batch: batch[0][0] * math.inf, huge))
        with pytest.raises(UsageError, match="there is no sample to evaluate") as error:
            session.evaluate(lambda batch: batch[0].mean(), [])
        assert "session.evaluate" in error.value.where and error.value.hint


def test_finite_losses_whose_sum_overflows_end_the_run_in_words(tmp_path: Path) -> None:
    model = nn.Linear(1, 1).double()
    with (
        pytest.raises(DivergedError, match="loss inf in step 1"),
        Session(tmp_path, micro_batches=2) as session,
    ):
        prepared, optimizer = session.prepare(model, sgd(model))
        loader = session.loader(TensorDataset(torch.ones(8, 1, dtype=torch.float64)), batch_size=2)
        for step in session.steps(1):
            for (rows,) in loader(step):
                session.backward(prepared(rows).sum() * 0 + 1.5e308, count=2)
            optimizer.step()


def test_an_evaluation_puts_an_ema_in_the_state_into_eval_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5))
    ema = copy.deepcopy(model)
    with Session(tmp_path, micro_batches=1) as session:
        session.prepare(model, sgd(model))
        session.state(ema=ema)
        mean = session.evaluate(lambda batch: ema(batch[0]).mean(), TensorDataset(INPUTS))
        assert mean == pytest.approx(ema[0](INPUTS).mean().item(), rel=1e-5) and ema.training


def test_a_misspelled_option_names_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean save_every or"):
        Session(tmp_path, micro_batches=1, save_evry=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="did you mean verify_every or"):
        Session(tmp_path, micro_batches=1, verify_evry=3)  # type: ignore[call-arg]


def test_a_loader_without_a_step_is_refused(tmp_path: Path) -> None:
    with Session(tmp_path, micro_batches=1) as session:
        loader = session.loader(TensorDataset(INPUTS), batch_size=4)
        with pytest.raises(UsageError, match=r"loader\(step\)"):
            iter(loader)


def test_a_prepared_model_is_called_like_its_module_and_copied_without_the_session(
    tmp_path: Path,
) -> None:
    with Session(tmp_path, micro_batches=1) as session:
        module = nn.Linear(4, 1)
        prepared, optimizer = session.prepare(module, sgd(module))
        assert (
            prepared.module is module
            and prepared.in_features == 4
            and isinstance(optimizer, torch.optim.SGD)
        )
        assert prepared(INPUTS).equal(module(INPUTS)), "outside the loop it is the plain module"
        assert type(copy.deepcopy(prepared)) is nn.Linear
        assert not hasattr(prepared, "absent")
        with pytest.raises(TypeError, match="'Linear' object is not subscriptable"):
            _ = prepared[0]


def test_the_parts_of_a_prepared_sequence_are_those_of_its_module(tmp_path: Path) -> None:
    with Session(tmp_path, micro_batches=1) as session:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        prepared, _ = session.prepare(module, sgd(module))
        assert prepared[-1] is module[1] and [*prepared] == [*module]


def refused(message: str) -> Any:
    return pytest.raises(UsageError, match=message)


def test_unequal_micro_batches_are_weighted_by_their_counts(tmp_path: Path) -> None:
    with linear_session(tmp_path, 4) as (session, prepared, optimizer):
        model = prepared.module
        for step in session.steps(2):
            mean = model(INPUTS[:10]).square().mean()
            expected = torch.autograd.grad(mean, [*model.parameters()])
            for k in session.micro_batches(step):
                rows = INPUTS[k * (k + 1) // 2 : (k + 1) * (k + 2) // 2]  # k + 1 rows
                session.backward(prepared(rows).square().sum(), count=len(rows))
            assert session.loss == pytest.approx(mean.item())
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert parameter.grad is not None and torch.allclose(parameter.grad, gradient)
            optimizer.step()


def test_count_may_be_a_tensor_or_zero_for_one_micro_batch(tmp_path: Path) -> None:
    with linear_session(tmp_path) as (session, prepared, _):
        for step in session.steps(1):
            for k in session.micro_batches(step):
                rows = INPUTS[: 3 * k]
                session.backward(prepared(rows).square().sum(), count=torch.tensor(len(rows)))
            assert session.loss == pytest.approx(prepared.module(INPUTS[:3]).square().mean().item())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((None, 3), "some micro-batches of a step have a count and others have none"),
        ((3, None), "some micro-batches of a step have a count and others have none"),
        ((0, 0), "the counts of a step add up to 0"),
        ((2, -3), "the count of a micro-batch is -3, not an integer"),
        ((0.5, 0.5), r"the count of a micro-batch is 0\.5, not an integer"),
    ],
)
def test_wrong_counts_are_refused(tmp_path: Path, counts: tuple[Any, Any], message: str) -> None:
    with refused(message), linear_session(tmp_path, rehearse=False) as (session, prepared, _):
        for step in session.steps(1):
            for k in session.micro_batches(step):
                session.backward(prepared(INPUTS).square().sum(), count=counts[k])


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    with refused("this Session is not open: session.world and"):
        Session(tmp_path, micro_batches=2).prepare(nn.Linear(4, 1))
    with Session(tmp_path, micro_batches=4) as session:
        model = nn.Linear(4, 1)
        optimizer = sgd(model)
        with refused("batch_size=6 with micro_batches=4 and 50 samples"):
            session.loader(Noisy(), batch_size=6)
        with refused("Endless has no length or no index"):
            session.loader(Endless(), batch_size=4)
        with refused(r"session\.steps without a model"):
            next(session.steps(1))
        with refused(r"session\.replicas does not exist yet"):
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
            with refused("the micro-batches of step=1"):
                next(loader(step + 1))
            with refused(r"session\.log of step=1"):
                session.log(step + 1, loss=0.0)
            break
        with refused("the body of step 1 ran no micro-batches"):
            for _ in session.steps(2):
                pass
    with refused("after the Session ended\n.*\n.*indent the loop"):
        next(session.steps(3))


def test_a_log_of_one_micro_batch_is_refused(tmp_path: Path) -> None:
    with refused("after the micro-batch loop: inside"), linear_session(tmp_path) as (session, *_):
        for step in session.steps(1):
            for _ in session.micro_batches(step):
                session.log(step, loss=0.0)


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer, second = (sgd(model) for _ in range(2))
    with refused("Session takes no verify_evry\n.*\n.*did you mean verify_every"):
        Session(tmp_path, micro_batches=2, verify_evry=2)  # type: ignore[call-arg]
    with refused("balance='uneven'\n.*\n.*'auto' or 'off'"):
        Session(tmp_path, micro_batches=2, balance="uneven")  # type: ignore[arg-type]
    with refused("unused='none'\n.*\n.*'raise' or 'zero'"):
        Session(tmp_path, micro_batches=2, unused="none")  # type: ignore[arg-type]
    with refused("on_nonfinite='ignor'\n.*\n.*'raise' or 'ignore'"):
        Session(tmp_path, micro_batches=2, on_nonfinite="ignor")  # type: ignore[arg-type]
    with refused("on_save_error='stopp'\n.*\n.*'continue' or 'stop'"):
        Session(tmp_path, micro_batches=2, on_save_error="stopp")  # type: ignore[arg-type]
    with refused("wire='fp8'\n.*\n.*'fp32' or 'bf16' or 'int8'"):
        Session(tmp_path, micro_batches=2, wire="fp8")  # type: ignore[arg-type]
    with refused("micro_batches=0"):
        Session(tmp_path, micro_batches=0)
    with Session(tmp_path, micro_batches=2) as session:
        with refused(
            r"takes one module, then optimizers of torch\n  session\.prepare\(SGD, Linear\)"
        ):
            session.prepare(optimizer, model)  # type: ignore[arg-type]
        with refused(r"LBFGS\.step needs a closure"):
            session.prepare(model, torch.optim.LBFGS(model.parameters()))
        with refused("2 of the optimizer's parameters are not in the model"):
            session.prepare(other, optimizer)
        with refused("several optimizers hold the same parameters"):
            session.prepare(model, optimizer, second)
        with refused("batch_size=52 with micro_batches=2 and 50 samples"):
            session.loader(Noisy(), batch_size=52)
        with refused("a tuple of tensors is not a data set"):
            session.loader((INPUTS, INPUTS), batch_size=4)
        with refused("there is no loss yet"):
            _ = session.loss
        with refused("session.stop outside of the loop"):
            session.stop()


def test_prepare_without_optimizers_returns_the_model_and_steps_asks_for_them(
    tmp_path: Path,
) -> None:
    message = r"2 trained parameters are in no optimizer that session\.prepare has received: .*\n.*\n.*session\.prepare\(model, optimizer\)"
    with refused(message), Session(tmp_path, micro_batches=2) as session:
        prepared = session.prepare(nn.Linear(4, 1))
        assert isinstance(prepared, nn.Module)
        next(session.steps(1))


def test_only_numbers_with_free_names_are_logged(tmp_path: Path) -> None:
    with linear_session(tmp_path) as (session, prepared, optimizer):
        for step in session.steps(1):
            for k in session.micro_batches(step):
                session.backward(prepared(INPUTS[k : k + 1]).square().mean())
            optimizer.step()
            for name, value in {
                "seconds": 1,
                "workers": 9,
                "step": 7,
                "loss": session.loss + 1,
            }.items():
                with refused(f"{name} is recorded already, with another value"):
                    session.log(step, **{name: value})
            for wrong in (torch.ones(3), object(), "text", None):
                with refused("x is a .*, not a number"):
                    session.log(step, x=wrong)
            session.log(step, loss=session.loss, accuracy=torch.tensor(0.5), best=True)
    (line,) = metrics.read_metrics(tmp_path / "metrics.jsonl")
    assert line["accuracy"] == 0.5 and line["best"] is True and line["loss"] == session.loss


@pytest.mark.parametrize("loop", ["same loader", "two loaders", "zip"])
def test_second_micro_batch_loop_in_a_step_is_refused(tmp_path: Path, loop: str) -> None:
    message = (
        "ended early\n.*a second micro-batch loop"
        if loop == "zip"
        else r"a second micro-batch loop in step 1: .*\n  loader\(step\) or"
    )
    with refused(message), linear_session(tmp_path) as (session, prepared, optimizer):
        first = session.loader(Noisy(), batch_size=4)
        second = first if loop == "same loader" else session.loader(Noisy(), batch_size=4)
        for step in session.steps(1):
            for rows in (
                first(step)
                if loop != "zip"
                else map(torch.cat, zip(first(step), second(step), strict=True))
            ):
                session.backward(prepared(rows).square().mean())
            optimizer.step()
            for rows in second(step):
                session.backward(prepared(rows).square().mean())


def test_a_scaler_scales_the_gradient_but_not_the_recorded_loss(tmp_path: Path) -> None:
    digests = set()
    for scale in (None, 2.0**10):
        out = tmp_path / str(scale)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
        with linear_session(out, lr=0.125, on_nonfinite="ignore") as opened:
            session, prepared, optimizer = opened
            for step in session.steps(2):
                for k in session.micro_batches(step):
                    session.backward(prepared(INPUTS[k : k + 3]).square().mean(), scaler=scaler)
                if scaler:
                    scaler.step(optimizer)
                    assert session.loss < 10 < float(prepared.bias.grad) * float(scaler.get_scale())
                    scaler.update()
                else:
                    optimizer.step()
        losses = [line["loss"] for line in metrics.read_metrics(out / "metrics.jsonl")]
        digests.add((digest_line(out), *losses))
    assert len(digests) == 1, "a power of two scales without rounding"


def test_a_scaler_that_backward_has_not_received_is_refused_before_the_update(
    tmp_path: Path,
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with linear_session(tmp_path, on_nonfinite="ignore") as (session, prepared, optimizer):
        before = prepared.weight.detach().clone()
        session.state(scaler=scaler)
        with refused(
            r"a loss that was scaled before session.backward(?s:.*)backward\(loss, scaler=scaler\)"
        ):
            for step in session.steps(2):
                for k in session.micro_batches(step):
                    session.backward(scaler.scale(prepared(INPUTS[k : k + 3]).square().mean()))
                scaler.step(optimizer)
    assert torch.equal(before, prepared.weight)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_may_have_one_element_in_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    for name, of_shape in (("scalar", ()), ("shaped", shape)):
        with linear_session(tmp_path / name) as (session, prepared, optimizer):
            for step in session.steps(2):
                for k in session.micro_batches(step):
                    session.backward(prepared(INPUTS[k : k + 3]).square().mean().view(of_shape))
                optimizer.step()
    assert digest_line(tmp_path / "scalar") == digest_line(tmp_path / "shaped")


def test_a_changed_learning_rate_is_a_warning_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, rate in ((1, 0.1), (2, 0.1), (3, 0.001)):
        caplog.clear()
        with linear_session(tmp_path, lr=rate) as (session, prepared, optimizer):
            for step in session.steps(steps):
                for k in session.micro_batches(step):
                    session.backward(prepared(INPUTS[k : k + 1]).square().mean())
                optimizer.step()
        warned = (
            "optimizer SGD: lr is 0.1 from the checkpoint, not 0.001 as constructed" in caplog.text
        )
        assert warned == (rate == 0.001), caplog.text


def test_a_program_without_logging_sees_when_it_resumes_saves_and_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    trained = train(tmp_path, 3)
    shown = capsys.readouterr().err
    assert "starts at step 1: there is no checkpoint yet\n" in shown
    assert f"\nsaved {tmp_path}/checkpoints/step-00000003: " in shown
    assert train(tmp_path, 3, progress=False).loss == trained.loss
    assert not capsys.readouterr().err
    train(tmp_path, 3)
    shown = capsys.readouterr().err
    assert "\nresumes from step 3, the newest checkpoint\n" in shown
    assert f"\nthe run is finished: step 3 of 3 in {tmp_path}; more steps continue it" in shown
    logger = logging.getLogger("lockstep")
    assert not logger.handlers and logger.propagate and not logger.level


def test_a_precision_that_the_loop_bypasses_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    with Session(tmp_path, micro_batches=2) as session:
        prepared, optimizer = session.prepare(model, sgd(model), precision="bf16")
        for step in session.steps(2):
            for k in session.micro_batches(step):
                session.backward(prepared.module(INPUTS[k : k + 1]).mean())
            optimizer.step()
    assert caplog.text.count('precision="bf16" has no effect') == 1


def test_a_loop_over_epochs_counts_the_steps_of_the_run(tmp_path: Path) -> None:
    with linear_session(tmp_path) as (session, prepared, optimizer):

        def epoch(total: int) -> int:
            for step in session.steps(total):
                for k in session.micro_batches(step):
                    session.backward(prepared(INPUTS[k : k + 1]).square().mean())
                optimizer.step()
            return session.step

        assert [epoch(2), epoch(4)] == [2, 4]
        with refused(r"session\.steps\(4\) again trains nothing"):
            epoch(4)


class Metric(nn.Module):
    """Keeps its sum as one of torchmetrics does: in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, value: Tensor) -> None:
        self.total = self.total + value


def test_a_metric_in_the_state_is_updated_after_the_loop(tmp_path: Path) -> None:
    metric = Metric()
    with (
        refused("session state 'metric' changed in the micro-batch loop of step 1"),
        linear_session(tmp_path) as (session, prepared, _),
    ):
        session.state(metric=metric)
        for step in session.steps(1):
            for k in session.micro_batches(step):
                loss = prepared(INPUTS[k : k + 1]).square().mean()
                metric.update(loss.detach())
                session.backward(loss)


def test_a_metric_that_a_later_loop_updates_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric = Metric()
    with linear_session(tmp_path) as (session, prepared, optimizer):
        session.state(metric=metric)
        for step in session.steps(4):
            for k in session.micro_batches(step):
                loss = prepared(INPUTS[k : k + 1]).square().mean()
                session.backward(loss)
                if step > 1:
                    metric.update(loss.detach())
            optimizer.step()
    warning = "did not change in the first step: session state metric.total"
    assert caplog.text.count(warning) == 1


def test_a_forgotten_update_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with linear_session(tmp_path) as (session, prepared, _):
        for step in session.steps(3):
            for k in session.micro_batches(step):
                session.backward(prepared(INPUTS[k : k + 1]).square().mean())
    assert caplog.text.count("changed no trained weight, and its gradient is lost") == 1
    caplog.clear()
    train(tmp_path / "right", 2)
    assert "changed no trained weight" not in caplog.text


@pytest.mark.parametrize(("inside", "last"), [(True, 3), (False, 4)])
def test_stop_ends_the_loop_with_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bool, last: int
) -> None:
    with linear_session(tmp_path) as (session, prepared, optimizer):
        for step in session.steps(9):
            for k in session.micro_batches(step):
                session.backward(prepared(INPUTS[k : k + 1]).square().mean())
                if inside and step == 2:
                    session.stop()
            optimizer.step()
            if step == 2:
                session.stop()
    assert session.step == last and digest_line(tmp_path).startswith(f"step {last} ")
    assert "the loop was left" not in caplog.text


def test_leaving_the_loop_early_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), linear_session(tmp_path, 4) as opened:
        session, prepared, optimizer = opened
        loader = session.loader(Noisy(), batch_size=4)
        for step in session.steps(9):
            for rows in loader(step):
                session.backward(prepared(rows).mean())
            optimizer.step()
            if step == 3:
                break
    assert (
        "the loop was left after 4 of 9 steps" in caplog.text
        and "session.stop() saves" in caplog.text
    )


def test_second_session_is_refused_inside_another_or_under_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Session(tmp_path, micro_batches=2),
        refused("a second Session is open in this process"),
        Session(tmp_path, micro_batches=2),
    ):
        pass
    with Session(tmp_path, micro_batches=2):
        pass
    worker_env = WorkerEnv(
        str(tmp_path), str(tmp_path / "state"), "host", 0, 1, 1, 1, 1, "127.0.0.1"
    )
    for name, value in worker_env.environ().items():
        monkeypatch.setenv(name, value)
    for folder in (tmp_path, tmp_path / "fold-1"):
        with refused("an agent runs one Session per start"), Session(folder, micro_batches=2):
            pass


def test_folders_that_differ_between_ranks_are_refused() -> None:
    refuse_different_folders(["runs/a", "runs/a"])
    with refused("the Session's folder differs: runs/a-0 on rank 0, runs/a-1 on rank 1"):
        refuse_different_folders(["runs/a-0", "runs/a-1"])


def test_resume_with_another_number_of_micro_batches_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with pytest.raises(CheckpointError, match="micro_batches was 4, is 2"):
        train(tmp_path, 4, micro_batches=2)


def test_keys_start_at_the_requested_micro_batch_and_tensors_move_to_the_device() -> None:
    keys = keys_from(3, 5, range(4, 6))
    assert [next(keys) for _ in range(4)] == [(3, 5), (4, 4), (4, 5), (5, 4)]
    Pair = namedtuple("Pair", "left right")
    moved = to_device({"a": [INPUTS, "text"], "b": Pair(INPUTS, (INPUTS, 1))}, torch.device("meta"))
    assert (
        moved["a"][0].is_meta
        and moved["a"][1] == "text"
        and moved["b"].left.is_meta
        and moved["b"].right[0].is_meta
    )


class Named(dict[str, Any]):
    """A dict with attributes and other arguments."""

    def __init__(self, label: str, **items: Any) -> None:
        super().__init__(**items)
        self.label = label


class Row(tuple[Any, ...]):
    def __new__(cls, left: Any, right: Any) -> Row:
        return super().__new__(cls, (left, right))


class Rows(list[Any]):
    label = ""


class HasTo(NamedTuple):
    to: Tensor  # such as the end of an edge


def test_classes_of_a_batch_are_kept() -> None:
    meta = torch.device("meta")
    rows = Rows([INPUTS])
    rows.label = "rows"
    named = to_device(Named("names", x=INPUTS), meta)
    assert type(named) is Named and named.label == "names" and named["x"].is_meta
    row = to_device(Row(INPUTS, 1), meta)
    assert type(row) is Row and row[0].is_meta and row[1] == 1
    moved = to_device(rows, meta)
    assert (
        type(moved) is Rows and moved.label == "rows" and moved[0].is_meta and not rows[0].is_meta
    )
    assert to_device(HasTo(INPUTS), meta).to.is_meta
    frozen = to_device(MappingProxyType({"x": INPUTS}), meta)
    assert type(frozen) is MappingProxyType and frozen["x"].is_meta


def test_batch_of_which_no_tensor_has_to_move_is_not_touched() -> None:
    batch = {"pair": (INPUTS, [INPUTS, {"text": ["a", "b"]}]), "row": Row(INPUTS, None)}
    assert to_device(batch, torch.device("cpu")) is batch
