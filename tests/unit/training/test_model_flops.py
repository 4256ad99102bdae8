"""The operations of a model's passes, compared with the formula 6 * parameters * tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.activation_checkpoint import Mode, checkpoint_activations
from lockstep.record.step_timer import flops_per_token
from lockstep.runtime.torch_private import compile_counters
from lockstep.training.model_flops import (
    ModelFlops,
    OperationCounter,
    dtype_of_products,
    refuse_counting,
)
from lockstep.training.session_checks import parse_mfu

WIDTH, ROWS, LENGTH = 16, 3, 10


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> None:
    """Forget what torch.compile has compiled in this process: nothing is counted beside it."""
    compile_counters()["stats"].clear()  # type: ignore[attr-defined]


CPU = torch.device("cpu")


class Block(nn.Module):
    """A block of a transformer, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def operations(forward: Callable[[], Tensor]) -> OperationCounter:
    counter = OperationCounter()
    with counter:
        loss = forward().sum()
    with counter.backward():
        loss.backward()
    return counter


def matrices(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_transformer_has_the_operations_of_the_formula_recomputed_ones_do_not_count(
    mode: Mode,
) -> None:
    model = nn.Sequential(Block(), Block())
    checkpoint_activations(model, mode)
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    formula = flops_per_token(matrices(model), len(model), WIDTH, LENGTH)
    assert operations(lambda: model(x)).flops == ROWS * LENGTH * formula


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_the_users_own_does_not_count(reentrant: bool) -> None:
    block = Block()
    x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
    plain = operations(lambda: block(x)).flops
    again = operations(lambda: checkpoint(block, x, use_reentrant=reentrant)).flops
    assert plain == again > 0


def test_an_mlp_has_6_operations_per_weight_and_row_4_in_its_first_layer() -> None:
    """The first layer computes no gradient of its input."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    counted = operations(lambda: model(torch.ones(5, 16))).flops
    assert counted == 5 * (4 * 16 * 32 + 6 * 32 * 8)


def test_counting_changes_no_bits() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Block(), nn.Dropout(0.2))
    x = torch.randn(ROWS, LENGTH, WIDTH)
    gradients = []
    for counts in (False, True):
        model.zero_grad()
        torch.manual_seed(2)
        if counts:
            operations(lambda: model(x))
        else:
            model(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_operations_without_a_formula_are_refused_by_name() -> None:
    model = nn.LSTM(4, 4)
    flops = ModelFlops(True, 2, model, CPU)
    with flops.forward():
        loss = model(torch.ones(3, 2, 4))[0].sum()
    with pytest.raises(UsageError, match="rnn_layer") as error, flops.backward(None):
        loss.backward()
    assert "mfu=6 * parameters" in error.value.hint


def test_a_model_without_products_is_refused() -> None:
    model = nn.Embedding(4, 2)
    flops = ModelFlops(True, 2, model, CPU)
    with flops.forward():
        loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(UsageError, match="no operations"), flops.backward(None):
        loss.backward()


def test_an_attempt_without_a_backward_pass_is_counted_again() -> None:
    model = nn.Linear(4, 2)
    flops = ModelFlops(True, 3, model, CPU)
    for lost in (True, False):
        with flops.forward():
            loss = model(torch.ones(5, 4)).sum()
        with flops.backward(None):
            if not lost:
                loss.backward()
    assert flops.per_step == 3 * 5 * 4 * 4 * 2


def test_with_counts_the_operations_are_those_of_a_token() -> None:
    model = nn.Linear(4, 2)
    flops = ModelFlops(True, 3, model, CPU)
    for count in (0, 10):  # the first micro-batch has no tokens
        with flops.forward():
            loss = model(torch.ones(5, 4)).sum()
        with flops.backward(count):
            loss.backward()
    assert flops.per_token == 5 * 4 * 4 * 2 / 10


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    model = nn.Linear(4, 2)
    flops = ModelFlops(1e9, 2, model, CPU)
    with flops.forward():
        model(torch.ones(1, 4))
    with flops.backward(None):
        pass
    flops.measure_peak()
    mfu = flops.mfu({"samples": 8, "samples_per_second": 3.0}, "samples", 2)["mfu"]
    assert mfu == 3.0 * 1e9 / (2 * flops.peak)
    with pytest.raises(UsageError, match="number of samples of a step is not known"):
        flops.mfu({"steps": 1, "steps_per_second": 3.0}, "steps", 2)
    assert not ModelFlops(False, 2, model, CPU).mfu({}, "samples", 2)


def test_the_dtype_of_the_products_is_that_of_autocast_or_of_the_parameters() -> None:
    model = nn.Linear(2, 2)
    assert dtype_of_products(model, CPU) == torch.float32
    assert dtype_of_products(nn.Linear(2, 2).bfloat16(), CPU) == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert dtype_of_products(model, CPU) == torch.float16


@pytest.mark.parametrize("mfu", [0, -1.0, float("inf"), float("nan"), "yes"])
def test_what_is_no_number_of_operations_is_refused(mfu: float) -> None:
    with pytest.raises(UsageError, match="mfu="):
        parse_mfu(mfu)


@pytest.mark.parametrize(
    ("layout", "compiles"),
    [(Layout(1, 1, 2), False), (Layout(1, 1, 1, 2), False), (Layout(1), True)],
)
def test_parts_of_a_model_and_compiled_modules_are_refused_but_not_a_given_number(
    layout: Layout, compiles: bool
) -> None:
    model = nn.Sequential(Block())
    refuse_counting(True, Layout(1, 2), model)
    if compiles:
        model[0].compile()
    with pytest.raises(UsageError, match="not counted"):
        refuse_counting(True, layout, model)
    refuse_counting(1e9, layout, model)
    refuse_counting(False, layout, model)


@pytest.mark.slow
def test_a_compiled_function_in_a_forward_pass_stays_compiled_and_is_refused() -> None:
    function = torch.compile(lambda x: (x @ x).tanh(), dynamic=False)
    x = torch.ones(3, 3, requires_grad=True)
    flops = ModelFlops(True, 2, nn.Linear(2, 2), CPU)
    with flops.forward():
        loss = function(x).sum()
    with pytest.raises(UsageError, match="not counted: compiled functions"), flops.backward(None):
        loss.backward()
    assert x.grad is not None
