"""docs/questions.md: each answer runs in the loop of the page, on one worker, and on two that are
interrupted and resumed. The bits are the same, and the weights are those of a plain loop.

PLAIN has a plain loop for each answer that trains otherwise than the loop of the page. The tests
below it check scores, files and what is printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT
from support.loops.questions import STEPS
from support.questions import LOOP, PAGE, SCRIPT, answers, script_of
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Subset

import lockstep
from lockstep.checkpoint.commands import best_step, digest_line, export
from lockstep.checkpoint.folder import committed_steps
from lockstep.data.order import UniformOrder, splitmix64
from lockstep.record.metrics import iter_steps
from lockstep.runtime.numerics import seed_generators
from lockstep.training.loader import KeyedBatches
from lockstep.training.sample_order import make_order

DRIVER = ROOT / "tests" / "support" / "loops" / "questions.py"
CPU = torch.device("cpu")
MICRO_BATCHES, BATCH, LR = 4, 32, 5e-2
IN_PYTORCH = "How do I load the weights in plain PyTorch, or export them (ONNX, Hugging Face)?"
IN_PYTEST = "How do I test my loop with pytest?"
SLOW = "torch.compile"
INTERRUPTED_IN = 6  # an update, after the checkpoint of step 4

Loss = Callable[[nn.Module, Tensor, Tensor, int, int], Tensor]


def names_of(long: bool) -> dict[str, str]:
    """Return the answers by name of their script: number of the question, and of the block."""
    return {
        f"{number:02d}-{block}": text
        for number, (title, blocks) in enumerate(answers().items())
        for block, text in enumerate(blocks)
        if title not in (IN_PYTORCH, IN_PYTEST) and (long or SLOW not in title)
    }


RUNS = names_of(os.environ.get("LOCKSTEP_CHAOS") == "1")


def name_of(words: str, block: int = 0) -> str:
    """Return the name of the answer whose question has these words."""
    found = [number for number, title in enumerate(answers()) if words in title]
    assert len(found) == 1, f"{len(found)} questions have the words {words!r}"
    return f"{found[0]:02d}-{block}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folders of all answers, and of the loop as it is: one/NAME and two/NAME."""
    folder = tmp_path_factory.mktemp("questions")
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "loop.py").write_text(SCRIPT)
    for name, answer in RUNS.items():
        (scripts / f"{name}.py").write_text(script_of(answer))
    for out, workers, interrupt_in in (("one", 1, 0), ("two", 2, INTERRUPTED_IN), ("two", 2, 0)):
        (folder / out).mkdir(exist_ok=True)
        flags = {"scripts": scripts, "interrupt_in": interrupt_in}
        result = run_loop(DRIVER, folder / out, workers, timeout_s=400.0, **flags)
        assert result == LoopResult(0, ""), result.text
        for report in (folder / out).glob("*.[01]"):
            assert "Traceback" not in report.read_text(), f"{report.name}: {report.read_text()}"
    return folder


def lines_of(runs: Path, name: str, out: str = "two") -> list[dict[str, Any]]:
    """Return what the lines of metrics.jsonl say that does not depend on time."""
    varying = ("second", "worker", "generation", "goodput", "wait", "exposed", "memory", "digest")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in varying)}
        for line in iter_steps(runs / out / name / "metrics.jsonl")
    ]


def tensors_of(runs: Path, name: str) -> dict[str, Tensor]:
    """Return what the newest checkpoint holds."""
    checkpoints = runs / "two" / name / "checkpoints"
    step = committed_steps(checkpoints)[-1]
    files = (checkpoints / f"step-{step:08d}").glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def weights_of(runs: Path, name: str, step: int | None = None) -> dict[str, Tensor]:
    file = runs / "weights.safetensors"
    export(runs / "two" / name, step, file)
    return load_file(file)


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Q: Any = load(ROOT / "examples" / "questions.py")


def loss_of(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
    return cross_entropy(model(x), y)


def nothing(*_: object) -> None:
    """Do nothing beside the steps of a plain loop."""


def adamw(*groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*groups, lr=LR)


def plain(
    model: nn.Module | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    loss: Loss = loss_of,
    before: Callable[[int], object] = nothing,
    change: Callable[[nn.Module], object] = nothing,
    after: Callable[[nn.Module], object] = nothing,
    batches: Any = None,
    micro_batches: int = MICRO_BATCHES,
) -> nn.Module:
    """Train as a script in one process that knows nothing of Lockstep would, with the samples and
    the random numbers of a Session.

    before, change, after  called before the passes, between them and the update, after the update
    """
    model = model or Q.Net()
    optimizers = optimizers or [adamw(model.parameters())]
    batches = batches or batches_of(micro_batches=micro_batches)
    for step in range(STEPS):
        before(step)
        for k in range(micro_batches):
            x, y = batches[step, k]
            seed_generators(splitmix64(0, step, k) >> 1, CPU)
            (loss(model, x, y, step, k) / micro_batches).backward()
        change(model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after(model)
    return model


def batches_of(
    dataset: Any = None, *, order: Any = None, micro_batches: int = MICRO_BATCHES
) -> KeyedBatches:
    dataset = dataset or Q.make_points(240, seed=1)
    order = order or UniformOrder(len(dataset), BATCH, micro_batches)
    return KeyedBatches(dataset, order, None)


def whole_batches() -> nn.Module:
    """One micro-batch per step, of the samples of all 8."""
    batches = batches_of(micro_batches=8)
    whole = {
        (step, 0): [
            torch.cat(part) for part in zip(*(batches[step, k] for k in range(8)), strict=True)
        ]
        for step in range(STEPS)
    }
    return plain(batches=whole, micro_batches=1)


def in_half_precision(dtype: torch.dtype) -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        with torch.autocast("cpu", dtype):
            return cross_entropy(model(x).float(), y)

    return plain(loss=loss)


def clipped() -> nn.Module:
    return plain(change=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def two_rates() -> nn.Module:
    model = Q.Net()
    blocks = {"params": model.blocks.parameters(), "lr": LR / 10}
    return plain(model, [adamw([blocks, {"params": model.head.parameters()}])])


def scheduled() -> nn.Module:
    model = Q.Net()
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    return plain(model, [optimizer], after=lambda _: scheduler.step())


def frozen() -> nn.Module:
    model = Q.Net()
    return plain(model, before=lambda step: model.blocks.requires_grad_(step >= 4))


def two_losses() -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        logits = model(x)
        return cross_entropy(logits, y) + 0.1 * logits.square().mean()

    return plain(loss=loss)


def distilled() -> nn.Module:
    teacher = Q.Net().requires_grad_(False)
    return plain(loss=lambda model, x, *_: cross_entropy(model(x), teacher(x).softmax(1)))


def gan() -> nn.Module:
    """The networks in turn: the loss of one, and the update of it."""
    model = Q.Gan()
    optimizers = [adamw(part.parameters()) for part in (model.discriminator, model.generator)]
    turn = [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        turn[0] = step % 2
        value: Tensor = model(x, trains_d=not turn[0])
        return value

    def drop_other(model: nn.Module) -> None:
        optimizers[1 - turn[0]].zero_grad()

    return plain(model, optimizers, loss=loss, change=drop_other)


def contrastive() -> nn.Module:
    batches = batches_of()

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        """Return the loss of the whole batch, in the last micro-batch."""
        if k < MICRO_BATCHES - 1:
            return 0.0 * model(x).sum()
        embedded = [model(batches[step, j][0]) for j in range(MICRO_BATCHES)]
        return MICRO_BATCHES * Q.contrast(embedded)

    return plain(Q.Embedding(), loss=loss, batches=batches)


def experts() -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        unused = sum(p.sum() for p in model.parameters())
        return cross_entropy(model(x), y) + 0.0 * unused

    return plain(Q.Experts(), loss=loss)


def recurrent() -> nn.Module:
    hidden = [torch.zeros(1, 8, 8)] * MICRO_BATCHES

    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        values, following = Q.series(step, k)
        output, state = model(values, hidden[k])
        hidden[k] = state.detach()
        return mse_loss(output, following)

    return plain(Q.Recurrent(), loss=loss)


def reinforced() -> nn.Module:
    def loss(model: nn.Module, x: Tensor, y: Tensor, step: int, k: int) -> Tensor:
        states = torch.randn(64, 4)
        policy: Any = Categorical(logits=model(states))  # type: ignore[no-untyped-call]
        actions = policy.sample()
        rewards = (actions == states[:, :3].argmax(1)).float()
        advantage = rewards - rewards.mean()
        reward: Tensor = (policy.log_prob(actions) * advantage).mean()
        return -reward

    return plain(loss=loss)


def balanced() -> nn.Module:
    """Also count the samples: each class is a third of them."""
    points = Q.make_points(240, seed=1)
    labels = points.tensors[1]
    classes = [Subset(points, (labels == c).nonzero().flatten().tolist()) for c in range(3)]
    mixture = lockstep.Mixture(classes, [1, 1, 1])
    order, _ = make_order(mixture, BATCH, None, None, MICRO_BATCHES, 0)
    batches = batches_of(mixture, order=order)
    drawn = [batches[step, k][1] for step in range(STEPS) for k in range(MICRO_BATCHES)]
    counts = torch.cat(drawn).bincount().tolist()
    assert max(counts) - min(counts) <= 1, counts
    return plain(batches=batches)


def of_two_epochs() -> nn.Module:
    return plain(batches=batches_of(order=UniformOrder(240, 60, MICRO_BATCHES)))


def weighted() -> nn.Module:
    points = Q.make_points(240, seed=1)
    weights = np.arange(1.0, 241.0)
    batches = {}
    for step in range(STEPS):
        for k in range(MICRO_BATCHES):
            draws = np.random.default_rng((step, k))
            batches[step, k] = points[draws.choice(240, 8, p=weights / weights.sum())]
    return plain(batches=batches)


class WithPartner(torch.utils.data.TensorDataset):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        other, _ = super().__getitem__(int(torch.randint(len(self), ())))
        return 0.9 * x + 0.1 * other, y


class Jittered(torch.utils.data.TensorDataset):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x + 0.1 * torch.randn(4), y


def mixed() -> nn.Module:
    return plain(batches=batches_of(WithPartner(*Q.make_points(240, seed=1).tensors)))


def augmented() -> nn.Module:
    return plain(batches=batches_of(Jittered(*Q.make_points(240, seed=1).tensors)))


# By words of the question and number of the block: what plain PyTorch trains. Else `plain`.
PLAIN: dict[tuple[str, int], Callable[[], nn.Module]] = {
    ("epochs", 0): of_two_epochs,
    ("accumulate", 0): whole_batches,
    ("bf16 or fp16", 0): partial(in_half_precision, torch.bfloat16),
    ("bf16 or fp16", 1): partial(in_half_precision, torch.float16),
    ("clip", 0): clipped,
    ("different learning rates", 0): two_rates,
    ("scheduler", 0): scheduled,
    ("freeze", 0): frozen,
    ("several losses", 0): two_losses,
    ("distill", 0): distilled,
    ("GAN", 0): gan,
    ("contrastive", 0): contrastive,
    ("no gradient", 0): experts,
    ("hidden state", 0): recurrent,
    ("reinforcement", 0): reinforced,
    ("balance", 0): balanced,
    ("balance", 1): weighted,
    ("two data sets", 0): mixed,
    ("augment", 0): augmented,
}
TRAINED = {name_of(*question): train for question, train in PLAIN.items()}
TOLERANCE = 2e-6  # a plain loop adds the gradients of the micro-batches in another order


@pytest.mark.parametrize("name", RUNS)
def test_an_answer_trains_as_plain_pytorch_does(name: str, runs: Path) -> None:
    assert digest_line(runs / "two" / name) == digest_line(runs / "one" / name)
    assert lines_of(runs, name, "two") == lines_of(runs, name, "one")
    if name == name_of("stop early"):
        return
    expected = TRAINED.get(name, plain)().state_dict()
    weights = weights_of(runs, name)
    assert weights.keys() == expected.keys()
    differences = {key: float((weights[key] - expected[key]).abs().max()) for key in weights}
    assert max(differences.values()) <= TOLERANCE, differences


def test_checkpointed_activations_have_the_same_bits(runs: Path) -> None:
    name = name_of("gradient checkpointing")
    assert digest_line(runs / "two" / name) == digest_line(runs / "two" / "loop")


def test_the_average_is_that_of_a_plain_loop(runs: Path) -> None:
    model = Q.Net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain(model, after=average.update_parameters)
    tensors = tensors_of(runs, name_of("EMA"))
    for key, expected in average.module.state_dict().items():
        torch.testing.assert_close(tensors[f"state.ema.module.{key}"], expected)


def test_the_parts_of_a_loss_are_means_over_all_workers(runs: Path) -> None:
    for line in lines_of(runs, name_of("several losses")):
        assert line["cross_entropy"] + line["penalty"] == pytest.approx(line["loss"], rel=1e-6)


def test_the_accuracy_is_that_of_all_micro_batches(runs: Path) -> None:
    lines = lines_of(runs, name_of("accuracy of training"))
    assert all(0 < 32 * line["accuracy"] == round(32 * line["accuracy"]) for line in lines)


def scores(weights: dict[str, Tensor]) -> tuple[float, float]:
    """Return the loss and the F1 of the whole test set."""
    x, y = Q.make_points(100, seed=2).tensors
    logits = outputs_of(weights, x)
    return float(cross_entropy(logits, y)), Q.f1_score(y, logits.argmax(1))


def outputs_of(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    model = Q.Net()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def test_scores_are_those_of_one_process(runs: Path) -> None:
    loss, f1 = scores(weights_of(runs, name_of("validate")))
    assert lines_of(runs, name_of("validate"))[-1]["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert lines_of(runs, name_of("metric over all ranks"))[-1]["val_f1"] == f1
    assert 0.1 < f1 < 1.0


def test_the_best_weights_are_those_of_the_lowest_loss(runs: Path) -> None:
    name = name_of("best weights")
    losses = {line["step"]: line["val_loss"] for line in lines_of(runs, name)}
    step = best_step(runs / "two" / name)
    assert losses[step] == min(losses.values()) and len(losses) == STEPS
    assert scores(weights_of(runs, name, step))[0] == pytest.approx(losses[step], rel=1e-6)


def test_a_loop_stops_after_scores_that_are_not_better(runs: Path) -> None:
    best, worse = float("inf"), []
    for line in lines_of(runs, name_of("stop early")):
        is_better = line["val_loss"] < best - 0.07
        worse = [] if is_better else [*worse, line["step"]]
        best = min(best, line["val_loss"]) if is_better else best
        last = line["step"]
    assert worse == [last - 1, last] and last < STEPS


def test_a_tracker_has_a_file(runs: Path) -> None:
    assert list((runs / "two" / name_of("Biases") / "tensorboard").iterdir())


def test_one_worker_prints(runs: Path) -> None:
    name = name_of("print once")
    printed = [(runs / "two" / f"{name}.{rank}").read_text() for rank in (0, 1)]
    assert f"step {STEPS - 1}: loss" in printed[0] and not printed[1]


def test_a_picture_has_the_outputs_of_all_workers(runs: Path) -> None:
    name = name_of("sample picture")
    one, two = ((runs / out / name / "step-8.pgm").read_bytes() for out in ("one", "two"))
    assert one == two and one.startswith(b"P5 3 64 255")
    assert len(set(one[-192:])) > 20


def test_counters_continue_after_a_resume(runs: Path) -> None:
    tensors = tensors_of(runs, name_of("counters"))
    assert json.loads(bytes(tensors["state.samples:json"].tolist())) == STEPS * BATCH


def test_another_learning_rate_needs_an_override(runs: Path, tmp_path: Path) -> None:
    """The answer that logs the rate has it."""
    name = name_of("Biases")
    shutil.copytree(runs / "two" / name, tmp_path / "run")
    script = runs / "scripts" / f"{name}.py"
    assert run_loop(script, tmp_path / "run", 1, steps=10, lr=0.001).code == 3
    result = run_loop(script, tmp_path / "run", 1, steps=10, override=["lr=0.001"])
    assert result == LoopResult(0, ""), result.text
    rates = [line["lr"] for line in iter_steps(tmp_path / "run" / "metrics.jsonl")]
    assert rates == [LR] * STEPS + [0.001] * 2


def test_plain_pytorch_loads_the_weights(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is that of `lockstep checkpoint export`, and the code imports no Lockstep."""
    monkeypatch.chdir(runs)
    weights = weights_of(runs, "loop")
    (code,) = answers()[IN_PYTORCH]
    names: dict[str, Any] = {"Net": Q.Net}
    exec(code, names)
    x = torch.randn(5, 4)
    assert torch.equal(names["model"](x), outputs_of(weights, x))
    assert "lockstep" not in code


def test_a_test_of_the_loop_passes(tmp_path: Path) -> None:
    (code,) = answers()[IN_PYTEST]
    names: dict[str, Any] = {"train": Q.train, "json": json}
    exec(code, names)
    names["test_the_loss_falls"](tmp_path)


def test_the_page_and_the_script_have_one_loop() -> None:
    assert SCRIPT.count(LOOP) == 1
    assert len(answers()) >= 28
    for script in re.findall(r"examples/gallery/\w+\.py", PAGE):
        assert (ROOT / script).exists()
