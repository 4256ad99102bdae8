"""The refusals of a Trainer on a Session, and its update compared with that of a plain Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset

import lockstep

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

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


class Evaluating(transformers.Trainer):  # type: ignore[name-defined]
    def evaluate(self, *words: Any, **named: Any) -> Any:
        return super().evaluate(*words, **named)


class OwnEvaluation(SessionLoop, Evaluating):
    pass


class DoubledLoss(transformers.Trainer):  # type: ignore[name-defined]
    def _loss(self, loss: Any) -> Any:  # the loop has no method of this name
        return 2 * loss

    def compute_loss(self, *words: Any, **named: Any) -> Any:
        return self._loss(super().compute_loss(*words, **named))


class OwnEpochs(list[Any]):
    def set_epoch(self, epoch: int) -> None:
        pass


class Saved(transformers.TrainerCallback):  # type: ignore[name-defined]
    def on_save(self, *_: Any, **__: Any) -> None:
        pass


class Control(transformers.TrainerCallback):  # type: ignore[name-defined]
    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        setattr(control, self.name, True)
        return control


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
    names = values.keys() & {"callbacks", "compute_loss_func", "compute_metrics", "eval_dataset"}
    trainer_values = {name: values.pop(name) for name in names}
    model = values.pop("model", None) or Net()
    make_args = values.pop("make_args", transformers.TrainingArguments)
    values = {"max_steps": 2, "use_cpu": True, "disable_tqdm": True} | values
    args = make_args(str(folder), **values)
    trainer: SessionLoop = kind(model, args, train_dataset=dataset or rows(), **trainer_values)
    return trainer


@pytest.mark.parametrize(
    "values, named",
    [
        ({"bf16_full_eval": True}, "bf16_full_eval=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy="),
        ({"save_strategy": "epoch"}, "save_strategy=epoch"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau"} | EVALUATED,
            "lr_scheduler_type=reduce_lr_on_plateau",
        ),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend=eager"),
        ({"kind": OwnLoader}, "OwnLoader.get_train_dataloader"),
        ({"kind": OwnEvaluation}, "OwnEvaluation.evaluate"),
        ({"callbacks": [Saved()]}, "Saved.on_save"),
        ({"lr_scheduler_type": "greedy"} | EVALUATED, "lr_scheduler_type=greedy"),
        ({"optim": "schedule_free_adamw"}, "optim=schedule_free_adamw"),
        ({"optim": "galore_adamw_layerwise"}, "optim=galore_adamw_layerwise"),
        ({"dataset": OwnEpochs(rows())}, "a data set with set_epoch"),
        (
            {
                "make_args": transformers.Seq2SeqTrainingArguments,
                "predict_with_generate": True,
            },
            "predict_with_generate=True",
        ),
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
    with pytest.raises(lockstep.UsageError, match="resume_from_checkpoint=checkpoint-2"):
        make(tmp_path).train("checkpoint-2")


@pytest.mark.parametrize("name", ["should_save", "should_epoch_stop"])
def test_a_wish_of_a_callback_that_the_loop_cannot_fulfil_is_refused(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(lockstep.UsageError, match=f"{name}=True.*effect on a Session"):
        make(tmp_path, callbacks=[Control(name)], save_steps=2).train()


def test_use_cpu_is_refused_where_the_session_has_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCKSTEP_DEVICE", raising=False)
    with pytest.raises(lockstep.UsageError, match="use_cpu=True on a machine with GPUs"):
        trainer.train()


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


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))


def token_rows() -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of labels."""
    tokens = torch.arange(1, 129).view(16, 8) * 7 % 16
    labels = [row.masked_fill(torch.arange(8) < n % 5, -100) for n, row in enumerate(tokens)]
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def sum_of_losses(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    if labels is None:  # a mean, which a Trainer adds over the micro-batches of a step
        return outputs.logits.square().mean()
    logits = outputs.logits[:, :-1].transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, labels[:, 1:], reduction="sum")
    return losses / num_items_in_batch


LANGUAGE = {"model": language_model, "dataset": token_rows()}
UNLABELED = [{"input_ids": row["input_ids"]} for row in token_rows()]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_grad_norm": -1.0},  # not clipped
        {"base": DoubledLoss},
        LANGUAGE | {"label_smoothing_factor": 0.1},  # of the next token
        LANGUAGE | {"compute_loss_func": sum_of_losses, "eval_dataset": token_rows()[:5]},
        LANGUAGE | {"compute_loss_func": sum_of_losses, "dataset": UNLABELED},
    ],
)
def test_one_worker_trains_as_a_plain_trainer_does(tmp_path: Path, values: dict[str, Any]) -> None:
    """One step over the whole data set, whose gradient does not depend on the order."""
    values = values | {"logging_steps": 1, "save_strategy": "no", "max_steps": 1, "optim": "sgd"}
    values |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    values["eval_strategy"] = "steps" if "eval_dataset" in values else "no"
    base = values.pop("base", transformers.Trainer)
    make_model = values.pop("model", Net)
    trained = []
    for kind in (base, type("Ours", (SessionLoop, base), {})):
        trainer = make(tmp_path / kind.__name__, kind, model=make_model(), **values)
        trainer.train()
        logged = {name: x for line in trainer.state.log_history for name, x in line.items()}
        weights = trainer.model.state_dict()
        trained.append((weights, {name: logged.get(name) for name in ("loss", "eval_loss")}))
    torch.testing.assert_close(*trained)
    initial = make_model().state_dict()
    assert any(not torch.equal(initial[name], tensor) for name, tensor in weights.items())


class Counting(transformers.TrainerCallback):  # type: ignore[name-defined]
    """Plain values, a set, an average of the model, and the model itself."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.epochs: set[float] = set()

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.model = model
        self.ema = AveragedModel(model)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.steps.append((state.global_step, state.epoch))
        self.epochs.add(state.epoch)
        self.ema.update_parameters(self.model)


class Exported(transformers.TrainerCallback, ExportableState):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.steps.append(state.global_step)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_what_callbacks_count_is_resumed_by_the_names_of_their_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "lockstep")
    make(tmp_path, callbacks=[Exported(), Counting()]).train()
    assert "no checkpoint can hold: session state trainer Counting.epochs" in caplog.text
    resumed = make(tmp_path, max_steps=3, callbacks=[Counting()])
    resumed.train()
    assert "objects that this run lacks: session state trainer Exported.steps" in caplog.text
    [counting] = [c for c in resumed.callback_handler.callbacks if isinstance(c, Counting)]
    assert [step for step, _ in counting.steps] == [1, 2, 3]
    assert counting.ema.n_averaged == 3


def test_early_stopping_ends_with_the_step_of_a_plain_trainer_and_is_not_resumed(
    tmp_path: Path,
) -> None:
    values = EVALUATED | {"max_steps": 9, "optim": "sgd", "learning_rate": 1.0}
    values |= {"metric_for_best_model": "loss", "max_grad_norm": 0.0, "logging_steps": 1}
    values |= {"per_device_train_batch_size": 16}
    ended = []
    for folder, kind in (
        ("plain", transformers.Trainer),
        ("ours", SessionLoop),
        ("ours", SessionLoop),
    ):
        trainer = make(tmp_path / folder, kind, callbacks=[EarlyStoppingCallback(2)], **values)
        ended.append(trainer.train().global_step)
        scores = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        assert len(scores) == ended[-1]
    assert ended == [3, 3, 3]


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
