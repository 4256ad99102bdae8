"""A user's own module, counted on the meta device: equal to what the module does with real data."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.config.schema import RunConfig
from lockstep.errors import UsageError
from lockstep.planner.calibration import own_timing
from lockstep.planner.count_model import own_model_cost
from lockstep.planner.model_cost import CHECKPOINT_MODES

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 4)
    def forward(self, x, y):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.last(h), y)

class Values(nn.Linear):
    def forward(self, x):
        return super().forward(x[x > 0].reshape(-1, 4))

def net(): return Net(), (torch.zeros(32, 8), torch.zeros(32, dtype=torch.long))
def plain(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(16, 4)
def only_a_module(): return Net()
def frozen(): return Net().requires_grad_(False), torch.zeros(1, 8)
class Choice(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(1)

def choice(): return Choice(4, 4), torch.zeros(4, 4)
def values(): return Values(4, 4), torch.zeros(4, 4)
def failing(): return Net(), {}["inputs"]
def wrong_shape(): return Net(), (torch.zeros(32, 9), torch.zeros(32, dtype=torch.long))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "planned_modules.py"
    path.write_text(SOURCE)
    return path


def saved_bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return the bytes that a real forward pass keeps, each storage once, without parameters."""
    kept, seen = 0, {p.untyped_storage()._cdata for p in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        kept += storage.nbytes() if storage._cdata not in seen else 0
        seen.add(storage._cdata)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = module(*inputs)
    assert outputs is not None
    return kept


def test_counted_as_the_real_module(file: Path) -> None:
    cost = own_model_cost(f"{file}:net", RunConfig())
    module, inputs = __import__("planned_modules").net()
    assert cost.parameters == sum(p.numel() for p in module.parameters())
    assert [unit.kind for unit in cost.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(
        unit.macs.whole == 32 * 2 * 16 * 64 and unit.elements(1) == 2 * 16 * 64 + 64 + 16
        for unit in cost.blocks
    )
    assert cost.embedding.macs.whole == 32 * 8 * 16 and cost.output.macs.whole == 32 * 16 * 4
    assert cost.tokens == 32
    saved = [sum(unit.saved[mode].whole for unit in cost.units) for mode in CHECKPOINT_MODES]
    assert saved[0] == saved_bytes(module, inputs)
    assert min(saved) == saved[2] > 3 * 32 * 16 * 4  # the inputs of the blocks, and of the others


def test_units_are_timed_and_a_module_without_units_is_one_part(file: Path) -> None:
    run = resolve(flags={"batch.micro_batches": "2"}).run
    timing = own_timing(f"{file}:net", run)
    assert set(timing.passes) == {
        (kind, 1) for kind in ("embedding", "blocks.0", "blocks.1", "blocks.2", "output")
    }
    assert (
        all(min(seconds) >= 0 for seconds in timing.passes.values())
        and min(timing.passes["blocks.0", 1]) > 0
    )
    whole = own_timing(f"{file}:plain", run)
    assert whole.passes["embedding", 1] == (0, 0) and min(whole.passes["output", 1]) > 0


def test_the_plan_of_an_own_module(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("net", "plain"):
        assert (
            main(["plan", f"{file}:{name}", "--devices", "2x2:cpu-4GiB", "--link", "100Mbit/s"])
            == 0
        )
        text = capsys.readouterr().out
        assert (
            "replicate 4" in text
            and "shard 4" in text
            and "Session(wire=" in text
            and "diloco" not in text
        )
        assert "not possible: " in text and "does not support tensor parallelism" in text


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("only_a_module", "returned Net"),
        ("frozen", "without trained parameters"),
        ("values", "nonzero"),
        ("choice", "no output of the module"),
        ("missing", "has no function 'missing'"),
        ("failing", "failing failed: KeyError: 'inputs'"),
        ("wrong_shape", "RuntimeError: .*same reduction dim"),
    ],
)
def test_refused(file: Path, name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        own_model_cost(f"{file}:{name}", RunConfig())
    assert caught.value.where and caught.value.hint
    assert (str(file) in caught.value.where) == (name not in ("only_a_module", "frozen", "choice"))


def test_a_file_that_python_cannot_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken_plan.py").write_text("def broken(:")
    with pytest.raises(UsageError, match="SyntaxError: invalid syntax"):
        own_model_cost(f"{tmp_path}/broken_plan.py:make_model", RunConfig())


def test_a_file_without_a_function_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(file), "--devices", "2x1:cpu", "--link", "100Mbit/s"]) == 2
    assert ":make_model" in capsys.readouterr().err
