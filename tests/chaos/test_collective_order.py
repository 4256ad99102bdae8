"""The order of collectives on each rank of real runs: a worker dies in a vote of which others miss the
decision, while joiners wait, and the run stops or ends.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from support.fault_matrix import StartTraining
from support.hosts import Host, Training
from support.processes import SUPPORT

A, B = Host("a"), Host("b")  # both on this machine
TABLE = '[[host]]\nname = "{}"\naddress = "127.0.0.1"\nworkers = {}\n'

# Actions of the workers of host a at one vote, by slot. Slot 0 is rank 0, which admits the joiners.
CASES = {
    "a kill in the vote, and rank 0 misses the end": (["miss"], ["end"], ["die"]),
    "a kill in the vote, and rank 0 misses the stop": (["miss"], ["stop"], ["die"]),
    "a kill in the vote, and rank 1 misses the stop": (["stop"], ["miss"], ["die"]),
    "a kill in the vote, and rank 0 misses the decision": (["miss"], [], ["die"]),
    "rank 0 dies in the vote, and rank 1 misses the stop": (["die"], ["miss"], ["stop"]),
    "rank 0 dies in the vote, and rank 1 misses the end": (["die"], ["miss"], ["end"]),
    "two ranks miss the end": (["miss"], ["miss"], ["end"], ["die"]),
    "all others miss the stop, and the rank that knows it dies": (
        ["miss"],
        ["miss"],
        ["stop", "die"],
    ),
    "the run stops without a fault": ([], ["stop"], []),
    "the run ends without a fault": ([], [], ["end"]),
}
SHORT = "a kill in the vote, and rank 0 misses the decision"


def start_with_joiners(
    start_training: StartTraining, workers: int, function: str = "train"
) -> Training:
    """Start a run on host a; two workers of host b wait to join. Return once all members know it."""
    script, words = f"{SUPPORT / 'recorded_loop.py'}:{function}", ("--max", str(workers))
    training = start_training(
        (A, B), workers=workers, steps=100_000, words=words, script=script, start=()
    )
    (training.folder / "hosts.toml").write_text(TABLE.format("a", workers) + TABLE.format("b", 2))
    training.start_agent(A)
    training.start_agent(B)
    files = [training.folder / f"a-{slot}.knows-joiner" for slot in range(workers)]
    training.wait(lambda: all(file.exists() for file in files), what="a request to join")
    return training


def orders_of(training: Training) -> dict[int, dict[str, list[str]]]:
    """Return the completed collectives of each worker, by generation."""
    orders: dict[int, dict[str, list[str]]] = defaultdict(dict)
    for path in training.folder.glob("*.collectives"):
        for generation, collective in map(json.loads, path.read_text().splitlines()):
            orders[generation].setdefault(path.stem, []).append(collective)
    return orders


def assert_same_order(training: Training) -> None:
    """Assert that the members of a generation completed the same collectives, some of them only the
    first ones if it broke.
    """
    orders = orders_of(training)
    for generation, of_workers in orders.items():
        longest = max(of_workers.values(), key=len)
        for worker, collectives in of_workers.items():
            is_same = (
                collectives == longest[: None if generation == max(orders) else len(collectives)]
            )
            assert is_same, (
                f"{worker}, generation {generation}: {collectives[-5:]}, others {longest[-5:]}\n{training.report()}"
            )


def set_actions(training: Training, actions: tuple[list[str], ...]) -> int:
    """Give the workers of host a their actions, in a step to come. Return the step."""
    step = training.step + 30
    votes = {f"a/{slot}": [step, words] for slot, words in enumerate(actions)}
    (training.folder / "votes.tmp").write_text(json.dumps(votes))
    (training.folder / "votes.tmp").rename(training.folder / "votes.json")
    return step


@pytest.mark.long
def test_a_joiner_that_differs_ends_the_run_of_a_member_that_missed_the_decision(
    start_training: StartTraining,
) -> None:
    training = start_with_joiners(start_training, 3, "train_with_state")
    step = set_actions(training, (["miss"], [], ["die"]))
    assert 2 in training.end().values(), training.report()
    assert training.wrote(f"of micro-batch 0 of step {step + 2} is not the same on all workers")
    assert not training.wrote("CollectiveMismatchError"), training.report()
    assert_same_order(training)
    training.assert_nothing_left()


@pytest.mark.parametrize(
    "actions",
    [
        pytest.param(actions, id=name, marks=[] if name == SHORT else pytest.mark.long)
        for name, actions in CASES.items()
    ],
)
def test_members_of_a_generation_complete_the_same_collectives(
    start_training: StartTraining, actions: tuple[list[str], ...]
) -> None:
    training = start_with_joiners(start_training, len(actions))
    step = set_actions(training, actions)
    words = [word for words in actions for word in words]
    goes_on = not {"stop", "end"} & set(words) or ["stop", "die"] in actions
    if goes_on:
        training.wait_for_step(step + 20)
        training.stop()
    assert set(training.end().values()) == {0 if "end" in words else 75}, training.report()
    assert not training.wrote("CollectiveMismatchError|Traceback"), training.report()
    assert_same_order(training)
    training.assert_nothing_left()
