"""Gradient accumulation on two houses: by hand, by the formula, by autograd, by two processes."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.launching import run_command
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from gradient_accumulation import (  # noqa: E402
    HOUSES,
    LEARNING_RATE,
    START,
    House,
    Reduce,
    Step,
    by_autograd,
    by_hand,
)

# By hand. First house: y = 6 * 0.773 + 2 * 0.321 + 0.067 = 5.347, 9.653 below its price of 15, so
# the gradient is -2 * 9.653 * (6, 2, 1). Second house, initial weights: y = 4.574, 7.426 below 12.
WITHOUT = [
    Step((-115.836, -38.612, -19.306), (0.888836, 0.359612, 0.086306)),
    # Updated weights: y = 5 * 0.888836 + 2 * 0.359612 + 0.086306 = 5.24971, 6.75029 below 12.
    Step((-67.5029, -27.00116, -13.50058), (0.9563389, 0.38661316, 0.09980658)),
]
SUMMED = [
    Step((-115.836 - 74.26, -38.612 - 29.704, -19.306 - 14.852), (0.963096, 0.389316, 0.101158))
]
AVERAGED = [Step((-95.048, -34.158, -17.079), (0.868048, 0.355158, 0.084079))]


def numbers(steps: list[Step]) -> list[float]:
    return [value for step in steps for value in step.gradient + step.weights]


@pytest.mark.parametrize("way", [by_hand, by_autograd])
@pytest.mark.parametrize(
    ("accumulate", "reduce", "paper"),
    [
        (False, "sum", WITHOUT),
        (False, "mean", WITHOUT),
        (True, "sum", SUMMED),
        (True, "mean", AVERAGED),
    ],
)
def test_gradients_and_weights_equal_the_calculation_by_hand(
    way: type, accumulate: bool, reduce: Reduce, paper: list[Step]
) -> None:
    assert numbers(way(accumulate=accumulate, reduce=reduce)) == pytest.approx(
        numbers(paper), rel=1e-12
    )


def test_accumulated_gradients_equal_those_of_one_batch() -> None:
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([[house.x1, house.x2, 1.0] for house in HOUSES], dtype=torch.float64)
    prices = torch.tensor([house.price for house in HOUSES], dtype=torch.float64)
    ((inputs @ weights - prices) ** 2).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == pytest.approx(
        by_autograd(accumulate=True)[0].gradient, rel=1e-14
    )


def test_accumulation_differs_from_two_steps() -> None:
    once, twice = by_hand(accumulate=True)[-1].weights, by_hand(accumulate=False)[-1].weights
    assert max(abs(a - b) for a, b in zip(once, twice, strict=True)) > 1e-3


def test_a_mean_of_means_is_wrong_when_micro_batches_differ_in_size() -> None:
    # Micro-batches of two houses and one: the mean of the two means counts the third house twice.
    third = House(3, 1, 4)
    right = by_hand([*HOUSES, third], accumulate=True, reduce="mean")[0].gradient
    means = (
        by_hand(accumulate=True, reduce="mean")[0].gradient,
        by_hand([third], accumulate=True)[0].gradient,
    )
    wrong = [(a + b) / 2 for a, b in zip(*means, strict=True)]
    sums = by_hand(accumulate=True)[0].gradient, by_hand([third], accumulate=True)[0].gradient
    assert [(a + b) / 3 for a, b in zip(*sums, strict=True)] == pytest.approx(right)
    assert abs(wrong[0] - right[0]) > 1


def test_example_prints_the_numbers_of_the_docs() -> None:
    said = run_command(
        [sys.executable, ROOT / "examples/gradient_accumulation.py"], check=True
    ).stdout
    docs = (ROOT / "docs/accumulation.md").read_text()
    for step in [*WITHOUT, *SUMMED, *AVERAGED]:
        for value in step.gradient:
            assert said.count(f"{value:.6f}") >= 2 and f"{value:.6g}" in docs, (
                f"both ways print it, and it is in the docs: {value}"
            )
        for value in step.weights:
            assert said.count(f"{value:.7f}") >= 2
    differences = re.findall(r"largest difference (\S+)", said)
    assert differences and all(float(text) < 1e-12 for text in differences)


@pytest.mark.parametrize(("number", "paper"), [(0, WITHOUT), (1, SUMMED)])
def test_the_loops_of_the_docs_train_the_weights_of_its_tables(
    number: int, paper: list[Step]
) -> None:
    docs = (ROOT / "docs/accumulation.md").read_text()
    loop = re.findall(r"^```python\n(.*?)^```", docs, re.MULTILINE | re.DOTALL)[number]
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([[house.x1, house.x2, 1.0] for house in HOUSES], dtype=torch.float64)
    houses = list(zip(inputs, [house.price for house in HOUSES], strict=True))
    optimizer = torch.optim.SGD([weights], lr=LEARNING_RATE)
    exec(loop, {"houses": houses, "weights": weights, "optimizer": optimizer})
    assert weights.tolist() == pytest.approx(list(paper[-1].weights))


def two_processes(rank: int, port: int, out: Path) -> None:
    """Train on both houses as micro-batches, in the order of the rank; record .grad after each."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight[:] = torch.tensor([START[:2]])
        model.bias[:] = START[2]
    replica = DistributedDataParallel(model)
    seen = []
    for number, house in enumerate(HOUSES if rank == 0 else HOUSES[::-1]):
        with replica.no_sync() if number == 0 else nullcontext():
            y = replica(torch.tensor([[house.x1, house.x2]], dtype=torch.float64))
            ((y - house.price) ** 2).sum().backward()
        assert model.weight.grad is not None and model.bias.grad is not None
        seen.append([*model.weight.grad.flatten().tolist(), *model.bias.grad.tolist()])
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= LEARNING_RATE * parameter.grad
    seen.append([*model.weight.flatten().tolist(), *model.bias.tolist()])
    torch.save(seen, out / f"{rank}.pt")
    dist.destroy_process_group()


def test_no_sync_keeps_gradients_local_and_the_last_micro_batch_reduces_the_sum(
    tmp_path: Path,
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(two_processes, args=(port, tmp_path), nprocs=2)
    seen = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    first, second = [list(step.gradient) for step in (WITHOUT[0], SUMMED[0])]
    other = [whole - part for whole, part in zip(second, first, strict=True)]
    assert seen[0][0] == pytest.approx(first) and seen[1][0] == pytest.approx(other), (
        "under no_sync each process has its local gradient"
    )
    # DDP divides by the number of processes: (both houses + both houses) / 2.
    assert seen[0][1] == pytest.approx(second) and seen[0][1] == seen[1][1], (
        "after the last micro-batch the gradients are equal"
    )
    assert seen[0][2] == pytest.approx(list(SUMMED[0].weights)) and seen[0][2] == seen[1][2]
