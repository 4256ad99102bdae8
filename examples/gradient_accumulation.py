"""Gradient accumulation on two houses: small enough to check by hand.

A price is y = x1 w1 + x2 w2 + b. Two houses are known. The model starts at w1 = 0.773, w2 = 0.321,
b = 0.067 and learns by gradient descent on the squared error. Without accumulation the weights
change after each house. With accumulation both gradients are computed at the same weights and
added, and the weights change once: the step of one batch of two houses, in the memory of one.

Run: python examples/gradient_accumulation.py
docs/accumulation.md explains the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Reduce = Literal["sum", "mean"]


@dataclass(frozen=True)
class House:
    x1: float
    x2: float
    price: float


@dataclass(frozen=True)
class Step:
    """The gradient of one step and the weights after it, each as (w1, w2, b)."""

    gradient: tuple[float, float, float]
    weights: tuple[float, float, float]


HOUSES = (House(6, 2, 15), House(5, 2, 12))
START = (0.773, 0.321, 0.067)
LEARNING_RATE = 0.001


def steps_of(houses: Sequence[House], accumulate: bool) -> list[Sequence[House]]:
    """Return the houses of each step: all in one step, or one house in each."""
    return [houses] if accumulate else [[house] for house in houses]


def by_hand(
    houses: Sequence[House] = HOUSES, *, accumulate: bool, reduce: Reduce = "sum"
) -> list[Step]:
    """Compute the steps with the derivative of (y - price)^2: 2 (y - price) times x1, x2 and 1."""
    w1, w2, b = START
    done = []
    for batch in steps_of(houses, accumulate):
        g1 = g2 = gb = 0.0
        for house in batch:
            error = house.x1 * w1 + house.x2 * w2 + b - house.price
            g1 += 2 * error * house.x1
            g2 += 2 * error * house.x2
            gb += 2 * error
        if reduce == "mean":
            g1, g2, gb = g1 / len(batch), g2 / len(batch), gb / len(batch)
        w1, w2, b = w1 - LEARNING_RATE * g1, w2 - LEARNING_RATE * g2, b - LEARNING_RATE * gb
        done.append(Step((g1, g2, gb), (w1, w2, b)))
    return done


def by_autograd(
    houses: Sequence[House] = HOUSES, *, accumulate: bool, reduce: Reduce = "sum"
) -> list[Step]:
    """Compute the steps as a PyTorch loop: backward() adds to .grad until zero_grad()."""
    weights = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=LEARNING_RATE)
    done = []
    for batch in steps_of(houses, accumulate):
        optimizer.zero_grad()
        for house in batch:  # one micro-batch each
            y = weights @ torch.tensor([house.x1, house.x2, 1.0], dtype=torch.float64)
            loss = (y - house.price) ** 2
            if reduce == "mean":
                loss = loss / len(
                    batch
                )  # by the size of the whole step, which must be known before its first micro-batch
            loss.backward()
        assert weights.grad is not None
        gradient = weights.grad.tolist()
        optimizer.step()
        done.append(Step(tuple(gradient), tuple(weights.tolist())))
    return done


def table(title: str, hand: Sequence[Step], autograd: Sequence[Step]) -> str:
    """Format both computations, line by line, with their largest difference."""
    lines = [
        title,
        f"  {'step':>4}  {'':8}{'d/dw1':>13}{'d/dw2':>13}{'d/db':>13}    {'w1':>10}{'w2':>11}{'b':>11}",
    ]
    for number, ways in enumerate(zip(hand, autograd, strict=True), 1):
        for name, step in zip(("by hand", "autograd"), ways, strict=True):
            gradient = "".join(f"{value:13.6f}" for value in step.gradient)
            weights = "".join(f"{value:11.7f}" for value in step.weights)
            lines.append(f"  {number:>4}  {name:8}{gradient}   {weights}")
    differences = (
        abs(first - second)
        for left, right in zip(hand, autograd, strict=True)
        for first, second in zip(
            left.gradient + left.weights, right.gradient + right.weights, strict=True
        )
    )
    return "\n".join([*lines, f"  largest difference {max(differences):.0e}"])


def main() -> None:
    cases: list[tuple[str, bool, Reduce]] = [
        ("Without accumulation: a step after each house", False, "sum"),
        ("With accumulation, summed: one step for both houses", True, "sum"),
        ("With accumulation, averaged: one step for both houses", True, "mean"),
    ]
    for title, accumulate, reduce in cases:
        hand, autograd = (
            way(accumulate=accumulate, reduce=reduce) for way in (by_hand, by_autograd)
        )
        print(table(title, hand, autograd), end="\n\n")


if __name__ == "__main__":
    main()
