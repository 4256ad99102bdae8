"""A user's own modules in replicas and shards: one digest for all layouts, and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from test_owner_update import Shampoo
from torch import Tensor, nn
from torch.optim import swa_utils

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.deferred_init import deferred_init
from lockstep.parallel.parallelize import LocalModel, SplitOptions
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import Samples, mean_over
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.sharding import shard_session

STEPS, MICRO_BATCHES, WORDS = 3, 5, 23


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention = (
            nn.LayerNorm(dim),
            nn.MultiheadAttention(dim, 2, batch_first=True),
        )
        self.hidden = nn.Sequential(
            nn.Linear(dim, 2 * dim + 1), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim + 1, dim)
        )

    def forward(self, states: Tensor) -> Tensor:
        normed = self.norm(states)
        states = states + self.attention(normed, normed, normed, need_weights=False)[0]
        return states + self.hidden(normed)


class SmallGPT(nn.Module):
    """Tied embeddings, repeated blocks, a frozen layer, and a buffer."""

    def __init__(self, dim: int = 10) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(WORDS, dim),
            nn.ModuleList(Block(dim) for _ in range(3)),
        )
        self.scale, self.head = nn.Linear(dim, dim), nn.Linear(dim, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(0, 1, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.scale(self.embed(tokens)) + self.shift
        for block in self.blocks:
            states = block(states)
        return nn.functional.cross_entropy(
            self.head(states)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


class SmallMLP(nn.Module):
    """No repeated blocks, running statistics, rows that no number of shards divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 1)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).square().mean()


class SkippingGPT(SmallGPT):
    """Leaves blocks out at random, another by the micro-batch, and a layer in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embed(tokens)
        for block in list(self.blocks)[: 1 + tokens.shape[1] % 3]:
            if not self.training or float(torch.rand(())) < 0.7:
                states = block(states)
        return nn.functional.cross_entropy(
            self.head(states)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


class TwoOutputs(nn.Module):
    """The gradients of the first row of `large` are 1e12 times those of the other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(7, 6), nn.Linear(7, 5)

    def forward(self, rows: Tensor) -> Tensor:
        factors = torch.tensor([1e6] + 5 * [1.0])
        return (self.large(rows) * factors).square().mean() + self.small(rows).square().mean()


class OneLargeRow(nn.Module):
    """A shard without rows of `large`, whose gradient is 1e12 times the others."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(7, 1, bias=False), nn.Linear(7, 5)

    def forward(self, rows: Tensor) -> Tensor:
        return (1e6 * self.large(rows)).square().mean() + self.small(rows).square().mean()


Parts = tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]
KINDS = [
    "gpt",
    "mlp",
    "muon",
    "adafactor",
    "shampoo",
    "fused",
    "unfrozen",
    "scaler",
    "scaler row",
    "deferred",
    "skipping",
]


def make(kind: str, shards: int = 1) -> Parts:
    """Return a model, its optimizers, and what else changes in training."""
    torch.manual_seed(1)
    build: type[nn.Module] = {
        "mlp": SmallMLP,
        "adafactor": SmallMLP,
        "scaler": TwoOutputs,
        "scaler row": OneLargeRow,
        "skipping": SkippingGPT,
    }.get(kind, SmallGPT)
    model: nn.Module = deferred_init(build) if kind == "deferred" and shards > 1 else build()
    if kind == "unfrozen":
        model.blocks[1].requires_grad_(False)  # type: ignore[index, union-attr, operator]
    optimizers = make_optimizers(kind, model)
    if kind == "mlp":  # an optimizer that has state already
        model(torch.ones(3, 7)).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    state: dict[str, Any] = {f"scheduler{i}": scheduler for i, scheduler in enumerate(schedulers)}
    if kind in ("gpt", "deferred", "skipping"):
        state["ema"] = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7)
        )
    if kind == "mlp":
        state["mean"] = swa_utils.AveragedModel(
            model, avg_fn=lambda average, weight, _: average + 0.3 * (weight - average)
        )
    if kind.startswith("scaler"):
        state["scaler"] = torch.amp.GradScaler(
            "cpu", init_scale=2.0**100, backoff_factor=2.0**-40, growth_interval=2
        )
    return model, optimizers, state


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    decay = [
        p for p in model.parameters() if (p.requires_grad or kind == "unfrozen") and p.dim() > 1
    ]
    others = [
        p for p in model.parameters() if (p.requires_grad or kind == "unfrozen") and p.dim() < 2
    ]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others}]
    if kind == "muon":
        embedding, *matrices = decay
        adamw = torch.optim.AdamW(
            [{"params": [embedding]}, {"params": others, "lr": 5e-3}], lr=1e-2
        )
        return [
            torch.optim.Muon([{"params": matrices[::2], "lr": 2e-2}, {"params": matrices[1::2]}]),
            adamw,
        ]
    if kind == "scaler":
        pairs = [(model.large, 1e-14), (model.small, 0.05)]
        return [torch.optim.SGD(part.parameters(), lr=lr, momentum=0.9) for part, lr in pairs]  # type: ignore[union-attr]
    if kind == "scaler row":
        groups = [
            {"params": [model.large.weight], "lr": 1e-14},
            {"params": model.small.parameters()},
        ]  # type: ignore[union-attr]
        return [torch.optim.SGD(groups, lr=0.05, momentum=0.9)]
    makers: dict[str, Any] = {
        "mlp": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=1e-2),
        "shampoo": lambda: Shampoo([*decay, *others], lr=1e-2),
    }
    return [makers.get(kind, lambda: torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused"))()]


def batch(model: nn.Module, step: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + k)
    if isinstance(model, SmallGPT):
        return torch.randint(WORDS, (2, 4 + k), generator=generator)
    return torch.randn(6, 7, generator=generator) + k


def train(
    runtime: ElasticRuntime, kinds: list[str], shards: int, folder: str, steps: int
) -> dict[str, list[Any]]:
    """Train each kind to step `steps`, and save; return its losses, norms and evaluations."""
    return {
        kind: train_kind(runtime, kind, shards, str(Path(folder) / kind / "checkpoints"), steps)
        for kind in kinds
    }


def train_kind(
    runtime: ElasticRuntime, kind: str, shards: int, folder: str, steps: int
) -> list[Any]:
    model, optimizers, state = make(kind, shards)
    if kind == "deferred" and shards > 1:
        torch.manual_seed(
            runtime.world.rank
        )  # the values do not follow from the generator's later state
    is_gpt, scaler = isinstance(model, SmallGPT), state.get("scaler")
    averages = [value for value in state.values() if isinstance(value, swa_utils.AveragedModel)]
    unused: Any = "zero" if kind == "skipping" else "raise"
    local = (
        shard_session(runtime, model, optimizers, Layout(1, shards), {}, state, unused=unused)
        if shards > 1
        else model
    )
    results: list[Any] = []
    with Checkpointer(Path(folder), runtime, local, optimizers, state=state) as checkpointer:
        first = checkpointer.resume()
        options: Any = {"on_nonfinite": "ignore" if scaler else "raise", "unused": unused}
        with ReplicaGroup(
            runtime, local, checkpointer, micro_batches=MICRO_BATCHES, **options
        ) as replicas:
            for step in range(first, steps):
                if kind == "unfrozen":
                    model.blocks[1].requires_grad_(step >= 2)  # type: ignore[index, union-attr, operator]
                    model.scale.requires_grad_(step == 1)  # type: ignore[union-attr, operator]
                for k in replicas.micro_batches(step):
                    inputs = batch(model, step, k)
                    with torch.no_grad():
                        model(inputs)
                    loss = replicas(inputs)
                    replicas.backward(
                        loss if is_gpt else loss / MICRO_BATCHES,
                        inputs.numel() if is_gpt else None,
                        scaler=scaler,
                    )
                norm = torch.zeros(())
                if step or not scaler:  # clipping would spread the values that are not finite
                    norm = replicas.updates.gradient.clip_(
                        0.3 * (scaler.get_scale() if scaler else 1)
                    )
                for optimizer in optimizers:
                    scaler.step(optimizer) if scaler else optimizer.step()
                if kind == "skipping":
                    for p in model.parameters():
                        p.data.mul_(0.999)
                for value in state.values():
                    if isinstance(value, swa_utils.AveragedModel):
                        value.update_parameters(model)
                    elif value is scaler:
                        scaler.update()
                    else:
                        value.step()
                for module in (model, *averages):
                    module.eval()
                dataset = [batch(model, 9, 1 if is_gpt else k) for k in range(3)]
                scores = [
                    evaluate(module, dataset, runtime, shards) for module in (model, *averages)
                ]
                for module in (model, *averages):
                    module.train()
                results.append(
                    (replicas.loss, float(norm), *scores, *([scaler.get_scale()] if scaler else []))
                )
        checkpointer.save(steps)
    return results


def evaluate(
    module: nn.Module, dataset: list[Tensor], runtime: ElasticRuntime, shards: int
) -> float:
    samples = Samples(dataset, "a test", 1, None, seed=0, replica_size=shards)
    return float(mean_over(runtime, samples, lambda rows: module(rows[0])))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Return the folder and the results of one worker."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(train, 1, KINDS, 1, str(folder), STEPS)[0]


def digests(folder: Path) -> dict[str, str]:
    return {kind: digest_line(folder / kind) for kind in KINDS}


@pytest.mark.parametrize(
    ("workers", "shards"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long), (3, 3), (4, 2)]
)
def test_own_models_have_one_digest_for_all_layouts(
    whole: tuple[Path, Any], workers: int, shards: int, tmp_path: Path
) -> None:
    by_rank = run_ranks(train, workers, KINDS, shards, str(tmp_path), STEPS)
    assert {str(results) for results in by_rank} == {str(whole[1])}, (
        "as text: the norm of a skipped update is NaN"
    )
    assert digests(tmp_path) == digests(whole[0])


def test_one_worker_clips_averages_and_skips(whole: tuple[Path, dict[str, list[Any]]]) -> None:
    assert (
        all(norm > 0.3 for _, norm, _, _ in whole[1]["gpt"][:2]) and len(whole[1]["gpt"]) == STEPS
    )
    assert all(score != average for _, _, score, average in whole[1]["gpt"][1:])
    assert whole[1]["scaler row"][0][-1] == 2.0**60, "the update of both parameters was skipped"
    assert [scale for *_, scale in whole[1]["scaler"]] == [2.0**60, 2.0**60, 2.0**61], (
        "one update was skipped"
    )


@pytest.mark.parametrize(
    ("workers", "shards", "others"),
    [pytest.param(2, 2, [(1, 1), (3, 3)], marks=pytest.mark.long), (1, 1, [(4, 2)])],
)
def test_checkpoint_in_shards_resumes_in_other_layouts(
    whole: tuple[Path, Any],
    workers: int,
    shards: int,
    others: list[tuple[int, int]],
    tmp_path: Path,
) -> None:
    run_ranks(train, workers, KINDS, shards, str(tmp_path / "first"), 2)
    for other_workers, other_shards in others:
        second = tmp_path / f"{other_workers}-{other_shards}"
        shutil.copytree(tmp_path / "first", second)
        run_ranks(train, other_workers, KINDS, other_shards, str(second), STEPS)
        assert digests(second) == digests(whole[0]), (other_workers, other_shards)


class Counter:
    """A state that is given its value."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Weights:
    """A state with tensors of the parameters' shapes."""

    def __init__(self, model: nn.Module) -> None:
        self.means = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.means

    def load_state_dict(self, means: dict[str, Tensor]) -> None:
        self.means = means


def refusals_in_shards(runtime: ElasticRuntime, folder: str) -> list[str]:
    """Return the error of each use that two shards refuse."""
    texts: list[str] = []

    @contextmanager
    def attempt() -> Iterator[None]:
        try:
            yield
            texts.append("accepted")
        except UsageError as error:
            texts.append(str(error))

    def sharded(kind: str, rank_dependent: str = "", **state: Any) -> tuple[Parts, LocalModel]:
        model, optimizers, more = make(kind)
        facts = {"--layout.shard": rank_dependent or "2"}
        return (model, optimizers, more), shard_session(
            runtime, model, optimizers, Layout(1, 2), facts, more | state
        )

    with attempt():
        sharded("mlp", rank_dependent=str(2 - runtime.world.rank))
    with attempt():
        (model, optimizers, state), local = sharded("gpt")
        state["own"] = Weights(SmallGPT())
        Checkpointer(Path(folder), runtime, local, optimizers, state=state)
    with attempt():
        model = nn.Sequential(nn.Linear(7, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard_session(
            runtime, model, [optimizer], Layout(1, 2), {}, {"scaler": torch.amp.GradScaler("cpu")}
        )
    with attempt():
        (model, optimizers, state), local = sharded(
            "mlp", own=Counter(runtime.world.rank), same=Counter(1)
        )
        state |= {"own": Counter(runtime.world.rank), "same": Counter(1)}
        with (
            Checkpointer(Path(folder), runtime, local, optimizers, state=state) as checkpointer,
            ReplicaGroup(runtime, local, checkpointer, micro_batches=2),
        ):
            checkpointer.save(1)
    with attempt():
        model = nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 0))
        shard_session(
            runtime, model, [torch.optim.SGD(model.parameters(), lr=0.1)], Layout(1, 2), {}, {}
        )
    for habit in (
        "a kept parameter",
        "a kept weight",
        "a group",
        "an average",
        "new memory",
        "new memory of the average",
    ):
        model, optimizers, state = make("gpt")
        kept = next(model.blocks[2].parameters())  # type: ignore[index, union-attr]
        local = shard_session(runtime, model, optimizers, Layout(1, 2), {}, state)
        with attempt(), ReplicaGroup(runtime, local, micro_batches=2) as replicas:
            if habit == "a kept parameter":
                kept.requires_grad_(False)
            if habit == "a group":
                optimizers[0].param_groups[0]["params"][0].requires_grad_(False)
            for k in replicas.micro_batches(0):
                loss = (
                    state["ema"](batch(model, 0, k))
                    if habit == "an average"
                    else replicas(batch(model, 0, k))
                )
                replicas.backward(loss + 0.1 * kept.norm() if habit == "a kept weight" else loss)
            changed = (
                optimizers[0].param_groups[0]["params"]
                if habit == "new memory"
                else state["ema"].parameters()
            )
            for p in changed:
                p.data = 0.9 * p.data
            replicas.replicas_identical(1)
    with attempt():
        model, optimizers, state = make("skipping")
        local = shard_session(
            runtime,
            model,
            optimizers,
            Layout(1, 2),
            {},
            state,
            splits=SplitOptions(units="blocks.*"),
            unused="zero",
        )
        ReplicaGroup(runtime, local, micro_batches=2, unused="zero")
    return texts


def test_what_shards_do_not_support_is_refused_with_names(tmp_path: Path) -> None:
    for texts in run_ranks(refusals_in_shards, 2, str(tmp_path)):
        words = [
            "--layout.shard is '2' on rank 0",
            "except copies of the model: state.own.embed.weight, ",
            "the last of 2 shards has no rows of the parameters of SGD, and a GradScaler needs some",
            "hold different state after step 1, and nothing was saved: state.own:json",
            "parameters without elements cannot be sharded: 1.weight, 1.bias",
            *2 * ["not those of the sharded model were used or changed: blocks.2.norm.weight"],
            "not those of the sharded model were used or changed: embed.weight",
            "a forward pass with gradients outside of the micro-batches, or of an average",
            "parameters have left the memory that the shards gather: embed.weight, ",
            "parameters have left the memory that the shards gather: state.ema.embed.weight, ",
            'unused="zero" needs a model that the shards gather at once, and this one has 4 parts',
        ]
        for text, expected in zip(texts, words, strict=True):
            assert expected in text


def teacher_of_a_deferred_model(runtime: ElasticRuntime) -> list[float]:
    """Return the outputs of a teacher with the names and shapes of the model, before and after shards."""
    torch.manual_seed(1)
    model, teacher, rows = deferred_init(SmallMLP), SmallMLP().eval(), torch.ones(3, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        before = teacher(rows)
        local = shard_session(runtime, model, [optimizer], Layout(1, 2), {}, {"teacher": teacher})
        with ReplicaGroup(runtime, local, micro_batches=2):
            return [float(before), float(teacher(rows))]


def test_teacher_of_a_deferred_model_keeps_its_values() -> None:
    for before, after in run_ranks(teacher_of_a_deferred_model, 2):
        assert before == after
