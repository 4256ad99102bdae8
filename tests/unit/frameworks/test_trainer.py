"""The refusals of a Trainer on a Session, and its update compared with that of a plain Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import lockstep

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lockstep.frameworks.trainer import SessionLoop  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x).flatten(), labels)}


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class OwnLoader(SessionLoop):
    def get_train_dataloader(self) -> Any:
        return []


class OwnEvaluation(SessionLoop):
    def prediction_step(self, *_: Any, **__: Any) -> Any:
        return None, None, None


EVENTS = ("on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_optimizer_step")
EVENTS += ("on_step_end", "on_log", "on_evaluate", "on_epoch_end")


class Events(transformers.TrainerCallback):  # type: ignore[name-defined]
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []
        for name in EVENTS:
            setattr(self, name, partial(self.record, name))

    def record(self, name: str, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((name, state.global_step, state.epoch))


def rows(count: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([n, 1.0]), "labels": torch.tensor(n / 2)} for n in range(count)]


EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows(4)}


def make(folder: Path, kind: type = SessionLoop, dataset: Any = None, **values: Any) -> SessionLoop:
    names = values.keys() & {"compute_metrics", "eval_dataset"}
    trainer_values = {name: values.pop(name) for name in names}
    values = {"max_steps": 2, "use_cpu": True, "disable_tqdm": True} | values
    args = transformers.TrainingArguments(str(folder), **values)
    trainer: SessionLoop = kind(Net(), args, train_dataset=dataset or rows(), **trainer_values)
    return trainer


@pytest.mark.parametrize(
    "values, named",
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy="),
        ({"save_strategy": "epoch"}, "save_strategy=SaveStrategy.EPOCH"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"} | EVALUATED, "ReduceLROnPlateau"),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend=eager"),
        ({"kind": OwnLoader}, "OwnLoader.get_train_dataloader"),
        ({"kind": OwnEvaluation}, "OwnEvaluation.prediction_step"),
        ({"compute_metrics": lambda _: {}}, "compute_metrics"),
        ({"dataset": Rows()}, "an IterableDataset"),
    ],
)
def test_what_the_loop_would_leave_out_is_refused(
    tmp_path: Path, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(lockstep.UsageError, match="SessionLoop does not support") as refusal:
        make(tmp_path, **values).train()
    assert named in str(refusal.value)


def test_a_checkpoint_of_the_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UsageError, match="resume_from_checkpoint='checkpoint-2'"):
        make(tmp_path).train("checkpoint-2")


def test_torch_compile_reaches_the_session(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UsageError, match="Net has no repeated blocks"):
        make(tmp_path, torch_compile=True).train()


def test_save_steps_may_be_a_share_of_the_steps(tmp_path: Path) -> None:
    make(tmp_path, max_steps=4, save_steps=0.5).train()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004"]


def test_each_of_several_data_sets_is_evaluated(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        max_steps=1,
        **EVALUATED | {"eval_dataset": {"few": rows(2), "many": rows(8)}},
    )
    trainer.add_callback(events := Events())
    trainer.train()
    assert [name for name, *_ in events.seen].count("on_evaluate") == 2
    logged = {key: value for line in trainer.state.log_history for key, value in line.items()}
    assert logged["eval_few_loss"] != logged["eval_many_loss"]


@pytest.mark.parametrize(
    "count, batch_size, epochs, steps, ends",
    [
        (10, 3, 3, 10, [4, 7, 10]),  # 3 * (10 / 3) is 10, and 10 % (10 / 3) is not 0
        (8, 5, 5, 8, [2, 4, 5, 7, 8]),
        # 25 * (11 / 5) is above 55.
        (11, 5, 25, 55, [11 * five + step for five in range(5) for step in (3, 5, 7, 9, 11)]),
        (10, 1, 0.1, 1, []),
    ],
)
def test_epochs_end_where_their_last_row_is(
    tmp_path: Path, count: int, batch_size: int, epochs: float, steps: int, ends: list[int]
) -> None:
    trainer = make(
        tmp_path,
        dataset=rows(count),
        per_device_train_batch_size=batch_size,
        max_steps=-1,
        num_train_epochs=epochs,
        save_strategy="no",
    )
    trainer.add_callback(events := Events())
    assert trainer.train().global_step == steps
    assert [step for name, step, _ in events.seen if name == "on_epoch_end"] == ends


def test_one_worker_trains_as_a_plain_trainer_does(tmp_path: Path) -> None:
    """One step over the whole data set, whose gradient does not depend on the order."""
    values = {"per_device_train_batch_size": 16, "max_steps": 1, "save_strategy": "no"}
    plain = make(tmp_path / "plain", transformers.Trainer, **values)
    plain.train()
    ours = make(tmp_path / "ours", **values)
    assert ours.train().global_step == 1
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], tensor)
    assert not torch.equal(ours.model.net.weight, Net().net.weight)


def test_callbacks_are_called_as_by_a_plain_trainer(tmp_path: Path) -> None:
    values = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "eval_dataset": rows(4),
        "logging_steps": 1,
    }
    seen = []
    for kind in (transformers.Trainer, SessionLoop):
        trainer = make(tmp_path / kind.__name__, kind, **values)
        trainer.add_callback(events := Events())
        trainer.train()
        seen.append([*events.seen])
        assert "eval_loss" in trainer.evaluate()  # after the run: this worker alone
    plain, ours = seen
    assert plain.pop(-1)[0] == "on_log"  # the speed of the whole run
    assert ours == plain
