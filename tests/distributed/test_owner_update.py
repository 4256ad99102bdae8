"""Optimizers that need whole parameters: the same bits on any number of replicas and shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from test_layouts import build_local_model, model_named, one_step, replica_of

from lockstep.checkpoint import commands
from lockstep.checkpoint.shards import slice_of
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.schema import OptimOptions
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, UsageError
from lockstep.layout import Layout
from lockstep.parallel.grad_norm import commit_gradient
from lockstep.parallel.parallelize import LocalModel
from lockstep.tasks.optim import make_optimizers, update_average
from lockstep.tensor_slice import TensorSlice
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.owner_update import apply_owner_rule

LAYOUTS = [Layout(1, 2), Layout(1, 3), Layout(2, 2), Layout(1, 2, 1, 2)]


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., 2018, as a user writes it: state of other shapes, a number, and a scalar tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                rows, state = p.grad.reshape(len(p), -1), self.state[p]
                if not state:
                    state.update(
                        steps=0, scale=torch.zeros(()), left=torch.zeros(3 * len(p), len(p))
                    )
                state["steps"] += 1
                state["scale"] += rows.norm()
                state["left"][: len(p)] += rows @ rows.T
                p.sub_(
                    (state["left"][: len(p)] @ rows).view_as(p),
                    alpha=group["lr"] / float(state["scale"] ** 3) / state["steps"],
                )


class Coupling(torch.optim.SGD):
    """Keeps a value of all parameters in its groups, as Prodigy does."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2
        super().step()


def optimizers_of(kind: str, local: LocalModel) -> list[torch.optim.Optimizer]:
    if kind == "shampoo":
        return [Shampoo(local.parameters(), lr=1e-2)]
    if kind in ("fused", "reversed"):
        return make_optimizers(local, OptimOptions(learning_rate=1e-2, fused=True))
    return make_optimizers(
        local, OptimOptions(kind=kind, learning_rate=1e-2, groups=("*norm*:2:0",))
    )  # type: ignore[arg-type]


def train_with(runtime: ElasticRuntime, layout: Layout, folder: str, kind: str, steps: int) -> None:
    """Resume, train to step `steps` and save."""
    model = model_named("llama")
    local = build_local_model(runtime, model, layout, torch.float32)
    optimizers = optimizers_of(kind, local)
    for optimizer in optimizers:
        apply_owner_rule(optimizer, local, runtime)
    with (
        Checkpointer(Path(folder) / "checkpoints", runtime, local, optimizers) as checkpointer,
        replica_of(local, 4) as replica,
    ):
        for step in range(checkpointer.resume(), steps):
            one_step(local, replica, model, step)
            commit_gradient(list(local.parameters()), replica.grad_norm_squared(), 72).clip_(1.0)
            for optimizer in optimizers:
                if kind == "reversed" and runtime.world.rank:
                    optimizer.state.update(
                        {p: dict(reversed(state.items())) for p, state in optimizer.state.items()}
                    )
                optimizer.step()
            update_average(optimizers, 0.9, step + 1)
        checkpointer.save(steps)


# The others in CI: tests/distributed/test_own_layouts.py trains them in a Session.
@pytest.mark.parametrize(
    "kind",
    [
        "muon",
        "lion",
        "reversed",
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in ("adafactor", "shampoo", "fused", "sgd")
        ),
    ],
)
def test_bits_do_not_depend_on_the_layout(kind: str, tmp_path: Path) -> None:
    run_ranks(train_with, 1, Layout(), str(tmp_path / "whole"), kind, 3)
    right = commands.digest_line(tmp_path / "whole")
    tensors = CheckpointStore(tmp_path / "whole" / "checkpoints").load(3).tensors
    assert any(name.startswith("optim.") and not name.endswith(".ema") for name in tensors)
    for layout in LAYOUTS if kind in ("muon", "shampoo") else LAYOUTS[1:2]:
        if layout.pipeline > 1 and kind == "shampoo":
            continue
        run_ranks(train_with, layout.workers, layout, str(tmp_path / str(layout)), kind, 3)
        if layout.pipeline == 1:  # the embedding is tied: a pipeline has other bits
            assert commands.digest_line(tmp_path / str(layout)) == right, layout


@pytest.mark.parametrize(
    "kind",
    ["muon", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("adafactor", "shampoo"))],
)
def test_owned_state_is_saved_whole_and_resumed_in_another_layout(
    kind: str, tmp_path: Path
) -> None:
    run_ranks(train_with, 1, Layout(), str(tmp_path / "whole"), kind, 3)
    for steps, layout in ((1, Layout(1, 2)), (2, Layout()), (3, Layout(2, 2))):
        run_ranks(train_with, layout.workers, layout, str(tmp_path / "changed"), kind, steps)
    assert commands.digest_line(tmp_path / "changed") == commands.digest_line(tmp_path / "whole")


def refusals(runtime: ElasticRuntime) -> list[str]:
    """Return the error of each use that is refused in shards."""
    model, texts = model_named("llama"), []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
            texts.append("accepted")
        except UsageError as error:
            texts.append(str(error))

    local = build_local_model(runtime, model, Layout(1, 2), torch.float32)
    with replica_of(local, 4) as replica:
        one_step(local, replica, model, 0)
        attempt(lambda: apply_owner_rule(torch.optim.LBFGS(local.parameters()), local, runtime))
        muon = torch.optim.Muon([p for p in local.parameters() if p.dim() == 2])
        apply_owner_rule(muon, local, runtime)
        attempt(lambda: muon.step(lambda: 0.0))
        coupling = Coupling(local.parameters(), lr=0.1)
        apply_owner_rule(coupling, local, runtime)
        attempt(coupling.step)
    split = build_local_model(runtime, model, Layout(1, 1, 2), torch.float32)
    attempt(
        lambda: apply_owner_rule(
            torch.optim.Muon([p for p in split.parameters() if p.dim() == 2]), split, runtime
        )
    )
    return texts


def test_what_the_owner_rule_does_not_cover_is_refused() -> None:
    for texts in run_ranks(refusals, 2):
        words = [
            "LBFGS evaluates the loss several times",
            "called with a closure",
            "couples parameters with each other",
            "layout.tensor splits",
        ]
        assert all(expected in text for text, expected in zip(texts, words, strict=True)), texts


def test_state_shaped_like_a_slice_is_refused_at_a_resume() -> None:
    whole = TensorSlice.whole((4, 3))
    half = whole.split_rows(0, 2)
    assert slice_of("optim.weight.mean", (4, 3), {"weight": half}) == half
    assert slice_of("optim.weight.half", (2, 3), {"weight": whole}) == TensorSlice.whole((2, 3))
    with pytest.raises(CheckpointError, match="which is also that of this worker's slice"):
        slice_of("optim.weight.half", (2, 3), {"weight": half})
