"""Helpers of the fault matrix tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.hosts import HERE, Host, Training, Truth
from support.waiting import wait_until

from lockstep.elastic.generation_log import Generation

STEPS = 40
BACK_WITHIN_S = 20.0  # far below the 600 s of a collective, far above what it takes
StartTraining = Callable[..., Training]
Reference = Callable[[int], Truth]


def print_seconds(**seconds: float) -> None:
    """Print measured times for `pytest -rP`."""
    print("; ".join(f"{what.replace('_', ' ')} {value:.2f} s" for what, value in seconds.items()))


def assert_back_in_time(
    training: Training, before: Generation, count: int | None = None
) -> Generation:
    """Wait until a generation after `before` has committed a step; return the first one after it."""
    back_s = training.wait_until_back(before, count)
    print_seconds(back=back_s)
    assert back_s < BACK_WITHIN_S
    return training.log.read(before.number + 1)


def assert_whole_in_time(training: Training, before: Generation) -> None:
    """Wait until all workers of the training are members again and have committed a step."""
    whole_s = training.wait_until_whole(before)
    print_seconds(whole=whole_s)
    assert whole_s < BACK_WITHIN_S


def train_steps(training: Training, count: int, timeout_s: float = 60.0) -> None:
    """Wait until the training has committed `count` more steps; its agents may be dead."""
    target = training.step + count
    wait_until(lambda: training.step >= target, f"step {target}", timeout_s, report=training.report)


def print_steps(training: Training, count: int) -> None:
    """Wait until the terminal shows `count` more steps; the run folder may be unreachable."""
    target = training.shown + count
    wait_until(lambda: training.shown >= target, f"step {target} on the terminal")


def start_other_command(training: Training, host: Host = HERE, **changed: Any) -> Any:
    """Start an agent of `host` with another command, such as steps=60; return its process."""
    before = {name: getattr(training, name) for name in changed}
    for values in (changed, before):
        for name, value in values.items():
            setattr(training, name, value)
        if values is changed:
            training.start_agent(host)
    return training.agents.pop(host.name)


def wait_for_refusal(training: Training, agent: Any, message: str) -> None:
    """Wait until an agent exits with code 2; assert that its message matches."""
    wait_until(lambda: agent.poll() is not None, "the refusal", report=training.report)
    assert agent.returncode == 2 and training.wrote(message), training.report()
